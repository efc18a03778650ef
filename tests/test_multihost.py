"""What the processes of a job say to each other, said by real ones."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import types
from unittest import mock

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import multihost_utils

from realm_jax import multihost
from realm_jax.cli import configuration
from realm_jax.cli.main import STOPPED, console
from realm_jax.data.records import RecordError
from realm_jax.errors import BadInputError, StoppedError, is_out_of_space
from realm_jax.index.manifest import AlreadyCommittedError
from realm_jax.storage import UnavailableStoreError
from realm_jax.training import pretrain
from tests import groups
from tests.refused import refused


def test_a_single_process_agrees_with_itself():
    assert (multihost.count(), multihost.number(), multihost.is_first()) == (1, 0, True)
    assert multihost.from_first("a") == "a"
    assert multihost.gather("a") == ["a"]
    assert multihost.run_on_primary(lambda: 3) == multihost.run_on_all(lambda: 3) == 3
    with refused("here"):
        multihost.run_on_all(lambda: _fail("here"))
    stop = multihost.StopRequest(event := threading.Event())
    assert not stop.is_set()
    event.set()
    assert stop.is_set()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.none(), inner)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_values_arrive_as_they_were_said(value):
    heard = multihost.decode(multihost.encode(value))
    assert repr(heard) == repr(value)


def test_numbers_of_numpy_arrive_as_numbers():
    heard = multihost.decode(multihost.encode((np.int64(3), np.bool_(True))))
    assert heard == (3, True)
    with pytest.raises(TypeError):
        multihost.encode(object())


def test_errors_arrive_by_class_and_text():
    for error in (
        BadInputError("expected x, got y; do z"),
        StoppedError("stopped"),
        AlreadyCommittedError("expected no snapshot"),
        UnavailableStoreError("gs://x: down"),
        OSError(28, "No space left on device"),
        KeyError("name"),
    ):
        heard = multihost.decode(multihost.encode((None, error)))[1]
        assert type(heard) in (type(error), OSError)
        assert str(error) in str(heard)
        assert is_out_of_space(heard) == is_out_of_space(error)


class _LocalError(BadInputError):
    """As of a module that another process has not imported."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def test_an_error_of_an_unknown_class_is_what_it_is_derived_from():
    heard = multihost.decode(multihost.encode(_LocalError("expected", "this")))
    assert type(heard) is BadInputError
    assert str(heard) == "expected this"
    assert type(multihost.decode(multihost.encode(RecordError("here", "why")))) in (
        RecordError,
        BadInputError,
    )


class _Evil:
    def __reduce__(self):
        return os.abort, ()


def test_nothing_that_is_said_can_run():
    for message in (
        pickle.dumps(_Evil()),
        b"",
        b'{"error": [["os", "abort"]], "text": "x"}',
        b'{"error": [["builtins", "exec"]], "text": "x"}',
        b'{"error": [["builtins", "SystemExit"]], "text": "x"}',
        b'{"call": "os.abort"}',
    ):
        try:
            heard = multihost.decode(message)
        except ValueError:
            continue
        assert type(heard) is RuntimeError, message


def test_half_a_group_is_bad_input(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with refused("all of JAX_COORDINATOR_ADDRESS"):
        multihost.join(multihost.HostsConfig())


@pytest.mark.full
def test_a_pod_where_there_is_none_is_bad_input():
    program = (
        "from realm_jax import multihost\n"
        "try:\n    multihost.join(multihost.HostsConfig(pod=True))\n"
        "except multihost.BadInputError as error:\n    print(error)\n"
    )
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
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
        codes, said = group.codes(), group.said()
    assert codes[failing] == 1, said[failing]
    assert "failed alone" in said[failing]
    assert codes[1 - failing] not in (0, 2), said[1 - failing]


@pytest.mark.full
@pytest.mark.parametrize("missing", [0, 1])
def test_one_that_never_comes_is_named_by_the_others(missing):
    arguments = ["tests.test_multihost", "nothing", "0"]
    with groups.started(arguments, num_processes=2) as group:
        group.processes[missing].kill()  # While it imports.
        code = group.codes()[1 - missing]
        said = group.said()[1 - missing]
    assert code == 2, said
    (line,) = [line for line in said.splitlines() if "error" in line]
    assert f"but process {missing} did not come" in line
    assert "Traceback" not in said


@pytest.mark.full
def test_one_that_is_asked_to_stop_ends_all_with_the_code_of_that():
    arguments = ["tests.test_multihost", "stop", "1"]
    with groups.started(arguments, num_processes=2) as group:
        assert group.codes() == [STOPPED] * 2, group.said()


def _fail(where: str) -> None:
    raise BadInputError(f"failed {where}")


def _main() -> None:
    multihost.join(multihost.HostsConfig())
    number = multihost.number()
    assert number == int(os.environ["JAX_PROCESS_ID"])
    if number == 0:
        port = int(os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2])
        found = psutil.Process().net_connections("tcp")
        heard_on = {c.laddr.ip for c in found if c.laddr.port == port and not c.raddr}
        # A socket for IPv6 shows addresses of IPv4 as if they were its own.
        assert {ip.removeprefix("::ffff:") for ip in heard_on} == {"127.0.0.1"}
    assert multihost.count() == 3
    # More words than are kept at a time.
    for i in range(1000):
        assert multihost.from_first((number, i)) == (0, i)
    assert multihost.gather({"from": number}) == [{"from": i} for i in range(3)]
    assert multihost.gather(number) == [0, 1, 2]
    assert multihost.run_on_primary(lambda: f"by {number}") == "by 0"
    for failing, action in ((0, multihost.run_on_primary), (1, multihost.run_on_all)):
        with refused(f"failed {failing}"):
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

    def run(config, report, stop, attempt):
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

    start_seconds = 5 if what == "nothing" else 600
    quick = multihost.HostsConfig(start_seconds=start_seconds, heartbeat_seconds=2)
    config = types.SimpleNamespace(
        refresh_mode="off",
        train_steps=1,
        model_dir="",
        profile=False,
        gin_file=(),
        **dict.fromkeys(("warm_start", "reader_warm_start", "retriever_source"), ""),
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
