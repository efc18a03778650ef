"""Gin files from before a renaming work, and are told the new names."""

import logging

import gin

from realm_jax.cli import configuration, renamed
from realm_jax.data.corpus_size import CorpusSize
from realm_jax.evaluation.run import EvaluateConfig
from realm_jax.hardware import HardwareConfig, LaunchConfig
from realm_jax.multihost import HostsConfig

OLD = """
from __gin__ import dynamic_registration
from realm_jax import hosts
from realm_jax.evaluation import run

ANOTHER_CORPUS = False
hosts.HostsConfig.pod = True
run.EvaluateConfig:
    corpus = "c"
    another_corpus = %ANOTHER_CORPUS
"""


def test_old_names_mean_the_new_ones_and_each_is_said_once_a_file(
    tmp_path, monkeypatch, caplog
):
    """In a file that includes an old one, as the command line of a run reads it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.gin").write_text(OLD)
    (tmp_path / "mine.gin").write_text('include "old.gin"\n')
    parser = configuration.make_parser("realm evaluate", "")
    arguments = ["--gin_file=mine.gin", "--gin.ANOTHER_CORPUS=True"]
    with caplog.at_level(logging.WARNING):
        configuration.parse(parser, arguments)
    assert configuration.configured(HostsConfig).pod
    bound = gin.get_bindings(EvaluateConfig)
    assert bound == {"corpus": "c", "allow_corpus_mismatch": True}
    assert [line for line in caplog.messages if line.startswith("old.gin: ")] == [
        f"old.gin: {old} is now {renamed.RENAMED[old]}; please change it."
        for old in (
            *("from realm_jax import hosts", "ANOTHER_CORPUS"),
            *("hosts.HostsConfig", "another_corpus"),
        )
    ]
    told = [line.partition(": ")[0] for line in caplog.messages]
    assert "--gin.ANOTHER_CORPUS" in told


def test_settings_of_a_class_and_of_a_block_are_replaced():
    old = "local.Stage.beside_devices = 2\nlocal.Stage:\n    beside = 'build-index'"
    assert renamed.current(old, "mine.gin") == old.replace("beside", "companion")


def test_names_of_today_text_and_comments_are_left_alone(caplog):
    for text in (
        "from realm_jax import multihost\nmultihost.HostsConfig.pod = True",
        "MY_ANOTHER_CORPUS = 1",
        "from tasks import prepared",
        'CORPUS = "runs/another_corpus"',
        "CORPUS = 'hosts.HostsConfig'  # beside another_corpus",
        'NOTE = "a \\" another_corpus"',
        'NOTE = """\nANOTHER_CORPUS\n"""',
        "chain.Stage.companion = 'build-index'  # beside it",
    ):
        caplog.clear()
        assert renamed.current(text, "mine.gin") == text
        assert not caplog.records
        old = f"{text}\nrun.EvaluateConfig.another_corpus = True"
        new = f"{text}\nrun.EvaluateConfig.allow_corpus_mismatch = True"
        assert renamed.current(old, "mine.gin") == new


MACHINES = """
from __gin__ import dynamic_registration
from tpu_launch import job
from tpu_launch import slices
from tpu_launch.planner import corpus_size

slices.HardwareConfig.trainer = "v4-8"
job.LaunchConfig:
    project = "mine"
corpus_size.CorpusSize.num_blocks = 9
"""


def test_machines_of_before_are_those_of_today(tmp_path, monkeypatch):
    """Where a file names them beside one that has the new names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "machines.gin").write_text(MACHINES)
    parser = configuration.make_parser("realm pretrain", "")
    arguments = ["--gin_file=gin/hardware/tpu.gin", "--gin_file=machines.gin"]
    currency = '--gin.slices.HardwareConfig.currency="EUR"'
    configuration.parse(parser, [*arguments, currency])
    hardware = configuration.configured(HardwareConfig)
    assert (hardware.trainer, hardware.currency) == ("v4-8", "EUR")
    assert "v6e" in hardware.chip_hour_prices
    assert configuration.configured(LaunchConfig).project == "mine"
    assert configuration.configured(CorpusSize).num_blocks == 9


def test_what_is_imported_instead_is_there():
    for new in renamed.RENAMED.values():
        if new.startswith("from"):
            exec(new)
