import dataclasses
import json
import shutil
import threading

import numpy as np
import pytest

from realm_jax.answering.hybrid import BM25Index
from realm_jax.answering.search import search_questions
from realm_jax.data.blocks import BlockStore
from realm_jax.data.documents import Document
from realm_jax.data.questions import question_examples, read_questions
from realm_jax.data.versions import link_versions
from realm_jax.errors import StoppedError
from realm_jax.evaluation import comparisons, provenance, run
from realm_jax.evaluation.findings import verdicts
from realm_jax.evaluation.stage_results import random_recall
from realm_jax.evaluation.watch import follow
from realm_jax.index.embed import document_embedder, embed_blocks
from realm_jax.index.embedding_cache import index_series
from realm_jax.index.manifest import EMBEDDINGS
from realm_jax.index.searchers import make_searcher
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.metrics.answers import has_answer, token_f1
from realm_jax.metrics.retrieval import recall_at_k, relevant_blocks
from realm_jax.models.retriever import tie_towers
from realm_jax.storage import open_store
from realm_jax.training import finetune, pretrain, warm_start
from realm_jax.training.checkpoints import restore_params
from tests import tiny_world
from tests.corpus_builder import build_corpus
from tests.json_lines import write_lines
from tests.records import change_details, change_record
from tests.refused import refused
from tests.tiny_world import EMBED, LENGTHS, NEVER, silent
from tests.training.runs import stop_run

# Questions may have another padded length than sentences.
QUESTION_MODELS = dataclasses.replace(
    tiny_world.models(), lengths=dataclasses.replace(LENGTHS, query=LENGTHS.query + 2)
)


pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.fixture(scope="module")
def chain(world, traced_once, tmp_path_factory):
    """A world and all three stages trained on it for a few steps."""
    folder = tmp_path_factory.mktemp("chain")
    with open(world.questions) as file:
        asked = [
            json.loads(line) | {"topic": str(i % 3)} for i, line in enumerate(file)
        ]
    questions = write_lines(folder / "questions.jsonl", asked)
    world = dataclasses.replace(world, questions=questions)
    started = tiny_world.warm_start_config(world, folder / "warm_start")
    warm_start.run(started, silent, NEVER)
    source = {"warm_start": started.model_dir, "train_steps": 3}
    trained = tiny_world.pretrain_config(world, folder / "pretrain", **source)
    pretrain.run(trained, silent, NEVER)
    source = {"warm_start": trained.model_dir, "models": QUESTION_MODELS}
    finetuned = tiny_world.finetune_config(world, folder / "finetune", **source)
    finetune.run(finetuned, silent, NEVER)
    return world, folder, finetuned


def config_of(chain, model_dir, **changes):
    world, folder, finetuned = chain
    values = {
        "model_dir": str(model_dir),
        "corpus": world.corpus,
        "questions": world.questions,
        "finetuned": finetuned,
        "models": tiny_world.models(),
        "warm_started": str(folder / "warm_start"),
        "pretrained": str(folder / "pretrain"),
        "split": "dev",
        "masked_task": "asked",
        "max_masked": 12,
        "num_candidates": 4,
        "embed": EMBED,
    }
    return run.EvaluateConfig(**(values | changes))


def evaluated(chain, folder, **changes):
    return run.run(config_of(chain, folder, **changes), silent, NEVER)


@pytest.fixture(scope="module")
def told():
    """The progress that was told while the report was made."""
    return []


