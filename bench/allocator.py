"""Measures the effect of glibc's heap settings on a training step on a CPU.

    python -m bench.allocator

XLA allocates the scratch memory of every call anew. The loss of a reader of MiniLM's
size with its gradient, as in `bench.encoder_settings`, in a fresh process for each
setting; the settings alternate.
"""

import argparse
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from bench.encoder_settings import make_passes

_MAKEFILE = pathlib.Path(__file__).parents[1] / "Makefile"
_EXPORTED = re.compile(r"export GLIBC_TUNABLES \?= (\S+)$", re.MULTILINE)

SETTINGS = {
    "as it comes": "",
    "in huge pages": "glibc.malloc.hugetlb=1",
    "the Makefile's": _EXPORTED.findall(_MAKEFILE.read_text())[0],
}
"""Maps the name of a setting to GLIBC_TUNABLES."""

_WARM_UP = 3


def measure(steps: int) -> dict[str, float]:
    """Returns seconds, kernel seconds and page faults per step, and peak GiB."""
    step = make_passes({"products": "float32"})["with gradient"].run
    for _ in range(_WARM_UP):
        jax.block_until_ready(step())
    before, seconds = resource.getrusage(resource.RUSAGE_SELF), []
    for _ in range(steps):
        began = time.perf_counter()
        jax.block_until_ready(step())
        seconds.append(time.perf_counter() - began)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": float(np.median(seconds)),
        "kernel seconds": (after.ru_stime - before.ru_stime) / steps,
        "page faults": (after.ru_minflt - before.ru_minflt) / steps,
        "GiB": after.ru_maxrss / 2**20,
    }


def main() -> None:
    """Prints medians over the rounds, and every round's seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.steps)))
        return
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    command = [sys.executable, "-m", "bench.allocator", "--child"]
    with tempfile.TemporaryDirectory() as compiled:
        for _ in range(arguments.rounds):
            for name, tunables in SETTINGS.items():
                done = subprocess.run(
                    [*command, "--steps", str(arguments.steps)],
                    env={
                        **os.environ,
                        "GLIBC_TUNABLES": tunables,
                        "JAX_COMPILATION_CACHE_DIR": compiled,
                    },
                    stdout=subprocess.PIPE,
                    check=True,
                    text=True,
                )
                rounds[name].append(json.loads(done.stdout.splitlines()[-1]))
    for name, of_rounds in rounds.items():
        medians = (
            f"{np.median([found[of] for found in of_rounds]):.2f} {of}"
            for of in of_rounds[0]
        )
        each = ", ".join(f"{found['seconds']:.2f}" for found in of_rounds)
        print(f"{name}: {', '.join(medians)}; rounds: {each}")


if __name__ == "__main__":
    main()
