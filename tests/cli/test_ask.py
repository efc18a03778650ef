"""A trained model is questioned, and follows the newest version of its corpus."""

import contextlib
import dataclasses
import json
import os
import pty
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import jax
import pytest

import realm_jax
from realm_jax.cli.main import main
from realm_jax.data.blocks import BlockStore
from realm_jax.data.versions import SUCCESSOR_FILE
from realm_jax.evaluation.ask import AnswerService
from realm_jax.index.builder import BuilderConfig, build_once
from realm_jax.index.retrievers import TrainedRetriever
from realm_jax.storage import open_store
from realm_jax.training.checkpoints import restore_params
from tests import tiny_run
from tests.json_lines import write_lines
from tests.standard_input import standard_input
from tests.waiting import PATIENCE, wait_until

OFTEN = "--gin.ask.AskConfig.poll_seconds=0.1"


class Server:
    """`realm ask` with a page, in a process of its own, on a copy of a chain."""

    def __init__(self, root):
        self.root = root
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        arguments = [*tiny_run.arguments("ask", root), f"--gin.PORT={self.port}", OFTEN]
        arguments.append("--gin.ALLOWED_HOSTS=('box.example',)")
        self.process = tiny_run.start(["realm_jax.cli.main", *arguments])

    def get(self, path, data=None):
        """Returns what is answered; `data` is posted."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data,
            {"Content-Type": "application/json", "Host": "box.example:8000"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return response.read().decode()

    def ask(self, question):
        data = json.dumps({"question": question}).encode()
        return json.loads(self.get("/answer", data))

    def status(self):
        return json.loads(self.get("/status"))

    def wait_for(self, what):
        """Waits until `what` holds of the status."""
        seen = []

        def holds():
            if self.process.poll() is not None:
                raise AssertionError(self.process.communicate()[0])
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                seen.append(self.status())
                return what(seen[-1])

        wait_until(holds)
        return seen[-1]


@pytest.fixture(scope="module")
def server(finished, tmp_path_factory):
    root = tmp_path_factory.mktemp("asked")
    tiny_run.copy(finished, root, "corpus", "pretrain", "finetune", "evaluate")
    server = Server(root)
    try:
        server.wait_for(lambda status: True)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        # What it said may have been read by a test.
        server.process.wait()


@pytest.mark.full
def test_answers_are_those_that_were_evaluated(server):
    lines = (server.root / "evaluate" / "predictions.jsonl").read_text().splitlines()
    evaluated = [json.loads(line) for line in lines]
    assert len(evaluated) == 20
    service = AnswerService(tiny_run.ask_config(server.root), threading.Event())
    answerer = service.version.answerer
    questions = [expected["question"] for expected in evaluated]
    batch = dataclasses.replace(answerer, batch_size=8).answer(questions)
    for expected, in_batch in zip(evaluated, batch, strict=True):
        reply = server.ask(expected["question"])
        (alone,) = answerer.answer([expected["question"]])
        assert reply["answer"] == alone.text
        # Another answer in the batch was as good.
        assert expected["prediction"] in (alone.text, in_batch.text)
        assert in_batch.log_probability == pytest.approx(
            alone.log_probability, abs=1e-5
        )
        scores = all_scores(answerer, expected["question"])
        documents = {d["block"]: d for d in reply["documents"]}
        # Sixty towns are much alike: where scores are equal but for the rounding of
        # another batch size, either block may come first.
        assert [scores[block] for block in documents] == pytest.approx(
            [scores[block] for block in expected["retrieved"]], abs=1e-5
        )
        same_answer = expected["prediction"] == reply["answer"]
        if same_answer and expected["block"] in documents:
            place = [expected["start"], expected["end"]]
            assert place in documents[expected["block"]]["answer_at"]


def all_scores(answerer, question):
    """f(x, z) of every block, from the model in this process."""
    ids = answerer.question_ids([question])
    found = answerer.search(ids, answerer.corpus.num_blocks)
    return dict(zip(found.ids[0].tolist(), found.scores[0].tolist(), strict=True))


@pytest.mark.full
def test_the_page_shows_the_answer_in_its_sources(server):
    ((question, answer),) = tiny_run.answered(server.root, 1).items()
    query = urllib.parse.quote(question)
    page = server.get(f"/?question={query}")
    assert f'<p class="answer">{answer}</p>' in page
    assert f"<mark>{answer}</mark>" in page
    store = BlockStore.open(server.root / "corpus")
    documents = server.ask(question)["documents"]
    assert len(documents) == 2
    for document in documents:
        text = store.text(document["block"])
        assert text.title in page
        assert text.source_id in page
    assert store.fingerprint[:12] in page
    # Nothing is loaded from elsewhere; the link to the answer is only followed.
    loaded = re.sub(r'<a [^>]*href="/\?question=', "", page)
    assert not re.findall(r"""(?:src|href|url\(|@import)[\s=("']""", loaded)


@pytest.mark.full
def test_a_long_question_is_cut_and_the_reader_told(server):
    long = "When was Town3 founded by the river " * 12
    reply = server.ask(long)
    assert "30 wordpieces" in reply["note"]
    cut = reply["note"].rpartition("… ")[2].rstrip("”.")
    assert cut in long
    assert reply["note"] in server.get(f"/?question={urllib.parse.quote(long)}")
    assert server.ask("When was Town3 founded?")["note"] == ""


def commit_index(root, step, params):
    """Commits an index of the corpus as if a builder had."""
    config, corpus = tiny_run.ask_config(root), BlockStore.open(root / "corpus")
    vocabulary = corpus.vocabulary
    retriever = TrainedRetriever(
        step,
        config.finetuned.models.retriever_config(vocabulary.size),
        params,
        vocabulary.fingerprint,
    )
    embed = config.embed.at_length(config.finetuned.models.lengths.document)
    store = open_store(str(root / "finetune"))
    assert build_once(retriever, corpus, store, BuilderConfig(embed=embed))


@pytest.mark.full
def test_a_newer_index_is_taken_over_if_the_tower_is_the_same(server):
    question = "When was Town2 founded?"
    before = server.ask(question)
    assert before["version"]["index_step"] == 0
    params = jax.device_get(
        restore_params(open_store(str(server.root / "pretrain"))).tree["retriever"]
    )
    commit_index(server.root, 7, params)
    server.wait_for(lambda status: status["index_step"] == 7)
    after = server.ask(question)
    assert after["version"]["index_step"] == 7
    # Which of two towns is first may be a matter of rounding, how likely they are not.
    likely, expected = (
        [document["document_probability"] for document in reply["documents"]]
        for reply in (after, before)
    )
    assert likely == pytest.approx(expected, rel=1e-4)
    others = jax.tree.map(lambda values: values + 1, params)
    commit_index(server.root, 9, others)
    status = server.wait_for(lambda status: status["problem"])
    assert "step 9" in status["problem"]
    assert server.ask(question)["version"]["index_step"] == 7


def write_changes(root, source_id):
    """Changes one article and deletes another, so that few blocks keep their ids."""
    lines = (root / "articles.jsonl").read_text().splitlines()
    articles = [json.loads(line) for line in lines]
    (changed,) = [article for article in articles if article["id"] == source_id]
    changed["text"] = changed["text"].replace("mills", "old mills")
    deleted = next(a["id"] for a in articles if a["id"] != source_id)
    write_lines(root / "changes.jsonl", [changed, {"id": deleted, "deleted": True}])


@pytest.mark.full
def test_what_is_wrong_with_a_later_corpus_is_told_and_the_old_one_served(server):
    before = server.status()["fingerprint"]
    broken = server.root / "corpus" / SUCCESSOR_FILE
    broken.write_text('{"corpus": "../nowhere", "fingerprint": "0"}')
    server.wait_for(lambda status: "nowhere" in status["problem"])
    assert server.ask("When was Town3 founded?")["version"]["fingerprint"] == before
    broken.unlink()
    server.wait_for(lambda status: "nowhere" not in status["problem"])


@pytest.mark.full
def test_a_later_corpus_is_served_without_a_restart(server):
    root = server.root
    question = "When was Town2 founded?"
    old = BlockStore.open(root / "corpus")
    write_changes(root, server.ask(question)["documents"][0]["source_id"])
    arguments = tiny_run.arguments("update-corpus", root)
    update = tiny_run.start(["realm_jax.cli.main", *arguments])
    replies = []

    def is_newer():
        replies.append(server.ask(question))
        return replies[-1]["version"]["fingerprint"] != old.fingerprint

    wait_until(is_newer)
    replies += [server.ask(question) for _ in range(3)]
    said, _ = update.communicate()
    assert update.returncode == 0, said
    later = BlockStore.open(root / "corpus2")
    seen = [reply["version"]["fingerprint"] for reply in replies]
    assert seen == [old.fingerprint] * (len(seen) - 4) + [later.fingerprint] * 4
    stores = {store.fingerprint: store for store in (old, later)}
    for reply, fingerprint in zip(replies, seen, strict=True):
        # All of an answer is of the version that it names.
        for document in reply["documents"]:
            text = stores[fingerprint].text(document["block"])
            assert document["passage"] == text.body
    changed = replies[0]["documents"][0]["passage"]
    assert changed not in [d["passage"] for d in replies[-1]["documents"]]
    assert server.status()["problem"] == ""
    # What it found is what a model that is opened now finds best.
    fresh = AnswerService(tiny_run.ask_config(root), threading.Event())
    assert fresh.version.corpus.fingerprint == later.fingerprint
    scores = all_scores(fresh.version.answerer, question)
    blocks = [document["block"] for document in replies[-1]["documents"]]
    best = sorted(scores.values(), reverse=True)[: len(blocks)]
    assert [scores[block] for block in blocks] == pytest.approx(best, abs=1e-5)


@pytest.mark.full
def test_ctrl_c_ends_it_and_frees_the_port(server):
    os.kill(server.process.pid, signal.SIGINT)
    said = server.process.communicate()[0]
    assert server.process.returncode == 0, said
    assert "Traceback" not in said
    assert str(server.root / "corpus2") in said
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_one_question_on_the_command_line(finished, realm):
    question = "When was Town5 founded?"
    answer = realm_jax.load(finished).answer(question)
    said = realm(*tiny_run.arguments("ask", finished, QUESTION=question))
    assert said.splitlines()[0] == answer.text
    for document in answer.documents:
        assert document.title in said


def test_a_hybrid_answer_is_that_of_the_library(finished, realm):
    question = "When was Town7 founded?"
    found = json.loads(realm("ask", finished, "--hybrid", "--json", question))
    answer = realm_jax.load(finished).answer(question, hybrid=True)
    assert found["answer"] == answer.text
    assert [d["block"] for d in found["documents"]] == [
        document.block_id for document in answer.documents
    ]
    # Embeddings alone find other blocks.
    plain = json.loads(realm("ask", finished, "--json", question))
    assert plain["documents"] != found["documents"]


def test_a_sentence_with_a_mask_shows_what_documents_do_for_it(finished, realm):
    sentence = "Town5 was founded in [MASK=1050] by Karel Dorm."
    told = json.loads(realm("ask", finished, sentence, "--json"))
    assert told["answer"] == "1050"
    documents = told["documents"]
    assert sum(d["document_probability"] for d in documents) == pytest.approx(1)
    products = [d["document_probability"] * d["answer_probability"] for d in documents]
    assert told["marginal"] == pytest.approx(sum(products))
    assert [d["passage"] for d in documents if d["block"] < 0] == [""]
    assert "No document" in realm("ask", finished, sentence)


@pytest.mark.full
def test_ctrl_c_at_the_prompt_is_its_ordinary_end(finished, capfd):
    terminal, line = pty.openpty()
    ((question, answer),) = tiny_run.answered(finished, 1).items()
    os.write(terminal, f"{question}\n".encode())

    def interrupt_when_answered():
        deadline = time.monotonic() + PATIENCE
        said = ""
        while time.monotonic() < deadline and "p(y|x)" not in said:
            said += capfd.readouterr().out
            time.sleep(0.1)
        heard.append(said)
        os.kill(os.getpid(), signal.SIGINT)

    heard = []
    interrupt = threading.Thread(target=interrupt_when_answered)
    interrupt.start()
    with standard_input(line):
        assert main(tiny_run.arguments("ask", finished)) == 0
    interrupt.join()
    assert heard[0].startswith("\n? ")
    assert answer in heard[0]
