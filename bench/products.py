"""Measures which operands this machine multiplies faster (`BertConfig.products`).

    python -m bench.products

A reader of MiniLM's size on 16 masked sentences of 112 wordpieces, as in the warm start
of the quickstart: the forward pass, and the loss with its gradient. They alternate.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import PyTree

from bench.minilm import LENGTHS, models
from realm_jax import hardware
from realm_jax.models.knowledge_encoder import KnowledgeEncoder

OPERANDS = ("float32", "bfloat16")
BATCH, MASKS, VOCABULARY = 16, 20, 30522


def random_sentences() -> tuple[np.ndarray, ...]:
    """Returns wordpieces and segments [batch, joined], then masks [batch, mask].

    The masks are positions and wordpieces.
    """
    random = np.random.default_rng(0)
    ids = random.integers(1000, VOCABULARY, (BATCH, LENGTHS.joined), dtype=np.int32)
    positions = random.integers(1, LENGTHS.query, (BATCH, MASKS), dtype=np.int32)
    targets = random.integers(1000, VOCABULARY, (BATCH, MASKS), dtype=np.int32)
    return ids, np.zeros_like(ids), positions, targets


def make_passes(operands: str) -> dict[str, Callable[[], PyTree]]:
    """Returns the compiled passes, with random parameters."""
    config = models("strong").bert(vocab_size=VOCABULARY)
    reader = KnowledgeEncoder(dataclasses.replace(config, products=operands))
    ids, segments, positions, targets = random_sentences()
    init = jax.jit(reader.init)
    # One candidate axis, as in the initialization of a reader.
    params = init(jax.random.key(0), *(x[:, None] for x in (ids, segments, positions)))

    def loss(params: PyTree) -> jax.Array:
        log_tokens = reader.apply(
            {"params": params},
            *(ids, segments, positions, targets),
            deterministic=True,
            method="token_log_probs",
        )
        return -log_tokens.mean()

    passes = {"forward": loss, "with gradient": jax.value_and_grad(loss)}
    return {
        name: functools.partial(
            jax.jit(run).lower(params["params"]).compile(), params["params"]
        )
        for name, run in passes.items()
    }


def main() -> None:
    """Prints median times and what `products="auto"` chooses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    repetitions = parser.parse_args().repetitions
    made = {operands: make_passes(operands) for operands in OPERANDS}
    chosen = OPERANDS[hardware.multiplies_bfloat16()]
    print(f'products="auto" is {chosen} here; medians of {repetitions}, seconds')
    for name in ("forward", "with gradient"):
        seconds: dict[str, list[float]] = {operands: [] for operands in OPERANDS}
        for _ in range(repetitions):
            for operands in OPERANDS:
                began = time.perf_counter()
                jax.block_until_ready(made[operands][name]())
                seconds[operands].append(time.perf_counter() - began)
        medians = {operands: np.median(times) for operands, times in seconds.items()}
        print(f"{name}: " + ", ".join(f"{o} {medians[o]:.2f}" for o in OPERANDS))


if __name__ == "__main__":
    main()
