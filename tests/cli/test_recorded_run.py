"""`realm ask RUN` and `realm evaluate RUN`: what training recorded is enough."""

import dataclasses
import json
import os
import pty
import shutil

import pytest

import realm_jax
from realm_jax.cli.main import main
from realm_jax.data.blocks import BlockStore, read_info
from realm_jax.data.documents import Document
from realm_jax.data.versions import PARENT_FILE, is_version_of, link_versions
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.evaluation.recorded import (
    SEARCHED,
    Overrides,
    ask_config,
    evaluate_config,
    find_corpus,
    find_model,
)
from tests import tiny_run, tiny_world
from tests.corpus_builder import build_corpus
from tests.records import as_earlier_version, change_details, change_record
from tests.standard_input import standard_input


@pytest.fixture(scope="module")
def moved(finished, tmp_path_factory):
    """A chain in another place than it was trained in, which it still records."""
    root = tmp_path_factory.mktemp("moved")
    folders = ("corpus", "warm_start", "pretrain", "finetune", "evaluate")
    return tiny_run.copy(finished, root, *folders)


@pytest.fixture(scope="module")
def expected(finished):
    """Three questions with their answers, from the chain where it was trained."""
    return tiny_run.answered(finished, 3)


def piped(text):
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    return standard_input(reading)


def test_questions_are_echoed_where_there_are_several(moved, expected, realm):
    first, *_ = expected
    for folder in (moved, moved / "finetune"):
        assert realm("ask", folder, first).splitlines()[0] == expected[first]
    said = realm("ask", moved, *expected).splitlines()
    for question, answer in expected.items():
        assert said[said.index(f"? {question}") + 1] == answer
    with piped("\n\n".join(expected)):
        assert realm("ask", moved).splitlines() == said


def test_in_json_a_reply_is_a_line(moved, expected, realm):
    # Options may stand between RUN and the questions.
    said = realm("ask", moved, "--json", *expected)
    replies = [json.loads(line) for line in said.splitlines()]
    assert {reply["question"]: reply["answer"] for reply in replies} == expected
    assert [reply["question"] for reply in replies] == list(expected)
    assert {reply["version"]["corpus"] for reply in replies} == {str(moved / "corpus")}


def test_at_a_terminal_without_a_question_there_is_a_prompt(moved, expected, capfd):
    terminal, line = pty.openpty()
    question, answer = next(iter(expected.items()))
    # A line and Ctrl-D, which ends the input that comes after the line.
    os.write(terminal, f"{question}\n\x04".encode())
    with standard_input(line):
        assert main(["ask", str(moved)]) == 0
    said = capfd.readouterr().out
    assert said.startswith("\n? ")
    assert answer in said
    assert "p(y|x)" in said


def test_everything_is_found_in_a_chain_that_was_moved(moved):
    config = ask_config(str(moved))
    assert config.corpus == str(moved / "corpus")
    assert config.finetuned.model_dir == str(moved / "finetune")
    # One tower, so a later corpus needs what it was fine-tuned from.
    assert config.pretrained == str(moved / "pretrain")
    assert (config.pretrained_checkpoint, config.port) == ("last", 0)
    assert not config.allow_corpus_mismatch


def test_where_fine_tuning_began_may_have_any_name_or_lie_elsewhere(
    moved, finished, tmp_path
):
    root = with_record(moved, tmp_path, source="/nowhere/realm_b")
    assert ask_config(str(root)).pretrained == str(root / "pretrain")
    (root / "pretrain").rename(root / "realm_b")
    assert ask_config(str(root)).pretrained == str(root / "realm_b")
    shutil.rmtree(root / "realm_b")
    assert ask_config(str(root)).pretrained == ""
    given = Overrides(pretrained=str(finished / "pretrain"))
    assert ask_config(str(root), given).pretrained == str(finished / "pretrain")


def test_the_searcher_is_the_recorded_one_unless_another_is_given(moved, tmp_path):
    root = str(with_record(moved, tmp_path, searcher="scann"))
    assert ask_config(root).searcher == "scann"
    assert ask_config(root, Overrides(searcher="device")).searcher == "device"


