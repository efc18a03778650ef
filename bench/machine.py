"""Describes the machine and the day of a measurement."""

import datetime
import os
import pathlib
import platform
import resource


def machine() -> str:
    """Returns the number of cores, the processor, and the matrix units it has."""
    processor, units = platform.machine(), ""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        fields = dict(
            (part.strip() for part in line.split(":", 1))
            for line in cpuinfo.read_text().split("\n\n", 1)[0].splitlines()
            if ":" in line
        )
        processor = fields.get("model name", processor)
        flags = fields.get("flags", "").split()
        found = [name for name, flag in _UNITS.items() if flag in flags]
        units = f" ({', '.join(found)})" if found else ""
    return f"{os.cpu_count()} CPU cores, {processor}{units}"


def peak_gib(who: int = resource.RUSAGE_SELF) -> float:
    """Returns the most memory that this process, or one of its children, has had."""
    return resource.getrusage(who).ru_maxrss / 2**20  # Linux reports kilobytes.


def today() -> str:
    """Returns the date, as in 2026-11-23."""
    return datetime.date.today().isoformat()


_UNITS = {
    "AVX2": "avx2",
    "AVX-512": "avx512f",
    "AVX512-BF16": "avx512_bf16",
    "AMX": "amx_bf16",
}
