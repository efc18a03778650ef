"""Estimates the work of an update, and its time by the slowest of three bounds.

Products of matrices at the expected share of the peak, the traffic of a device's memory
at its bandwidth, and the latency of a step: these overlap, so the longest one counts.
"""

from realm_jax.training import flops
from realm_jax.training.watchdog import stall_bound
from tpu_launch.planner import devices, memory
from tpu_launch.planner.devices import DeviceMemory, Setting
from tpu_launch.planner.figures import Line, Unit


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