def test_a_stage_finds_the_corpus_it_was_started_with_and_has_to_end(
    finished, tmp_path, refuse
):
    model_dir = tmp_path / "elsewhere" / "model"
    shutil.copytree(finished / "pretrain", model_dir)
    corpus = str(finished / "corpus")
    assert find_corpus(find_model(model_dir, SEARCHED)) == (corpus, False)
    change_details(model_dir, train_steps=99)
    output = f"--output={tmp_path / 'out'}"
    for words in (["search", model_dir, "mills"], ["export", model_dir, output]):
        refuse(words, "found step 12 of 99; let it end first")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stages", [("pretrain",), ("pretrain", "finetune")])
def test_the_last_stage_of_a_chain_is_searched(
    stages, moved, tmp_path, realm, monkeypatch, refuse
):
    """Without questions, too: then the chain ends before fine-tuning."""
    root = tiny_run.copy(moved, tmp_path, "corpus", "warm_start", *stages)
    embedded = tiny_world.count_embedded(monkeypatch)
    queries = ["When was Town7 founded?", "the river near Town8"]
    lines = realm("search", root, "--k=3", *queries, "--json").splitlines()
    found = {
        line["query"]: [(d["title"], d["score"]) for d in line["documents"]]
        for line in map(json.loads, lines)
    }
    model = realm_jax.load(root / stages[-1])
    assert list(found) == queries
    for query in queries:
        documents = model.search(query, k=3)
        assert found[query] == [(d.title, d.score) for d in documents]
    fused = json.loads(realm("search", root, "--hybrid", queries[0], "--json"))
    titles = [d.title for d in model.search(queries[0], k=5, hybrid=True)]
    assert [d["title"] for d in fused["documents"]] == titles
    # Both stages have left an index of what they ended with.
    assert embedded == []
    with piped(f"{queries[0]}\n\n{queries[1]}"):
        said = realm("search", root)
    first, second = (said.index(f"? {query}\n") for query in queries)
    assert first < said.index(f"{found[queries[0]][0][0]} (town-") < second
    if stages == ("pretrain",):
        refuse(["ask", root, "who?"], "expected a checkpoint of `realm finetune`")


def test_answers_come_from_the_later_corpus_that_an_update_made(moved, tmp_path, realm):
    root = tiny_run.copy(moved, tmp_path, "corpus", "pretrain", "finetune", "evaluate")
    changed = {"id": "town-60", "title": "Town60", "text": "Town60 has 60 mills."}
    (root / "changes.jsonl").write_text(f"{json.dumps(changed)}\n")
    assert main(tiny_run.arguments("update-corpus", root)) == 0
    later = BlockStore.open(root / "corpus2").fingerprint
    for given in ([], [f"--corpus={root / 'corpus2'}"]):
        words = [*given, "--json", "When was Town2 founded?"]
        reply = json.loads(realm("ask", root, *words))
        assert reply["version"]["fingerprint"] == later
        assert reply["answer"]


def test_a_later_corpus_is_searched_as_it_is_asked(moved, tmp_path, realm, refuse):
    """With one tower by the checkpoint that fine-tuning began with."""
    root = with_record(moved, tmp_path)
    other_corpus(moved, root / "later")
    link_versions(root / "corpus", root / "later")
    words = ["search", root, "mills", "--json"]
    later = f"--corpus={root / 'later'}"
    (found,) = json.loads(realm(*words, later))["documents"]
    assert found["title"] == "Town"
    change_record(root / "finetune", source_checkpoint="best")
    change_details(root / "pretrain", held_out_utility=None)
    refuse([*words, later], f"{root}/pretrain", "held_out_utility")
    # The corpus that was trained on has its index.
    assert json.loads(realm(*words))["documents"]


def answers(folder):
    """What was answered; sixty towns are so alike that rounding orders some of them."""
    lines = (folder / "predictions.jsonl").read_text().splitlines()
    return [(one["id"], one["prediction"]) for one in map(json.loads, lines)]


