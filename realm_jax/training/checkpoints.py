"""Saves and restores checkpoints: Orbax arrays with a checksum manifest.

Every process saves and restores its own shards; the first writes manifests, deletes
old checkpoints, and chooses the one to restore.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import PyTree

from realm_jax import multihost
from realm_jax.errors import BadInputError
from realm_jax.storage import Store
from realm_jax.training.checkpoint_manifests import (
    DEV_EXACT_MATCH,
    FOLDER,
    HELD_OUT_UTILITY,
    HOLDS_INDEX,
    Which,
    add_detail,
    all_details,
    best_step,
    find_damage,
    finished_steps,
    manifest_name,
    read_details_of,
    score_of,
    write_manifest,
)
from realm_jax.training.state import TrainState

KEPT_CHECKPOINTS = 2
"""Number of newest checkpoints that are kept, beside the best."""

_INDEX = "index"


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was read completely: its details, and the tree asked for."""

    step: int
    tree: Any
    details: Mapping[str, Any]


class Checkpointer:
    """Writes checkpoints asynchronously, one at a time.

    The newest `KEPT_CHECKPOINTS` are kept, and the one with the highest score.
    `require_alone` raises an error if another job saves in this directory; it is called
    in the first process before older checkpoints are deleted.
    """

    def __init__(self, store: Store, require_alone: Callable[[], None] = lambda: None):
        self._require_alone = require_alone
        self._store = store
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self._finishing: Future[None] | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(self, state: TrainState, details: Mapping[str, Any]) -> None:
        """Starts to save a state; returns once it has been copied off the devices.

        An existing checkpoint of this step is left as it is, unless it is damaged; a
        score is added to its details, because it may be measured after the checkpoint
        was saved.
        """
        step = int(state.step)

        def make_room() -> bool:
            self.wait()
            return self._make_room(step, details)

        self._orbax.wait_until_finished()
        if not multihost.run_on_primary(make_room):
            return
        items = _items(state).items()
        args = {name: ocp.args.StandardSave(item) for name, item in items}
        self._orbax.save(
            self._store.url(f"{FOLDER}/{step}"), ocp.args.Composite(**args)
        )
        if multihost.is_first():
            details = {**details, HOLDS_INDEX: state.index is not None}
            # In the background, so that even a run that is killed can resume from here.
            self._finishing = self._threads.submit(self._finish, step, details)

    def wait(self) -> None:
        """Waits until this process has finished its part of a checkpoint.

        It does not wait for other processes: one that fails alone must be able to end.
        """
        self._orbax.wait_until_finished()
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            finishing.result()

    def _make_room(self, step: int, details: Mapping[str, Any]) -> bool:
        """Returns whether to write the checkpoint; deletes a damaged one."""
        if step in finished_steps(self._store):
            if find_damage(self._store, step) is None:
                for name, score in score_of(details).items():
                    add_detail(self._store, step, name, score)
                return False
            self._store.delete(manifest_name(step))
        self._store.delete_folder(f"{FOLDER}/{step}")
        return True

    def _finish(self, step: int, details: Mapping[str, Any]) -> None:
        """Writes the manifest once all processes have saved; drops old checkpoints."""
        self._orbax.wait_until_finished()
        write_manifest(self._store, step, details)
        # What is unfinished here may be another trainer's by now.
        self._require_alone()
        finished = finished_steps(self._store)
        newest = finished[-KEPT_CHECKPOINTS:]
        kept = {*newest, best_step(all_details(self._store))}
        for old in set(finished) - kept:
            self._store.delete(manifest_name(old))
        # Folders of deleted checkpoints, and those left by a process that was killed
        # while writing or deleting one.
        parts = [name.split("/") for name in self._store.list(FOLDER)]
        folders = {part[1] for part in parts if len(part) > 2}
        for folder in folders - {str(step) for step in kept}:
            self._store.delete_folder(f"{FOLDER}/{folder}")

    def close(self) -> None:
        """Waits for the checkpoint being saved, then releases the threads."""
        try:
            self.wait()
        finally:
            self._orbax.close()
            self._threads.shutdown()


class KeptCheckpoints:
    """The details of the checkpoints that remain, by step.

    `Checkpointer` keeps the newest and the best by score. A stage that measures scores
    follows it here, to recognise a new best one. Pre-training also has to know the
    indexes that garbage collection must keep: a run whose newest checkpoints are
    damaged resumes from the best, with the index that it names.
    """

    def __init__(self, store: Store):
        self._details = multihost.run_on_primary(lambda: all_details(store))
        self._measured: dict[int, dict[str, float]] = {}

    @property
    def index_steps(self) -> tuple[int, ...]:
        """Versions of the indexes with which they resume, in order of their steps."""
        return tuple(details["index_step"] for details in self._details.values())

    def note_score(self, step: int, name: str, score: float) -> bool:
        """Notes the score of a step; returns whether no checkpoint's is higher."""
        self._measured = {step: {name: score}}
        best = best_step(self._details)
        if best is None:
            return math.isfinite(score)
        return score >= self._details[best][name]

    def add(self, step: int, details: Mapping[str, Any]) -> Mapping[str, Any]:
        """Adds a checkpoint; returns its details with the score of its step, if any."""
        score = self._measured.get(step, {})
        details = {**details, **score}
        # An existing checkpoint keeps its details, see `Checkpointer.save`.
        found = {**self._details, step: {**details, **self._details.get(step, {})}}
        found[step].update(score)
        newest = sorted(found)[-KEPT_CHECKPOINTS:]
        kept = {*newest, best_step(found)}
        self._details = {step: found[step] for step in sorted(found) if step in kept}
        return details


