import dataclasses
import json
from collections import Counter

import numpy as np
import pytest

import realm_jax
from realm_jax.answering.hybrid import BM25Index
from realm_jax.data.blocks import BlockStore
from realm_jax.data.questions import read_questions
from realm_jax.evaluation import comparisons, run
from realm_jax.evaluation.compare import compare_runs, read_run
from realm_jax.evaluation.findings import verdicts
from realm_jax.evaluation.loading import FinetunedModel
from realm_jax.evaluation.open_qa import (
    Baseline,
    SameReader,
    evaluate_open_qa,
    oracle_blocks,
    random_blocks,
)
from realm_jax.evaluation.report import render_html
from realm_jax.index.embedding_cache import KnownRows
from realm_jax.metrics.answers import has_answer
from realm_jax.training import finetune, warm_start
from tests import tiny_world
from tests.refused import refused
from tests.tiny_world import EMBED, NEVER, silent

NUM_READ = 3


@pytest.fixture(scope="module")
def stages(world, traced_once, tmp_path_factory):
    """A world, a warm start of it, and what was fine-tuned from that."""
    folder = tmp_path_factory.mktemp("stages")
    started = tiny_world.warm_start_config(world, folder / "start")
    warm_start.run(started, silent, NEVER)
    settings = {"warm_start": started.model_dir, "num_read": NUM_READ}
    tuned = tiny_world.finetune_config(world, folder / "finetune", **settings)
    finetune.run(tuned, silent, NEVER)
    return world, started, tuned


@pytest.fixture(scope="module")
def config(stages, tmp_path_factory):
    world, started, tuned = stages
    given = {"questions": world.questions, "split": "dev", "embed": EMBED}
    return run.EvaluateConfig(
        model_dir=str(tmp_path_factory.mktemp("evaluated")),
        corpus=world.corpus,
        finetuned=tuned,
        models=tiny_world.models(),
        starting_point=started.model_dir,
        baselines=tuple(Baseline),
        **given,
    )


@pytest.fixture(scope="module")
def report(config):
    return run.run(config, silent, NEVER)


def lines_of(config, baseline=None):
    name = f"predictions_{baseline}.jsonl" if baseline else "predictions.jsonl"
    with open(f"{config.model_dir}/{name}") as file:
        return list(map(json.loads, file))


def read_in(line):
    return [document["block"] for document in line["documents"]]


def test_each_row_reads_the_blocks_of_its_baseline(stages, config, report):
    store = BlockStore.open(stages[0].corpus)
    texts = [q.question for q in read_questions(config.questions, "dev")]
    by_words = BM25Index(store).search(texts, NUM_READ).ids
    by_chance = random_blocks(len(texts), store.num_blocks, NUM_READ)
    for baseline, found in (("bm25", by_words), ("random", by_chance)):
        for line, blocks in zip(lines_of(config, baseline), found, strict=True):
            assert set(read_in(line)) == set(blocks.tolist()) - {-1}
    assert not any(map(read_in, lines_of(config, "closed_book")))
    before, fine = lines_of(config, "starting_point"), lines_of(config)
    hits = [line["measured"]["Before training"]["recall@1"] for line in fine]
    bodies = [store.text(read_in(line)[0]).body for line in before]
    right = [
        has_answer(body, line["answers"])
        for body, line in zip(bodies, before, strict=True)
    ]
    assert right == hits


def test_the_hybrid_row_is_what_the_library_answers(stages, config, report):
    world, _, tuned = stages
    model = realm_jax.load(tuned.model_dir, world.corpus)
    texts = [q.question for q in read_questions(config.questions, "dev")]
    lines = lines_of(config, "hybrid")
    for line, answer in zip(lines, model.answer(texts, hybrid=True), strict=True):
        assert line["prediction"] == answer.text
        assert read_in(line) == [document.block_id for document in answer.documents]
    assert list(map(read_in, lines)) != list(map(read_in, lines_of(config)))


def test_the_oracle_reads_one_block_and_it_has_the_answer(stages, config, report):
    store = BlockStore.open(stages[0].corpus)
    for line, fine in zip(lines_of(config, "oracle"), lines_of(config), strict=True):
        holds = fine["measured"]["After fine-tuning"]["recall@100"] == 1.0
        assert len(read_in(line)) == holds
        for block in read_in(line):
            assert has_answer(store.text(block).body, line["answers"])
            assert line["documents"][0]["document_probability"] == pytest.approx(1.0)
        if not holds:
            assert line["prediction"] == ""