def measured(folder):
    """Which values of which stages stand in a report, over how many questions."""
    report = json.loads((folder / "report.json").read_text())
    rows = [
        (row["label"], {name: of["count"] for name, of in row["metrics"].items()})
        for row in report["comparison"]["rows"]
    ]
    return rows, bool(report["masked_accuracy"])


def test_an_evaluation_of_a_folder_is_that_of_the_gin_files(moved, tmp_path, capsys):
    again, before = tmp_path / "again", moved / "evaluate"
    shutil.copytree(before / "settings", again / "settings")
    assert main(["evaluate", str(moved), f"--output={again}"]) == 0
    # The settings of a folder are others than those of the gin files: no news.
    assert "changed since" not in "".join(capsys.readouterr())
    assert answers(again) == answers(before)
    assert measured(again) == measured(before)


def test_of_a_model_alone_the_report_lies_in_its_folder(moved, tmp_path, realm):
    shutil.copytree(moved / "finetune", tmp_path / "model")
    flags = [
        f"--questions={moved / 'questions.jsonl'}",
        f"--corpus={moved / 'corpus'}",
        "--baselines=oracle,starting_point",
        f"--starting_point={moved / 'warm_start'}",
    ]
    realm("evaluate", tmp_path / "model", *flags)
    folder = tmp_path / "model" / "evaluate"
    assert answers(folder) == answers(moved / "evaluate")
    report = json.loads((folder / "report.json").read_text())
    assert [row["label"] for row in report["same_reader"]["rows"]] == [
        *("oracle block", "Before training", "After fine-tuning")
    ]


def test_a_model_alone_is_measured_by_its_own_lengths(moved, tmp_path):
    root = with_record(moved, tmp_path, lengths={"query": 24, "joined": 64})
    other_corpus(moved, root / "later")
    link_versions(root / "corpus", root / "later")
    tuned, pretrained = root / "finetune", str(root / "pretrain")
    lengths = [find_model(run, SEARCHED).trained.lengths for run in (tuned, pretrained)]
    # A later corpus is embedded by what fine-tuning began with, which is measured, too.
    for given, expected in (
        (Overrides(), ("", lengths[0])),
        (Overrides(corpus=str(root / "later")), (pretrained, lengths[1])),
        (Overrides(pretrained=pretrained), (pretrained, lengths[1])),
    ):
        config = evaluate_config(str(tuned), given)
        used = config.pretrained, dataclasses.asdict(config.models.lengths)
        assert used == expected
        assert config.finetuned.models.lengths.query == 24


def with_record(moved, root, **new):
    """Copies the chain; fine-tuning has recorded something else."""
    tiny_run.copy(moved, root, "corpus", "pretrain", "finetune")
    change_record(root / "finetune", **new)
    return root


def test_questions_that_were_not_recorded_are_asked_for(moved, tmp_path, refuse):
    root = with_record(moved, tmp_path, source="")
    change_record(root / "pretrain", questions="")
    refuse(["evaluate", root], "--questions FILE")
    assert not (root / "evaluate").exists()


def test_what_is_missing_is_named(moved, tmp_path, refuse):
    nowhere, empty = tmp_path / "nowhere", tmp_path / "empty"
    empty.mkdir()
    for command in ("ask", "evaluate", "search"):
        refuse([command, nowhere], nowhere, "does not exist")
        refuse([command, empty], "no checkpoint")
    for command in ("ask", "evaluate"):
        refuse([command, moved / "pretrain"], "run of pretrain")
        refuse([command], "RUN")
        refuse([command, "--gin_file=gin/runs/ask.gin", moved], "got both")
    refuse(["ask", moved, "who?", "--port=8000"], "got both")
    for port in ("eighty", "-1"):
        said = f"a whole number of at least 0, got '{port}'"
        refuse(["ask", moved, f"--port={port}"], said)
    refuse(["ask", moved, "--port=70000"], "PORT")
    for option in ("--host=0.0.0.0", "--allow_host=box.example"):
        refuse(["ask", moved, "who?", option], "expected --port beside --host")
    refuse(["ask", moved, "who?", " "], "question")
    # A search reads no block.
    for option in ("--num_read=3", "--retrieval_weight=2"):
        refuse(["search", moved, "mills", option], option)
    given = ["search", moved / "pretrain", "mills", f"--pretrained={moved}"]
    refuse(given, "leave pretrained out")


