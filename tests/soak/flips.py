"""Damages one file after another, starts what reads it, and tells what happened."""

import collections
import contextlib
import dataclasses
import functools
import io
import logging
import pathlib
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench import tables
from realm_jax.cli.main import guard
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.run_record import Attempt
from realm_jax.storage import open_store
from realm_jax.training import finetune, pretrain, warm_start
from realm_jax.training.stage_config import StageConfig
from tests import tiny_world
from tests.tiny_world import read_item, silent

# Kind of file -> the paths of its files, below the corpus or the model directory. What
# stands in braces is a stage's own, see `Stage.pattern`.
CORPUS = {
    "corpus.json": r"corpus/corpus\.json",
    "a corpus's vocabulary": r"corpus/vocab\.txt",
    "a corpus's arrays": r"corpus/[a-z_]+\.npy",
    "a corpus's texts": r"corpus/texts-.*",
}
EXAMPLES = {
    "examples.json": r"corpus/examples/{task}/train/examples\.json",
    "examples' arrays": r"corpus/examples/{task}/train/.*\.npy",
}
HELD_OUT = {
    "held-out examples.json": r"corpus/examples/{task}/validation/examples\.json",
    "held-out examples' arrays": r"corpus/examples/{task}/validation/.*\.npy",
}
CHECKPOINT = {
    "newest checkpoint: manifest": r"model/checkpoints/{newest}\.json",
    "newest checkpoint: data": r"model/checkpoints/{newest}/.*",
}
INDEX_OF_CHECKPOINT = {
    "newest checkpoint: its index": r"model/checkpoints/{newest}/index/.*",
}
INDEX = {
    "index: manifest": r"model/index/commits/{index}\.json",
    "index: chunks": r"model/index/data/{index}-.*/c/.*",
    "index: zarr.json": r"model/index/data/{index}-.*zarr\.json",
    "an index's attempt.json": r"model/index/data/.*attempt\.json",
}
RUN = {
    "metrics.jsonl": r"model/metrics\.jsonl",
    "settings of an earlier start": r"model/settings/.*\.json",
}
JOBS = {
    "trainer's heartbeat": r"model/jobs/trainer\.json",
    "a lease that was left": r"model/lease/1\.json",
    "its sign of life": r"model/lease/1\.beat\.json",
}
KINDS = {
    **(CORPUS | EXAMPLES | HELD_OUT),
    **(CHECKPOINT | INDEX_OF_CHECKPOINT | INDEX | RUN | JOBS),
}
OTHERS = {
    r"model/retriever/.*": "damaged in tests/index/test_index_damage.py",
    r"model/index/.*/progress/.*": "damaged in tests/index/test_lost_attempts.py",
    r"corpus/examples/\w+_questions/(dev|test)/.*": "QUESTIONS is read instead",
    r"model/tensorboard/.*": "read by TensorBoard, with checksums of its own",
}
"""Paths of further files, and why no run is resumed after they were damaged."""
NAMED = "named, exit code 2"
WARNED = "warning, same result"
MADE_ANEW = "warning, index made anew"
SAME = "same result"
CHANGED = "a value of an earlier line is another"
GAP = "a gap"
BAD = ("traceback", "another result in silence", "not named")


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage whose run is resumed after `done` updates, and goes on to `steps`.

    Attributes:
      config: makes its configuration from world, model directory and settings.
      index: the version that it resumes with.
      task: whose examples it reads.
      kinds: those of `KINDS` that are damaged.
    """

    run: Callable[..., bool]
    config: Callable[..., Any]
    done: int
    steps: int
    index: int
    task: str
    kinds: Mapping[str, str]

    def pattern(self, kind: str) -> str:
        """Returns the pattern of the paths of a kind."""
        return self.kinds[kind].format(
            newest=self.done, index=self.index, task=self.task
        )


PRETRAINING = Stage(
    pretrain.run,
    tiny_world.pretrain_config,
    *(8, 10, 6, "asked"),
    CORPUS | EXAMPLES | CHECKPOINT | INDEX | RUN | JOBS,
)
ROLLING = Stage(
    pretrain.run,
    functools.partial(
        tiny_world.pretrain_config, refresh_mode="rolling", held_out_examples=6
    ),
    *(8, 10, 0, "asked"),
    HELD_OUT | INDEX_OF_CHECKPOINT | INDEX,
)
FINETUNING = Stage(
    finetune.run,
    functools.partial(tiny_world.finetune_config, checkpoint_period=2),
    *(4, 6, 0, "questions"),
    EXAMPLES | CHECKPOINT | INDEX,
)
WARM_STARTING = Stage(
    warm_start.run,
    functools.partial(tiny_world.warm_start_config, checkpoint_period=2),
    *(4, 6, 0, "pairs"),
    EXAMPLES | CHECKPOINT,
)
STAGES = (PRETRAINING, ROLLING, FINETUNING, WARM_STARTING)


class Flips:
    """A run that is resumed for two more updates after each damage."""

    def __init__(
        self,
        world: tiny_world.TinyWorld,
        folder: pathlib.Path,
        stage: Stage = PRETRAINING,
    ):
        """Makes the run, and resumes it once without damage."""
        self._stage, self.kinds = stage, stage.kinds
        self._folder, self._sound = folder / "now", folder / "sound"
        shutil.copytree(world.corpus, self._folder / "corpus")
        self._world = dataclasses.replace(world, corpus=str(self._folder / "corpus"))
        self._run(self._config(stage.done), tiny_world.NEVER)
        # As a trainer of another machine leaves it that was lost.
        store = open_store(self._folder / "model")
        store.write("lease/1.json", b'{"host": "gone", "pid": 3, "claim": "c"}')
        store.write("lease/1.beat.json", b'{"beat": 17}')
        shutil.copytree(self._folder, self._sound)
        code, said, warned = self._resume()
        assert code == 0, said
        self._usual = set(warned)
        self._params, self._losses = self._result()

    def files(self, kind: str) -> list[str]:
        """Paths of the files of a kind, below the folder."""
        paths = (p for p in self._sound.rglob("*") if p.is_file())
        names = sorted(path.relative_to(self._sound).as_posix() for path in paths)
        pattern = self._stage.pattern(kind)
        found = [name for name in names if re.fullmatch(pattern, name)]
        assert found, kind
        return found

    def after(self, name: str, damage: Callable[[bytes], bytes]) -> str:
        """Returns what happens after a file was damaged."""
        shutil.rmtree(self._folder)
        shutil.copytree(self._sound, self._folder)
        path = self._folder / name
        path.write_bytes(damage(path.read_bytes()))
        try:
            code, said, warned = self._resume()
        except Exception as error:
            return f"traceback ({type(error).__name__}: {error})"
        if code == 2:
            # Of a chunk the error may name the array.
            names = (path.name, *(parent.name for parent in path.parents[:3]))
            known = said.count("\n") == 1 and any(part in said for part in names)
            return NAMED if known else f"not named ({said})"
        warned = [line for line in warned if line not in self._usual]
        params, losses = self._result()
        if not _same(params, self._params):
            anew = any("anew" in line or "made of" in line for line in warned)
            return MADE_ANEW if anew else f"another result in silence ({warned})"
        if missing := self._losses.keys() - losses.keys():
            is_gap = max(missing) <= self._stage.done
            return GAP if is_gap else "another result in silence"
        if losses != self._losses:
            return CHANGED
        return WARNED if warned else SAME

    def _config(self, steps: int) -> StageConfig:
        model_dir = self._folder / "model"
        return self._stage.config(self._world, model_dir, train_steps=steps)

    def _resume(self) -> tuple[int, str, list[str]]:
        """Returns exit code, standard error, and the warnings that were logged."""
        stderr = contextlib.redirect_stderr(io.StringIO())
        with stderr as said, _warnings() as warned:
            config = self._config(self._stage.steps)
            code = guard(lambda stop: self._run(config, stop))
        return code, said.getvalue(), warned

    def _run(self, config: StageConfig, stop: threading.Event) -> int:
        """Runs the stage as its command does; returns the exit code."""
        attempt = Attempt(config.stage.command, config, note=logging.warning)
        return 0 if self._stage.run(config, silent, stop, attempt) else 1

    def _result(self) -> tuple[list, dict[int, float]]:
        """Returns the parameters that a run ended with, and its loss by step."""
        model_dir = str(self._folder / "model")
        store = open_store(model_dir)
        last = self._stage.steps
        params = [read_item(store, last, item) for item in ("params", "rest")]
        losses = {line["step"]: line.get("loss") for line in read_metrics(model_dir)}
        return params, losses


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)


def _same(left, right) -> bool:
    try:
        tiny_world.assert_same_bits(left, right)
    except AssertionError:
        return False
    return True


def flip(rng: random.Random) -> Callable[[bytes], bytes]:

    def damage(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(changed)

    return damage


def truncate(rng: random.Random) -> Callable[[bytes], bytes]:
    return lambda data: data[: rng.randrange(len(data))]


def table(counts: dict[str, collections.Counter]) -> str:
    """Returns the table for docs/faults.md."""
    rows = [
        [
            kind,
            found.total(),
            found.total() - found[SAME] - found[CHANGED],
            found[SAME],
            "; ".join(f"{what}: {n}" for what, n in found.most_common()),
        ]
        for kind, found in counts.items()
    ]
    header = ["file", "times damaged", "found", "of no effect", "what happens"]
    return tables.table(header, [list(map(str, row)) for row in rows])
