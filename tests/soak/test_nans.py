"""Gradients that are not finite at random updates, while a builder publishes.

Nobody ever sees a checkpoint, a retriever or an index with a NaN, and the run goes on
from the last checkpoint before it. SOAK_NAN_SEED chooses the updates.
"""

import contextlib
import os
import random
import threading

import jax
import numpy as np
import pytest

from realm_jax.cli.main import guard
from realm_jax.data.blocks import BlockStore
from realm_jax.index.manifest import EMBEDDINGS
from realm_jax.index.retrievers import read_params
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.storage import open_store
from realm_jax.training import pretrain
from realm_jax.training.checkpoint_manifests import finished_steps
from tests import tiny_world
from tests.tiny_world import poisoned, read_item

SEED = int(os.environ.get("SOAK_NAN_SEED", "0"))


class Watcher:
    """Reads everything that is committed, as soon as it is; a context manager."""

    def __init__(self, model_dir):
        self._store = open_store(model_dir)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.finite: dict[tuple[str, int], bool] = {}

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(60)
        self._look()

    def _run(self):
        while not self._stop.wait(0.01):
            self._look()

    def _look(self):
        series = {n: SnapshotSeries(self._store, n) for n in ("retriever", "index")}
        seen = {name: of.steps() for name, of in series.items()}
        seen["checkpoints"] = finished_steps(self._store)
        for name, steps in seen.items():
            for step in steps:
                # What is withdrawn or collected meanwhile cannot be read.
                with contextlib.suppress(Exception):
                    arrays = jax.tree.leaves(self._read(name, step))
                    good = all(np.isfinite(array).all() for array in arrays)
                    before = self.finite.get((name, step), True)
                    self.finite[name, step] = before and good

    def _read(self, name, step):
        if name == "checkpoints":
            return [read_item(self._store, step, item) for item in ("params", "rest")]
        series = SnapshotSeries(self._store, name)
        manifest = series.read_manifest(step)
        if name == "retriever":
            return read_params(series, manifest)
        return series.read_array(manifest, EMBEDDINGS)


def check_mode(world, folder, mode, steps, count):
    rng = random.Random(f"{SEED} {mode}")
    bad = sorted(rng.sample(range(2, steps), count))
    config = tiny_world.pretrain_config(
        world, folder, refresh_mode=mode, train_steps=steps, log_period=3
    )
    store, corpus = open_store(folder), BlockStore.open(world.corpus)

    def life():
        """Returns the exit code, and the updates done at the first report.

        It comes after the first update, whether the devices have finished that or not.
        """
        seen = []

        def report(step, total, values, what=""):
            if not what:
                seen.append(step)

        with tiny_world.builder_beside(config, corpus):
            code = guard(lambda stop: 0 if pretrain.run(config, report, stop) else 1)
        return code, seen[0] if seen else None

    saved = 0
    with Watcher(folder) as watcher:
        for update in bad:
            with poisoned(update):
                code, began = life()
            assert code == 2
            assert began in (saved, saved + 1)
            # A checkpoint every fourth update, and none of what came after the NaN.
            saved = (update - 1) // config.checkpoint_period * config.checkpoint_period
            assert max(finished_steps(store), default=0) == saved
        code, began = life()
        assert code == 0
        assert began in (saved, saved + 1)
        assert max(finished_steps(store)) == steps
    kinds = {name for name, _ in watcher.finite}
    assert kinds >= {"checkpoints"} | ({"retriever"} if mode == "async" else set())
    wrong = [what for what, finite in watcher.finite.items() if not finite]
    assert wrong == []


@pytest.mark.full
def test_a_nan_while_a_builder_publishes(world, tmp_path):
    with tiny_world.traced_once():
        check_mode(world, tmp_path, "async", 10, 1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["off", "blocking", "async", "rolling"])
def test_five_nans_in_forty_updates(world, tmp_path, mode):
    check_mode(world, tmp_path, mode, 40, 5)
