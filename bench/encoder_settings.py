"""Times settings of `BertConfig` beside each other on this machine.

    python -m bench.encoder_settings products=float32 products=bfloat16
    python -m bench.encoder_settings scan_unroll=1 scan_unroll=6

A reader of MiniLM's size on 16 masked sentences of 112 wordpieces, as in the warm start
of the quickstart: the forward pass, and the loss with its gradient. They are compiled
one after the other, and then take turns.
"""

import argparse
import ast
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from bench.command import command_line, make_parser, publish, reporting
from bench.machine import machine, today
from bench.minilm import LENGTHS, models
from bench.tables import table
from realm_jax.errors import BadInputError
from realm_jax.models.bert import BertConfig
from realm_jax.models.knowledge_encoder import KnowledgeEncoder

BATCH, MASKS, VOCABULARY = 16, 20, 30522


class Pass(NamedTuple):
    """A compiled program, and how many seconds its compilation took."""

    run: Callable[[], PyTree]
    compile_seconds: float


def random_sentences() -> tuple[np.ndarray, ...]:
    """Returns wordpieces and segments [batch, joined], then masks [batch, mask].

    The masks are positions and wordpieces.
    """
    random = np.random.default_rng(0)
    ids = random.integers(1000, VOCABULARY, (BATCH, LENGTHS.joined), dtype=np.int32)
    positions = random.integers(1, LENGTHS.query, (BATCH, MASKS), dtype=np.int32)
    targets = random.integers(1000, VOCABULARY, (BATCH, MASKS), dtype=np.int32)
    return ids, np.zeros_like(ids), positions, targets


def make_passes(settings: dict[str, Any]) -> dict[str, Pass]:
    """Compiles the passes, with random parameters."""
    config = _minilm()
    reader = KnowledgeEncoder(dataclasses.replace(config, **settings))
    ids, segments, positions, targets = random_sentences()
    init = jax.jit(reader.init)
    # One candidate axis, as in the initialization of a reader.
    params = init(jax.random.key(0), *(x[:, None] for x in (ids, segments, positions)))

    def loss(params: PyTree) -> jax.Array:
        log_tokens = reader.apply(
            {"params": params},
            ids,
            segments,
            positions,
            targets,
            deterministic=True,
            method="token_log_probs",
        )
        return -log_tokens.mean()

    passes = {"forward": loss, "with gradient": jax.value_and_grad(loss)}
    return {name: _compile(run, params["params"]) for name, run in passes.items()}


def _minilm() -> BertConfig:
    return models("strong").bert(vocab_size=VOCABULARY)


def _compile(run: Callable[[PyTree], PyTree], params: PyTree) -> Pass:
    lowered = jax.jit(run).lower(params)
    began = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - began
    jax.block_until_ready(compiled(params))
    return Pass(functools.partial(compiled, params), seconds)


def settings_from(text: str) -> dict[str, Any]:
    """Returns the setting that "name=value" gives; commas separate several."""
    settings = {}
    known = {field.name for field in dataclasses.fields(BertConfig)}
    for one in text.split(","):
        name, _, value = one.partition("=")
        if name not in known or not value:
            raise BadInputError(
                f"expected name=value with a name of BertConfig, got {one!r}; the "
                f"names are {', '.join(sorted(known))}"
            )
        try:
            settings[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            settings[name] = value
    dataclasses.replace(_minilm(), **settings)
    return settings


def measure(flags: argparse.Namespace) -> list[list[str]]:
    """Returns a row for each pass: median seconds to run, then seconds to compile."""
    settings = [settings_from(text) for text in flags.settings]
    made = [make_passes(one) for one in settings]
    rows = []
    for name in made[0]:
        seconds: list[list[float]] = [[] for _ in made]
        for _ in range(flags.repetitions):
            for passes, times in zip(made, seconds, strict=True):
                began = time.perf_counter()
                jax.block_until_ready(passes[name].run())
                times.append(time.perf_counter() - began)
        medians = [f"{np.median(times):.2f}" for times in seconds]
        compiling = [f"{passes[name].compile_seconds:.1f}" for passes in made]
        rows.append([name, *medians, *compiling])
    return rows


def main() -> None:
    """Prints the table, and writes it to a page."""
    parser = make_parser(__doc__, "page")
    parser.add_argument("settings", nargs="+", help="name=value, or several, by commas")
    parser.add_argument("--repetitions", type=int, default=9)
    flags = parser.parse_args()
    place = "encoder-" + flags.settings[0].partition("=")[0]
    with reporting(place, flags):
        head = [
            "seconds",
            *flags.settings,
            *(f"{text}, compiling" for text in flags.settings),
        ]
        text = table(head, measure(flags))
        where = f"{machine()}, {today()}; medians of {flags.repetitions}."
        command = f"    {command_line('encoder_settings')}"
        publish(place, f"{command}\n\n{text}\n\n{where}\n", None, flags)


if __name__ == "__main__":
    main()
