"""Trainer and builder as real processes on an invented world, and who restarts them."""

import dataclasses
import os
import pathlib
import signal
import time

from bench.invented_world import LENGTHS, WorldConfig
from realm_jax.cli.main import STOPPED
from tests import tiny_run
from tests.soak.fork_server import Fault, ForkServer
from tests.waiting import PATIENCE
from tpu_launch import local

# The corpus of these runs.
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
    log_period = {log_period}
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
      mode: of the refresh.
      period: steps between two refreshes; the index may become two of them old.
      processes: of the trainer.
    """

    model_dir: str
    scratch: pathlib.Path
    corpus: str
    mode: str = "async"
    steps: int = 30
    period: int = 5
    checkpoint_period: int = 10
    log_period: int = 2
    processes: int = 1

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
            text += _RUN.format(**vars(self), staleness=staleness)
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
    """The processes of a run, started anew whenever one of them was killed."""

    def __init__(
        self, stage: str, run: Run, fork_server: ForkServer, fault: Fault | None = None
    ):
        self.log = run.scratch / f"{stage}.log"
        self._arguments = run.arguments(stage)
        self._loaded = run.loaded
        self._fork_server = fork_server
        self._processes = run.processes if stage == "pretrain" else 1
        self._asked = False
        self.start(fault)

    def start(self, fault: Fault | None = None) -> None:
        """Starts the processes, one of which is to kill itself."""
        self.started = time.time()
        port = local.free_port()
        self._pids = [
            self._fork_server.start(
                self._arguments,
                self.log,
                self._loaded,
                local.environment_of(number, self._processes, port, devices=1),
                fault if fault and fault.process == number else None,
            )
            for number in range(self._processes)
        ]

    @property
    def pid(self) -> int:
        """Of the process that speaks for all."""
        return self._pids[0]

    @property
    def has_ended(self) -> bool:
        """Whether it ended by itself, and well."""
        codes = [self._fork_server.code(pid) for pid in self._pids]
        expected = (None, 0, STOPPED if self._asked else 0)
        if not set(codes) <= set(expected):
            said = self.log.read_text()[-4000:]
            raise AssertionError(f"{self.log.name}: codes {codes}\n{said}")
        return None not in codes

    def wait_for(self, fault: Fault) -> None:
        """Waits until it has struck itself, and ends as a launcher would see to it."""
        pid = self._pids[fault.process]
        code = self._wait(pid)
        if fault.signal == signal.SIGTERM:
            codes = [self._wait(pid) for pid in self._pids]
            assert codes == [STOPPED] * self._processes, self.log.read_text()[-4000:]
            return
        assert code == -fault.signal, self.log.read_text()[-4000:]
        for other in self._pids:
            if self._fork_server.code(other) is None:
                os.kill(other, signal.SIGKILL)
                self._wait(other)

    def _wait(self, pid: int) -> int:
        deadline = time.monotonic() + PATIENCE
        while (code := self._fork_server.code(pid)) is None:
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.01)
        return code

    def kill(self) -> bool:
        """Kills it as a lost machine does; False if it had ended already."""
        if self.has_ended:
            return False
        os.kill(self.pid, signal.SIGKILL)
        return self._wait(self.pid) != 0  # It may have ended in this very moment.

    def ask_to_end(self) -> None:
        """Asks it to end, as the launcher does."""
        if not self._asked and not self.has_ended:
            self._asked = True
            os.kill(self.pid, signal.SIGTERM)
