"""Reading a configuration leaves the logs of others as they are."""

import logging

import pytest

from realm_jax.cli import configuration

# In a folder of the package, which gin finds after two that lack it.
SHIPPED = "hardware/cpu.gin"


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads gin files as the command line of a run does."""
    monkeypatch.chdir(tmp_path)
    parser = configuration.make_parser("realm pretrain", "")
    return lambda *files: configuration.parse(
        parser, [f"--gin_file={file}" for file in files]
    )


def test_folders_without_the_file_are_not_logged(read, caplog):
    with caplog.at_level(logging.DEBUG):
        read(SHIPPED)
    assert "not found" not in caplog.text


def test_the_root_logger_is_left_alone(read, tmp_path, monkeypatch, caplog):
    """Also while gin reads, for it imports modules, which may log."""
    (tmp_path / "talkative.py").write_text("import logging\nlogging.info('here')\n")
    (tmp_path / "mine.gin").write_text(
        "from __gin__ import dynamic_registration\nimport talkative\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.INFO):
        read("mine.gin", SHIPPED)
        assert logging.getLogger().level == logging.INFO
    assert "here" in caplog.messages
