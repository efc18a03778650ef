"""Estimates the work and time of an update, and of refreshing the index.

An update takes as long as the slowest of three bounds: products of matrices at the
expected share of the peak, the traffic of a device's memory at its bandwidth, and the
latency of a step. These overlap, so the longest one counts.
"""

import math
from collections.abc import Sequence

from realm_jax.hardware import HardwareConfig
from realm_jax.index.embed import EmbedConfig
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.training import flops
from realm_jax.training.finetune import FinetuneConfig
from realm_jax.training.partitioning import MeshConfig
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.training.refresh import RefreshMode
from realm_jax.training.watchdog import stall_bound
from tpu_launch.planner import devices, memory, programs
from tpu_launch.planner.devices import DeviceMemory, Setting, usable
from tpu_launch.planner.figures import Line, Unit
from tpu_launch.slices import Slice

# Share of padding if blocks of similar length are embedded together.
# Source: docs/benchmarks.md.
_PADDING = 0.13
_SAMPLE = 8
_NEEDED = "memory of a device"


def update_lines(found: DeviceMemory, setting: Setting) -> tuple[list[Line], float]:
    """Returns lines on the work and time of an update, and its seconds."""
    stage, hardware = found.stage, setting.hardware
    with memory.over(stage.mesh):
        needed = stage.loss.update_flops(stage.state, stage.inputs)
        done = flops.count(stage.step, stage.state, stage.inputs)
    moved = _memory_traffic(found, setting)
    rate = setting.trainer.flops_per_second(hardware) * hardware.trainer_slices
    bounds = {
        f"compute, {hardware.utilization:.0%} of the peak": done / rate,
        "latency, as stated": hardware.step_latency_ms / 1000,
    }
    chip = setting.trainer.chip
    if chip is not None and chip.bandwidth is not None:
        bounds[f"memory, {chip.bandwidth / 1e9:,.0f} GB/s"] = moved / chip.bandwidth
    seconds, bound = max((seconds, bound) for bound, seconds in bounds.items())
    lines = [
        Line("the model needs", needed, Unit.FLOP, "counted from shapes"),
        Line("the program does", done, Unit.FLOP, "with what is computed again"),
        Line("reads and writes", moved, Unit.BYTES, "of a device, at least"),
        Line("takes", seconds, Unit.SECONDS, f"bound by {bound}"),
        Line("updates", 3600 / seconds, Unit.PER_HOUR),
    ]
    if found.config.stall_seconds is not None:
        stall = stall_bound(found.config.stall_seconds, seconds)
        note = "without an update"
        lines.append(Line("a stall ends the run after", stall, Unit.SECONDS, note))
    return lines, seconds


def _memory_traffic(found: DeviceMemory, setting: Setting) -> float:
    """Returns the bytes that a device reads and writes in an update, at least.

    Parameters are read. Of those that are trained, the gradient is written and read,
    the parameters are written, and Adam's two moments, which are the optimizer's state,
    are read and written. A search reads all embeddings, or all codes. Activations are
    left out: what of them stays on the chip is the compiler's choice.
    """
    moments = found.held["optimizer state"]
    moved = found.held["parameters"] + 2 * moments + 3 * moments / 2
    table = devices.searched_table(found.config, found.stage, setting)
    if table is not None:
        searched = table.rows if table.codes is None else table.codes
        moved += memory.bytes_per_device(searched)
    return moved


def embedding_lines(
    towers: RetrieverConfig, config: EmbedConfig, machines: Slice, setting: Setting
) -> list[Line]:
    """Returns lines on the work, time and memory of embedding the corpus on a slice."""
    corpus, hardware = setting.corpus, setting.hardware
    length, mesh = config.document_length, memory.one_device()
    function, arguments = programs.embedding(towers, length, _SAMPLE, mesh)
    with memory.over(mesh):
        per_document = flops.count(function, *arguments) / _SAMPLE
    share = corpus.share_embedded(length, _PADDING, len(towers.document_prefix))
    work = per_document * corpus.num_blocks * share
    seconds = work / machines.flops_per_second(hardware)
    stated = f"on {machines.accelerator_type}, {hardware.utilization:.0%} of its peak"
    lines = [
        Line("blocks", corpus.num_blocks, Unit.COUNT, corpus.source),
        Line("to embed them", work, Unit.FLOP, "once"),
        Line("a refresh takes", seconds, Unit.SECONDS, stated),
    ]
    host = machines.one_host()
    if setting.compiles and memory.has_compiler(host):
        setting.say(f"compiling the embedding job for {host.accelerator_type}")
        mesh = memory.compiler_mesh(host, MeshConfig())
        function, arguments = programs.embedding(
            towers, length, config.batch_size, mesh
        )
        needed = memory.compiled(function, arguments, mesh)
        size = needed.num_bytes + memory.bytes_per_device(arguments)
        note = f"of {usable(machines) / (1 << 30):.1f} GiB, compiled"
        lines.append(Line(_NEEDED, size, Unit.BYTES, note))
    return lines


def problems(lines: Sequence[Line], machines: Slice) -> list[str]:
    """Returns which parts of an embedding job, by its lines, do not fit on a slice."""
    needed = sum(line.value for line in lines if line.name == _NEEDED)
    if needed <= usable(machines):
        return []
    return [
        f"a batch of documents on {machines.accelerator_type}; halve "
        "embed.EmbedConfig.batch_size"
    ]


def refresh_lines(
    config: PretrainConfig | FinetuneConfig,
    embed_seconds: float,
    step_seconds: float,
    hardware: HardwareConfig,
) -> tuple[list[Line], list[str]]:
    """Returns lines on the age of an index, and hints if it becomes too old."""
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
            "keep up, or REFRESH_MODE='rolling', which renews a share with every "
            "update"
        )
    if not isinstance(config, PretrainConfig):
        return lines, hints
    bound = config.max_staleness_steps
    if bound is not None and oldest > bound:
        hints.append(
            f"MAX_STALENESS_STEPS={bound:,} is less than the {oldest:,.0f} steps that "
            f"an index becomes old: the trainer will {config.when_stale}"
        )
    return lines, hints
