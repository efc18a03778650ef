"""Checkpoints: Orbax arrays with a checksum manifest beside them.

    MODEL_DIR/checkpoints/<step>/        parameters and the rest of the state (Orbax)
    MODEL_DIR/checkpoints/<step>.json    size and crc32c of every file, and details

Orbax does not checksum arrays: a flipped bit would restore silently wrong. The manifest
is written last, so a checkpoint without one was never finished and does not count.

Every process saves and restores its own shards; the first writes manifests, deletes,
and says which checkpoint is restored.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import PyTree

from realm_jax import hosts
from realm_jax.errors import BadInputError
from realm_jax.index.device_search import EmbeddingTable
from realm_jax.storage import Store
from realm_jax.training.state import TrainState

_FOLDER = "checkpoints"

KEPT_CHECKPOINTS = 2
"""How many of the newest checkpoints remain."""

HOLDS_INDEX = "holds_index"
"""In a checkpoint's details: whether the index is part of the state."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was read back whole.

    Attributes:
      step: number of updates done.
      tree: what was asked for: a `TrainState` or the parameters alone.
      details: what was saved beside it, such as `index_step` and fingerprints.
    """

    step: int
    tree: Any
    details: Mapping[str, Any]


class Checkpointer:
    """Writes checkpoints while training goes on; one at a time.

    Args:
      store: the model directory.
      keep: how many of the newest checkpoints remain.
    """

    def __init__(self, store: Store, keep: int = KEPT_CHECKPOINTS):
        self._store = store
        self._keep = keep
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self._finishing: Future[None] | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(self, state: TrainState, details: Mapping[str, Any]) -> None:
        """Starts writing; returns when the state has been copied off the device.

        A checkpoint of this step that is there already is left as it is, unless it is
        damaged.

        Args:
          state: its step names the checkpoint.
          details: JSON-serialisable facts to find at restore.
        """
        step = int(state.step)

        def make_room() -> bool:
            self.wait()
            return self._make_room(step)

        self._orbax.wait_until_finished()
        if not hosts.first_does(make_room):
            return
        rest = {
            "step": state.step,
            "optimizer_state": state.optimizer_state,
            "key": state.key,
        }
        items = {"params": state.params, "rest": rest}
        if state.index is not None:
            items["index"] = _index_item(state.index)
        args = {name: ocp.args.StandardSave(item) for name, item in items.items()}
        self._orbax.save(
            self._store.url(f"{_FOLDER}/{step}"), ocp.args.Composite(**args)
        )
        if hosts.is_first():
            details = {**details, HOLDS_INDEX: state.index is not None}
            # In the background: a run that is killed then goes on from here.
            self._finishing = self._threads.submit(self._finish, step, details)

    def wait(self) -> None:
        """Waits until what this process has to do for a checkpoint is done.

        It waits for no other process: one that fails alone must be able to end.
        """
        self._orbax.wait_until_finished()
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            finishing.result()

    def _make_room(self, step: int) -> bool:
        """Returns whether the checkpoint is to be written; drops a damaged one."""
        if step in finished_steps(self._store):
            if _find_damage(self._store, step) is None:
                return False
            self._store.delete(_manifest_name(step))
        self._store.delete_folder(f"{_FOLDER}/{step}")
        return True

    def _finish(self, step: int, details: Mapping[str, Any]) -> None:
        """Writes the manifest when all processes have written; drops old ones."""
        self._orbax.wait_until_finished()
        files = {
            name: {"size": stat.size, "crc32c": stat.crc32c}
            for name, stat in self._store.stats(f"{_FOLDER}/{step}").items()
        }
        manifest = {"step": step, "details": details, "files": files}
        self._store.write(_manifest_name(step), json.dumps(manifest, indent=2).encode())
        finished = finished_steps(self._store)
        for old in finished[: -self._keep]:
            self._store.delete(_manifest_name(old))
        # Those of the old, and what a process left that was killed as it wrote or
        # deleted one.
        kept = {str(step) for step in finished[-self._keep :]}
        parts = [name.split("/") for name in self._store.list(_FOLDER)]
        for folder in {part[1] for part in parts if len(part) > 2} - kept:
            self._store.delete_folder(f"{_FOLDER}/{folder}")

    def close(self) -> None:
        """Waits, then releases the threads."""
        self.wait()
        self._orbax.close()
        self._threads.shutdown()


def finished_steps(store: Store) -> list[int]:
    """Steps of the checkpoints that have a manifest, ascending."""
    names = [name.removeprefix(f"{_FOLDER}/") for name in store.list(_FOLDER)]
    stems = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def read_details(store: Store) -> tuple[int, Mapping[str, Any]] | None:
    """Step and details of the newest finished checkpoint, without reading arrays."""
    steps = finished_steps(store)
    return (steps[-1], _read_manifest(store, steps[-1])["details"]) if steps else None


def all_details(store: Store) -> list[Mapping[str, Any]]:
    """Details of every finished checkpoint, oldest first."""
    return [_read_manifest(store, step)["details"] for step in finished_steps(store)]


def restore_state(store: Store, template: TrainState) -> Restored | None:
    """Reads the newest undamaged checkpoint, or None if there is no checkpoint at all.

    Args:
      store: the model directory.
      template: a state with the shapes, dtypes and shardings to restore to. Its index,
        if any, is only restored from checkpoints that hold one; else it stays.

    Raises:
      BadInputError: every checkpoint is damaged, or holds other shapes.
    """

    def read(url: str, details: Mapping[str, Any]) -> TrainState:
        items = {
            "params": template.params,
            "rest": {
                "step": template.step,
                "optimizer_state": template.optimizer_state,
                "key": template.key,
            },
        }
        index = template.index
        if index is not None and details.get(HOLDS_INDEX):
            items["index"] = _index_item(index)
        read = _restore(url, **items)
        if "index" in items:
            index = index.replace(**read["index"])
        return TrainState(params=read["params"], index=index, **read["rest"])

    return _newest(store, read)


def restore_params(store: Store) -> Restored | None:
    """Reads the parameters alone; see `restore_state`.

    They come to this process's first device, whichever devices they were saved from.
    """
    return _newest(store, lambda url, _: jax.device_put(_read_on_host(url, "params")))


def read_item(store: Store, step: int, item: str) -> PyTree:
    """Returns one item of a checkpoint ("params", "rest", "index") as NumPy arrays."""
    return _read_on_host(store.url(f"{_FOLDER}/{step}"), item)


def _newest(store: Store, read) -> Restored | None:
    step = hosts.first_does(lambda: _newest_undamaged(store))
    if step is None:
        return None
    details = _read_manifest(store, step)["details"]
    return Restored(step, read(store.url(f"{_FOLDER}/{step}"), details), details)


def _newest_undamaged(store: Store) -> int | None:
    damaged = []
    for step in reversed(finished_steps(store)):
        problem = _find_damage(store, step)
        if problem is None:
            return step
        damaged.append(problem)
        logging.warning("checkpoint %d is damaged: %s; trying an older", step, problem)
    if damaged:
        raise BadInputError(
            f"expected an undamaged checkpoint in {store.url(_FOLDER)}, but "
            f"{'; '.join(damaged)}; delete the folder to start anew"
        )
    return None


def _find_damage(store: Store, step: int) -> str | None:
    """Names the first file that is not what the manifest says."""
    found = store.stats(f"{_FOLDER}/{step}")
    for name, expected in _read_manifest(store, step)["files"].items():
        if name not in found:
            return f"{name} is missing"
        if found[name].size != expected["size"]:
            return f"{name} has {found[name].size} bytes, not {expected['size']}"
        if found[name].crc32c != expected["crc32c"]:
            return f"{name} fails its checksum"
    return None


def _read_manifest(store: Store, step: int) -> dict[str, Any]:
    try:
        return json.loads(store.read(_manifest_name(step)))
    except json.JSONDecodeError as error:
        raise BadInputError(
            f"expected JSON in {store.url(_manifest_name(step))}, got something else "
            f"({error}); delete that file to fall back to an older checkpoint"
        ) from error


def _manifest_name(step: int) -> str:
    return f"{_FOLDER}/{step}.json"


def _index_item(index: EmbeddingTable) -> dict[str, jax.Array]:
    """The arrays of an index; how many blocks it has the corpus knows."""
    arrays = {"rows": index.rows, "codes": index.codes, "scales": index.scales}
    return {name: array for name, array in arrays.items() if array is not None}


def _read_on_host(url: str, item: str) -> PyTree:
    saved = ocp.StandardCheckpointHandler().metadata(epath.Path(url) / item)
    # A template of NumPy arrays that take no memory.
    template = jax.tree.map(
        lambda array: np.broadcast_to(np.zeros((), array.dtype), array.shape),
        getattr(saved, "tree", saved),
    )
    return _restore(url, **{item: template})[item]


def _describe(leaf: jax.Array | np.ndarray) -> jax.ShapeDtypeStruct | np.ndarray:
    """What Orbax is to restore a leaf as: on the same devices, or on the host."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return leaf


def _restore(url: str, **items: PyTree) -> dict[str, PyTree]:
    args = {
        name: ocp.args.StandardRestore(jax.tree.map(_describe, tree))
        for name, tree in items.items()
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as orbax:
        try:
            return dict(orbax.restore(url, ocp.args.Composite(**args)).items())
        except ValueError as error:
            first_line = str(error).strip().splitlines()[0]
            raise BadInputError(
                f"expected parameters of this run's shapes in {url}, got others "
                f"({first_line}); use the model file that the checkpoint was made with"
            ) from error
