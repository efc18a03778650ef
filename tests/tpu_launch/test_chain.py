"""A chain's settings reach the stages that read them; a stage's roles end together."""

import contextlib
import os
import threading
from unittest import mock

import pytest
from rich.console import Console

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError
from realm_jax.storage import UnavailableStoreError, open_store
from tests import tiny_run
from tests.refused import refused
from tests.waiting import PATIENCE, wait_until
from tpu_launch import local, records
from tpu_launch.chain import Chain, ChainCommands, Stage
from tpu_launch.records import GKE, LaunchRecord
from tpu_launch.roles import Worker
from tpu_launch.run import BUILDER, TRAINER

QUICKSTART = str(tiny_run.GIN / "runs" / "quickstart.gin")


def commands(*bindings):
    """What the stages of the quickstart are given beside its own settings."""
    given = [f"--gin.{binding}" for binding in bindings]
    parser = configuration.make_parser("test", "")
    configuration.parse_chain(parser, [f"--gin_file={QUICKSTART}", *given])
    return ChainCommands(configuration.configured(local.Chain), [QUICKSTART], given)


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
    monkeypatch.setattr(local, "_LOOK_SECONDS", 0.01)
    store, said = open_store(tmp_path), []

    def until_over(worker):
        wait_until(worker.must_end)
        return 143

    def run(builder, trainer=until_over):
        records.forget_outcomes(store)
        told = {BUILDER: builder, TRAINER: trainer}
        monkeypatch.setattr(
            Worker, "keep_running", lambda worker: told[worker._role](worker)
        )
        roles = {role: [] for role in told}
        ended = local.run_roles(roles, store, threading.Event(), Console(), said.append)
        return ended, records.outcomes(store)

    return run


def end_well(worker):
    return 0 if worker.await_end() else 1


def test_an_error_of_one_ends_the_other(run_roles, tmp_path):
    ended, outcomes = run_roles(lambda worker: 2)
    assert ended == (2, BUILDER)
    # The trainer was asked to end; that says nothing of its work.
    assert set(outcomes) == {BUILDER}
    for error in (BadInputError("expected a, got b"), ZeroDivisionError("a")):
        with pytest.raises(type(error)):
            run_roles(mock.Mock(side_effect=error))
        outcomes = records.outcomes(open_store(tmp_path))
        assert outcomes[BUILDER].message == str(error)
        assert TRAINER not in outcomes


def test_a_builder_is_done_with_its_trainer_whatever_it_waited_for(run_roles):
    """Code 75 may come in the moment in which all is built."""

    def wait(worker):
        wait_until(worker.must_end)
        return 75

    ended, outcomes = run_roles(wait, end_well)
    assert ended == (0, TRAINER)
    assert all(outcomes[role].done for role in (TRAINER, BUILDER))
    # A trainer that has failed for good ends a builder that would wait for ever.
    ended, outcomes = run_roles(wait, lambda worker: 1)
    assert ended == (1, TRAINER)


def test_a_builder_that_ended_first_awaits_the_end_of_its_trainer(run_roles):
    asked_first = threading.Event()

    def build(worker):
        asked_first.set()
        return end_well(worker)

    def train(worker):
        assert asked_first.wait(PATIENCE)
        return end_well(worker)

    assert run_roles(build, train)[0] == (0, TRAINER)


def test_a_failure_ends_the_others_where_the_store_is_away(run_roles, monkeypatch):
    away = mock.Mock(side_effect=UnavailableStoreError("the bucket is away"))
    monkeypatch.setattr(records, "write_outcome", away)
    assert run_roles(lambda worker: 1)[0] == (1, BUILDER)


def test_work_that_others_say_has_failed_is_no_success(run_roles, tmp_path):
    """Such as another `local` of the same chain, or a TPU VM that is still there."""

    def train(worker):
        records.write_outcome(open_store(tmp_path), TRAINER, 1, "no disk")
        wait_until(worker.must_end)
        return 143

    code, _ = run_roles(train, train)[0]
    assert code == 1


def test_a_chain_lies_on_this_machine():
    with refused("root to be a folder of this machine, got 'gs://b/x'; a MODEL_DIR"):
        Chain("gs://b/x", ())


def test_a_chain_has_one_launcher(tmp_path):
    """A second one would take the processes of the first for leftovers."""
    with make_runner(tmp_path)._alone(), refused("one is at work in"):
        make_runner(tmp_path).run()
    with make_runner(tmp_path)._alone():
        pass


def test_the_directory_of_a_run_on_an_engine_is_left_to_it(tmp_path):
    """Else `down` would not find the run, and its machines would not be deleted."""
    store, runner = open_store(tmp_path), make_runner(tmp_path)
    runner._commands = mock.Mock()
    runner._commands.configure.return_value.model_dir = str(tmp_path)
    record = LaunchRecord("realm-0a", GKE, {}, 0.0, deadline=1e10)
    records.write_record(store, record)
    with refused("launched by gke; run `down` first"):
        runner._launch(Stage("pretrain", processes=2))
    assert records.read_record(store) == record


def make_runner(root):
    chain = Chain(str(root), ())
    return local.Runner(chain, ChainCommands(chain, []), threading.Event())


def test_a_reader_that_has_left_ends_no_run(tmp_path, monkeypatch):
    """As in `... local | head`: rich would exit with 1, whatever becomes of the run."""
    reader, writer = os.pipe()
    os.close(reader)
    with (tmp_path / "stdout").open("w") as stdout, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stdout)
        gone = os.fdopen(writer, "w")
        console = local._Console(file=gone)
        console.print("one")
        with contextlib.suppress(BrokenPipeError):
            gone.close()
    assert console.quiet


def test_a_process_has_its_devices():
    assert local.environment_of(0, 1, 0, 1) == {}
    told = local.environment_of(0, 1, 0, 4)
    assert told == {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
