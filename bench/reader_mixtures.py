"""What the reader's warm start should read: variants of it beside each other.

    python -m bench.reader_mixtures --corpus CORPUS --weights MINILM \
        --work runs/mixtures --output docs/figures/reader_mixtures.json

Every variant trains the reader alone, from the same weights, for as many updates, and
then fills in the masked sentences of the validation split with what an untrained
retriever finds: utility and accuracy with and without documents. A variant that was
measured is not trained again.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.realm_gain import LENGTHS, models, optimizer
from realm_jax.data.blocks import BlockStore
from realm_jax.evaluation.provenance import stage_times
from realm_jax.evaluation.retrieval import bootstrap_interval
from realm_jax.index.embed import EmbedConfig, document_embedder, embed_blocks
from realm_jax.index.searchers import Searcher, make_searcher
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.storage import open_store
from realm_jax.training import warm_start
from realm_jax.training.checkpoints import restore_params
from realm_jax.training.masked_spans import HeldOutSpans
from realm_jax.training.stage import open_examples
from realm_jax.training.warm_start import ReaderMixture, WarmStartConfig

# What each variant changes of the last one, the quickstart's.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "own block, one span": {
        "mixture": ReaderMixture(1.0, 0.0, 0.0),
        "spans": "one_per_sentence",
    },
    "own 0.85, null 0.15, one span": {
        "mixture": ReaderMixture(0.85, 0.15, 0.0),
        "spans": "one_per_sentence",
    },
    "own 0.85, null 0.15": {"mixture": ReaderMixture(0.85, 0.15, 0.0)},
    "own 0.45, null 0.15, retrieved 0.4": {
        "mixture": ReaderMixture(0.45, 0.15, 0.4),
    },
    "own 0.75, null 0.1, retrieved 0.15, rate 2e-4": {"learning_rate": 2e-4},
    "own 0.75, null 0.1, retrieved 0.15": {},
}


def train(flags: argparse.Namespace, name: str, model_dir: str) -> None:
    """Trains the reader of a variant."""
    changes = dict(VARIANTS[name])
    rate = changes.pop("learning_rate", 5e-4)
    config = WarmStartConfig(
        model_dir=model_dir,
        corpus=flags.corpus,
        task=f"{flags.name}_salient",
        train_steps=flags.steps,
        batch_size=16,
        reader_batch_size=16,
        models=models("strong"),
        optimizer=optimizer(rate, 1.0, 20),
        warm_start=flags.weights,
        projection="pca",
        mixture=ReaderMixture(0.75, 0.1, 0.15),
        spans="together",
        embed=EmbedConfig(document_length=LENGTHS.document),
        log_period=20,
        checkpoint_period=100,
    )
    warm_start.run(dataclasses.replace(config, **changes), _silent, threading.Event())


class Measures:
    """Fills in the validation split; one index serves all, for no retriever trains."""

    def __init__(self, flags: argparse.Namespace):
        self._store = BlockStore.open(flags.corpus)
        self._config = models("strong").retriever_config(self._store.vocabulary.size)
        self._spans = HeldOutSpans(
            Retriever(self._config),
            KnowledgeEncoder(self._config.bert),
            corpus=self._store,
            examples=open_examples(self._store, f"{flags.name}_salient", "validation"),
            num_candidates=5,
            lengths=LENGTHS,
            max_examples=flags.examples,
        )
        self._searcher: Searcher | None = None

    def __call__(self, model_dir: str) -> dict[str, Any]:
        """Returns what a trained reader reaches."""
        restored = restore_params(open_store(model_dir))
        assert restored is not None
        params = restored.tree
        if self._searcher is None:
            embeddings = embed_blocks(
                document_embedder(self._config),
                params["retriever"],
                self._store,
                np.arange(self._store.num_blocks),
                EmbedConfig(document_length=LENGTHS.document),
            )
            self._searcher = make_searcher("device", embeddings)
        spans = self._spans.fill_in(params, self._searcher)
        (time,) = stage_times(model_dir)
        return {
            "seconds of updates": time.seconds,
            "utility": dataclasses.asdict(bootstrap_interval(spans.utility)),
            "utility, equal weights": dataclasses.asdict(
                bootstrap_interval(_with_equal_weights(spans) - spans.log_null)
            ),
            "log p(y|null,x)": float(spans.log_null.mean()),
            "right": float(spans.correct.mean()),
            "right, null document": float(spans.null_correct.mean()),
        }


def _with_equal_weights(spans) -> np.ndarray:
    """log of the mean of p(y|z,x) over the retrieved documents: the reader alone."""
    retrieved = spans.log_candidates[:, 1:]
    count = np.log(retrieved.shape[1])
    return np.logaddexp.reduce(retrieved, axis=1) - count


def _silent(step: int, total: int, values: Mapping[str, float]) -> None:
    """Reports to nobody."""


def main() -> None:
    """Trains and measures what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--name", default="vital")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--examples", type=int, default=400)
    flags = parser.parse_args()
    output = pathlib.Path(flags.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    measures: Measures | None = None
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "updates": flags.steps,
        "variants": {},
    }
    if output.exists():
        result["variants"] = json.loads(output.read_text())["variants"]
    for number, name in enumerate(VARIANTS):
        if name in result["variants"]:
            continue
        model_dir = f"{flags.work}/{number}"
        train(flags, name, model_dir)
        measures = measures or Measures(flags)
        result["variants"][name] = measures(model_dir)
        output.write_text(json.dumps(result, indent=1) + "\n")
        print(name, result["variants"][name], flush=True)


if __name__ == "__main__":
    main()
