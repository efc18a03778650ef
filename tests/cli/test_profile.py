"""The flag of the training commands that asks for a profile."""

import importlib
import logging

import pytest

from realm_jax.cli.main import main
from realm_jax.training import profiling
from tests import tiny_run


@pytest.fixture
def quiet():
    """As a process begins: nothing asks for more than warnings."""
    profiling.LOG.setLevel(logging.NOTSET)
    yield
    profiling.LOG.setLevel(logging.NOTSET)


@pytest.mark.parametrize("command", ["warm-start", "pretrain", "finetune"])
def test_it_reaches_the_stage_and_is_heard_of(
    command, quiet, inputs, monkeypatch, caplog
):
    stage = importlib.import_module(f"realm_jax.training.{command.replace('-', '_')}")
    configs = []

    def run(config, report, stop, attempt=None):
        configs.append(config)
        profiling.LOG.info("here is the profile")
        return True

    monkeypatch.setattr(stage, "run", run)
    arguments = tiny_run.arguments(command, inputs)
    assert main(arguments) == 0
    assert "here is the profile" not in caplog.messages
    assert main([*arguments, "--profile"]) == 0
    assert "here is the profile" in caplog.messages
    assert [config.profile for config in configs] == [False, True]
