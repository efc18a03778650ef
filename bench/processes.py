"""Runs the programs that a bench compares, each as a process of its own."""

import json
import os
import pathlib
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from realm_jax.errors import BadInputError

PEERS_PYTHON = pathlib.Path(".cache/peers/bin/python")
"""Where `make peers` puts PyTorch."""

# Whether glibc gives memory back after every call; see docs/benchmarks.md.
_ALLOCATOR = "GLIBC_TUNABLES"


def require_peers(python: pathlib.Path) -> None:
    """Checks that peers are installed, and that all would get the same allocator."""
    if not python.exists():
        raise BadInputError(
            f"expected the peers' Python at {python}, got none; run `make peers`, "
            "or give --peers"
        )
    if _ALLOCATOR not in os.environ:
        raise BadInputError(
            f"expected {_ALLOCATOR} in the environment, on which the seconds of all "
            "that are compared depend, got none; run it by `make bench`, or copy the "
            "line of the Makefile"
        )


def pin_to_cores(count: int) -> None:
    """Keeps this process, and those that it starts, on so many cores."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        raise BadInputError(
            f"expected {count} cores for all that are compared, got {len(cores)}; "
            "measure on another machine"
        )
    os.sched_setaffinity(0, cores[:count])


def run_json(command: Sequence[str]) -> dict[str, Any]:
    """Runs a program, and returns the JSON object of its last line."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        raise BadInputError(
            f"expected {' '.join(command)} to succeed, got exit code "
            f"{done.returncode}: {said[-1][-400:] if said else 'nothing was said'}"
        )
    return json.loads(lines[-1])


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what repeated runs of a program measured, their seconds as one list."""
    seconds = [s for run in runs for s in run["seconds"]]
    return {
        **runs[0],
        "seconds": statistics.median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "peak_gib": max(run["peak_gib"] for run in runs),
    }
