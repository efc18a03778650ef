"""Measures the effect of glibc's heap settings on an update of training on a CPU.

    python -m bench.allocator

XLA allocates the scratch memory of every call anew. The quickstart's update of
fine-tuning, on random inputs, in a fresh process for each setting; the settings
alternate.
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
from jaxtyping import PyTree

from realm_jax.cli import configuration
from realm_jax.data.corpus_size import CorpusSize
from realm_jax.training.finetune import FinetuneConfig
from tpu_launch.planner import memory, programs

_MAKEFILE = pathlib.Path(__file__).parents[1] / "Makefile"
_EXPORTED = re.compile(r"export GLIBC_TUNABLES \?= (\S+)$", re.MULTILINE)
_THRESHOLD = re.compile(r"(?<=mmap_threshold=)\d+")
_MAKEFILES = _EXPORTED.findall(_MAKEFILE.read_text())[0]

SETTINGS = {
    "as it comes": "",
    "in huge pages": "glibc.malloc.hugetlb=1",
    "the Makefile's, but from 1 GiB on": _THRESHOLD.sub(str(1 << 30), _MAKEFILES),
    "the Makefile's": _MAKEFILES,
}
"""Maps the name of a setting to GLIBC_TUNABLES."""

_FILES = (*("models/minilm_l6", "hardware/cpu", "runs/finetune", "runs/quickstart"),)
_REQUIRED = ("MODEL_DIR", "CORPUS", "TASK", "WARM_START")
_BLOCKS = 5173
_WARM_UP = 3


def random_like(shapes: PyTree, scale: float) -> PyTree:
    """Returns arrays of these shapes: wordpieces, True, and numbers below a scale."""
    random = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype == bool:
            drawn = np.ones(leaf.shape, bool)
        elif np.issubdtype(leaf.dtype, np.integer):
            drawn = random.integers(1, 1000, leaf.shape)
        else:
            drawn = scale * random.random(leaf.shape, np.float32)
        return jax.numpy.asarray(drawn, leaf.dtype)

    return jax.tree.map(draw, shapes)


def measure(steps: int) -> dict[str, float]:
    """Returns seconds, kernel seconds and page faults per step, and peak GiB."""
    parser = configuration.make_parser("bench.allocator", None)
    arguments = [f"--gin_file=gin/{name}.gin" for name in _FILES]
    arguments += [f"--gin.{name}=random" for name in _REQUIRED]
    configuration.parse(parser, arguments, "finetune")
    config = configuration.configured(FinetuneConfig)
    update = programs.training(config, CorpusSize(_BLOCKS), memory.one_device())
    state, inputs = random_like(update.state, 0.02), random_like(update.inputs, 1.0)
    seconds = []
    for done in range(_WARM_UP + steps):
        if done == _WARM_UP:
            before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        state, metrics = update.step(state, inputs)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": float(np.median(seconds[_WARM_UP:])),
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
