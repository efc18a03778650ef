"""Which checkpoints there are, what was said of them, and whether they are sound.

    MODEL_DIR/checkpoints/<step>/        parameters and the rest of the state (Orbax)
    MODEL_DIR/checkpoints/<step>.json    size and crc32c of every file, and details

Orbax does not checksum arrays: a flipped bit would restore silently wrong. The manifest
is written last, so a checkpoint without one was never finished and does not count. It
carries a checksum of its own; one that is damaged counts as a damaged checkpoint.

Nothing here reads an array, so that a launcher can ask how far a run is without JAX.
"""

import contextlib
import enum
import math
from collections.abc import Mapping
from typing import Any

from realm_jax import manifests
from realm_jax.storage import MissingObjectError, Store

FOLDER = "checkpoints"
"""Of the model directory."""

HOLDS_INDEX = "holds_index"
"""In a checkpoint's details: whether the index is part of the state."""

HELD_OUT_UTILITY = "held_out_utility"
"""In a checkpoint's details, if it was measured: mean retrieval utility, in nats."""


class Which(enum.Enum):
    """Which checkpoint of a run is asked for."""

    LAST = "last"
    BEST = "best"


def finished_steps(store: Store) -> list[int]:
    """Steps of the checkpoints that have a manifest, ascending."""
    names = [name.removeprefix(f"{FOLDER}/") for name in store.list(FOLDER)]
    stems = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def read_details(store: Store) -> tuple[int, Mapping[str, Any]] | None:
    """Step and details of the newest finished checkpoint, without reading arrays.

    Checkpoints whose manifest is damaged do not count.
    """
    found = all_details(store)
    step = max(found, default=None)
    return None if step is None else (step, found[step])


def all_details(store: Store) -> dict[int, Mapping[str, Any]]:
    """Details of every finished checkpoint by step, in order, as `read_details`."""
    found = {}
    for step in finished_steps(store):
        # What is damaged is named when it is restored.
        with contextlib.suppress(manifests.DamagedManifestError, MissingObjectError):
            found[step] = read_details_of(store, step)
    return found


def best_step(details: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The checkpoint with the highest held-out utility; of equal ones the later.

    Args:
      details: of the checkpoints, by step.

    Returns:
      None if none of them carries a utility that is a number.
    """
    utilities = {
        step: found.get(HELD_OUT_UTILITY, math.nan) for step, found in details.items()
    }
    measured = [step for step, value in utilities.items() if math.isfinite(value)]
    return max(measured, key=lambda step: (utilities[step], step), default=None)


def add_detail(store: Store, step: int, name: str, value: Any) -> None:
    """Adds a fact to the manifest of a finished checkpoint, known to be sound."""
    manifest = manifests.read(store, manifest_name(step))
    manifest["details"][name] = value
    store.write(manifest_name(step), manifests.seal(manifest))


def write_manifest(store: Store, step: int, details: Mapping[str, Any]) -> None:
    """Seals a checkpoint whose files are all there; from then on it counts.

    Args:
      store: the model directory.
      step: of the checkpoint.
      details: JSON-serialisable facts to find at restore.
    """
    files = manifests.file_records(store.stats(f"{FOLDER}/{step}"))
    manifest = {"step": step, "details": details, "files": files}
    store.write(manifest_name(step), manifests.seal(manifest))


def read_details_of(store: Store, step: int) -> Mapping[str, Any]:
    """Details of one finished checkpoint, which is known to be sound."""
    return manifests.read(store, manifest_name(step))["details"]


def find_damage(store: Store, step: int) -> str | None:
    """Names the first file that is not what was written."""
    try:
        manifest = manifests.read(store, manifest_name(step))
    except manifests.DamagedManifestError as error:
        return str(error)
    files = manifests.parse_files(manifest["files"])
    return manifests.find_damage(files, store.stats(f"{FOLDER}/{step}").get)


def manifest_name(step: int) -> str:
    """Name of the manifest of a checkpoint in the model directory."""
    return f"{FOLDER}/{step}.json"
