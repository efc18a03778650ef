"""A chain's settings reach the stages that read them; a stage's roles end together."""

import threading

import pytest

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError
from realm_jax.storage import open_store
from tests import tiny_run
from tests.refused import refused
from tests.waiting import wait_until
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


def test_a_setting_reaches_the_stages_that_read_it():
    for binding, readers in (
        ("BATCH_SIZE=8", {"warm-start", "pretrain", "finetune"}),
        ("pretrain/BATCH_SIZE=8", {"pretrain"}),
        ("prepare/VALIDATION_FRACTION=0.1", {"prepare"}),
    ):
        chain = commands(binding)
        given = {stage.command: chain.main(stage) for stage in chain.stages}
        assert {one for one in given if f"--gin.{binding}" in given[one]} == readers


def test_a_setting_that_reaches_none_is_refused():
    for binding, said in (
        ("BATCHSIZE=8", "did you mean BATCH_SIZE"),
        ("pretrain/BATCHSIZE=8", "did you mean pretrain/BATCH_SIZE"),
        ("NONSENSE=8", "top of each run file"),
        # There is such a macro, which is none of evaluation's.
        ("evaluate/TRAIN_STEPS=8", "no stage reads it"),
    ):
        name = binding.partition("=")[0]
        expected = f"^{name} has no effect on any.*{said}"
        with refused(expected):
            commands(binding)


@pytest.fixture
def run_roles(tmp_path, monkeypatch):
    """Runs both roles; the builder as told, the trainer until it is over."""
    store = open_store(tmp_path)

    def run(builder):
        def keep_running(commands, *, is_over, **others):
            if threading.current_thread().name == BUILDER:
                return builder()
            wait_until(is_over)
            return 143

        monkeypatch.setattr(processes, "keep_running", keep_running)
        roles = local.Roles(store, threading.Event(), lambda text: None)
        return roles.run({TRAINER: [], BUILDER: []}), records.outcomes(store)

    return run


def test_bad_input_of_one_ends_the_other(run_roles):
    def refuse():
        raise BadInputError("expected a, got b")

    ended, outcomes = run_roles(refuse)
    assert ended == (2, BUILDER)
    assert outcomes[BUILDER].message == "expected a, got b"
    # It was asked to end; that says nothing of its work.
    assert TRAINER not in outcomes


def test_a_bug_in_one_ends_the_other_and_is_raised(run_roles):
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_roles(fail)