def restore_state(store: Store, template: TrainState) -> Restored | None:
    """Restores the newest undamaged checkpoint; None if there is no checkpoint.

    `template` has the shapes, dtypes and shardings to restore to. Its index, if any, is
    restored only from a checkpoint that holds one, and else kept; its padding may
    differ from that of the checkpoint.
    """

    def read(url: str, details: Mapping[str, Any]) -> TrainState:
        items, index = _items(template), template.index
        if not details.get(HOLDS_INDEX):
            items.pop(_INDEX, None)
        read = _restore(url, **items)
        if index is not None and _INDEX in items:
            index = index.replace(**read[_INDEX])
        return TrainState(params=read["params"], index=index, **read["rest"])

    return _chosen(store, _newest_undamaged, read)


def restore_params(store: Store, which: Which = Which.LAST) -> Restored | None:
    """Restores the parameters alone, of the newest undamaged checkpoint or of the best.

    They are placed on this process's first device, whatever devices saved them. Without
    a checkpoint it returns None; a best one that is damaged, or was never measured, is
    refused.
    """
    choose = _newest_undamaged if which is Which.LAST else _best_undamaged
    return _chosen(
        store, choose, lambda url, _: jax.device_put(_read_on_host(url, "params"))
    )


def _chosen(
    store: Store,
    choose: Callable[[Store], int | None],
    read: Callable[[str, Mapping[str, Any]], Any],
) -> Restored | None:
    step = multihost.run_on_primary(lambda: choose(store))
    if step is None:
        return None
    details = read_details_of(store, step)
    return Restored(step, read(store.url(f"{FOLDER}/{step}"), details), details)


def _newest_undamaged(store: Store) -> int | None:
    damaged = []
    for step in reversed(finished_steps(store)):
        problem = find_damage(store, step)
        if problem is None:
            return step
        damaged.append(problem)
        logging.warning("checkpoint %d is damaged: %s; trying an older", step, problem)
    if damaged:
        raise BadInputError(
            f"expected an undamaged checkpoint in {store.url(FOLDER)}, but "
            f"{'; '.join(damaged)}; delete the folder to start anew"
        )
    return None


def _best_undamaged(store: Store) -> int | None:
    finished = finished_steps(store)
    if not finished:
        return None
    step = best_step(all_details(store))
    if step is None:
        raise BadInputError(
            f"expected a checkpoint with a {HELD_OUT_UTILITY} or {DEV_EXACT_MATCH} in "
            f"{store.url(FOLDER)}, but none of steps {', '.join(map(str, finished))} "
            "has one; pretrain with held_out_examples above 0, fine-tune with "
            'QUESTIONS, or ask for the last checkpoint (CHECKPOINT="last")'
        )
    problem = find_damage(store, step)
    if problem is not None:
        raise BadInputError(
            f"expected the best checkpoint of {store.url()}, that of step {step}, as "
            f'it was written, but {problem}; ask for the last one (CHECKPOINT="last", '
            'and of a fine-tuned model FINETUNED_CHECKPOINT="last")'
        )
    return step


def _items(state: TrainState) -> dict[str, PyTree]:
    """Returns the parts of a checkpoint by name; that of the index if there is one."""
    rest = {
        "step": state.step,
        "optimizer_state": state.optimizer_state,
        "key": state.key,
    }
    items = {"params": state.params, "rest": rest}
    if (index := state.index) is not None:
        # Its number of blocks is known from the corpus.
        arrays = {"rows": index.rows, "codes": index.codes, "scales": index.scales}
        items[_INDEX] = {k: array for k, array in arrays.items() if array is not None}
    return items


def _read_on_host(url: str, item: str) -> PyTree:
    saved = ocp.StandardCheckpointHandler().metadata(epath.Path(url) / item)
    template = host_template(getattr(saved, "tree", saved))
    return _restore(url, **{item: template})[item]


def host_template(metadata: PyTree) -> PyTree:
    """Returns NumPy arrays that occupy no memory, to restore to."""
    return jax.tree.map(
        lambda array: np.broadcast_to(np.zeros((), array.dtype), array.shape), metadata
    )


def _describe(leaf: jax.Array | np.ndarray) -> jax.ShapeDtypeStruct | np.ndarray:
    """Returns what Orbax restores a leaf as: on the same devices, or on the host."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return leaf


def _restore(url: str, **items: PyTree) -> dict[str, PyTree]:
    args = {
        # The padding of an index depends on the number of devices; its blocks do not.
        name: ocp.args.StandardRestore(
            jax.tree.map(_describe, tree), strict=name != _INDEX
        )
        for name, tree in items.items()
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as orbax:
        try:
            return dict(orbax.restore(url, ocp.args.Composite(**args)).items())
        except ValueError as error:
            first_line = str(error).strip().splitlines()[0]
            raise BadInputError(
                f"expected parameters of this run's shapes in {url}, got others "
                f"({first_line}); use the model file, the frozen parameters and the "
                "precision of the index that the checkpoint was made with"
            ) from error
