"""A small file system that fills up under a trainer and under an index builder.

SOAK_DISK_SEED chooses how much room is left. Skipped where nothing may be mounted; as
the root of a user namespace (`unshare --map-root-user --mount`) anyone may.
"""

import os
import pathlib
import random
import shutil
import subprocess
import threading

import pytest

from realm_jax.cli.main import guard
from realm_jax.data.blocks import BlockStore
from realm_jax.index.builder import TRAINER_ROLE, BuilderConfig, IndexBuilder
from realm_jax.index.heartbeat import Heartbeat
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.storage import open_store
from realm_jax.training import pretrain
from realm_jax.training.checkpoint_manifests import find_damage, finished_steps
from tests import tiny_world
from tests.tiny_world import EMBED, silent

SEED = int(os.environ.get("SOAK_DISK_SEED", "0"))
_MIB = 64


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={_MIB}m", "tmpfs", str(folder)]
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, *options], check=False).returncode:
        pytest.skip(
            "needs to mount a tmpfs: run it by `unshare --map-root-user --mount`"
        )
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def leave(folder: pathlib.Path, num_bytes: int) -> pathlib.Path:
    """Fills the disk with something else, but for so many bytes."""
    filler = folder / "filler"
    filler.unlink(missing_ok=True)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free - num_bytes)
    return filler


def check_committed(store):
    """What is committed is whole."""
    for name in ("retriever", "index"):
        series = SnapshotSeries(store, name)
        for step in series.steps():
            series.verify(series.read_manifest(step))
    for step in finished_steps(store):
        assert find_damage(store, step) is None


def require_one_line(code, capfd):
    said = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert code == 2
    assert len(said) == 1, said
    assert "expected room for" in said[0]


def fail_for_room(folder, store, capfd, rounds, most, run):
    """Runs a command again and again with less than `most` bytes of room."""
    rng = random.Random(SEED)
    capfd.readouterr()
    for _ in range(rounds):
        filler = leave(folder, rng.randrange(4096, most))
        require_one_line(run(), capfd)
        filler.unlink()
        check_committed(store)


def check_trainer(world, folder, capfd, rounds):
    """Its first run ends after 4 updates; the next ones want a checkpoint at 8."""
    model_dir = folder / "model"
    config = tiny_world.pretrain_config(world, model_dir)
    stop, report = tiny_world.stop_after(4)
    assert not pretrain.run(config, report, stop)
    store = open_store(model_dir)
    before = finished_steps(store)

    def train():
        return guard(lambda stop: 0 if pretrain.run(config, silent, stop) else 1)

    fail_for_room(folder, store, capfd, rounds, 60_000, train)
    assert set(before) <= set(finished_steps(store))
    assert train() == 0
    assert finished_steps(store)[-1] == 8


def check_builder(world, folder, capfd, rounds):
    model_dir = folder / "model"
    config = tiny_world.pretrain_config(
        world, model_dir, refresh_mode="async", train_steps=1
    )
    store, corpus = open_store(model_dir), BlockStore.open(world.corpus)
    building = BuilderConfig(embed=EMBED, poll_seconds=0.02)

    def run(stop):
        return 0 if IndexBuilder(store, corpus, building).run(stop) else 1

    def build():
        return guard(run)

    beside = threading.Thread(target=run, args=(tiny_world.NEVER,))
    beside.start()
    assert pretrain.run(config, silent, tiny_world.NEVER)
    beside.join(60)
    series = SnapshotSeries(store, "index")
    last = series.latest_step()
    series.forget(last)
    series.collect(keep=9, attempt_age_seconds=0.0)
    fail_for_room(folder, store, capfd, rounds, 20_000, build)
    assert last not in series.steps()
    ended = threading.Timer(0.5, Heartbeat(store, TRAINER_ROLE).beat, (1, "finished"))
    ended.start()
    assert build() == 0
    ended.join()
    check_committed(store)
    assert series.latest_step() == last


@pytest.mark.parametrize("check", [check_trainer, check_builder])
@pytest.mark.parametrize(
    "times",
    [
        pytest.param(1, marks=pytest.mark.full),
        pytest.param(10, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_a_disk_fills_up(world, small_disk, capfd, check, times):
    check(world, small_disk, capfd, times)
