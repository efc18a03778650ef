"""What a trainer keeps of the indexes that it has replaced, and of its checkpoints."""

import subprocess
import sys

import jax
import psutil
import pytest

from realm_jax.training import index_client, pretrain
from tests import memory, tiny_world
from tests.tiny_world import NEVER

_BUILDER = """
import sys, threading
from realm_jax.data.blocks import BlockStore
from realm_jax.index.builder import BuilderConfig, IndexBuilder
from realm_jax.storage import open_store
from tests.tiny_world import EMBED

config = BuilderConfig(embed=EMBED, poll_seconds=0.02)
store, corpus = open_store(sys.argv[1]), BlockStore.open(sys.argv[2])
IndexBuilder(store, corpus, config).run(threading.Event())
"""
_STEPS = 200


class Watch:
    """What a trainer holds in the middle of its run, and at the end."""

    def __init__(self):
        self._arrays, self._resident = {}, {}

    def report(self, step, total, values, what=""):
        if what:
            return
        # As long after a line of metrics: until then its values are on the devices. An
        # update in flight is not reported, so that a step may be left out.
        mark = _STEPS // 2 - 2 if step < _STEPS - 2 else _STEPS - 2
        if step >= mark and mark not in self._arrays:
            # Else what a worker's other tests have freed would be taken for growth.
            memory.give_back()
            self._arrays[mark] = len(jax.live_arrays())
            self._resident[mark] = psutil.Process().memory_info().rss

    def growth(self):
        """Bytes for each step of the second half, which leaves no arrays behind."""
        (before, after), (least, most) = self._arrays.values(), self._resident.values()
        # Those of updates in flight come and go: fewer than one is left by a step.
        assert after < before + _STEPS // 2
        return (most - least) / (_STEPS // 2)


@pytest.mark.full
def test_hundreds_of_refreshes_leave_little_behind(world, tmp_path, monkeypatch):
    """An index after every update, by a builder in a process of its own."""
    follower = index_client.IndexFollower
    monkeypatch.setattr(
        index_client,
        "IndexFollower",
        lambda *given, **named: follower(*given, **named, poll_seconds=0.02),
    )
    watch = Watch()
    rarely = {"checkpoint_period": 10 * _STEPS, "log_period": 10}
    often = {"refresh_mode": "async", "refresh_period": 1, "max_staleness_steps": 1}
    settings = {"train_steps": _STEPS, **often, **rarely}
    config = tiny_world.pretrain_config(world, tmp_path, **settings)
    command = [sys.executable, "-c", _BUILDER, str(tmp_path), world.corpus]
    with subprocess.Popen(command) as builder:
        try:
            assert pretrain.run(config, watch.report, NEVER)
        finally:
            builder.kill()
    per_refresh = watch.growth()
    print(f"{per_refresh / 1024:.0f} KiB per refresh")
    assert per_refresh < 64 * 1024


@pytest.mark.full
def test_hundreds_of_checkpoints_leave_little_behind(world, tmp_path):
    """A checkpoint after every update, of an index that stays."""
    watch = Watch()
    settings = {"refresh_mode": "off", "checkpoint_period": 1, "log_period": 10}
    config = tiny_world.pretrain_config(world, tmp_path, train_steps=_STEPS, **settings)
    assert pretrain.run(config, watch.report, NEVER)
    per_checkpoint = watch.growth()
    print(f"{per_checkpoint / 1024:.0f} KiB per checkpoint")
    # Twice what docs/architecture.md has of it.
    assert per_checkpoint < 512 * 1024