@pytest.fixture(scope="module")
def report(chain, told, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    config = config_of(chain, folder)
    return run.run(config, lambda *line: told.append(line[:2]), NEVER), folder


def lines_of(folder, name="predictions.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def control(chain):
    """Its warm start goes on for longer than the chain's own took."""
    world, folder, _ = chain
    source = {"warm_start": str(folder / "warm_start"), "train_steps": 5, "seed": 1}
    went_on = tiny_world.warm_start_config(world, folder / "control_warm", **source)
    assert warm_start.run(went_on, silent, NEVER)
    source = {"warm_start": went_on.model_dir, "models": QUESTION_MODELS}
    finetuned = tiny_world.finetune_config(world, folder / "control_fine", **source)
    assert finetune.run(finetuned, silent, NEVER)
    return {
        "control_warm_started": went_on.model_dir,
        "control_finetuned": finetuned.model_dir,
    }


@pytest.fixture(scope="module")
def compared(chain, control, tmp_path_factory):
    """The report of a chain with its control, and its folder."""
    folder = tmp_path_factory.mktemp("compared")
    return evaluated(chain, folder, masked_task="", **control), folder


@pytest.fixture(scope="module")
def asked(chain):
    """The corpus, the questions that are asked, and the blocks that are right."""
    store = BlockStore.open(chain[0].corpus)
    questions = read_questions(chain[0].questions, "dev")
    return store, questions, relevant_blocks(store, questions)


def hits_of(asked, model_dir, k, towers=lambda params: params):
    """Recall@k of every question by the retriever of a stage, from its parameters."""
    store, questions, relevant = asked
    config = tiny_world.models().retriever_config(store.vocabulary.size)
    params = towers(restore_params(open_store(model_dir)).tree["retriever"])
    embeddings = embed_blocks(
        document_embedder(config), params, store, np.arange(store.num_blocks), EMBED
    )
    ids = question_examples(questions, store.vocabulary, query_length=LENGTHS.query)
    searcher = make_searcher("device", embeddings)
    found = search_questions(config, params, searcher, ids["question_ids"], k)
    return recall_at_k(np.asarray(found.ids), relevant, k)


ROWS = ["Before training", "After the warm start", "After REALM", "After fine-tuning"]


def test_recall_is_that_of_the_parameters_a_stage_ended_with(chain, asked, report):
    rows = {row.label: row.metrics for row in report[0].comparison.rows}
    assert list(rows) == ROWS[1:]
    for stage, row in zip(("warm_start", "pretrain"), rows.values(), strict=False):
        for k in (1, 5, 20):
            hits = hits_of(asked, chain[1] / stage, k)
            assert row[f"recall@{k}"].mean == pytest.approx(hits.mean())


def test_a_taught_query_tower_has_a_row_for_what_it_began_as(chain, asked, tmp_path):
    started = tmp_path / "started"
    shutil.copytree(chain[1] / "warm_start", started)
    change_record(started, data_order={"bm25_weight": 0.5})
    given = {"warm_started": str(started), "masked_task": ""}
    data = evaluated(chain, tmp_path / "out", **given)
    assert [row.label for row in data.comparison.rows] == ROWS
    named = evaluated(chain, tmp_path / "named", starting_point=str(started), **given)
    assert named.comparison.rows == data.comparison.rows
    for row, towers in zip(data.comparison.rows, (tie_towers, dict), strict=False):
        for k in (1, 5, 20):
            hits = hits_of(asked, started, k, towers)
            assert row.metrics[f"recall@{k}"].mean == pytest.approx(hits.mean())


def require_means(figure, *with_and_without):
    """Requires the means of a chain and its control, and the difference of these."""
    with_realm, without_realm = with_and_without
    means = [figure.with_realm.mean, figure.without_realm.mean, figure.difference.mean]
    assert means == pytest.approx([*with_and_without, with_realm - without_realm])


def test_the_control_before_fine_tuning_is_compared_by_recall(
    chain, asked, control, compared
):
    folders = chain[1] / "pretrain", control["control_warm_started"]
    for k in (1, 5, 20):
        figure = compared[0].control.find("before fine-tuning", f"recall@{k}")
        require_means(figure, *(hits_of(asked, one, k).mean() for one in folders))


def test_the_control_after_fine_tuning_is_compared_by_what_it_answered(asked, compared):
    data, folder = compared
    _, questions, relevant = asked
    means = []
    for name in ("predictions.jsonl", "predictions_control.jsonl"):
        lines = lines_of(folder, name)
        assert [line["id"] for line in lines] == [question.id for question in questions]
        found = [
            line["retrieved"][0] in blocks
            for line, blocks in zip(lines, relevant, strict=True)
        ]
        right = np.mean([line["correct"] for line in lines])
        means.append({"exact match": right, "recall@1": np.mean(found)})
    for metric in means[0]:
        figure = data.control.find("after fine-tuning", metric)
        require_means(figure, *(one[metric] for one in means))


def test_the_control_leaves_the_chains_own_curves_and_rows_alone(report, compared):
    (alone, _), (data, _) = report, compared
    assert alone.control is None
    own, found = ((one.comparison, one.curves, one.run.stages) for one in (alone, data))
    assert own == found
    times = data.control.realm_time, data.control.control_time
    assert [time.steps for time in times] == [3, 5]


def test_a_retriever_that_was_measured_is_not_embedded_again(chain, tmp_path):
    """As of a warm start that trained the reader alone."""
    ignore = shutil.ignore_patterns("index")
    for name in ("started", "control"):
        shutil.copytree(chain[1] / "warm_start", tmp_path / name, ignore=ignore)
    given = {"starting_point": str(tmp_path / "started"), "masked_task": ""}
    given["control_warm_started"] = str(tmp_path / "control")
    data = evaluated(chain, tmp_path / "out", **given)
    assert [row.label for row in data.comparison.rows] == ROWS
    before, after, *_ = data.comparison.rows
    assert before.metrics == after.metrics
    for figure in data.control.figures:
        assert figure.without_realm == after.metrics[figure.metric]
    assert (tmp_path / "started" / "index").exists()
    assert not (tmp_path / "control" / "index").exists()
    assert not (tmp_path / "out" / run.CONTROL_PREDICTIONS_NAME).exists()


def test_a_control_that_cannot_be_compared_is_bad_input(chain, control, tmp_path):
    changed = tmp_path / "changed"
    unfit = (
        ({"corpus_fingerprint": "x"}, "corpus_fingerprint"),
        ({"model": {"shared": 1}}, r"a run with model\."),
    )
    longer, other = {"train_steps": 9}, {"data_order": {"batch_size": 8}}
    warm = (longer, "found step 5 of 9"), ({"stage": "pretrain"}, "stage 'warm_start'")
    tuned = (longer, "found step 3 of 9"), (other, "a control with batch_size 4")
    cases = {"control_warm_started": warm, "control_finetuned": tuned}
    for macro, changes in cases.items():
        given = {**control, macro: str(changed), "masked_task": ""}
        for new, named in (*unfit, *changes):
            shutil.copytree(control[macro], changed)
            change = change_details if "train_steps" in new else change_record
            change(changed, **new)
            with refused(f"{named}.*{changed}|{changed}.*{named}"):
                evaluated(chain, tmp_path / "out", **given)
            shutil.rmtree(changed)
    # Stages of two chains are no control.
    given = control | {"control_finetuned": chain[2].model_dir, "masked_task": ""}
    with refused(r"\(CONTROL_WARM_STARTED\), but it was"):
        evaluated(chain, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_baselines_are_judged_as_the_retriever_is(report, asked):
    store, questions, relevant = asked
    rows = {row.label: row.metrics for row in report[0].comparison.baselines}
    assert list(rows) == ["random blocks", "BM25"]
    found = BM25Index(store).search([q.question for q in questions], 20).ids
    for k in (1, 5, 20):
        hits = recall_at_k(found, relevant, k)
        assert rows["BM25"][f"recall@{k}"].mean == pytest.approx(hits.mean())
        by_chance = random_recall(relevant, store.num_blocks, k)
        figure = rows["random blocks"][f"recall@{k}"]
        assert figure.mean == pytest.approx(by_chance.mean())


def test_f1_and_topics_are_those_of_the_predictions(report, asked):
    data, folder = report
    lines = lines_of(folder)
    _, questions, _ = asked
    for line, question in zip(lines, questions, strict=True):
        assert line["topic"] == question.topic
        assert line["f1"] == token_f1(line["prediction"], question.answers)
        figures = line["measured"]["After fine-tuning"]
        expected = line["f1"], line["correct"]
        assert (figures["F1"], figures["exact match"]) == expected
    for row in data.comparison.rows:
        for metric, interval in row.metrics.items():
            values = [line["measured"][row.label][metric] for line in lines]
            assert interval.mean == pytest.approx(np.mean(values))
    assert {row.label for row in data.topics} == {"0", "1", "2"}
    for row in data.topics:
        f1 = [line["f1"] for line in lines if line["topic"] == row.label]
        assert row.metrics["F1"].mean == pytest.approx(np.mean(f1))
        assert row.metrics["F1"].count == len(f1)


def test_errors_and_calibration_are_those_of_the_predictions(report, asked):
    data, folder = report
    lines = lines_of(folder)
    store, *_ = asked
    texts = [[store.text(d["block"]).body for d in x["documents"]] for x in lines]
    has = [
        any(has_answer(text, line["answers"]) for text in read)
        for line, read in zip(lines, texts, strict=True)
    ]
    right = np.asarray([line["correct"] for line in lines])
    errors = data.errors
    assert errors.right.mean == pytest.approx(right.mean())
    assert errors.oracle.mean == pytest.approx(np.mean(right | has))
    assert errors.retriever.mean == pytest.approx(1 - errors.oracle.mean)
    reader = errors.wrong_block.mean + errors.wrong_span.mean
    assert reader == pytest.approx(errors.oracle.mean - errors.right.mean)
    assert 0 < errors.retriever.mean < 1
    confidence = np.mean([line["probability"] for line in lines])
    assert data.calibration.confidence == pytest.approx(confidence)
    for line in lines:
        assert line["index"]["corpus_fingerprint"] == store.fingerprint


def test_questions_that_were_trained_on_are_told_apart(report, chain, tmp_path):
    data, folder = report
    path = chain[0].questions
    trained, asked = (read_questions(path, split) for split in ("train", "dev"))
    known = {answer for question in trained for answer in question.answers}
    seen = np.asarray([bool(known & set(q.answers)) for q in asked])
    rows = {row.label: row.metrics["exact match"] for row in data.overlaps}
    correct = np.asarray([line["correct"] for line in lines_of(folder)])
    for label, rows_of_label in (
        ("answer in training", seen),
        ("neither in training", ~seen),
    ):
        assert rows[label].count == rows_of_label.sum() > 0
        assert rows[label].mean == pytest.approx(correct[rows_of_label].mean())
    assert "question in training" not in rows
    assert not any("word for word" in found.text for found in verdicts(data))
    # The training set itself is recognised.
    again = evaluated(chain, tmp_path, split="train", masked_task="")
    assert [row.label for row in again.overlaps] == ["question in training"]
    assert any("word for word" in found.text for found in verdicts(again))


def test_what_the_stages_recorded_is_in_the_report(chain, tmp_path):
    for name in ("pretrain", "finetune"):
        shutil.copytree(chain[1] / name, tmp_path / name)
    record = {"command": "pretrain", "started": "2099-05-01T10:00:00Z", "seed": 0}
    record |= {"version": "0.2.0", "commit": None, "arguments": [], "gin": ""}
    record["settings"] = {"questions": "questions.jsonl", "questions_split": "dev"}
    path = tmp_path / "pretrain/settings/pretrain-0000.json"
    path.write_text(json.dumps(record))
    moved = dataclasses.replace(chain[2], model_dir=str(tmp_path / "finetune"))
    given = {"pretrained": str(tmp_path / "pretrain"), "masked_task": ""}
    data = evaluated(chain, tmp_path / "out", finetuned=moved, **given)
    found = {stage.stage: [s.seed for s in stage.starts] for stage in data.recorded}
    # Of pre-training the last is the one that was written here.
    assert found == {"warm_start": [0], "pretrain": [0, 0], "finetune": [0]}
    assert data.run.held_out_questions == "held-out dev questions"
    path.write_text("{")
    with refused(r"pretrain-0000\.json"):
        evaluated(chain, tmp_path / "out", finetuned=moved, **given)


def test_what_was_written_is_whole(report, asked):
    data, folder = report
    written = {path.name for path in folder.iterdir()}
    assert written == {"report.html", "report.json", "predictions.jsonl"}
    assert list(data.files) == ["predictions.jsonl"]
    # Nothing is read instead of the retriever's blocks unless it is asked for.
    assert "The same reader" not in (folder / "report.html").read_text()
    predictions = lines_of(folder)
    store, questions, _ = asked
    assert [p["id"] for p in predictions] == [q.id for q in questions]
    for prediction in predictions:
        body = store.text(prediction["block"]).body
        assert prediction["prediction"] == body[prediction["start"] : prediction["end"]]
    assert len(data.examples) == 6
    assert data.masked_accuracy is not None
    stages = [time.stage for time in data.run.stages]
    assert stages == ["warm_start", "pretrain", "finetune"]


def test_stages_and_baselines_can_be_left_out(chain, tmp_path):
    without = {"max_bm25_blocks": 0, "warm_started": "", "pretrained": ""}
    data = evaluated(chain, tmp_path, **without)
    assert data.comparison.baselines == []
    assert [row.label for row in data.comparison.rows] == [comparisons.AFTER_FINETUNING]
    assert data.masked_accuracy is None


def test_progress_reaches_its_end_and_goes_no_further(report, told):
    assert told == [(step, 7) for step in range(len(told))]
    assert len(told) <= 8


def test_asked_to_stop_it_writes_nothing(chain, tmp_path):
    for after in (0, 2, 5):
        stop = threading.Event()

        def report(step, total, values, stop=stop, after=after):
            if step >= after:
                stop.set()

        with pytest.raises(StoppedError):
            run.run(config_of(chain, tmp_path, masked_task=""), report, stop)
        assert list(tmp_path.iterdir()) == []


def test_extras_that_are_not_installed_have_no_version(monkeypatch):
    every = provenance.versions()
    monkeypatch.setattr(provenance, "_VERSIONS", (*every, "not_installed"))
    assert provenance.versions() == every


def test_nothing_is_written_before_all_is_collected(chain, tmp_path, monkeypatch):
    def fail():
        raise OSError("no machine")

    monkeypatch.setattr(provenance, "machine", fail)
    with pytest.raises(OSError, match="no machine"):
        evaluated(chain, tmp_path / "out", masked_task="", warm_started="")
    assert not (tmp_path / "out").exists()


def test_what_does_not_belong_together_is_bad_input(chain, tmp_path):
    _, folder, finetuned = chain
    moved = tmp_path / "finetune"
    shutil.copytree(folder / "finetune", moved)
    shutil.rmtree(moved / "index")
    without_index = dataclasses.replace(finetuned, model_dir=str(moved))
    alone = {"warm_started": "", "pretrained": ""}
    for changes, named in (
        ({"pretrained": str(tmp_path / "nothing")}, "run that stage first"),
        ({"models": tiny_world.models(hidden=32)}, r"model\.bert\.hidden_size 32"),
        ({"pretrained": f"{folder}/warm_start"}, "a run with stage 'pretrain'"),
        ({"masked_task": "nothing"}, "prepared examples"),
        ({"split": "nobody"}, "nobody"),
        ({"questions": f"{folder}/nothing"}, "nothing"),
        (alone | {"finetuned": without_index}, "fine-tune again"),
    ):
        with refused(named):
            evaluated(chain, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_the_time_of_a_stage_adds_up_over_a_resumption(tmp_path):
    lines = [("pretrain", 10, 5.0), ("pretrain", 14, 2.0), ("finetune", 6, 3.0)]
    names = ("stage", "step", "steps_per_second")
    metrics = [dict(zip(names, line, strict=True)) for line in lines]
    write_lines(tmp_path / "metrics.jsonl", metrics)
    assert provenance.stage_times(str(tmp_path)) == [
        comparisons.StageTime("pretrain", 4.0, 14),
        comparisons.StageTime("finetune", 2.0, 6),
    ]


def later_version(world, folder):
    """The corpus with its first block changed and its last one gone."""
    old = BlockStore.open(world.corpus)
    documents = [
        Document(text.title, text.body, text.source_id)
        for text in old.texts(range(old.num_blocks))
    ]
    first = documents[0]
    documents[0] = dataclasses.replace(first, text=f"{first.text} {first.text}")
    settings = {"vocabulary": old.vocabulary, "chunk_length": old.chunk_length}
    return build_corpus(documents[:-1], folder / "later", **settings)


def test_after_a_complete_chain_no_document_is_embedded_again(
    chain, tmp_path, monkeypatch
):
    """The warm start's index is pre-training's first, and fine-tuning's its last."""
    _, folder, finetuned = chain
    own = {stage: tmp_path / stage for stage in ("warm_start", "pretrain", "finetune")}
    for stage, copied in own.items():
        shutil.copytree(folder / stage, copied)
    # As the chain left them: what other tests have measured since is gone.
    shutil.rmtree(own["warm_start"] / "index", ignore_errors=True)
    shutil.rmtree(own["pretrain"] / "other_index", ignore_errors=True)
    SnapshotSeries(open_store(own["pretrain"]), INDEX_SERIES).forget_after(0)
    embedded = tiny_world.count_embedded(monkeypatch)
    changes = {
        "warm_started": str(own["warm_start"]),
        "pretrained": str(own["pretrain"]),
        "finetuned": dataclasses.replace(finetuned, model_dir=str(own["finetune"])),
        "masked_task": "",
    }
    evaluated(chain, tmp_path / "out", **changes)
    # Two indexes were made, and not one block was embedded for them.
    assert embedded == [0, 0]
    for stage in ("warm_start", "pretrain"):
        series = SnapshotSeries(open_store(tmp_path / stage), INDEX_SERIES)
        assert 3 in series.steps()


def test_a_later_version_of_the_corpus_is_searched_without_training(chain, tmp_path):
    world, folder, _ = chain
    old, later = BlockStore.open(world.corpus), later_version(world, tmp_path)
    changes = {"corpus": str(tmp_path / "later"), "masked_task": ""}
    with refused("corpus_fingerprint"):
        evaluated(chain, tmp_path / "a", **changes)
    data = evaluated(chain, tmp_path / "b", allow_corpus_mismatch=True, **changes)
    assert data.run.corpus.num_blocks < old.num_blocks + 3
    for stage in ("warm_start", "pretrain", "finetune"):
        store = open_store(folder / stage)
        series = index_series(store, later.fingerprint)
        # A warm start has no index of its own before it is evaluated.
        if stage != "warm_start":
            assert series.name.startswith("other_index/")
        (step,) = series.steps()
        assert series.read_manifest(step).corpus_fingerprint == later.fingerprint


@pytest.mark.full
def test_one_tower_needs_the_model_it_began_as(chain, tmp_path):
    world, *_ = chain
    models, first = tiny_world.models(shared=True), tmp_path / "pretrain"
    began = tiny_world.pretrain_config(world, first, train_steps=1, models=models)
    assert pretrain.run(began, silent, NEVER)
    finetuned = tiny_world.finetune_config(
        world, tmp_path / "finetune", models=models, warm_start=str(first)
    )
    assert finetune.run(finetuned, silent, NEVER)
    later = later_version(world, tmp_path)
    changes = {
        "corpus": str(later.directory),
        "finetuned": finetuned,
        "models": models,
        "warm_started": "",
        "masked_task": "",
        "allow_corpus_mismatch": True,
    }
    with refused("expected in PRETRAINED the model"):
        evaluated(chain, tmp_path / "a", pretrained="", **changes)
    evaluated(chain, tmp_path / "b", pretrained=str(first), **changes)
    stores = [open_store(finetuned.model_dir), open_store(first)]
    rows = [
        series.read_array(series.read_manifest(series.steps()[-1]), EMBEDDINGS)
        for series in (index_series(store, later.fingerprint) for store in stores)
    ]
    # Embedded by the tower as it was, not as fine-tuning left it.
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-5)


@pytest.mark.full
def test_following_measures_every_newer_version_until_it_is_stopped(chain, tmp_path):
    world, folder, finetuned = chain
    shutil.copytree(world.corpus, tmp_path / "corpus")
    shutil.copytree(folder / "finetune", tmp_path / "finetune")
    corpus = {"corpus": str(tmp_path / "corpus")}
    folder = str(tmp_path / "finetune")
    moved = dataclasses.replace(finetuned, model_dir=folder, **corpus)
    given = {"finetuned": moved, "warm_started": "", "follow": True, **corpus}
    config = config_of(chain, tmp_path / "out", **given)
    stop = threading.Event()
    reports = follow(config, silent, stop, poll_seconds=0.01)
    first = next(reports)
    assert first.run.corpus.fingerprint == BlockStore.open(world.corpus).fingerprint
    assert first.masked_accuracy is not None

    later = later_version(world, tmp_path)
    link_versions(tmp_path / "corpus", later.directory)
    second = next(reports)
    assert second.run.corpus.fingerprint == later.fingerprint
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert written["run"]["corpus"]["fingerprint"] == later.fingerprint

    more = dataclasses.replace(moved, train_steps=finetuned.train_steps + 1)
    assert finetune.run(more, silent, NEVER)
    third = next(reports)
    assert third.run.corpus.fingerprint == later.fingerprint
    assert third.run.stages[-1].steps == more.train_steps
    stop.set()
    assert list(reports) == []


@pytest.mark.full
def test_what_follows_waits_while_a_stage_trains_on(chain, tmp_path):
    _, folder, finetuned = chain
    shutil.copytree(folder / "finetune", tmp_path / "finetune")
    moved = dataclasses.replace(finetuned, model_dir=str(tmp_path / "finetune"))
    config = config_of(
        chain, tmp_path / "out", finetuned=moved, warm_started="", pretrained=""
    )
    stop = threading.Event()
    reports = follow(config, silent, stop, poll_seconds=0.01)
    next(reports)
    steps = finetuned.train_steps
    more = dataclasses.replace(moved, train_steps=steps + 2, checkpoint_period=1)
    stop_run(finetune, more, steps + 1)
    threading.Timer(0.5, stop.set).start()
    assert list(reports) == []
