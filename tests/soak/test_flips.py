"""Every file that a resumed run reads, damaged: it is named, or nothing comes of it.

SOAK_FLIP_SEED chooses the bits. The longer form prints the table of docs/faults.md.
"""

import collections
import functools
import os
import random
import re

import pytest

from realm_jax.training import lease, stage
from tests import tiny_run, tiny_world
from tests.soak import flips

SEED = int(os.environ.get("SOAK_FLIP_SEED", "0"))


@pytest.fixture(params=[flips.PRETRAINING])
def run(request, tmp_path, monkeypatch):
    # A lease of another machine is waited for.
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.05)
    impatient = functools.partial(lease.Lease, stale_seconds=0.2)
    monkeypatch.setattr(stage, "Lease", impatient)
    with tiny_world.traced_once():
        yield flips.Flips(tiny_world.make(tmp_path / "world"), tmp_path, request.param)


# The others have tests of their own (tests/training/test_verified_files.py).
EVERY_DAY = (
    "newest checkpoint: data",
    "index: chunks",
    "metrics.jsonl",
    "trainer's heartbeat",
    "settings of an earlier start",
    "a lease that was left",
)


def test_no_file_of_a_chain_is_left_out(tmp_path_factory):
    chain = tiny_run.finished(tmp_path_factory)
    places = dict.fromkeys(("warm_start", "pretrain", "finetune"), "model")
    names = {
        f"{place}/{path.relative_to(chain / folder).as_posix()}"
        for folder, place in {**places, "corpus": "corpus"}.items()
        for path in (chain / folder).rglob("*")
        if path.is_file()
    }
    of_any_stage = {"newest": r"\d+", "index": r"\d+", "task": r"\w+"}
    known = [pattern.format(**of_any_stage) for pattern in flips.KINDS.values()]
    found = {
        pattern: {name for name in names if re.fullmatch(pattern, name)}
        for pattern in [*known, *flips.OTHERS]
    }
    assert names - set().union(*found.values()) == set()
    assert all(found[pattern] for pattern in flips.OTHERS)


def damage_all(run, kinds, flips_of_a_file, files_of_a_kind, truncations):
    counts = {}
    for kind in kinds:
        rng = random.Random(f"{SEED} {kind}")
        found = counts[kind] = collections.Counter()
        names = run.files(kind)
        for name in rng.sample(names, min(files_of_a_kind, len(names))):
            ways = [flips.flip(rng) for _ in range(flips_of_a_file)]
            for way in ways + [flips.truncate(rng) for _ in range(truncations)]:
                what = run.after(name, way)
                assert not what.startswith(flips.BAD), f"{name}: {what}"
                found[what] += 1
    return counts


@pytest.mark.full
def test_one_bit_of_a_file_of_some_kinds(run):
    counts = damage_all(run, EVERY_DAY, 1, 1, 0)
    assert counts["index: chunks"][flips.SAME] == 0
    assert counts["newest checkpoint: data"] == {flips.WARNED: 1}


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("run", flips.STAGES, indirect=True)
def test_many_bits_of_every_kind(run):
    print("\n" + flips.table(damage_all(run, run.kinds, 4, 8, 1)))
