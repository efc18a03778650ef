"""Trainer and builder as real processes on an invented world, and who restarts them."""

import dataclasses
import os
import pathlib
import signal
import time

from bench.invented_world import LENGTHS, WorldConfig
from tests import tiny_run, tiny_world
from tests.soak.nursery import Nursery

WORLD = WorldConfig(num_entities=40, num_relations=6, num_values=40, num_held_out=20)

_SIZES = f"""
from __gin__ import dynamic_registration

from realm_jax.index import builder
from realm_jax.index import embed
from realm_jax.models import bert
from realm_jax.models import retriever
from realm_jax.training import initialization
from realm_jax.training import optimizers
from realm_jax.training import pretrain

bert.BertConfig:
    hidden_size = 16
    num_layers = 1
    num_heads = 2
    mlp_size = 32
    max_positions = 40
    dropout_rate = 0.1
retriever.RetrieverConfig:
    projection_size = 8
initialization.Lengths:
    query = {LENGTHS.query}
    document = {LENGTHS.document}
    joined = {LENGTHS.joined}
embed.EmbedConfig:
    document_length = {LENGTHS.document}
    batch_size = 8
    shard_blocks = 8
builder.BuilderConfig:
    poll_seconds = 0.05
    sampled_blocks = 4
pretrain/optimizers.OptimizerConfig:
    learning_rate = 1e-2
    warmup_steps = 0
"""

_RUN = """
pretrain.PretrainConfig:
    log_period = 2
    checkpoint_period = {checkpoint_period}
TASK = "asked"
WARM_START = ""
BATCH_SIZE = 4
NUM_CANDIDATES = 4
TRAIN_STEPS = {steps}
REFRESH_PERIOD = {period}
REFRESH_MODE = "{mode}"
MAX_STALENESS_STEPS = {staleness}
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run to be killed, or its twin that is not.

    Attributes:
      model_dir: folder or gs://.
      scratch: a local folder for logs and for what the trainer loaded.
      corpus: of the invented world.
      mode: of the refresh.
      steps: in all.
      period: between two refreshes; the index may become two of them old.
      checkpoint_period: steps between two checkpoints.
    """

    model_dir: str
    scratch: pathlib.Path
    corpus: str
    mode: str = "async"
    steps: int = 30
    period: int = 5
    checkpoint_period: int = 10

    @property
    def loaded(self) -> pathlib.Path:
        """Where the trainer writes down what it loads."""
        return self.scratch / "loaded"

    def arguments(self, stage: str) -> list[str]:
        """The command line of `realm`."""
        self.loaded.mkdir(parents=True, exist_ok=True)
        text = _SIZES
        if stage == "pretrain":
            staleness = 2 * self.period if self.mode == "async" else None
            text += _RUN.format(
                checkpoint_period=self.checkpoint_period,
                steps=self.steps,
                period=self.period,
                mode=self.mode,
                staleness=staleness,
            )
        sizes = self.scratch / f"{stage}.gin"
        # Another builder may be reading it.
        if not sizes.exists():
            sizes.write_text(text)
        macros = {"MODEL_DIR": self.model_dir, "CORPUS": self.corpus}
        return [
            stage,
            *(f"--gin_file={file}" for file in [*tiny_run.gin_files(stage), sizes]),
            *(f'--gin.{name}="{value}"' for name, value in macros.items()),
        ]


class Job:
    """A process of a run, started anew whenever it was killed."""

    def __init__(self, stage: str, run: Run, nursery: Nursery):
        self.log = run.scratch / f"{stage}.log"
        self._arguments = run.arguments(stage)
        self._loaded = run.loaded
        self._nursery = nursery
        self._asked = False
        self.start()

    def start(self) -> None:
        """Starts the process."""
        self.started = time.time()
        self.pid = self._nursery.start(self._arguments, self.log, self._loaded)

    @property
    def has_ended(self) -> bool:
        """Whether it ended by itself, and well."""
        code = self._nursery.code(self.pid)
        expected = (None, 0, 128 + signal.SIGTERM if self._asked else 0)
        if code not in expected:
            said = self.log.read_text()[-4000:]
            raise AssertionError(f"{self.log.name}: code {code}\n{said}")
        return code is not None

    def kill(self) -> bool:
        """Kills it as a lost machine does; False if it had ended already."""
        if self.has_ended:
            return False
        os.kill(self.pid, signal.SIGKILL)
        while (code := self._nursery.code(self.pid)) is None:
            time.sleep(0.01)
        return code != 0  # It may have ended in this very moment.

    def ask_to_end(self) -> None:
        """Asks it to end, as the launcher does."""
        if not self._asked and not self.has_ended:
            self._asked = True
            os.kill(self.pid, signal.SIGTERM)


def make_world(folder: pathlib.Path) -> tiny_world.TinyWorld:
    """Invents the corpus of these runs."""
    return tiny_world.make(folder, WORLD)
