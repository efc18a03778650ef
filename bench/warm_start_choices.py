"""Compares choices of the warm start: mixtures, clips, temperatures.

    python -m bench.warm_start_choices --corpus CORPUS --weights MINILM \
        --work runs/choices --output docs/figures/warm_start_choices.json

Every variant trains for as many updates from the same weights, and then predicts the
masked sentences of the validation split with the documents that its retriever finds:
utility and accuracy with and without documents. The mixtures train only the reader. The
clips train both models; their cost to the reader is seen by comparison with the same
mixture without a retriever. Temperatures are measured with the last mixture's reader,
without training. A variant that was measured is not trained again.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import platform
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.command import write_figures
from bench.minilm import EMBED, fill_in, models, optimizer, reader_config, restored
from realm_jax.data.blocks import BlockStore
from realm_jax.evaluation.provenance import stage_times
from realm_jax.index.embed import document_embedder, embed_blocks
from realm_jax.index.searchers import Searcher, make_searcher
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.metrics.retrieval import bootstrap_interval
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.training import warm_start
from realm_jax.training.masked_spans import MaskedSpans
from realm_jax.training.warm_start import ReaderMixture

# The changes of each variant to the quickstart's warm start. One that reads a retrieved
# block is last, because its reader is used for the temperatures.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "own, one span": {
        "mixture": ReaderMixture(1.0, 0.0, 0.0),
        "spans": "one_per_sentence",
    },
    "own": {"mixture": ReaderMixture(1.0, 0.0, 0.0)},
    "own 0.85, null 0.15": {"mixture": ReaderMixture(0.85, 0.15, 0.0)},
    "own 0.85, null 0.15, unmasked wordpieces too": {
        "mixture": ReaderMixture(0.85, 0.15, 0.0),
        "score_unmasked": True,
    },
    "own 0.75, null 0.1, retrieved 0.15, unmasked wordpieces too": {
        "score_unmasked": True,
    },
    "own 0.85, null 0.15, one clip, with ICT": {
        "mixture": ReaderMixture(0.85, 0.15, 0.0),
        "pairs_task": "ict",
        "clip": "joint",
    },
    "own 0.85, null 0.15, a clip per model, with ICT": {
        "mixture": ReaderMixture(0.85, 0.15, 0.0),
        "pairs_task": "ict",
    },
    "own 0.45, null 0.15, retrieved 0.4": {
        "mixture": ReaderMixture(0.45, 0.15, 0.4),
    },
    "own 0.75, null 0.1, retrieved 0.15, rate 2e-4": {"learning_rate": 2e-4},
    "own 0.75, null 0.1, retrieved 0.15": {},
}
TEMPERATURES = (1.0, 2.0, 4.0, 8.0, 16.0)


def train(flags: argparse.Namespace, name: str, model_dir: str) -> None:
    """Trains the reader of a variant."""
    changes = dict(VARIANTS[name])
    rate = changes.pop("learning_rate", 5e-4)
    clip = changes.pop("clip", "per_model")
    if "pairs_task" in changes:
        changes["pairs_task"] = f"{flags.name}_{changes['pairs_task']}"
    config = reader_config(
        model_dir, flags.corpus, flags.name, flags.weights, flags.steps
    )
    changes["optimizer"] = functools.partial(optimizer(rate, 1.0, 20), clip=clip)
    config = dataclasses.replace(config, **changes)
    warm_start.run(config, lambda *_: None, threading.Event())


class Measures:
    """Predicts the masked sentences of the validation split."""

    def __init__(self, flags: argparse.Namespace):
        self._store = BlockStore.open(flags.corpus)
        self._config = models("strong").retriever_config(self._store.vocabulary.size)
        self._flags = flags
        # A searcher of the retriever that no variant has trained.
        self._untrained: Searcher | None = None

    def variant(self, name: str, model_dir: str) -> dict[str, Any]:
        """Returns the results of a trained model."""
        params = restored(model_dir).tree
        spans = self._fill_in(self._config, params, self._searcher(name, params))
        (time,) = stage_times(model_dir)
        last = list(read_metrics(model_dir))[-1]
        return {
            "seconds of updates": time.seconds,
            "reader's loss": last["reader_loss"],
            "in-batch accuracy": last.get("in_batch_accuracy"),
            "utility": _interval(spans.utility),
            "utility, equal weights": _interval(
                _with_equal_weights(spans) - spans.log_null
            ),
            "log p(y|null,x)": float(spans.log_null.mean()),
            "right": float(spans.correct.mean()),
            "right, null document": float(spans.null_correct.mean()),
        }

    def temperature(self, value: float, model_dir: str) -> dict[str, Any]:
        """Returns the effect of a temperature on p(z|x), and so on the utility."""
        params = restored(model_dir).tree
        config = dataclasses.replace(self._config, temperature=value)
        spans = self._fill_in(config, params, self._searcher("", params))
        retrieved = np.exp(spans.log_retrieval)
        return {
            "entropy of p(z|x)": float(spans.retrieval_entropy.mean()),
            "largest p(z|x)": float(retrieved.max(axis=1).mean()),
            "p(null|x)": float(retrieved[:, 0].mean()),
            "utility": _interval(spans.utility),
        }

    def _searcher(self, name: str, params: Any) -> Searcher:
        if "ICT" in name:
            return self._embed(params)
        self._untrained = self._untrained or self._embed(params)
        return self._untrained

    def _embed(self, params: Any) -> Searcher:
        embeddings = embed_blocks(
            document_embedder(self._config),
            params["retriever"],
            self._store,
            np.arange(self._store.num_blocks),
            EMBED,
        )
        return make_searcher("device", embeddings)

    def _fill_in(
        self, config: RetrieverConfig, params: Any, searcher: Searcher
    ) -> MaskedSpans:
        return fill_in(
            config,
            params,
            self._store,
            self._flags.name,
            "validation",
            searcher,
            self._flags.examples,
        )


def _interval(values: np.ndarray) -> dict[str, float]:
    return dataclasses.asdict(bootstrap_interval(values))


def _with_equal_weights(spans) -> np.ndarray:
    """Returns log of the mean p(y|z,x) over retrieved documents: the reader alone."""
    retrieved = spans.log_candidates[:, 1:]
    count = np.log(retrieved.shape[1])
    return np.logaddexp.reduce(retrieved, axis=1) - count


def main() -> None:
    """Trains and measures every variant that has not been measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("corpus", "weights", "work", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--name", default="vital")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--examples", type=int, default=400)
    flags = parser.parse_args()
    output = pathlib.Path(flags.output)
    measures = Measures(flags)
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "updates": flags.steps,
        "variants": {},
        "temperatures": {},
    }
    if output.exists():
        result |= json.loads(output.read_text())

    def keep(kind: str, name: str, measured: dict[str, Any]) -> None:
        result[kind][name] = measured
        write_figures(output, result)
        print(name, measured, flush=True)

    model_dir = ""
    for number, name in enumerate(VARIANTS):
        model_dir = f"{flags.work}/{number}"
        if name not in result["variants"]:
            train(flags, name, model_dir)
            keep("variants", name, measures.variant(name, model_dir))
    for temperature in TEMPERATURES:
        if str(temperature) not in result["temperatures"]:
            measured = measures.temperature(temperature, model_dir)
            keep("temperatures", str(temperature), measured)


if __name__ == "__main__":
    main()
