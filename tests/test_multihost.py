"""What the processes of a job say to each other, said by real ones."""

import os
import signal
import subprocess
import sys
import threading
import types
from unittest import mock

import numpy as np
import pytest
from jax.experimental import multihost_utils

from realm_jax import multihost
from realm_jax.cli import configuration
from realm_jax.cli.main import STOPPED, console
from realm_jax.errors import BadInputError
from realm_jax.training import pretrain
from tests import groups


def test_a_single_process_agrees_with_itself():
    assert (multihost.count(), multihost.number(), multihost.is_first()) == (1, 0, True)
    assert multihost.from_first("a") == "a"
    assert multihost.gather("a") == ["a"]
    assert multihost.run_on_primary(lambda: 3) == multihost.run_on_all(lambda: 3) == 3
    with pytest.raises(BadInputError, match="here"):
        multihost.run_on_all(lambda: _fail("here"))
    stop = multihost.StopRequest(event := threading.Event())
    assert not stop.is_set()
    event.set()
    assert stop.is_set()


def test_half_a_group_is_bad_input(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(BadInputError, match="all of JAX_COORDINATOR_ADDRESS"):
        multihost.join(multihost.HostsConfig())


@pytest.mark.full
def test_a_pod_where_there_is_none_is_bad_input():
    program = (
        "from realm_jax import multihost\n"
        "try:\n    multihost.join(multihost.HostsConfig(pod=True))\n"
        "except multihost.BadInputError as error:\n    print(error)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert "or HostsConfig.pod = False for a single process" in said


@pytest.mark.full
def test_three_processes_hear_the_same():
    with groups.started(["tests.test_multihost"], num_processes=3) as group:
        said = group.wait()
    assert all("agreed" in text for text in said)


@pytest.mark.full
@pytest.mark.parametrize("where", ["words", "collective"])
@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_fails_alone_ends_the_others(where, failing):
    arguments = ["tests.test_multihost", where, str(failing)]
    with groups.started(arguments, num_processes=2) as group:
        codes = [process.wait(60) for process in group.processes]
        said = [log.read_text() for log in group.logs]
    assert codes[failing] == 1, said[failing]
    assert "failed alone" in said[failing]
    assert codes[1 - failing] not in (0, 2), said[1 - failing]


@pytest.mark.full
def test_one_that_is_asked_to_stop_ends_all_with_the_code_of_that():
    with groups.started(
        ["tests.test_multihost", "stop", "1"], num_processes=2
    ) as group:
        codes = [process.wait(60) for process in group.processes]
        said = [log.read_text() for log in group.logs]
    assert codes == [STOPPED] * 2, said


def _fail(where: str) -> None:
    raise BadInputError(f"failed {where}")


def _main() -> None:
    multihost.join(multihost.HostsConfig())
    number = multihost.number()
    assert number == int(os.environ["JAX_PROCESS_ID"])
    assert multihost.count() == 3
    # More words than are kept at a time.
    for i in range(1000):
        assert multihost.from_first((number, i)) == (0, i)
    assert multihost.gather({"from": number}) == [{"from": i} for i in range(3)]
    assert multihost.gather(number) == [0, 1, 2]
    assert multihost.run_on_primary(lambda: f"by {number}") == "by 0"
    for failing, action in ((0, multihost.run_on_primary), (1, multihost.run_on_all)):
        with pytest.raises(BadInputError, match=f"failed {failing}"):
            action(lambda at=failing: number == at and _fail(str(number)))
    multihost.post("note", number)
    multihost.post("note", 10 * number)
    multihost.gather(None)
    assert multihost.posted("note") == {0: 0, 1: 10, 2: 20}
    stop = multihost.StopRequest(event := threading.Event())
    assert not stop.is_set()
    if number == 2:
        event.set()
    rounds = 0
    while not stop.is_set():
        rounds += 1
    assert multihost.gather(rounds) == [rounds] * 3
    print("agreed")


def _run_command(what: str, number: str) -> None:
    """Runs `realm pretrain`, in place of which one process does `what`."""

    def run(config, report, stop):
        is_chosen = multihost.number() == int(number)
        if what == "stop":
            asked = multihost.StopRequest(stop)
            if is_chosen:
                os.kill(os.getpid(), signal.SIGTERM)
            while not asked.is_set():
                pass
            return False
        multihost.gather(None)
        if is_chosen:
            raise RuntimeError("failed alone")
        if what == "words":
            multihost.gather(None)
        multihost_utils.process_allgather(np.ones(3))
        return True

    quick = multihost.HostsConfig(heartbeat_seconds=2)
    config = types.SimpleNamespace(
        refresh_mode="off", train_steps=1, model_dir="", profile=False
    )
    with (
        mock.patch.object(pretrain, "run", run),
        mock.patch.object(configuration, "configured", return_value=config),
        mock.patch.object(configuration, "configured_if_bound", return_value=quick),
        mock.patch.object(configuration, "parse", return_value=config),
    ):
        console(["pretrain"])


if __name__ == "__main__":
    sys.exit(_run_command(*sys.argv[1:]) if sys.argv[1:] else _main())
