"""Measures the share of an epoch of masked sentences from the blocks densest in names.

    python -m bench.span_density runs/quickstart/corpus vital_salient

A sentence with ten salient spans gives ten examples if every span is one, and one
if a span of it is drawn (`data/batch_order.py`).
"""

import argparse
import pathlib

import numpy as np

from realm_jax.data.batch_order import Spans
from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples
from realm_jax.errors import BadInputError

_DENSEST = 0.1


def share_of_densest(per_block: np.ndarray) -> float:
    """Returns the share of all examples that are from the densest blocks.

    `per_block` is the number of examples from each block of the corpus.
    """
    kept = round(_DENSEST * len(per_block))
    return float(np.sort(per_block)[::-1][:kept].sum() / per_block.sum())


def epoch_by_block(examples: Examples, spans: Spans, num_blocks: int) -> np.ndarray:
    """Returns how many examples of the first epoch each block has, shape [block]."""
    starts, source = examples.sentence_starts, None
    if "source_block" in examples.features:
        source = np.asarray(examples.features["source_block"])
    if starts is None or source is None or source.min() < 0:
        raise BadInputError(
            f"expected examples of masked sentences of blocks in {examples.directory}, "
            "got some without a source_block or without sentence_starts; name another "
            "task, or prepare them again"
        )
    size = len(examples) if spans is Spans.ALL else len(starts) - 1
    rows = examples.step_rows(0, batch_size=size, seed=0, spans=spans)
    return np.bincount(source[rows], minlength=num_blocks)


def _report(examples: Examples, num_blocks: int) -> None:
    for spans in (Spans.ALL, Spans.ONE_PER_SENTENCE):
        per_block = epoch_by_block(examples, spans, num_blocks)
        print(
            f"{spans.value}: an epoch has {per_block.sum():,} examples; the densest "
            f"{_DENSEST:.0%} of {num_blocks:,} blocks give "
            f"{share_of_densest(per_block):.1%} of them"
        )


def main() -> None:
    """Prints the share with every span an example, and with one per sentence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", help="a prepared corpus")
    parser.add_argument("task", help="its masked sentences, such as vital_salient")
    arguments = parser.parse_args()
    folder = pathlib.Path(arguments.corpus) / "examples" / arguments.task / "train"
    try:
        store = BlockStore.open(arguments.corpus)
        _report(Examples.open(folder), store.num_blocks)
    except BadInputError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
