"""Shows what an update spends its time on, from a profile of this machine.

    python -m bench.operations CORPUS --task my_salient --size paper

One update of `bench.train_step`'s sizes on passages of real lengths. The matrix
products' own rate stands beside the rate of a large product on the same machine, which
is the limit: an update without anything else would take as long as its products do at
that rate.
"""

import collections
import pathlib
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bench import train_step
from bench.command import command_line, make_parser, publish, reporting
from bench.machine import machine, today
from bench.tables import table
from realm_jax.objectives.masked_lm import Marginalization
from realm_jax.training.initialization import initial_params
from realm_jax.training.optimizers import OptimizerConfig, make_optimizer
from realm_jax.training.pretrain_loss import PretrainLoss
from realm_jax.training.state import create_state
from realm_jax.training.step import make_step

_PROGRAM = "jit_step"
# The first that matches an operation's name in the program.
_KINDS = {
    "products of attention": r"bhqd,bhkd->bhqk|bhqk,bhkd->bhqd",
    "products with the vocabulary": r"\.\.\.e,ve->\.\.\.v",
    "products of dense layers": r"dot_general",
    "gradients of biases": r"transpose.*(query|key|value|put)/reduce_sum",
    "dropout": r"kept_weights|[Dd]ropout|random_bits|_where",
    "norms": r"norm|_add_and_norm",
    "softmax": r"attention",
    "activations": r"checkpoint|rematted|tanh|mlp",
    "the optimizer": r"^jit\(step\)/[a-z_]+$|jit\(clip\)|jit\(step\)/jit",
}
_OTHER = "all else"
_MATRIX = 2048


def kind_of(name: str) -> str:
    """Returns the kind of an operation, by its name in the program."""
    kinds = (kind for kind, pattern in _KINDS.items() if re.search(pattern, name))
    return next(kinds, _OTHER)


def names_of(program: str) -> dict[str, str]:
    """Returns the names that JAX gave the instructions of a compiled program."""
    found = re.finditer(
        r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name="([^"]*)"', program, re.MULTILINE
    )
    return {match[1]: match[2] for match in found}


def seconds_by_kind(folder: pathlib.Path, names: Mapping[str, str]) -> dict[str, float]:
    """Returns the seconds of all threads in each kind of operation, most first."""
    (path,) = folder.rglob("*.xplane.pb")
    seconds = collections.Counter()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for event in (event for line in plane.lines for event in line.events):
            stats = dict(event.stats)
            if stats.get("hlo_module") == _PROGRAM:
                name = names.get(str(stats.get("hlo_op", event.name)), "")
                seconds[kind_of(name)] += event.duration_ns / 1e9
    return dict(seconds.most_common())


def measure(
    size: train_step.Size, corpus: str, task: str, packs: bool
) -> dict[str, Any]:
    """Profiles one update without dropout of attention, after one that warms up.

    The task is one of masked sentences. With `packs` two documents share a row, as with
    PACK_DOCUMENTS.
    """
    inputs = jax.device_put(train_step.real_inputs(size, corpus, task))
    models = train_step.models(size, dropout_rate=0.1, attention_dropout_rate=0.0)
    params, _ = initial_params(*models, size.lengths, seed=0)
    packing = train_step.packed_lengths(size, corpus, task) if packs else None
    loss = PretrainLoss(*models, Marginalization.PER_TOKEN, packing=packing)
    optimizer = make_optimizer(OptimizerConfig(1e-5, 0, 1000))
    state = create_state(params, optimizer, seed=0)
    operations = loss.update_flops(state, inputs)
    step: Any = make_step(loss, optimizer)
    compiled = step.lower(state, inputs).compile()
    state, _ = jax.block_until_ready(compiled(state, inputs))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            began = time.perf_counter()
            jax.block_until_ready(compiled(state, inputs))
            seconds = time.perf_counter() - began
        kinds = seconds_by_kind(pathlib.Path(folder), names_of(compiled.as_text()))
    return {
        "seconds": seconds,
        "kinds": kinds,
        "teraflop": operations / 1e12,
        "rate": matrix_rate(),
    }


def matrix_rate() -> float:
    """Returns the TFLOP/s of a large product in float32, the best of five."""
    matrix = jnp.ones((_MATRIX, _MATRIX))
    product = jax.jit(lambda x: x @ x)
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        product(matrix).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * _MATRIX**3 / min(seconds) / 1e12


def rows(measured: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields the kinds of operations: seconds of all threads, share."""
    total = sum(measured["kinds"].values())
    for kind, seconds in measured["kinds"].items():
        yield [kind, f"{seconds:.2f}", f"{seconds / total:.0%}"]


def markdown(measured: Mapping[str, Any], command: str) -> str:
    """Returns the table with its command, machine and date."""
    seconds, rate = measured["seconds"], measured["rate"]
    least = measured["teraflop"] / rate
    return (
        f"    {command}\n\n{machine()}, {today()}: {seconds:.2f} s an update, while it "
        f"is profiled; its products, {measured['teraflop']:.3f} TFLOP, would take "
        f"{least:.2f} s ({least / seconds:.0%}) at the {rate:.3f} TFLOP/s of a large "
        f"one.\n\n"
        f"{table(['', 'seconds of all threads', 'share'], rows(measured))}\n"
    )


def main() -> None:
    """Measures, and prints the table."""
    parser = make_parser(__doc__, "page")
    parser.add_argument("corpus", help="as `realm prepare` made")
    parser.add_argument("--task", required=True, help="masked sentences of the corpus")
    parser.add_argument("--size", choices=train_step.SIZES, default="paper")
    parser.add_argument("--packs", action="store_true", help="two documents to a row")
    flags = parser.parse_args()
    with reporting("operations", flags):
        size = train_step.SIZES[flags.size]
        measured = measure(size, flags.corpus, flags.task, flags.packs)
        command = command_line("operations", {"CORPUS": flags.corpus})
        publish("operations", markdown(measured, command), measured, flags)


if __name__ == "__main__":
    main()
