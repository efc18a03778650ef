"""Estimates the cost of refreshing an index: work, time, and the index's age."""

import math
from collections.abc import Sequence

from realm_jax.hardware import HardwareConfig
from realm_jax.index.embed import EmbedConfig
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.training import flops
from realm_jax.training.partitioning import MeshConfig
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.training.refresh import RefreshMode
from tpu_launch.planner import memory, programs
from tpu_launch.planner.devices import Setting, usable
from tpu_launch.planner.figures import Line, Unit
from tpu_launch.slices import Slice

# Share of padding if blocks of similar length are embedded together.
# Source: docs/benchmarks.md.
_PADDING = 0.13
_SAMPLE = 8
_NEEDED = "memory of a device"


def embedding_flops(towers: RetrieverConfig, length: int, setting: Setting) -> float:
    """Returns the operations of embedding the whole corpus once."""
    mesh = memory.one_device()
    embed, arguments = programs.embedding(towers, length, _SAMPLE, mesh)
    with memory.over(mesh):
        per_document = flops.count(embed, *arguments) / _SAMPLE
    share = setting.corpus.share_embedded(length, _PADDING)
    return per_document * setting.corpus.num_blocks * share


def embedding_lines(
    towers: RetrieverConfig, config: EmbedConfig, machines: Slice, setting: Setting
) -> list[Line]:
    """Returns lines on the work, time and memory of embedding the corpus on a slice."""
    work = embedding_flops(towers, config.document_length, setting)
    seconds = work / machines.flops_per_second(setting.hardware)
    stated = f"on {machines.accelerator_type}, {_percent(setting)} of its peak"
    lines = [
        Line("blocks", setting.corpus.num_blocks, Unit.COUNT, setting.corpus.source),
        Line("to embed them", work, Unit.FLOP, "once"),
        Line("a refresh takes", seconds, Unit.SECONDS, stated),
    ]
    host = machines.one_host()
    if setting.compiles and memory.has_compiler(host):
        setting.say(f"compiling the embedding job for {host.accelerator_type}")
        mesh = memory.compiler_mesh(host, MeshConfig())
        function, arguments = programs.embedding(
            towers, config.document_length, config.batch_size, mesh
        )
        needed = memory.compiled(function, arguments, mesh)
        size = needed.num_bytes + memory.bytes_per_device(arguments)
        note = f"of {usable(machines) / (1 << 30):.1f} GiB, compiled"
        lines.append(Line(_NEEDED, size, Unit.BYTES, note))
    return lines


def problems(lines: Sequence[Line], machines: Slice) -> list[str]:
    """Returns which parts of an embedding job do not fit on a slice.

    Args:
      lines: from `embedding_lines`.
      machines: the slice that embeds.
    """
    needed = sum(line.value for line in lines if line.name == _NEEDED)
    if needed <= usable(machines):
        return []
    return [
        f"a batch of documents on {machines.accelerator_type}; halve "
        "embed.EmbedConfig.batch_size"
    ]


def refresh_lines(
    config: PretrainConfig,
    embed_seconds: float,
    step_seconds: float,
    hardware: HardwareConfig,
) -> tuple[list[Line], list[str]]:
    """Returns lines on the age of an index, and hints if it becomes too old.

    Args:
      config: configuration of pre-training.
      embed_seconds: time to embed the corpus, in seconds.
      step_seconds: time of an update, in seconds.
      hardware: the machines for both.
    """
    mode, period = RefreshMode(config.refresh_mode), config.refresh_period
    if mode is RefreshMode.OFF:
        return [Line("oldest", config.train_steps, Unit.STEPS, "never refreshed")], []
    if mode is not RefreshMode.ASYNC:
        return [Line("oldest", period, Unit.STEPS, f"refreshed {mode.value}")], []
    takes = embed_seconds / step_seconds
    every = period * math.ceil(max(takes, 1) / period)
    oldest = takes + every
    lines = [
        Line("a new index", every, Unit.STEPS, "apart"),
        Line("youngest", takes, Unit.STEPS, "old, when it is taken up"),
        Line("oldest", oldest, Unit.STEPS, "old, before the next one"),
    ]
    hints = []
    if not hardware.builder:
        hints.append(
            f"trainer and index builder share {hardware.trainer}: the minutes are of "
            "either alone, and the memory must do for both; REFRESH_MODE='blocking' "
            "takes turns"
        )
    if every > period:
        hints.append(
            f"a refresh takes {takes:,.0f} updates, REFRESH_PERIOD is {period:,}: the "
            f"builder skips retrievers. {takes / period:.1f} times its chips would "
            "keep up, or REFRESH_MODE='rolling', which renews a share with every update"
        )
    bound = config.max_staleness_steps
    if bound is not None and oldest > bound:
        hints.append(
            f"MAX_STALENESS_STEPS={bound:,} is less than the {oldest:,.0f} steps that "
            f"an index becomes old: the trainer will {config.when_stale}"
        )
    return lines, hints


def _percent(setting: Setting) -> str:
    return f"{setting.hardware.utilization:.0%}"
