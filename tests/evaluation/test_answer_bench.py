import pytest

from bench.answer import PARTS, TimedAnswerer, markdown, measure
from realm_jax.index.searchers import make_searcher
from tests.evaluation.tiny_reader import LENGTHS, make_answerer


def test_a_question_takes_as_long_as_its_parts(models, corpus, embeddings):
    answerer = make_answerer(
        models, corpus, make_searcher("device", embeddings), batch_size=1
    )
    timed = TimedAnswerer(**vars(answerer))
    for _ in range(2):
        seconds = timed.time("Who founded Ansk?")
        assert set(seconds) == {*PARTS, "all"}
        assert min(seconds.values()) >= 0.0
        parts = sum(seconds[part] for part in PARTS)
        assert seconds["all"] == pytest.approx(parts)


def test_the_table_has_a_row_for_each_model(monkeypatch, models, corpus, embeddings):
    answerer = make_answerer(models, corpus, make_searcher("device", embeddings))
    monkeypatch.setattr("bench.answer._random_answerer", lambda *_: answerer)
    run = measure(corpus, ["Who founded Ansk?", "when"], LENGTHS, rounds=1)
    assert run["median_ms"] <= run["p95_ms"]
    assert len(run["questions_per_second"]) == 1
    *_, row = markdown([run], "command").strip().splitlines()
    assert row.startswith(f"| {corpus.num_blocks} | 56, 64 |")
