"""Trainer and builder on this machine, with the restart loop taken over."""

import threading

import pytest

from realm_jax.errors import BadInputError
from realm_jax.storage import open_store
from tests.waiting import wait_until
from tpu_launch import local, processes, records
from tpu_launch.run import BUILDER, TRAINER

ROLES = {TRAINER: [], BUILDER: []}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs both roles; the builder as told, the trainer until it is over."""
    store = open_store(tmp_path)

    def run(builder):
        def keep_running(commands, *, is_over, is_done, **others):
            if threading.current_thread().name == BUILDER:
                return builder()
            wait_until(is_over)
            return 143

        monkeypatch.setattr(processes, "keep_running", keep_running)
        roles = local._Roles(store, threading.Event(), lambda text: None)
        return roles.run(ROLES), records.outcomes(store)

    return run


def test_bad_input_of_one_ends_the_other(run):
    def refuse():
        raise BadInputError("expected a, got b")

    ended, outcomes = run(refuse)
    assert ended == (2, BUILDER)
    assert outcomes[BUILDER].message == "expected a, got b"
    # It was asked to end; that says nothing of its work.
    assert TRAINER not in outcomes


def test_a_bug_in_one_ends_the_other_and_is_raised(run):
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(fail)
