"""What the processes of a job say to each other, said by real ones."""

import os
import subprocess
import sys
import threading

import pytest

from realm_jax import hosts
from realm_jax.errors import BadInputError
from tests import groups


def test_a_single_process_agrees_with_itself():
    assert (hosts.count(), hosts.number(), hosts.is_first()) == (1, 0, True)
    assert hosts.from_first("a") == "a"
    assert hosts.gather("a") == ["a"]
    assert hosts.first_does(lambda: 3) == hosts.together(lambda: 3) == 3
    with pytest.raises(BadInputError, match="here"):
        hosts.together(lambda: _fail("here"))
    stop = hosts.StopRequest(event := threading.Event())
    assert not stop.is_set()
    event.set()
    assert stop.is_set()


def test_half_a_group_is_bad_input(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(BadInputError, match="all of JAX_COORDINATOR_ADDRESS"):
        hosts.join(hosts.HostsConfig())


def test_a_pod_where_there_is_none_is_bad_input():
    program = (
        "from realm_jax import hosts\n"
        "try:\n    hosts.join(hosts.HostsConfig(pod=True))\n"
        "except hosts.BadInputError as error:\n    print(error)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert "or HostsConfig.pod = False for a single process" in said


def test_three_processes_hear_the_same():
    with groups.started(["tests.test_hosts"], num_processes=3) as group:
        said = group.wait()
    assert all("agreed" in text for text in said)


def _fail(where: str) -> None:
    raise BadInputError(f"failed {where}")


def _main() -> None:
    hosts.join(hosts.HostsConfig())
    number = hosts.number()
    assert number == int(os.environ["JAX_PROCESS_ID"])
    assert hosts.count() == 3
    # More words than are kept at a time.
    for i in range(1000):
        assert hosts.from_first((number, i)) == (0, i)
    assert hosts.gather({"from": number}) == [{"from": i} for i in range(3)]
    assert hosts.gather(number) == [0, 1, 2]
    assert hosts.first_does(lambda: f"by {number}") == "by 0"
    for failing, action in ((0, hosts.first_does), (1, hosts.together)):
        with pytest.raises(BadInputError, match=f"failed {failing}"):
            action(lambda at=failing: number == at and _fail(str(number)))
    hosts.post("note", number)
    hosts.post("note", 10 * number)
    hosts.gather(None)
    assert hosts.posted("note") == {0: 0, 1: 10, 2: 20}
    stop = hosts.StopRequest(event := threading.Event())
    assert not stop.is_set()
    if number == 2:
        event.set()
    rounds = 0
    while not stop.is_set():
        rounds += 1
    assert hosts.gather(rounds) == [rounds] * 3
    print("agreed")


if __name__ == "__main__":
    sys.exit(_main())
