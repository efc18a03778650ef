"""The index that fine-tuning searches: that of its first step, or a refreshed one.

A refreshed index changes hands as in pre-training (`refresh.py`). It belongs to the
document tower that is being trained, so whoever opens a checkpoint later searches an
index of the parameters of that checkpoint, not the one that training was using then.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Float, Int

from realm_jax import axes
from realm_jax.index import device_search
from realm_jax.index.device_tokens import DocumentLayout, TokenTable, place_tokens
from realm_jax.index.searchers import DeviceSearcher
from realm_jax.index.source import IndexSource, LoadedIndex
from realm_jax.placement import place_batch
from realm_jax.training.checkpoint_manifests import HOLDS_INDEX
from realm_jax.training.checkpoints import KeptCheckpoints
from realm_jax.training.index_client import IndexClient
from realm_jax.training.refresh import Refresher, RefreshMode
from realm_jax.training.stage import Stage, StageParts
from realm_jax.training.step_timing import Part
from realm_jax.types import Array

# While the builder makes no progress, as long as pre-training waits by default.
_WAIT_SECONDS = 3600.0


class FrozenIndex(contextlib.AbstractContextManager["FrozenIndex"]):
    """The index of the retriever that a run begins with, searched to the end.

    `trained` is as in `IndexSource.open_first`. `tokens` are the wordpieces of the
    corpus on the devices, where updates renew the index.
    """

    tokens: TokenTable | None = None
    # Rows on the host, from where the loss has the embeddings of what was found.
    _keeps_rows: ClassVar[bool] = True

    def __init__(
        self,
        stage: StageParts[Any],
        source: IndexSource,
        stop: threading.Event,
        trained: str = "",
    ):
        self._stage = stage
        self._source = dataclasses.replace(source, keeps_rows=self._keeps_rows)
        self._stop = stop
        self._trained = trained
        self._index: LoadedIndex | None = None

    @property
    def current(self) -> LoadedIndex:
        """The index in use; available once `open` has returned."""
        assert self._index is not None
        return self._index

    def embeddings_of(
        self, block_ids: Int[np.ndarray, "batch neighbour"]
    ) -> Float[Array, "batch neighbour projection"]:
        """Returns embeddings for this process's part of a batch; any for id -1."""
        rows = self.current.rows
        assert rows is not None
        return rows[np.maximum(block_ids, 0)]

    def open(self) -> None:
        """Gets the first index; StoppedError or NotReadyError if there is none."""
        self._index = self._source.open_first(
            self._stage.state.params["retriever"],
            self._stop,
            resumes=self._stage.details is not None,
            trained=self._trained,
        )

    def refresh(self) -> None:
        """Publishes or embeds, if it is time, and takes a newer index."""

    def metrics(self) -> Mapping[str, float]:
        """Returns version and age of a refreshed index, as metrics."""
        return {}

    def details(self) -> Mapping[str, Any]:
        """Returns what a checkpoint has to hold of a refreshed index."""
        return {}

    def keep(self, kept: KeptCheckpoints) -> None:
        """Has the indexes kept with which checkpoints resume."""

    def finish(self) -> None:
        """Publishes the last retriever, if there is a builder for it."""

    def __exit__(self, *error: Any) -> None:
        """Ends what is in the background."""


