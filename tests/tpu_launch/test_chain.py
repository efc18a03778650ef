"""A chain's settings reach the stages that read them; a stage's roles end together."""

import threading
from unittest import mock

import pytest

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError
from realm_jax.storage import open_store
from tests import tiny_run
from tests.refused import refused
from tests.waiting import PATIENCE, wait_until
from tpu_launch import local, processes, records
from tpu_launch.chain import ChainCommands
from tpu_launch.run import BUILDER, TRAINER

QUICKSTART = str(tiny_run.GIN / "runs" / "quickstart.gin")


def commands(*bindings):
    """What the stages of the quickstart are given beside its own settings."""
    given = [f"--gin.{binding}" for binding in bindings]
    parser = configuration.make_parser("test", "")
    configuration.parse_chain(parser, [f"--gin_file={QUICKSTART}", *given])
    chain = configuration.configured(local.Chain)
    return ChainCommands(chain, [QUICKSTART], given)


def test_a_setting_reaches_the_stages_that_read_it_or_is_refused():
    for binding, readers in (
        ("BATCH_SIZE=8", {"warm-start", "pretrain", "finetune"}),
        ("pretrain/BATCH_SIZE=8", {"pretrain"}),
        ("prepare/VALIDATION_FRACTION=0.1", {"prepare"}),
        # A field of its configuration, of which no run file has a macro.
        ("WAIT_SECONDS=8", {"pretrain"}),
    ):
        chain = commands(binding)
        given = {stage.command: chain.main(stage) for stage in chain.stages}
        assert {one for one in given if f"--gin.{binding}" in given[one]} == readers
    for binding, said in (
        ("BATCHSIZE=8", "did you mean BATCH_SIZE"),
        ("pretrain/BATCHSIZE=8", "did you mean pretrain/BATCH_SIZE"),
        ("NONSENSE=8", "--help lists"),
        # There is such a macro, which is none of evaluation's.
        ("evaluate/TRAIN_STEPS=8", "no stage reads it"),
    ):
        name = binding.partition("=")[0]
        with refused(f"^{name} has no effect on any.*{said}"):
            commands(binding)


@pytest.fixture
def run_roles(tmp_path, monkeypatch):
    """Runs both roles as told; a trainer that is not runs until it is over."""
    store = open_store(tmp_path)

    def until_over(is_over, **others):
        wait_until(is_over)
        return 143

    def run(builder, trainer=until_over):
        def keep_running(commands, **asked):
            roles = {BUILDER: builder, TRAINER: trainer}
            return roles[threading.current_thread().name](**asked)

        monkeypatch.setattr(processes, "keep_running", keep_running)
        roles = local.Roles(store, threading.Event(), lambda text: None)
        return roles.run({TRAINER: [], BUILDER: []}), records.outcomes(store)

    return run


def test_an_error_of_one_ends_the_other(run_roles):
    refuse = mock.Mock(side_effect=BadInputError("expected a, got b"))
    ended, outcomes = run_roles(refuse)
    assert ended == (2, BUILDER)
    assert outcomes[BUILDER].message == "expected a, got b"
    # It was asked to end; that says nothing of its work.
    assert TRAINER not in outcomes
    with pytest.raises(ZeroDivisionError):
        run_roles(mock.Mock(side_effect=ZeroDivisionError))


def test_a_builder_is_done_with_its_trainer_whatever_it_waited_for(run_roles):
    """Code 75 may come in the moment in which all is built."""

    def wait(is_over, **others):
        wait_until(is_over)
        return 75

    ended, outcomes = run_roles(wait, lambda **asked: 0)
    assert ended == (0, TRAINER)
    assert all(outcome.done for outcome in outcomes.values())
    # A trainer that has failed for good ends a builder that would wait for ever.
    ended, outcomes = run_roles(wait, lambda **asked: 1)
    assert ended == (1, TRAINER)


def test_a_builder_that_ended_first_awaits_the_end_of_its_trainer(run_roles):
    asked_first = threading.Event()

    def build(is_done, **others):
        asked_first.set()
        return 0 if is_done() else 1

    def train(**asked):
        assert asked_first.wait(PATIENCE)
        return 0

    assert run_roles(build, train)[0] == (0, TRAINER)


def test_a_process_has_its_devices():
    assert local.environment_of(0, 1, 0, 1) == {}
    told = local.environment_of(0, 1, 0, 4)
    assert told == {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
