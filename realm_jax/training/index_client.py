"""The trainer's side of the refresh: publishes, builds, loads, sends heartbeats.

In a job of several processes the first writes for all; each loads its own rows.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence

from jaxtyping import PyTree

from realm_jax import multihost
from realm_jax.errors import BadInputError
from realm_jax.index.builder import (
    BUILDER_ROLE,
    RETRIEVER_CRC32C,
    TRAINER_ROLE,
    collect_garbage,
)
from realm_jax.index.follower import IndexFollower
from realm_jax.index.heartbeat import Heartbeat, JobStatus, Listener, State
from realm_jax.index.manifest import (
    AlreadyCommittedError,
    Manifest,
    MismatchedSnapshotError,
)
from realm_jax.index.retrievers import (
    PARAMS_CRC32C,
    publish_retriever,
)
from realm_jax.index.snapshots import INDEX_SERIES, RETRIEVER_SERIES, SnapshotSeries
from realm_jax.index.source import FIRST_STEP, IndexSource, LoadedIndex, of_another_run
from realm_jax.storage import MissingObjectError, UnavailableStoreError
from realm_jax.training.lease import Lease

_BEAT_SECONDS = 2.0
# After the store was not available.
_RETRY_SECONDS = 30.0
_LISTEN_SECONDS = 5.0
_KEEP = 2

_log = logging.getLogger(__name__)


class IndexClient:
    """The trainer's access to the model directory; a context manager.

    Its heartbeat names the index in use, which garbage collection then keeps. The last
    heartbeat says "finished" or "failed", on which the builder ends too. Once another
    trainer has taken the lease over, nothing is written any more; without a lease it
    writes regardless.
    """

    def __init__(
        self,
        source: IndexSource,
        stop: threading.Event,
        builder_patience_seconds: float = 300.0,
        step: int = 0,
        lease: Lease | None = None,
    ):
        self._source = source
        self._lease = lease
        self._patience_seconds = builder_patience_seconds
        self._builder: Listener | None = None
        self._builder_said: JobStatus | None = None
        self._listened = 0.0
        self._silent_until = 0.0
        self._warned_of = ""
        self._stop = stop
        self._heartbeat = Heartbeat(source.model_store, TRAINER_ROLE, _BEAT_SECONDS)
        self._follower: IndexFollower | None = None
        self._step = step
        # The index of the previous stage, if there was one: later measurements of that
        # stage take its rows from here.
        self._first = [FIRST_STEP] if source.donors else []
        self._in_use: dict[str, object] = {"kept_index_steps": self._first}
        # Checksums of the retrievers that this process published, by step.
        self._published: dict[int, int] = {}
        self._resumed_at = -1
        self._finished = False

    def __enter__(self) -> "IndexClient":
        return self

    def __exit__(self, *error: object) -> None:
        if self._follower is not None:
            self._follower.stop()
        self._say("finished" if self._finished else "failed")

    def beat(self, step: int) -> None:
        """Sends a heartbeat, at most every few seconds; warns of a silent builder."""
        self._step = step
        self._say("running")
        now = time.monotonic()
        if self._builder is not None and now - self._listened >= _LISTEN_SECONDS:
            self._listened = now
            problem = ""
            with contextlib.suppress(UnavailableStoreError):
                problem = self._builder_problem()
            if problem and problem.rpartition(",")[0] != self._warned_of:
                _log.warning("%s; training goes on with the index it has", problem)
            self._warned_of = problem.rpartition(",")[0]

    def _say(self, state: State) -> None:
        if not multihost.is_first():
            return
        # The builder ends on the last word, so that must not be said for a successor.
        is_last = state != "running"
        if not is_last and time.monotonic() < self._silent_until:
            return
        try:
            if self._lease is None or self._lease.is_held(lately=not is_last):
                self._heartbeat.beat(self._step, state, **self._in_use)
        except UnavailableStoreError as error:
            # Training goes on, and does not wait for the store at every update: a
            # checkpoint finds out whether it lasts.
            self._silent_until = time.monotonic() + _RETRY_SECONDS
            _log.warning("no heartbeat was written: %s", error)

    def _require_alone(self) -> None:
        """Requires, in the first process, that this job may write."""
        if self._lease is not None:
            self._lease.require_held()

    def _builder_problem(self) -> str:
        """Describes an unresponsive builder; "" if the builder responds."""
        assert self._builder is not None
        status, silent_seconds = self._builder.listen()
        self._builder_said = status
        # A builder that ended or failed may be restarted.
        if silent_seconds <= self._patience_seconds:
            return ""
        heard = f"last heard of {silent_seconds:.0f} s ago"
        if status is None:
            return f"no index builder has given a sign of life, {heard}"
        return (
            f"the index builder (process {status.pid} on {status.host}, "
            f"{status.state}) is silent at step {status.step}, {heard}"
        )

    def builder_progress(self) -> Mapping[str, float]:
        """Returns the retriever being embedded and the share done, as metrics."""
        said = self._builder_said
        if said is None or said.extra.get("activity") != "embedding":
            return {}
        share = said.extra["blocks_done"] / said.extra["num_blocks"]
        return {"builder_step": said.step, "builder_share": share}

    def use(self, index_step: int) -> None:
        """Records the index in use."""
        self._in_use = {**self._in_use, "index_step": index_step}
        self._say("running")

    def keep(self, index_steps: Sequence[int]) -> None:
        """Records the indexes with which checkpoints resume."""
        named = list(dict.fromkeys([*self._first, *index_steps]))
        self._in_use = {**self._in_use, "kept_index_steps": named}
        self._say("running")

    def build(self, step: int, params: PyTree) -> LoadedIndex:
        """Embeds the corpus in this process, then deletes unused snapshots."""
        index = self._source.build(
            step, params, self._stop, require_wanted=self._require_alone
        )

        def collect() -> None:
            self._require_alone()
            collect_garbage(self._source.model_store, _KEEP)

        multihost.run_on_primary(collect)
        return index

    def load(self, step: int) -> LoadedIndex | None:
        """Returns the committed index of a step; None if there is none (any more)."""
        return self._source.load(step)

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of the index of a step, which must still exist."""
        try:
            return self._source.series.read_manifest(step)
        except MissingObjectError as error:
            raise BadInputError(
                f"expected the manifest of the index of step {step}, from which the "
                f"one in the checkpoint was made, in {self._source.series.store.url()}"
                "; use another MODEL_DIR"
            ) from error

    def forget_after(self, step: int) -> None:
        """Deletes the snapshots of a lost run's later steps, which are run again."""
        self._resumed_at = step

        def forget() -> None:
            self._require_alone()
            # Retrievers first: one without its index would be embedded again.
            for name in (RETRIEVER_SERIES, INDEX_SERIES):
                SnapshotSeries(self._source.model_store, name).forget_after(step)

        multihost.run_on_primary(forget)

    def publish(self, step: int, params: PyTree) -> None:
        """Publishes the retriever; AlreadyCommittedError if another run has done so."""
        store, corpus = self._source.model_store, self._source.corpus
        retriever = self._source.retriever(step, params)

        def publish() -> int:
            self._require_alone()
            # What this run published before it was resumed is bit-identical.
            manifest = publish_retriever(store, retriever, corpus.fingerprint)
            return manifest.metadata[PARAMS_CRC32C]

        try:
            checksum = multihost.run_on_primary(publish)
        except AlreadyCommittedError as error:
            series = SnapshotSeries(store, RETRIEVER_SERIES)
            raise of_another_run(series, step) from error
        self._published[step] = checksum

    def follow(self, newer_than: int) -> None:
        """Starts to watch for newer indexes in the background."""
        if multihost.is_first():
            self._builder = Listener(self._source.model_store, BUILDER_ROLE)
        self._follower = IndexFollower(
            self._source.series,
            self._source.load_manifest,
            check=self._require_of_this_run,
            newer_than=newer_than,
        ).start()

    def _require_of_this_run(self, manifest: Manifest) -> None:
        """Requires an index of a retriever of this run, not of a lost or other one."""
        step = manifest.step
        length = manifest.metadata["embed"]["document_length"]
        if length != self._source.embed.document_length:
            raise MismatchedSnapshotError(
                f"expected documents embedded at {self._source.embed.document_length} "
                f"wordpieces, as this run reads them, those of step {step} are at "
                f"{length}; start the builder with the same document_length."
            )
        if step not in self._published and step <= self._resumed_at:
            return  # Published before this process, and not withdrawn by it.
        if manifest.metadata.get(RETRIEVER_CRC32C) != self._published.get(step):
            raise MismatchedSnapshotError(
                f"expected an index of a retriever that this run published, that of "
                f"step {step} is of another; it is made anew."
            )

    def has_newer(self) -> bool:
        """Returns whether a newer index is committed, so that `wait` gets it soon."""
        follower = self._follower
        return follower is not None and multihost.run_on_primary(follower.has_newer)

    def take(self) -> LoadedIndex | None:
        """Returns a newer index if one is loaded; does not wait."""
        return None if self._follower is None else self._follower.take()

    def wait(self, seconds: float) -> LoadedIndex:
        """Waits for the builder's next index, at most `seconds` without progress.

        Raises:
          StoppedError: the process was asked to stop.
          NotReadyError: none came for so long while the builder embedded nothing, or it
            fell silent; it is named. A builder that has not been heard of may be
            waiting for its machine, and is only waited for.
        """
        assert self._follower is not None

        def problem() -> str:
            # The builder may give up on a silent trainer before a large corpus is done.
            self.beat(self._step)
            return self._builder_problem()

        def progress() -> object:
            said = self._builder_said
            return None if said is None else (said.step, said.extra.get("blocks_done"))

        return self._follower.wait_for_first(
            seconds, problem, multihost.StopRequest(self._stop).asked, progress
        )

    def finish(self, step: int, params: PyTree) -> None:
        """Publishes the last retriever, and makes "finished" the last heartbeat."""
        self.publish(step, params)
        self._step, self._finished = step, True
