"""Fine-tuning on answers that are regular expressions, or nowhere."""

import dataclasses
import logging
import re

import numpy as np
import pytest

from realm_jax.data.examples import write_examples
from realm_jax.data.questions import question_examples, read_questions
from realm_jax.errors import BadInputError
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.storage import open_store
from realm_jax.training import finetune
from realm_jax.training.checkpoint_manifests import finished_steps
from tests import tiny_world
from tests.tiny_world import LENGTHS, NEVER, silent
from tests.training.test_finetune import inputs_of


def with_patterns(world, corpus, task):
    """The same questions, with patterns that match what their answers are."""
    questions = [
        dataclasses.replace(
            q,
            answers=tuple(re.escape(a) for a in q.answers),
            answers_are_patterns=True,
        )
        for q in read_questions(world.questions, "train")
    ]
    with_questions(corpus, task, questions)


def with_questions(corpus, task, questions):
    arrays = question_examples(
        questions, corpus.vocabulary, query_length=LENGTHS.query, max_pattern_length=32
    )
    folder = corpus.directory / "examples" / task / "train"
    folder.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"vocabulary_fingerprint": corpus.vocabulary.fingerprint}
    write_examples(folder, [arrays], metadata)


def test_patterns_are_learned_from_as_the_answers_they_match(
    world, corpus, tmp_path, monkeypatch
):
    with_patterns(world, corpus, "patterns")
    exact = inputs_of(
        monkeypatch, tiny_world.finetune_config(world, tmp_path / "exact")
    )
    found = inputs_of(
        monkeypatch,
        tiny_world.finetune_config(world, tmp_path / "found", task="patterns"),
    )
    assert not found.questions.answer_ids.any()
    assert found.questions.answer_patterns is None
    np.testing.assert_array_equal(found.block_has_answer, exact.block_has_answer)
    np.testing.assert_array_equal(found.span_is_answer, exact.span_is_answer)
    assert exact.block_has_answer.any(axis=1).all()


def test_how_many_questions_can_be_learned_from_is_said_first(
    world, corpus, tmp_path, monkeypatch, caplog
):
    asked = read_questions(world.questions, "train")
    lost = [dataclasses.replace(q, answers=("nowhere at all",)) for q in asked]
    with_questions(corpus, "lost", lost)
    config = tiny_world.finetune_config(world, tmp_path, task="lost")
    with pytest.raises(BadInputError, match=f"got none for {len(lost)} of {len(lost)}"):
        finetune.run(config, silent, NEVER)
    assert not finished_steps(open_store(tmp_path))
    half = len(asked) // 2
    with_questions(corpus, "half", [*lost[:half], *asked[half:]])
    with caplog.at_level(logging.INFO, "realm_jax.training.answer_coverage"):
        config = tiny_world.finetune_config(world, tmp_path, task="half")
        inputs_of(monkeypatch, config)
    share = 100 * (len(asked) - half) / len(asked)
    assert f"{share:.1f}% of {len(asked)} questions have an answer" in caplog.text


@pytest.mark.full
def test_a_run_on_patterns_ends(world, corpus, tmp_path):
    with_patterns(world, corpus, "whole_run")
    config = tiny_world.finetune_config(world, tmp_path, task="whole_run")
    assert finetune.run(config, silent, NEVER)
    lines = list(read_metrics(str(tmp_path)))
    assert [line["answer_retrieved"] for line in lines] == [1.0, 1.0, 1.0]
