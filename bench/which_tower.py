"""Finds which tower REALM's gain comes from, by crossing queries and indexes.

    python -m bench.which_tower --corpus runs/quickstart/corpus \
        --questions tasks/data/vital_questions.jsonl \
        --before runs/quickstart/warm_start --after runs/quickstart/pretrain

Prints recall of the questions of train and dev, which neither stage is trained on, as
rows of a Markdown table, with the paired difference from the stage before.
"""

import argparse

import numpy as np

from bench.minilm import held_out_questions, load_searcher, models, restored
from realm_jax.data.blocks import BlockStore
from realm_jax.data.features import in_chunks
from realm_jax.index.embed import query_embedder
from realm_jax.index.searchers import Searcher
from realm_jax.metrics.retrieval import paired_bootstrap_difference, recall_at_k

RECALL_AT = (1, 5, 20)
_BATCH = 32


def main() -> None:
    """Prints recall for every combination of the towers."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("corpus", "questions", "before", "after"):
        parser.add_argument(f"--{name}", required=True)
    flags = parser.parse_args()
    store = BlockStore.open(flags.corpus)
    config = models("strong").retriever_config(store.vocabulary.size)
    ids, relevant = held_out_questions(store, flags.questions)
    embed = query_embedder(config)
    queries: dict[str, np.ndarray] = {}
    indexes: dict[str, Searcher] = {}
    for name in ("before", "after"):
        model_dir = getattr(flags, name)
        trained = restored(model_dir)
        retriever = trained.tree["retriever"]
        parts = [np.asarray(embed(retriever, part)) for part in in_chunks(ids, _BATCH)]
        queries[name] = np.concatenate(parts)
        indexes[name] = load_searcher(model_dir, store, config, trained.step)
    base: dict[int, np.ndarray] = {}
    print("| queries | index |" + "".join(f" recall@{k} |" for k in RECALL_AT))
    for query_tower, document_tower in (
        *(("before", "before"), ("after", "before")),
        *(("before", "after"), ("after", "after")),
    ):
        found = indexes[document_tower].search(queries[query_tower], max(RECALL_AT))
        row = f"| {query_tower} | {document_tower} |"
        for k in RECALL_AT:
            hits = recall_at_k(np.asarray(found.ids), relevant, k)
            change = paired_bootstrap_difference(base.setdefault(k, hits), hits)
            row += f" {100 * hits.mean():.1f} ({change.percent('+.1f')}) |"
        print(row)


if __name__ == "__main__":
    main()
