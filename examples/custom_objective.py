"""Trains a retriever with an objective of one's own and the update of every stage.

    python examples/custom_objective.py runs/quickstart/corpus 200

The objective is a margin: a sentence's own block must beat every other block of the
batch by 1. Prints the loss and the share of sentences that rank their own block first,
every 20 steps. Only the loss is new; step and optimizer are those of all stages.
Another objective of pre-training needs no loop of its own: see own_objective.py.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import realm_jax
from realm_jax.data.inverse_cloze import inverse_cloze_examples
from realm_jax.metrics import means
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.training import optimizers, state, step
from realm_jax.types import InverseClozeBatch


def main(corpus: str, steps: int) -> None:
    """Runs the example."""
    store = realm_jax.open_corpus(corpus)
    blocks, lengths = np.arange(min(store.num_blocks, 1000)), (32, 64)
    features = dict(zip(("query_length", "document_length"), lengths, strict=True))
    pairs = InverseClozeBatch(**inverse_cloze_examples(store, blocks, **features))
    bert = BertConfig(store.vocabulary.size, 64, 1, 2, 128, initializer_range=0.1)
    retriever = Retriever(RetrieverConfig(bert, projection_size=32, pooling="mean"))

    def margin_loss(params, batch: InverseClozeBatch, key):
        inputs = batch.query_ids, batch.document_ids, batch.document_segment_ids
        queries, documents = retriever.apply({"params": params["retriever"]}, *inputs)
        scores = queries @ documents.T
        own = jnp.diagonal(scores)[:, None]
        others = batch.block_ids[:, None] != batch.block_ids[None, :]
        loss = jnp.where(others, jax.nn.relu(1.0 + scores - own), 0.0).mean()
        first = ((scores < own) | ~others).all(axis=1)
        found = means.mean_of(first.sum(), len(first))
        return loss, {"loss": means.mean_of(loss, 1.0), "found_first": found}

    def batch_at(done: int) -> InverseClozeBatch:
        rows = np.random.default_rng(done).integers(len(pairs.block_ids), size=16)
        return jax.tree.map(lambda array: array[rows], pairs)

    ids = jnp.ones((1, 8), jnp.int32)
    params = {"retriever": retriever.init(jax.random.key(0), ids, ids, ids)["params"]}
    config = optimizers.OptimizerConfig(3e-3, total_steps=steps)
    optimizer = optimizers.make_optimizer(config)
    update = step.make_step(step.FunctionLoss(margin_loss), optimizer)
    now = state.create_state(params, optimizer, seed=0)
    for done in range(steps):
        now, metrics = update(now, batch_at(done))
        if (done + 1) % 20 == 0:
            values = means.compute(metrics)
            print(f"{done + 1} {values['loss']:.3f} {values['found_first']:.3f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
