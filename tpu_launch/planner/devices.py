"""Determines whether an update fits on the devices, and what to change if not."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from realm_jax.data.corpus_size import CorpusSize
from realm_jax.hardware import HardwareConfig
from realm_jax.index import device_search
from realm_jax.index.device_search import EmbeddingTable, Precision
from realm_jax.models.bert import REMAT
from realm_jax.training.partitioning import MeshConfig
from realm_jax.training.stage_config import StageConfig
from tpu_launch.planner import memory, programs
from tpu_launch.planner.figures import Line, Unit, with_limit
from tpu_launch.planner.memory import Temporaries
from tpu_launch.planner.programs import Training
from tpu_launch.slices import Slice, parse

# Share of a TPU that the compiler leaves to programs; share of a GPU that XLA takes.
_USABLE_TPU, _USABLE_GPU = 0.96, 0.75
# Counted bytes are an estimate: beyond this ratio, compiling is pointless.
_HOPELESS = 1.5
# A count is right within a tenth (docs/pods.md).
_COUNT_ERROR = 1.1
_MOST_MICROBATCHES = 64


@dataclasses.dataclass(frozen=True)
class Setting:
    """The corpus and machines of a plan, and how it is made.

    Attributes:
      compiles: whether to use the compiler if one is available.
      say: reports slow steps.
      chooses_remat: whether to find the cheapest rematerialisation that fits, in place
        of that of the configuration.
    """

    corpus: CorpusSize
    hardware: HardwareConfig
    compiles: bool
    say: Callable[[str], None]
    chooses_remat: bool = False

    @property
    def trainer(self) -> Slice:
        """One slice of the trainer."""
        return parse(self.hardware.trainer)

    @property
    def builder(self) -> Slice:
        """The slice of the index builder."""
        return parse(self.hardware.builder or self.hardware.trainer)

    @property
    def num_hosts(self) -> int:
        """Hosts of the trainer, over all its slices."""
        return self.trainer.num_hosts * self.hardware.trainer_slices

    def mesh_shape(self, config: MeshConfig) -> tuple[int, int, int]:
        """Returns the sizes of data, fsdp and model over the trainer's slices."""
        slices = self.hardware.trainer_slices
        return config.shape(self.trainer.num_devices * slices, slices)


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Memory of the fullest device during training.

    Attributes:
      config: configuration of the stage, with the chosen rematerialisation.
      stage: its update, as shapes only.
      held: name -> bytes that are held permanently.
      temporaries: temporaries of the update.
      limit: bytes available to programs.
    """

    config: StageConfig
    stage: Training
    held: Mapping[str, int]
    temporaries: Temporaries
    limit: int

    @property
    def total(self) -> int:
        """Total memory, in bytes."""
        return sum(self.held.values()) + self.temporaries.num_bytes

    @property
    def fits(self) -> bool:
        """True if the update fits on the device."""
        return self.temporaries.fits and self.total <= self.limit

    @property
    def surely_fits(self) -> bool:
        """True if it fits even if a count is too low."""
        error = 1.0 if self.temporaries.is_compiled else _COUNT_ERROR
        return self.fits and self.total * error <= self.limit

    def lines(self) -> list[Line]:
        """Returns the lines of a plan."""
        how = "compiled" if self.temporaries.is_compiled else "counted"
        how += f"; remat {memory.encoder_of(self.config).remat}"
        if self.config.microbatches > 1:
            how += f", {self.config.microbatches} microbatches"
        lines = [Line(name, size, Unit.BYTES) for name, size in self.held.items()]
        lines.append(Line("temporaries", self.temporaries.num_bytes, Unit.BYTES, how))
        return with_limit(lines, self.limit, "for programs")


def usable(machines: Slice) -> int:
    """Returns the bytes of a device that are available to programs."""
    if machines.chip is None:
        return machines.host_memory
    share = _USABLE_TPU if machines.topology else _USABLE_GPU
    return int(machines.chip.memory * share)


def held(config: StageConfig, stage: Training, setting: Setting) -> dict[str, int]:
    """Returns what a device holds between two updates of a stage: name -> bytes."""
    found = {
        "parameters": memory.bytes_per_device(stage.state.params),
        "optimizer state": memory.bytes_per_device(stage.state.optimizer_state),
    }
    inputs, use = stage.inputs, config.index_use
    if tokens := getattr(inputs, "tokens", None):
        found["wordpieces of the corpus"] = memory.bytes_per_device(tokens)
        inputs = inputs.batch if use.is_in_step else inputs.replace(tokens=None)
    table = searched_table(config, stage, setting)
    if use is not None and table is not None:
        found["embeddings"] = memory.bytes_per_device(table)
        if use.is_replaced:
            found["embeddings, the next"] = found["embeddings"]
    found["batch"] = memory.bytes_per_device(inputs)
    return found


def searched_table(
    config: StageConfig, stage: Training, setting: Setting
) -> EmbeddingTable | None:
    """Returns the embeddings that devices search, as shapes; None if they do not."""
    use = config.index_use
    if use is None or use.searcher != "device":
        return None
    if use.is_in_step:
        return stage.state.index or stage.inputs.embeddings
    towers = config.models.retriever_config(setting.corpus.vocab_size)
    return device_search.table_shapes(
        setting.corpus.num_blocks,
        towers.projection_size,
        stage.mesh,
        Precision(use.device.precision),
    )


def of_training(config: StageConfig, setting: Setting) -> DeviceMemory:
    """Returns the memory of a stage, with the cheapest policy if it is to be chosen."""
    data, fsdp, _ = setting.mesh_shape(config.mesh)
    config.require_divisible(data * fsdp)
    chooses = setting.chooses_remat
    policies = REMAT if chooses else (memory.encoder_of(config).remat,)
    compiles = setting.compiles and memory.has_compiler(setting.trainer)
    for policy in policies:
        found = counted(memory.with_encoder(config, remat=policy), setting)
        hopeless = found.total > _HOPELESS * found.limit
        # The count for the last policy is an overestimate, so it is compiled too.
        if compiles and (not hopeless or policy == policies[-1]):
            found = _compiled(found, setting)
        if found.surely_fits or (found.fits and not chooses):
            break
    return found


def counted(config: StageConfig, setting: Setting) -> DeviceMemory:
    """Returns the memory of a stage as it is, counted from shapes."""
    mesh = memory.shape_mesh(setting.mesh_shape(config.mesh))
    stage = programs.training(config, setting.corpus, mesh)
    return DeviceMemory(
        config,
        stage,
        held(config, stage, setting),
        memory.counted(config, setting.corpus, mesh),
        usable(setting.trainer),
    )


def _compiled(found: DeviceMemory, setting: Setting) -> DeviceMemory:
    """Returns the same, with the temporaries measured by the compiler."""
    config, hardware = found.config, setting.hardware
    remat = memory.encoder_of(config).remat
    setting.say(
        f"compiling the update for {hardware.trainer}, remat {remat}; BERT-base takes "
        "minutes"
    )
    mesh = memory.compiler_mesh(setting.trainer, config.mesh, hardware.trainer_slices)
    stage = programs.training(config, setting.corpus, mesh)
    temporaries = memory.compiled(stage.step, (stage.state, stage.inputs), mesh)
    return dataclasses.replace(found, temporaries=temporaries)


def advice(config: StageConfig, setting: Setting) -> str:
    """Returns settings that would make a stage fit that does not, by counted memory."""
    changes: dict[str, str] = {}
    for name, value, changed in knobs(config, setting):
        changes[name] = value
        found = counted(changed, setting)
        if found.fits:
            said = " and ".join(f"{name}={value}" for name, value in changes.items())
            return f"{said} would do: {found.total / (1 << 30):.1f} GiB, counted"
    return (
        f"no setting makes it fit on {setting.hardware.trainer}; take a larger slice, "
        "a smaller model or shorter sequences"
    )


def knobs(config: Any, setting: Setting) -> Iterator[tuple[str, str, StageConfig]]:
    """Yields possible changes, the cheapest first; each adds to the last.

    That is: a setting, its value, and the configuration with all changes so far.
    """
    if memory.encoder_of(config).remat != "full":
        config = memory.with_encoder(config, remat="full")
        yield "bert.BertConfig.remat", '"full"', config
    use = config.index_use
    exact = Precision.FLOAT32.value
    if use is not None and use.is_in_step and use.device.precision == exact:
        device = dataclasses.replace(use.device, precision="bfloat16")
        config = dataclasses.replace(config, device=device)
        yield "searchers.DeviceConfig.precision", '"bfloat16"', config
    data, fsdp, model = setting.mesh_shape(config.mesh)
    parts = 2 * config.microbatches
    while parts <= _MOST_MICROBATCHES and not config.batch_size % (parts * data * fsdp):
        config = dataclasses.replace(config, microbatches=parts)
        yield "MICROBATCHES", f"{parts}", config
        parts *= 2
    if model > 1:
        return
    fsdp *= 2
    hidden_size = memory.encoder_of(config).hidden_size
    while fsdp <= setting.trainer.num_devices and not hidden_size % fsdp:
        mesh = dataclasses.replace(config.mesh, data=-1, fsdp=fsdp)
        config = dataclasses.replace(config, mesh=mesh)
        yield "partitioning.MeshConfig.fsdp", f"{fsdp}", config
        fsdp *= 2
