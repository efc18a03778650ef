"""Reads and writes checkpoint manifests: steps, details and checksums.

    MODEL_DIR/checkpoints/<step>/        parameters and the rest of the state (Orbax)
    MODEL_DIR/checkpoints/<step>.json    size and crc32c of every file, and details

Orbax does not checksum arrays: a flipped bit would be restored silently. The manifest
is written last, so a checkpoint without one is unfinished and is ignored. It has its
own checksum; a damaged manifest makes a damaged checkpoint.

This module reads no arrays, so that a launcher can find a run's progress without JAX.
"""

import contextlib
import enum
import math
from collections.abc import Mapping
from typing import Any

from realm_jax import manifests
from realm_jax.storage import MissingObjectError, Store

FOLDER = "checkpoints"
"""Folder of the checkpoints in the model directory."""

HOLDS_INDEX = "holds_index"
"""In a checkpoint's details: whether the index is part of the state."""

HELD_OUT_UTILITY = "held_out_utility"
"""In a checkpoint's details, if it was measured: mean retrieval utility, in nats."""

DEV_EXACT_MATCH = "dev_exact_match"
"""In a checkpoint's details, if it was measured: exact match on held-out questions."""

ENDED_EARLY = "ended_early"
"""In a checkpoint's details: whether its run has ended with fewer updates than it was
to make."""

_SCORES = (HELD_OUT_UTILITY, DEV_EXACT_MATCH)
"""The score of a checkpoint, higher is better: of pre-training, and of fine-tuning."""


class Which(enum.Enum):
    """Selects a checkpoint of a run: the last, or the one with the highest score."""

    LAST = "last"
    BEST = "best"


def finished_steps(store: Store) -> list[int]:
    """Returns the steps of the checkpoints that have a manifest, ascending."""
    names = [name.removeprefix(f"{FOLDER}/") for name in store.list(FOLDER)]
    stems = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def all_details(store: Store) -> dict[int, Mapping[str, Any]]:
    """Returns the details of all finished checkpoints whose manifest is undamaged."""
    found = {}
    for step in finished_steps(store):
        # Damage is reported when the checkpoint is restored.
        with contextlib.suppress(manifests.DamagedManifestError, MissingObjectError):
            found[step] = read_details_of(store, step)
    return found


def score_of(details: Mapping[str, Any]) -> dict[str, float]:
    """Returns the score of a checkpoint by its name; empty if it was not measured."""
    return {name: details[name] for name in _SCORES if name in details}


def best_step(details: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Returns the latest step with the highest finite score; None without a score."""
    scores = {
        step: value
        for step, found in details.items()
        for value in score_of(found).values()
        if math.isfinite(value)
    }
    return max(scores, key=lambda step: (scores[step], step), default=None)


def add_detail(store: Store, step: int, name: str, value: Any) -> None:
    """Adds a detail to the manifest of a finished, undamaged checkpoint."""
    manifest = _read(store, step)
    manifest["details"][name] = value
    store.write(manifest_name(step), manifests.seal(manifest))


def write_manifest(store: Store, step: int, details: Mapping[str, Any]) -> None:
    """Writes a checkpoint's manifest once its files are complete, which finishes it."""
    # Orbax syncs its arrays alone.
    store.sync(f"{FOLDER}/{step}")
    files = manifests.file_records(store.stats(f"{FOLDER}/{step}"))
    manifest = {"step": step, "details": details, "files": files}
    store.write(manifest_name(step), manifests.seal(manifest))


def read_details_of(store: Store, step: int) -> Mapping[str, Any]:
    """Returns the details of a finished, undamaged checkpoint."""
    return _read(store, step)["details"]


def find_damage(store: Store, step: int) -> str | None:
    """Describes the first file that differs from its record; None if none does."""
    try:
        files = manifests.parse_files(_read(store, step)["files"])
    except manifests.DamagedManifestError as error:
        return str(error)
    except ValueError as error:
        return f"{manifest_name(step)} is damaged ({error})"
    return manifests.find_damage(files, store.stats(f"{FOLDER}/{step}").get)


def _read(store: Store, step: int) -> dict[str, Any]:
    fields = {"details": dict, "files": dict}
    return manifests.read(store, manifest_name(step), fields)


def manifest_name(step: int) -> str:
    """Returns the name of a checkpoint's manifest in the model directory."""
    return f"{FOLDER}/{step}.json"
