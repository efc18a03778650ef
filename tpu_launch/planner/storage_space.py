"""Estimates the memory and disks of hosts, and the space of a run in its bucket."""

from realm_jax.data.blocks import HASH_BYTES
from realm_jax.index.builder import BuilderConfig
from realm_jax.training.checkpoints import KEPT_CHECKPOINTS
from realm_jax.training.finetune import FinetuneConfig
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.training.refresh import RefreshMode
from realm_jax.training.stage_config import StageConfig
from tpu_launch.planner import memory
from tpu_launch.planner.devices import Setting
from tpu_launch.planner.figures import Line, Unit
from tpu_launch.planner.programs import Training

_FLOAT = 4
# ScaNN keeps for each block: its row in float32, a code of half a byte per two
# dimensions, and the leaf it belongs to.
_SCANN_LEAF = 8


def index_bytes(dimension: int, setting: Setting) -> int:
    """Returns the bytes of one published index."""
    return setting.corpus.num_blocks * (dimension * _FLOAT + HASH_BYTES)


def host_lines(config: StageConfig, stage: Training, setting: Setting) -> list[Line]:
    """Returns lines on the memory and disk that each host of a trainer needs."""
    towers = config.models.retriever_config(setting.corpus.vocab_size)
    num_hosts = setting.trainer.num_hosts * setting.hardware.trainer_slices
    whole = memory.num_bytes(
        (stage.state.params, stage.state.optimizer_state, stage.state.key)
    )
    lines = [
        Line("state, whole, at the start", whole, Unit.BYTES, "of every host"),
        Line("checkpoint under way", -(-whole // num_hosts), Unit.BYTES, "its share"),
    ]
    rows = setting.corpus.num_blocks * towers.projection_size * _FLOAT
    use = config.index_use
    if use is not None and use.searcher == "scann":
        codes = setting.corpus.num_blocks * (towers.projection_size // 4 + _SCANN_LEAF)
        copies = 1 if use.refresh is None else 2
        note = "and the next one" if copies == 2 else ""
        lines.append(Line("ScaNN", copies * (rows + codes), Unit.BYTES, note))
    elif use is not None and use.is_in_step:
        share = -(-rows // num_hosts)
        lines.append(Line("index while it is loaded", share, Unit.BYTES, "its share"))
    if isinstance(config, FinetuneConfig):
        lines.append(Line("embeddings of what was found", rows, Unit.BYTES, "at most"))
    total = sum(line.value for line in lines)
    disk = setting.corpus.disk_bytes(config.models.lengths.document)
    return [
        *lines,
        Line("in all", total, Unit.BYTES),
        Line("there is", setting.trainer.host_memory, Unit.BYTES, "of each host"),
        Line("the corpus on its disk", disk, Unit.BYTES, "mapped into memory"),
    ]


def bucket_lines(config: StageConfig, stage: Training, setting: Setting) -> list[Line]:
    """Returns lines on the maximum space of MODEL_DIR."""
    state = memory.num_bytes(stage.state)
    kept_checkpoints = KEPT_CHECKPOINTS
    note = f"{KEPT_CHECKPOINTS} and the one being written"
    if isinstance(config, PretrainConfig) and config.held_out_examples:
        kept_checkpoints += 1
        note = f"{KEPT_CHECKPOINTS}, the best, and the one being written"
    checkpoints = (kept_checkpoints + 1) * state
    lines = [Line("checkpoints", checkpoints, Unit.BYTES, note)]
    towers = config.models.retriever_config(setting.corpus.vocab_size)
    index = index_bytes(towers.projection_size, setting)
    use = config.index_use
    if use is not None and use.refresh is None:
        lines.append(Line("index", index, Unit.BYTES))
    elif use is not None:
        retriever = memory.num_bytes(stage.state.params["retriever"])
        kept = BuilderConfig.keep
        # The newest, those of kept checkpoints, and one attempt.
        indexes = 1 if use.refresh is RefreshMode.OFF else kept
        indexes += kept_checkpoints + 1
        lines.append(Line("indexes", indexes * index, Unit.BYTES, f"at most {indexes}"))
        if use.has_builder:
            lines.append(
                Line(
                    *("retrievers", (kept + 1) * retriever, Unit.BYTES),
                    f"{kept} and the one being written",
                )
            )
    total = sum(line.value for line in lines)
    return [*lines, Line("in all", total, Unit.BYTES)]
