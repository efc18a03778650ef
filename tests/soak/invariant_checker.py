"""What a bystander sees of a model directory while trainer and builder are killed.

It believes no job: it reads commits, files and rows by itself, from the first moment it
finds them, and embeds every block again, one by one, with whatever retriever was
published.
"""

import contextlib
import dataclasses
import pathlib
import re

import numpy as np

from realm_jax.data.blocks import BlockStore
from realm_jax.index.builder import RETRIEVER_CRC32C, TRAINER_ROLE, BuilderConfig
from realm_jax.index.heartbeat import read_heartbeat
from realm_jax.index.manifest import EMBEDDINGS, DamagedSnapshotError, Manifest
from realm_jax.index.retrievers import (
    PARAMS_CRC32C,
    TrainedRetriever,
    load_retriever,
)
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.storage import MissingObjectError, open_store
from realm_jax.training.checkpoint_manifests import finished_steps
from tests.index.tiny_builder import slow_embeddings
from tests.soak.jobs import LENGTHS, Job, Run

SERIES = ("retriever", "index")
_KEPT = BuilderConfig.keep


@dataclasses.dataclass
class Seen:
    """A commit, and what it held when it was first seen."""

    manifest: Manifest
    retriever: TrainedRetriever | None = None
    rows: np.ndarray | None = None
    gone: bool = False


@dataclasses.dataclass(frozen=True)
class Life:
    """A trainer's process: its id, its first moment, the checkpoint it began with."""

    pid: int
    began: float
    checkpoint: int


