"""The flag of the training commands that asks for a profile."""

import logging

from realm_jax.cli.main import main
from realm_jax.training import profiling, warm_start
from tests import tiny_run


def test_it_reaches_the_stage_and_is_heard_of(inputs, monkeypatch, caplog):
    configs = []

    def run(config, report, stop, attempt=None):
        configs.append(config)
        profiling.LOG.info("here is the profile")
        return True

    monkeypatch.setattr(warm_start, "run", run)
    arguments = tiny_run.arguments("warm-start", inputs)
    # As a process begins: nothing asks for more than warnings.
    with caplog.at_level(logging.NOTSET, profiling.LOG.name):
        assert main(arguments) == 0
        assert "here is the profile" not in caplog.messages
        assert main([*arguments, "--profile"]) == 0
    assert "here is the profile" in caplog.messages
    assert [config.profile for config in configs] == [False, True]