@pytest.mark.parametrize("k", [0, 10_000])
def test_how_many_blocks_are_sought_is_checked_before_the_first_query(k, moved, refuse):
    with piped("mills\nrivers\n"):
        refuse(["search", moved, f"--k={k}"], "expected k from 1 to", f"got {k}")


def test_two_models_are_to_be_told_apart(moved, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(moved / "finetune", tmp_path / name)
    with pytest.raises(BadInputError, match=r"one run of `realm finetune`.*/a, .*/b"):
        find_model(tmp_path)
    shutil.rmtree(tmp_path / "b")
    assert find_model(tmp_path).model_dir == str(tmp_path / "a")


def test_a_corpus_that_is_nowhere_is_named(moved, tmp_path, refuse):
    root = with_record(moved, tmp_path, corpus="/nowhere/corpus")
    assert find_corpus(find_model(root)) == (str(root / "corpus"), False)
    shutil.rmtree(root / "corpus")
    sought = f"no corpus in {root}/corpus"
    refuse(["ask", root, "who?"], sought, "/nowhere/corpus", "--corpus FOLDER")
    other_corpus(moved, root / "corpus")
    refuse(["ask", root, "who"], f"another corpus in {root}/corpus")
    shutil.rmtree(root / "corpus")
    vocabulary = WordPiece.train(["Town has a mill."], 60, tmp_path / "vocab.txt")
    other_corpus(moved, root / "corpus", vocabulary)
    for allow in ([], ["--allow_corpus_mismatch"]):
        words = ["ask", moved, "who?", f"--corpus={root / 'corpus'}", *allow]
        refuse(words, "vocabulary")


def other_corpus(moved, folder, vocabulary=None):
    vocabulary = vocabulary or WordPiece.load(moved / "corpus" / "vocab.txt")
    town = Document("Town", "Town has a mill.", "town")
    build_corpus([town], folder, vocabulary, chunk_length=40)


def test_only_a_later_version_of_the_corpus_is_safe(moved, tmp_path):
    model = find_model(moved)
    trained = read_info(moved / "corpus")["fingerprint"]
    root = tiny_run.copy(moved, tmp_path, "corpus")
    for name in ("second", "third", "stranger"):
        other_corpus(moved, root / name)
    link_versions(root / "corpus", root / "second")
    link_versions(root / "second", root / "third")
    with pytest.raises(BadInputError, match="or a later version of it"):
        find_corpus(model, str(root / "stranger"))
    stranger = Overrides(corpus=str(root / "stranger"), allow_corpus_mismatch=True)
    assert ask_config(str(moved), stranger).allow_corpus_mismatch
    for name in ("second", "third"):
        assert find_corpus(model, str(root / name)) == (str(root / name), True)
    # The fingerprint is what counts: the first version may be gone, the link not.
    shutil.rmtree(root / "corpus")
    assert is_version_of(root / "third", trained)
    (root / "second" / PARENT_FILE).unlink()
    assert not is_version_of(root / "third", trained)


def test_a_chain_of_the_version_before_is_read_and_goes_on(moved, expected, tmp_path):
    stages = ("warm_start", "pretrain", "finetune")
    root = tiny_run.copy(moved, tmp_path, "corpus", *stages)
    for stage in stages:
        as_earlier_version(root / stage)
    assert find_model(root).trained == find_model(moved).trained
    model = realm_jax.load(root)
    assert model.corpus.directory == root / "corpus"
    for question, answer in expected.items():
        assert model.answer(question).text == answer
    config, of_today = (evaluate_config(str(r), Overrides()) for r in (root, moved))
    assert config.questions == of_today.questions
    assert config.masked_task == "towns_salient"
    assert config.model_dirs == [str(root / stage) for stage in stages]
    arguments = tiny_run.chain_arguments("finetune", root)
    assert main([*arguments, "--gin.finetune.FinetuneConfig.train_steps=21"]) == 0
    assert find_model(root).trained.source == str(root / "pretrain")