class RefreshedIndex(FrozenIndex):
    """An index that follows the retriever in training, `blocking` or `async`."""

    def __init__(
        self,
        stage: Stage[Any],
        source: IndexSource,
        stop: threading.Event,
        mode: RefreshMode,
        period: int,
    ):
        """Prepares the index, and sends the trainer's heartbeat from here on."""
        super().__init__(stage, source, stop)
        self._run = stage
        self._client = IndexClient(
            self._source, stop, step=stage.step, lease=stage.lease
        )
        self._refresher = Refresher(
            mode,
            period,
            self._client,
            wait_seconds=_WAIT_SECONDS,
            slices=(stage.mesh.size, source.embed.batch_size, period),
        )

    @property
    def current(self) -> LoadedIndex:
        """See `FrozenIndex`."""
        return self._refresher.index

    def open(self) -> None:
        """See `FrozenIndex`; a resumed run gets the index of its checkpoint again."""
        run = self._run
        saved = None if run.details is None else run.details["index_step"]
        self._refresher.start(run.step, run.state.params["retriever"], saved)

    def refresh(self) -> None:
        """See `FrozenIndex`; nothing is done twice for the same step."""
        run, refresher = self._run, self._refresher
        retriever = run.state.params["retriever"]
        if refresher.is_due(run.step):
            run.require_finite(retriever)
        with run.stopwatch.part(Part.SWAP):
            refresher.before_step(run.step, retriever)
        self._client.beat(run.step)

    def metrics(self) -> Mapping[str, float]:
        """See `FrozenIndex`."""
        return {
            **self._refresher.staleness(self._run.step),
            **self._client.builder_progress(),
        }

    def details(self) -> Mapping[str, Any]:
        """See `FrozenIndex`."""
        index_step = self.current.manifest.step
        return {"index_step": index_step, **self._refresher.details()}

    def keep(self, kept: KeptCheckpoints) -> None:
        """See `FrozenIndex`."""
        self._client.keep(kept.index_steps)

    def finish(self) -> None:
        """See `FrozenIndex`; the builder makes the last index, and ends."""
        run = self._run
        self._client.finish(run.step, run.state.params["retriever"])

    def __exit__(self, *error: Any) -> None:
        self._client.__exit__(*error)


class RollingIndex(RefreshedIndex):
    """An index in the training state, of which each update renews a slice.

    The update after a search renews it (`RenewingFinetuneLoss`), so that no row that is
    searched is older than a period of updates.
    """

    _keeps_rows = False

    def __init__(
        self, stage: Stage[Any], source: IndexSource, stop: threading.Event, period: int
    ):
        """Places the wordpieces of the corpus; the arguments are `RefreshedIndex`'s."""
        super().__init__(stage, source, stop, RefreshMode.ROLLING, period)
        layout = DocumentLayout.of(stage.config.models.lengths, stage.corpus.vocabulary)
        self.tokens = place_tokens(stage.corpus, layout, stage.mesh)
        self._gather = jax.jit(
            functools.partial(device_search.gather_rows, mesh=stage.mesh),
            out_shardings=NamedSharding(stage.mesh, axes.partition_spec("batch")),
        )

    @property
    def current(self) -> LoadedIndex:
        """See `FrozenIndex`; its manifest is of the index that it was made from."""
        return LoadedIndex(self._searcher(), self._refresher.index.manifest)

    def embeddings_of(
        self, block_ids: Int[np.ndarray, "batch neighbour"]
    ) -> Float[Array, "batch neighbour projection"]:
        """See `FrozenIndex`; gathered from all devices, so all processes call it."""
        run = self._run
        assert run.state.index is not None
        return self._gather(run.state.index.rows, place_batch(run.mesh, block_ids))

    def open(self) -> None:
        """See `FrozenIndex`; a checkpoint has the very rows that were searched."""
        run = self._run
        details = run.details or {}
        if details.get(HOLDS_INDEX):
            manifest = self._client.manifest(details["index_step"])
            index = LoadedIndex(self._searcher(), manifest)
            self._refresher.adopt(run.step, index, details)
            return
        saved = details.get("index_step")
        self._refresher.start(run.step, run.state.params["retriever"], saved)
        table = self._refresher.index.searcher.table
        run.state = run.state.replace(index=table)

    def _searcher(self) -> DeviceSearcher:
        run = self._run
        assert run.state.index is not None
        return DeviceSearcher.over(
            run.state.index,
            run.corpus.num_blocks,
            run.step,
            run.mesh,
            self._source.device,
        )
