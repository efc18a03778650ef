"""`realm adapt`: a text and an encoder become a measured and exported retriever."""

import itertools
import json
import os
import pathlib
import shutil
import signal
import string
import threading
import types

import pytest

from realm_jax.cli import adapt
from realm_jax.cli.main import main
from realm_jax.data.judgements import JudgedQuery
from realm_jax.errors import BadInputError
from realm_jax.evaluation import adapt_report, adaptation, comparisons
from realm_jax.evaluation.comparisons import (
    AFTER_REALM,
    AFTER_WARM_START,
    BEFORE_TRAINING,
    SENTENCES,
    fused_name,
)
from realm_jax.evaluation.searching import find_retriever
from realm_jax.prepare.adapt_chain import Survey, require_enough
from realm_jax.prepare.first_chain import TextSize
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import finished_steps
from tests import tiny_run
from tests.cli.chains import configs_of, write_articles, write_encoder
from tests.flipped import flip
from tests.json_lines import write_lines
from tests.waiting import wait_until

QUERIES = [
    {"_id": f"q{i}", "text": f"Which river is near Town{i}?"} for i in range(0, 60, 7)
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A BERT whose pieces are letters, pairs of them and digits."""
    folder, letters = tmp_path_factory.mktemp("weights"), string.ascii_lowercase
    pairs = [*map("".join, itertools.product(letters, letters))]
    write_encoder(folder, [*letters, *string.digits, *pairs])
    return folder


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A folder with articles.jsonl, queries.jsonl and qrels.tsv."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    return tmp_path


def write_text(folder):
    tiny_run.make_inputs(folder, num_articles=150)
    write_lines(folder / "queries.jsonl", QUERIES)
    rows = [f"{query['_id']}\ttown-{query['_id'][1:]}\t1\n" for query in QUERIES]
    header = "query-id\tcorpus-id\tscore\n"
    (folder / "qrels.tsv").write_text(header + "".join(rows))


def planned(encoder, *words, text="articles.jsonl"):
    """The arguments of a run that is planned and not made."""
    return ["adapt", str(text), "--output=runs/my", f"--weights={encoder}", *words]


@pytest.fixture
def planning(monkeypatch):
    """The chain files that would be run; running one gives 7."""
    seen = []

    def run(path, stop):
        seen.append(path)
        return 7

    monkeypatch.setattr(adapt, "_run_chain", run)
    return seen


def test_the_chain_fits_text_and_encoder(text, encoder, planning, capsys):
    assert main(planned(encoder, "--updates=60")) == 7
    said = capsys.readouterr().out
    assert "text: 150 documents" in said
    assert "1 layers of 16" in said
    assert "encoder: 16 wide, mean pooling, normalised (no modules.json" in said
    assert "questions" not in said
    found = configs_of(*planning)
    assert list(found) == ["prepare", "warm-start", "pretrain"]
    assert found["warm-start"].pairs_task == "my_ict"
    assert found["warm-start"].bm25_weight == 0.5
    assert found["prepare"].examples == ["ict", "salient"]
    assert found["warm-start"].warm_start == str(encoder)
    pretrain = found["pretrain"]
    assert (pretrain.train_steps, pretrain.refresh_period) == (60, 40)
    assert pretrain.max_staleness_steps is None
    assert pretrain.refresh_mode == "async"
    retriever = pretrain.models.retriever_config(9)
    names = ("hidden_size", "num_layers", "num_heads", "mlp_size", "activation")
    of_bert = [getattr(retriever.bert, name) for name in names]
    assert of_bert == [16, 1, 2, 32, "gelu"]
    assert (retriever.projection_size, retriever.pooling) == (16, "mean")
    # The same command goes on; one with other settings would train on something else.
    assert main(planned(encoder, "--updates=60")) == 7
    assert main(planned(encoder)) == 2
    assert "another --output" in capsys.readouterr().err


def test_fewer_features_are_those_that_pieces_share_with_their_blocks(
    text, encoder, planning
):
    assert main(planned(encoder, "--width=8")) == 7
    found = configs_of(*planning)["warm-start"]
    assert found.projection == "lda"
    assert found.models.retriever_config(9).projection_size == 8


@pytest.mark.parametrize(
    ("documents", "share"), [(300, 0.05), (1398, 0.05), (8000, 0.025), (100_000, 0.01)]
)
def test_two_hundred_articles_are_held_out_where_they_are_a_twentieth(documents, share):
    size = TextSize(documents, 1000 * documents, is_estimate=False)
    size = require_enough("a.jsonl", size, Survey(frozenset(), 0, 0, ""))
    assert size.validation_fraction == share


@pytest.mark.usefixtures("planning")
def test_a_document_may_be_a_book_and_others_empty_or_copies(text, encoder, capsys):
    book = " ".join(f"Town{i % 90} lies in Hill{i % 70}, {i}." for i in range(20_000))
    write_articles([book, "", "  ", *["Town1 burnt down in 1700."] * 4])
    assert main(planned(encoder)) == 7
    said = capsys.readouterr().out
    assert "2 have no text and 3 have that of another one" in said


def test_a_folder_of_markdown(text, encoder, planning):
    docs = text / "docs"
    docs.mkdir()
    for line in (text / "articles.jsonl").read_text().splitlines():
        article = json.loads(line)
        page = f"# {article['title']}\n\n```\ncode()\n```\n\n{article['text']}\n"
        (docs / f"{article['id']}.md").write_text(page)
    (docs / "logo.png").write_bytes(bytes(range(256)))
    assert main(planned(encoder, text="docs")) == 7
    assert configs_of(*planning)["prepare"].source == "docs"


class TestRefused:
    @pytest.fixture(autouse=True)
    def _nothing_runs(self, planning, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        yield
        assert planning == []
        assert not pathlib.Path("runs").exists()

    @pytest.fixture
    def refused(self, refuse):
        # Each says what to do.
        return lambda arguments, *words: refuse(arguments, "; ", *words)

    @pytest.mark.parametrize(
        ("texts", "words"),
        [
            (["Graz burnt down in 1585."] * 10, ["10 documents", "use it as it is"]),
            (["Graz burnt down in 1585. " * 40] * 200, ["199 are empty or copies"]),
            ([""] * 30, ["got 30 documents with 80 characters"]),
            (["東京は日本の首都である。" * 60] * 9, ["9 documents", "are empty"]),
            (
                [f"東京{i}は日本の首都である。" * 90 for i in range(90)],
                ["are [UNK]", "of its language", "`realm init`"],
            ),
            # Without blocks to look for.
            (
                [f"Town{i} burnt down in {1200 + i}." for i in range(200)],
                ["by --queries and --qrels"],
            ),
        ],
    )
    def test_text_that_teaches_nothing(self, texts, words, text, encoder, refused):
        write_articles(texts)
        refused(planned(encoder), *words)

    def test_files_that_are_no_text(self, text, encoder, refused):
        docs = text / "docs"
        docs.mkdir()
        (docs / "logo.png").write_bytes(b"\x89PNG")
        refused(planned(encoder, text="docs"), "*.md")
        (docs / "logo.txt").write_bytes(b"\x89PNG")
        refused(planned(encoder, text="docs"), "logo.txt: expected the text in UTF-8")
        refused(planned(encoder, text="docs/logo.png"), "a folder of text")
        pathlib.Path("articles.jsonl").write_text('{"title": "Graz"}\n')
        refused(planned(encoder), "articles.jsonl, line 1")

    def test_no_encoder(self, text, monkeypatch, refused):
        monkeypatch.setattr(
            "realm_jax.prepare.encoder_start.find_weights", lambda f: ""
        )
        refused(["adapt", "articles.jsonl", "--output=runs/my"], "`make data`")

    def test_options_that_do_not_fit(self, text, encoder, refused):
        refused(planned(encoder, "--updates=0"), "at least 1 as --updates, got 0")
        given = ["--queries=queries.jsonl", "--qrels=qrels.tsv"]
        refused(planned(encoder, given[1]), "--queries beside")
        refused(planned(encoder, given[0]), "--qrels=FILE")
        with open("qrels.tsv", "a") as file:
            file.write("q0\ttown-999\t1\n")
        refused(planned(encoder, *given), "'town-999'")


JUDGED = [
    JudgedQuery(q["_id"], q["text"], {f"town-{q['_id'][1:]}": 1}) for q in QUERIES
]


@pytest.fixture
def chain(finished, tmp_path):
    """A copy of a chain that is done, as far as measuring needs to know it."""
    root = tiny_run.copy(finished, tmp_path, "corpus", "warm_start", "pretrain")
    return types.SimpleNamespace(root=str(root), task="towns_salient")


def test_what_was_measured_is_written_exported_and_not_measured_again(
    chain, monkeypatch
):
    stop = threading.Event()
    report = adapt._measured(chain, JUDGED, stop)
    assert set(report["measured"]) == {SENTENCES, comparisons.QUERIES}
    written = json.loads((pathlib.Path(chain.root) / adapt_report.NAME).read_text())
    assert written.pop("crc32c")
    assert written == report
    of_queries = report["measured"][comparisons.QUERIES]
    labels = [row["label"] for row in of_queries["baselines"] + of_queries["rows"]]
    trained = (BEFORE_TRAINING, AFTER_WARM_START, AFTER_REALM)
    fused = [*map(fused_name, trained)]
    assert labels == ["BM25", comparisons.ENCODER, *fused, *trained]
    bm25, _, *fused = of_queries["baselines"]
    for alone, beside in zip(of_queries["rows"], fused, strict=True):
        assert alone["metrics"]["MRR@10"]["mean"] < beside["metrics"]["MRR@10"]["mean"]
    # Nothing but the name of the town tells articles apart, and it is in the query.
    assert bm25["metrics"]["MRR@10"]["mean"] == 1.0
    assert bm25["metrics"]["MRR@10"]["count"] == len(QUERIES)
    monkeypatch.setattr(adaptation, "measure", None)
    assert adapt._measured(chain, JUDGED, stop) == report
    export = adapt._exported(chain.root, report["exported"], stop)
    card = (pathlib.Path(export) / "README.md").read_text()
    assert f"| {len(QUERIES)} queries | BM25 | nDCG@10 100.0 " in card
    assert "| queries | gained after REALM, in points | nDCG@10 " in card
    gained, cost, _ = adapt_report.summary(report, chain.root, export)
    assert gained.count("the encoder without a projection ") == 2
    assert "warm start 60 updates" in cost
    first, *_ = seconds_of_indexes(chain.root, "warm_start")
    *_, last = seconds_of_indexes(chain.root, "pretrain")
    assert report["cost"]["embedding"]["seconds"] == first + last
    assert f"embedding the text {(first + last) / 60:.1f} min, measuring" in cost
    # Other queries are measured.
    with pytest.raises(TypeError):
        adapt._measured(chain, JUDGED[:3], stop)


def seconds_of_indexes(root, stage):
    """How long each index of a stage took to embed, the oldest first."""
    commits = pathlib.Path(root, stage, "index", "commits").glob("*.json")
    ordered = sorted(commits, key=lambda path: int(path.stem))
    return [json.loads(path.read_text())["build_seconds"] for path in ordered]


def test_the_chosen_one_is_opened_as_long_as_it_is_of_this_chain(chain, caplog):
    report = adapt._measured(chain, JUDGED, threading.Event())
    for chosen, stage in adapt_report.STAGES_OF.items():
        adapt_report.write_report(chain.root, report | {"exported": chosen})
        found, is_before = find_retriever(chain.root)
        assert found.trained.stage == stage.name
        assert is_before is (chosen == BEFORE_TRAINING)
    assert not caplog.messages
    other = {"exported": AFTER_WARM_START, "of": report["of"] | {"updates": 1}}
    adapt_report.write_report(chain.root, report | other)
    assert find_retriever(chain.root)[0].trained.stage == "pretrain"
    assert "is not of what" in caplog.messages[-1]
    pathlib.Path(chain.root, adapt_report.NAME).write_text("{")
    assert find_retriever(chain.root)[0].trained.stage == "pretrain"
    assert "is damaged" in caplog.messages[-1]


def test_all_are_computed_as_the_index_of_the_builder(chain, monkeypatch):
    numerics = {"dtype": "float32", "products": "bfloat16"}
    monkeypatch.setattr(adaptation, "index_numerics", lambda models, corpus: numerics)
    index = pathlib.Path(chain.root, "warm_start", "index")
    shutil.rmtree(index)  # That of the chain's evaluation.
    adapt._measured(chain, [], threading.Event())
    commits = [*(index / "commits").iterdir()]
    assert len(commits) == 2  # As it began, and as it ended.
    for commit in commits:
        bert = json.loads(commit.read_text())["metadata"]["retriever"]["bert"]
        assert {name: bert[name] for name in numerics} == numerics


@pytest.mark.full
def test_one_command_stopped_once(encoder, tmp_path):
    """By Ctrl-C, in the middle of its training; then it goes on to its end."""
    write_text(tmp_path)
    root = tmp_path / "run"
    words = [
        *("realm_jax.cli.main", "adapt", str(tmp_path / "articles.jsonl")),
        *(f"--output={root}", f"--weights={encoder}", "--updates=8"),
        *(f"--queries={tmp_path / 'queries.jsonl'}", f"--qrels={tmp_path}/qrels.tsv"),
    ]
    process = tiny_run.start(words)
    warm_start = root / "warm_start"
    wait_until(lambda: process.poll() is not None or (warm_start / "lease").exists())
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGINT, said
    assert "Traceback" not in said
    assert "run the same command again to go on" in said
    process = tiny_run.start(words)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    gained, cost, export = said.splitlines()[-3:]
    assert gained.startswith(f"gained: nDCG@10 of {len(QUERIES)} queries ")
    assert "warm start 180 updates in" in cost
    assert "REALM 8 updates in" in cost
    assert str(root / "export") in export
    assert finished_steps(open_store(root / "pretrain"))[-1] == 8
    assert (root / "export" / "embeddings.npy").exists()


def test_a_damaged_corpus_is_not_measured(chain):
    flip(pathlib.Path(chain.root, "corpus", "hashes.npy"))
    with pytest.raises(BadInputError, match=r"hashes\.npy is damaged"):
        adapt._measured(chain, [], threading.Event())