def test_closed_book_is_the_most_frequent_answer_of_training(config, report):
    counts = Counter(
        answer
        for question in read_questions(config.questions, "train")
        for answer in {text.lower() for text in question.answers}
    )
    most = max(counts.values())
    predicted = {line["prediction"] for line in lines_of(config, "closed_book")}
    assert len(predicted) == 1
    assert counts[predicted.pop()] == most


def test_the_retrievers_own_blocks_are_answered_as_they_are_without(stages, config):
    world, _, tuned = stages
    store = BlockStore.open(world.corpus)
    model = FinetunedModel.open(tuned, store, searcher="device", embed=EMBED)
    index = model.index(store)
    answerer = model.corpus_search(store, index)
    questions = read_questions(world.questions, "dev")
    own = evaluate_open_qa(answerer, questions)
    embeddings = KnownRows(model.source(store).series, index.manifest)
    reader = SameReader(answerer, embeddings, questions, own)
    again = reader.read(own.retrieved)
    for first, second in zip(own.predictions, again.predictions, strict=True):
        one, other = first.answer, second.answer
        assert (other.text, other.block_id) == (one.text, one.block_id)
        assert other.probability == pytest.approx(one.probability, rel=1e-4)
    np.testing.assert_array_equal(own.exact_match, again.exact_match)
    np.testing.assert_array_equal(own.answer_read, again.answer_read)


def test_rows_and_differences_are_those_of_the_files(config, report):
    rows = {row.label: row.metrics for row in report.same_reader.rows}
    assert list(rows) == [
        *("closed book", "random blocks", "BM25"),
        *("After fine-tuning, fused with BM25", "Before training", "oracle block"),
        comparisons.AFTER_FINETUNING,
    ]
    fine = np.mean([line["correct"] for line in lines_of(config)])
    assert rows[comparisons.AFTER_FINETUNING]["exact match"].mean == fine
    for baseline in Baseline:
        mean = np.mean([line["correct"] for line in lines_of(config, baseline.value)])
        assert rows[baseline.label]["exact match"].mean == mean
        gain = report.same_reader.find_change(
            baseline.label, comparisons.AFTER_FINETUNING, "exact match"
        )
        assert gain.mean == pytest.approx(fine - mean)
        place = f"{config.model_dir}/predictions_{baseline.value}.jsonl"
        compared = compare_runs(read_run(place), read_run(config.model_dir))
        [figure] = [f for f in compared.figures if f.metric == "exact match"]
        assert figure.difference == gain
    read = {label: row.get("answer in what was read") for label, row in rows.items()}
    assert read.pop("closed book") is None
    assert read["oracle block"].mean == max(found.mean for found in read.values())
    page = render_html(report)
    assert "The same reader, other blocks" in page
    assert any("in place of BM25's" in finding.text for finding in verdicts(report))


def test_random_blocks_are_the_same_every_time_and_differ():
    first = random_blocks(20, 30, 4)
    np.testing.assert_array_equal(first, random_blocks(20, 30, 4))
    assert (first[0] != first[1]).any()
    assert all(len(set(row)) == 4 for row in first.tolist())
    assert set(first.ravel().tolist()) <= set(range(30))
    few = random_blocks(5, 2, 4)
    assert all(sorted(row) == [-1, -1, 0, 1] for row in few.tolist())


def test_the_oracle_takes_the_first_block_that_is_relevant():
    retrieved = np.array([[4, 7, 2], [3, 1, -1], [5, 6, 0]])
    found = oracle_blocks(retrieved, [{2, 7}, set(), {5}], 2)
    np.testing.assert_array_equal(found, [[7, -1], [-1, -1], [5, -1]])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"baselines": ["dpr"]}, "BASELINES.*'dpr'"),
        ({"starting_point": ""}, "expected STARTING_POINT beside"),
        ({"max_bm25_blocks": 1}, r"at most 1 blocks .*'bm25'"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(config, tmp_path, changes, said):
    with refused(said):
        other = dataclasses.replace(config, model_dir=str(tmp_path), **changes)
        run.run(other, silent, NEVER)
    assert not list(tmp_path.iterdir())