class InvariantChecker:
    """Looks again and again; each look asserts what must hold at any moment."""

    def __init__(self, run: Run):
        self._run = run
        self._store = open_store(run.model_dir)
        self._blocks = BlockStore.open(run.corpus)
        self._series = {name: SnapshotSeries(self._store, name) for name in SERIES}
        self._seen: dict[str, dict[tuple[int, str], Seen]] = {n: {} for n in SERIES}
        self._lives: list[Life] = []
        self.step = 0
        """What the trainer said last."""

    def begins(self, trainer: Job) -> None:
        """A trainer was started: what later steps had published is withdrawn by it."""
        checkpoint = max(finished_steps(self._store), default=0)
        self._lives.append(Life(trainer.pid, trainer.started, checkpoint))

    def look(self) -> None:
        """Looks once."""
        used = {int(line["index_step"]) for line in self._metrics()}
        said = self._said()
        for name in SERIES:
            self._look_at(name)
        # Committed before they were used, so they have been seen by now.
        never = used - {step for step, _ in self._seen["index"]}
        assert not never, f"metrics name indexes {sorted(never)}, never committed"
        found = self._series["index"].steps()
        # Said before and after: so it was in use when they were listed.
        if said is not None and self._said() == said:
            assert said in found, f"the index in use, {said}, was collected"

    def _metrics(self) -> list[dict]:
        lines = list(read_metrics(self._run.model_dir))
        self.step = lines[-1]["step"] if lines else 0
        return lines

    def _said(self) -> int | None:
        """The index that the trainer of now says it uses."""
        status = read_heartbeat(self._store, TRAINER_ROLE)
        if status is None or not self._lives or status.pid != self._lives[-1].pid:
            return None
        return status.extra.get("index_step")

    def _look_at(self, name: str) -> None:
        series, seen = self._series[name], self._seen[name]
        present = set()
        for step in series.steps():
            with contextlib.suppress(MissingObjectError):
                manifest = series.read_manifest(step)
                present.add((step, manifest.attempt))
                if (step, manifest.attempt) not in seen:
                    self._remember(name, manifest)
        # What was collected made room for two that are newer. They may be gone too,
        # withdrawn by the next trainer before anybody looked; their data stays longer.
        begun = self._begun(name)
        highest = begun | {step for step, _ in [*present, *seen]} | set(series.steps())
        for (step, attempt), commit in seen.items():
            if (step, attempt) in present or commit.gone:
                continue
            retired = sum(other > step for other in highest) >= _KEPT
            published = self._published_at(commit.manifest)
            withdrawn = any(
                life.began > published and step > life.checkpoint
                for life in self._lives
            )
            assert retired or withdrawn, f"{name} {step} is lost: {sorted(present)}"
            commit.gone = True

    def _begun(self, name: str) -> set[int]:
        """The steps that an attempt was begun for, by the names of their files."""
        pattern = re.compile(rf"{name}/data/(\d+)-.+")
        matches = map(pattern.fullmatch, self._store.list(f"{name}/data"))
        return {int(match.group(1)) for match in matches if match}

    def _published_at(self, manifest: Manifest) -> float:
        """When the retriever was, of which this is a snapshot or an index."""
        crc = manifest.metadata.get(RETRIEVER_CRC32C)
        times = [
            commit.manifest.committed
            for (step, _), commit in self._seen["retriever"].items()
            if step == manifest.step and commit.manifest.metadata[PARAMS_CRC32C] == crc
        ]
        return min(times, default=manifest.committed)

    def _remember(self, name: str, manifest: Manifest) -> None:
        series, commit = self._series[name], Seen(manifest)
        try:
            series.verify(manifest)
            if name == "retriever":
                commit.retriever = load_retriever(self._store, manifest.step)
            else:
                commit.rows = series.read_array(manifest, EMBEDDINGS)
        except DamagedSnapshotError:
            # Collected or withdrawn between two reads; else it is damaged indeed.
            if manifest.step in series.steps():
                assert series.read_manifest(manifest.step) != manifest
        self._seen[name][manifest.step, manifest.attempt] = commit

    def check_loaded(self) -> int:
        """Every index a trainer loaded is of the retriever published at its step.

        Returns:
          How many there were.
        """
        loaded = sorted(self._run.loaded.glob("*.npy"))
        checked: dict[int, np.ndarray] = {}
        for path in loaded:
            nanoseconds, pid, step, attempt, crc = path.stem.split("-")
            life = next(life for life in self._lives if life.pid == int(pid))
            retriever = self._published(int(step), int(crc), life, int(nanoseconds))
            if int(crc) not in checked:
                checked[int(crc)] = slow_embeddings(
                    retriever, self._blocks, LENGTHS.document
                )
            rows = np.load(path)
            np.testing.assert_allclose(rows, checked[int(crc)], atol=1e-4, rtol=0)
            commit = self._seen["index"].get((int(step), attempt))
            if commit is not None and commit.rows is not None:
                np.testing.assert_array_equal(rows, commit.rows)
        return len(loaded)

    def _published(
        self, step: int, crc: int, life: Life, nanoseconds: int
    ) -> TrainedRetriever:
        """The retriever of an index, if the run it belongs to had published it."""
        for commit in self._seen["retriever"].values():
            if commit.retriever is None or commit.manifest.step != step:
                continue
            # What another life published after this one's checkpoint is not its own.
            committed = commit.manifest.committed
            own = step <= life.checkpoint or committed > life.began
            if own and commit.retriever.params_crc32c() == crc:
                assert committed < nanoseconds / 1e9
                return commit.retriever
        raise AssertionError(f"{life} loaded index {step} of {crc}; who published it?")

    def leftovers(self) -> list[str]:
        """Names in the directory that no finished job of these series should leave."""
        for series in self._series.values():
            # As it will be in an hour.
            series.collect(keep=_KEPT, in_use=self._in_use(), attempt_age_seconds=0)
        files = {"metrics.jsonl", "jobs/trainer.json", "jobs/index_builder.json"}
        # One file of these for every process, and one for every start.
        folders = ["tensorboard/", "settings/"]
        for name, series in self._series.items():
            for step in series.steps():
                manifest = series.read_manifest(step)
                series.verify(manifest)
                files.add(f"{name}/commits/{step}.json")
                folders.append(f"{name}/data/{step}-{manifest.attempt}/")
        for step in finished_steps(self._store):
            files.add(f"checkpoints/{step}.json")
            folders.append(f"checkpoints/{step}/")
        others = set(self._all()) - files
        return sorted(name for name in others if not name.startswith(tuple(folders)))

    def _in_use(self) -> list[int]:
        extra = read_heartbeat(self._store, TRAINER_ROLE).extra
        return [extra["index_step"], *extra["kept_index_steps"]]

    def _all(self) -> list[str]:
        """Every file there is, those of TensorStore that are no objects too."""
        top = pathlib.Path(self._run.model_dir)
        if "://" in self._run.model_dir:
            return self._store.list()
        # A writer that was killed before its file had its name leaves a hidden one.
        files = (p for p in top.rglob("*") if p.is_file() and p.name[0] != ".")
        return [str(path.relative_to(top)) for path in files]

    def is_up_to_date(self) -> bool:
        """Whether the last retriever has its index."""
        return self._run.steps in self._series["index"].steps()

    def steps(self) -> dict[str, list[int]]:
        """The steps of what the directory holds."""
        found = {name: series.steps() for name, series in self._series.items()}
        return found | {"checkpoints": finished_steps(self._store)}
