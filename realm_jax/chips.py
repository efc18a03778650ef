"""Provides published figures of devices, per device as JAX counts devices.

A device is a core up to TPU v3, a chip from v4 on, and half a chip of TPU7x.
Sources: cloud.google.com/tpu/docs/system-architecture-tpu-vm and the pages of each
version there; NVIDIA's data sheets (dense bfloat16, SXM). They give figures of a chip,
and none was found for the bandwidth of v2.
"""

import dataclasses
import functools
import pathlib

LIBTPU_FLAGS = "--fibers_default_thread_stack_size=8388608"
"""For LIBTPU_INIT_ARGS: compiling BERT-base's update for v6e overflows the stacks that
the compiler (0.0.42.1) gives its threads by default, and ends the process."""

_GIB = 1 << 30
_TERA = 10**12
_GIGA = 10**9


@dataclasses.dataclass(frozen=True)
class Chip:
    """A type of device.

    Attributes:
      kind: value of `jax.Device.device_kind`, or its beginning.
      peak_flops: bfloat16 operations per second.
      bandwidth: bytes per second between memory and device; None if not published.
      devices: number of JAX devices on one chip; prices are per chip.
    """

    name: str
    kind: str
    peak_flops: float
    memory: int
    bandwidth: float | None
    devices: int = 1


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v2", "TPU v2", 22.5 * _TERA, 8 * _GIB, None, 2),
        Chip("v3", "TPU v3", 61.5 * _TERA, 16 * _GIB, 450 * _GIGA, 2),
        Chip("v4", "TPU v4", 275 * _TERA, 32 * _GIB, 1200 * _GIGA),
        Chip("v5litepod", "TPU v5 lite", 197 * _TERA, 16 * _GIB, 819 * _GIGA),
        Chip("v5p", "TPU v5", 459 * _TERA, 95 * _GIB, 2765 * _GIGA),
        Chip("v6e", "TPU v6 lite", 918 * _TERA, 32 * _GIB, 1638 * _GIGA),
        Chip("tpu7x", "TPU7x", 1153.5 * _TERA, 96 * _GIB, 3690 * _GIGA, 2),
        Chip("a100", "NVIDIA A100", 312 * _TERA, 80 * _GIB, 2039 * _GIGA),
        Chip("h100", "NVIDIA H100", 989 * _TERA, 80 * _GIB, 3350 * _GIGA),
        Chip("h200", "NVIDIA H200", 989 * _TERA, 141 * _GIB, 4800 * _GIGA),
    )
}


def find(device_kind: str) -> Chip | None:
    """Returns the chip of this device kind, None if its figures are not known."""
    # "TPU v5 lite" also starts with "TPU v5", so the longest match is chosen.
    known = [chip for chip in CHIPS.values() if device_kind.startswith(chip.kind)]
    return max(known, key=lambda chip: len(chip.kind), default=None)


@functools.cache
def multiplies_bfloat16(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Returns whether this machine multiplies bfloat16 faster than float32.

    This concerns products that are accumulated in float32, compiled by XLA for CPUs.
    With AVX512-BF16 an EPYC does, and a Xeon does not (docs/benchmarks.md): its unit
    for bfloat16 is AMX, which a virtual machine may hide. On other machines XLA
    converts the operands, which is slower than float32.
    """
    try:
        processors = pathlib.Path(cpuinfo).read_text()
    except OSError:
        return False
    if "amx_bf16" in processors:
        return True
    return "avx512_bf16" in processors and "AuthenticAMD" in processors
