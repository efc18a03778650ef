"""Fine-tuning measures exact match on held-out questions, and keeps the best."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

from realm_jax.data.questions import read_questions
from realm_jax.evaluation.open_qa import evaluate_open_qa
from realm_jax.evaluation.provenance import chosen_checkpoint
from realm_jax.evaluation.report_data import ChosenCheckpoint
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.storage import open_store
from realm_jax.training import finetune
from realm_jax.training.checkpoint_manifests import DEV_EXACT_MATCH, Which, all_details
from realm_jax.training.dev_exact_match import DevExactMatch, read_dev_questions
from tests import groups, tiny_world
from tests.refused import refused
from tests.tiny_world import NEVER, assert_same_bits, silent
from tests.training import hosts_program
from tests.training.runs import kill_run, opened, state_of, stop_run


def config_of(world, folder, **changes):
    """Six updates, measured after every second; one program in all tests."""
    values = {"train_steps": 6, "batch_size": 12, "questions": world.questions}
    values |= {"evaluation_period": 2, "checkpoint_period": 4}
    return tiny_world.finetune_config(world, folder, **(values | changes))


def measured_at(folder):
    """What stands in metrics.jsonl, by step."""
    return {
        line["step"]: line[DEV_EXACT_MATCH]
        for line in read_metrics(str(folder))
        if DEV_EXACT_MATCH in line
    }


def scores_of(folder):
    found = all_details(open_store(folder))
    return {step: details.get(DEV_EXACT_MATCH) for step, details in found.items()}


def scripted(scores):
    """Has the measurements of a run give these scores, one after the other."""
    arrays = [np.array([score]) for score in scores]
    return mock.patch.object(DevExactMatch, "exact_match", side_effect=arrays)


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """A run that measured itself, at a rate at which it learns something."""
    folder = tmp_path_factory.mktemp("trained")
    config = config_of(world, folder, train_steps=35, evaluation_period=10)
    assert finetune.run(config, silent, NEVER)
    return config


def test_it_is_the_exact_match_of_evaluation(world, corpus, trained):
    dev = read_questions(world.questions, "dev")
    found = measured_at(trained.model_dir)
    assert list(found) == [10, 20, 30, 35]
    checked = 0
    for which in Which:
        model = opened(trained, corpus, which)
        answerer = model.corpus_search(corpus, model.index(corpus), batch_size=5)
        expected = evaluate_open_qa(answerer, dev, recall_at=[1]).exact_match.mean()
        assert found[model.run.step] == pytest.approx(expected)
        assert model.run.details[DEV_EXACT_MATCH] == pytest.approx(expected)
        checked += 0 < expected < 1
    assert checked, f"scores that tell nothing apart: {found}"


@pytest.mark.full
def test_measuring_changes_no_bit_of_training(world, tmp_path):
    folders = tmp_path / "measured", tmp_path / "not"
    for folder, questions in zip(folders, (world.questions, ""), strict=True):
        config = config_of(world, folder, questions=questions)
        assert finetune.run(config, silent, NEVER)
    assert_same_bits(*(state_of(folder, 6) for folder in folders))
    assert measured_at(folders[0]).keys() == {2, 4, 6}
    assert measured_at(folders[1]) == {}
    assert scores_of(folders[1]) == {4: None, 6: None}


def test_the_best_is_kept_opened_and_named(world, corpus, tmp_path):
    config = config_of(world, tmp_path, train_steps=10)
    with scripted([0.2, 0.5, 0.3, 0.5, 0.4]):
        assert finetune.run(config, silent, NEVER)
    # Of equal ones the later; 4 went when 10 was saved.
    assert scores_of(tmp_path) == {8: 0.5, 10: 0.4}
    assert opened(config, corpus).run.step == 8
    assert opened(config, corpus, Which.LAST).run.step == 10
    assert chosen_checkpoint(str(tmp_path), 8) == ChosenCheckpoint(8, 0.5, 10, 0.4)


def test_it_ends_early_and_does_not_go_on(world, corpus, tmp_path):
    config = config_of(world, tmp_path, train_steps=20, early_stopping=2)
    # As high as the highest is not higher.
    with scripted([0.3, 0.5, 0.4, 0.5]) as measured:
        assert finetune.run(config, silent, NEVER)
        assert measured.call_count == 4
    assert list(measured_at(tmp_path)) == [2, 4, 6, 8]
    assert max(scores_of(tmp_path)) == 8
    assert opened(config, corpus, Which.LAST).run.step == 8
    # Killed and resumed, too.
    parts = dataclasses.replace(config, model_dir=str(tmp_path / "parts"))
    with scripted([0.3, 0.5, 0.4]):
        kill_run(finetune, parts, 7)
    with scripted([0.4, 0.5]):
        assert finetune.run(parts, silent, NEVER)
    assert_same_bits(*(state_of(one.model_dir, 8) for one in (config, parts)))
    # It goes on with more patience alone, and with less ends where it is.
    before = state_of(tmp_path, 8)
    assert finetune.run(config, silent, NEVER)
    assert_same_bits(before, state_of(tmp_path, 8))
    with scripted([0.4]):
        more = dataclasses.replace(config, early_stopping=3)
        assert finetune.run(more, silent, NEVER)
    assert max(scores_of(tmp_path)) == 10
    with refused("found step 11 of 20"), scripted([]):
        longer = dataclasses.replace(config, early_stopping=9)
        stop_run(finetune, longer, 11)
        opened(config, corpus)


def test_other_questions_do_not_go_on_choosing(world, tmp_path):
    config = config_of(world, tmp_path, train_steps=2)
    assert finetune.run(config, silent, NEVER)
    others = dataclasses.replace(config, train_steps=4, max_questions=3)
    with refused(r"got 3 others.*another MODEL_DIR"):
        finetune.run(others, silent, NEVER)
    # None choose nothing; the score stays.
    none = dataclasses.replace(others, questions="")
    assert finetune.run(none, silent, NEVER)
    assert scores_of(tmp_path)[4] is None


def test_without_questions_the_last_checkpoint_is_opened(world, corpus, tmp_path):
    config = config_of(world, tmp_path, questions="", train_steps=2)
    assert finetune.run(config, silent, NEVER)
    assert opened(config, corpus).run.step == 2
    assert chosen_checkpoint(str(tmp_path), 2) is None


def test_questions_that_cannot_choose_are_refused_and_leave_nothing(world, tmp_path):
    for changes, named in (
        ({"questions_split": "train"}, "not train on, got 'train'"),
        ({"questions_split": "mars"}, "of the split 'mars'"),
        ({"questions": "nowhere.jsonl"}, "nowhere.jsonl"),
    ):
        with refused(named):
            finetune.run(config_of(world, tmp_path, **changes), silent, NEVER)
    assert list(tmp_path.iterdir()) == []


def test_fewer_questions_are_spread_over_the_file(world):
    every = read_dev_questions(world.questions, "dev", None)
    assert every == read_questions(world.questions, "dev")
    some = read_dev_questions(world.questions, "dev", 3)
    assert some == [every[0], every[(len(every) - 1) // 2], every[-1]]
    assert read_dev_questions(world.questions, "dev", 10**6) == every
    assert read_dev_questions("", "train", None) == []


@pytest.mark.full
def test_several_devices_and_processes_choose_as_one_does(world, tmp_path):
    settings = {"batch_size": 8, "train_steps": 4, "evaluation_period": 2}
    mesh = {"data": 2, "model": 2}
    several = tmp_path / "several", "finetune"
    train = hosts_program.arguments(world, *several, mesh=mesh, **settings)
    with groups.started(train, num_processes=2, devices=2) as group:
        group.wait()
    given = {"optimizer": hosts_program.smooth, **settings}
    assert finetune.run(config_of(world, tmp_path / "alone", **given), silent, NEVER)
    found, expected = (measured_at(tmp_path / name) for name in ("several", "alone"))
    assert list(found) == list(expected) == [2, 4]
    np.testing.assert_allclose(list(found.values()), list(expected.values()))
