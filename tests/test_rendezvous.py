"""Processes of a job meet before JAX starts; threads stand in for them."""

import functools
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from realm_jax.errors import StoppedError
from realm_jax.multihost import HostsConfig, join
from realm_jax.rendezvous import meet, reminders, split_address
from tests.refused import refused
from tests.waiting import PATIENCE, wait_until
from tpu_launch import local


@pytest.fixture
def attend():
    """Starts a process of a job of three at a free port; returns its future."""
    address, stop = ("127.0.0.1", local.free_port()), threading.Event()

    def attend(number, seconds=PATIENCE, every=PATIENCE):
        call = functools.partial(meet, seconds=seconds, stop=stop, every=every)
        return pool.submit(call, address, address[0], number, 3)

    with ThreadPoolExecutor() as pool:
        yield attend
        stop.set()


def test_all_go_on_when_all_are_there(attend):
    for future in [attend(number) for number in (2, 0, 1)]:
        future.result(PATIENCE)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_job_on_several_machines_meets_by_either_version_of_ip(host):
    address, stop = (host, local.free_port()), threading.Event()
    with ThreadPoolExecutor() as pool:
        call = functools.partial(meet, address, "", seconds=PATIENCE, stop=stop)
        for future in [pool.submit(call, number, 2) for number in (1, 0)]:
            future.result(PATIENCE)


def test_who_is_waited_for_is_said_and_ends_all(attend, caplog):
    with caplog.at_level(logging.WARNING):
        first = attend(0, seconds=2.0, every=0.05)
        other = attend(2, every=0.05)
        wait_until(lambda: caplog.text.count("waiting for process 1 for") > 3)
        for future in (first, other):
            with refused("but process 1 did not come;"):
                future.result(PATIENCE)
    assert "processes 1, 2" not in str(first.exception())


def test_process_0_may_be_the_missing_one(attend):
    with refused("but process 0 did not come;"):
        attend(1, seconds=0.05).result(PATIENCE)
    with refused("but processes 1, 2 did not come;"):
        attend(0, seconds=0.05).result(PATIENCE)


def test_waiting_can_be_stopped():
    stop = threading.Event()
    stop.set()
    address = ("127.0.0.1", local.free_port())
    for number in (0, 1):
        with pytest.raises(StoppedError, match="waiting for process"):
            meet(address, address[0], number, 2, seconds=PATIENCE, stop=stop)


def test_addresses_are_split_and_need_host_and_port():
    assert split_address("a.b:8476") == ("a.b", 8476)
    assert split_address("[::1]:1") == ("::1", 1)
    for address in ("10.0.0.2", "10.0.0.2:", ":8476", "x:y", "x:0"):
        with refused("as host:port of process 0"):
            split_address(address)


def test_a_taken_port_is_bad_input(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in local.environment_of(0, 2, port, 1).items():
            monkeypatch.setenv(name, value)
        with refused(f"free port .*127.0.0.1:{port}, got"):
            join(HostsConfig())


def test_who_is_waited_for_elsewhere_is_said_until_it_is_over(caplog):
    with caplog.at_level(logging.WARNING):
        with reminders("the other processes", 600.0, every=0.01):
            wait_until(lambda: caplog.text.count("for the other processes for 0 s") > 1)
        said = len(caplog.records)
    assert "at most 600 s" in caplog.text
    assert not any(t.name == "reminders" for t in threading.enumerate())
    assert len(caplog.records) == said
