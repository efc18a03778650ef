"""Measures separately what can teach a weak retriever over a small corpus.

    python -m bench.realm_signal --corpus CORPUS --questions QUESTIONS \
        --weights MINILM --work runs/realm_gain --output docs/figures/realm_signal.json

The weak start of `bench.realm_gain` finds documents for masked sentences, and its
reader reads them once. Then only the projection of the query tower is trained on these,
which takes seconds, so that useful signals can be told apart from others:

    reader          p(y|z,x), as in REALM
    shuffled        the same values, permuted among the documents of a sentence
    answers         a reader that knows which documents contain the answer, and no more
    reader, own     `reader`, with the sentence's own block, read without the sentence,
                    as a further document
    own             of these documents, only the own block is right, as in ICT

Each with p(z|x) normalised over the documents of a sentence, and over the corpus.
Recall is measured on the questions of train and dev, which nothing here is trained on.
"""

import argparse
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench.command import write_figures
from bench.machine import machine
from bench.minilm import (
    EMBED,
    LENGTHS,
    fill_in,
    held_out_questions,
    holding_answer,
    models,
    restored,
)
from bench.realm_gain import REALM, RECALL_AT, Study, make_start
from realm_jax.answering.masks import read_masks
from realm_jax.data.blocks import BlockStore
from realm_jax.data.features import in_chunks
from realm_jax.index.candidates import own_candidates
from realm_jax.index.embed import document_embedder, embed_blocks, query_embedder
from realm_jax.index.searchers import make_searcher
from realm_jax.metrics.retrieval import paired_bootstrap_difference, recall_at_k
from realm_jax.models.bert import Bert
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import QUERY_TOWER, Retriever, RetrieverConfig
from realm_jax.types import NULL_BLOCK, Candidates, PretrainBatch

NORMALIZATIONS = ("candidates", "corpus")
_BATCH = 64
# How much worse a document without the answer is than one with it, in nats.
_WRONG = 8.0


class Sentences(NamedTuple):
    """Masked sentences and the documents found for them.

    Attributes:
      features: outputs of the query encoder, before the projection: [sentence, hidden].
      embeddings: those of null document, retrieved blocks, own block:
        [sentence, document, projection].
      log_likelihood: log p(y|z,x): [sentence, document].
      valid: False for an empty slot.
      holds: whether the document is retrieved and contains the answer.
      source: the own block: [sentence].
    """

    features: np.ndarray
    embeddings: np.ndarray
    log_likelihood: np.ndarray
    valid: np.ndarray
    holds: np.ndarray
    source: np.ndarray


class Bench:
    """A start, its index, its sentences and the questions."""

    def __init__(self, study: Study, model_dir: str, num_sentences: int):
        """Embeds the corpus, and reads the documents found for the sentences."""
        store = BlockStore.open(study.corpus)
        self._store = store
        self.config = models("weak").retriever_config(store.vocabulary.size)
        self._params = jax.device_get(restored(model_dir).tree)
        tower = self._params["retriever"][QUERY_TOWER]
        self.projection = {k: tower[k] for k in ("projection", "projection_norm")}
        self.blocks = embed_blocks(
            document_embedder(self.config),
            self._params["retriever"],
            store,
            np.arange(store.num_blocks),
            EMBED,
        )
        self.sentences = self._read(study, num_sentences)
        ids, self._relevant = held_out_questions(store, study.questions)
        self._questions = self._features(ids)
        embedded = query_embedder(self.config)(self._params["retriever"], ids[:8])
        ours = embed(self.config, self.projection, self._questions[:8])
        # The package's matrix products may have bfloat16 operands.
        np.testing.assert_allclose(ours, embedded, atol=2e-2)

    def recall(self, projection: Any) -> dict[int, np.ndarray]:
        """Returns recall of the questions, with a projection of their features."""
        queries = np.asarray(embed(self.config, projection, self._questions))
        order = np.argsort(-(queries @ self.blocks.T), axis=1)[:, : max(RECALL_AT)]
        return {k: recall_at_k(order, self._relevant, k) for k in RECALL_AT}

    def _features(self, ids: np.ndarray) -> np.ndarray:
        bert = Bert(self.config.bert)
        params = self._params["retriever"][QUERY_TOWER]["bert"]

        @jax.jit
        def run(params: Any, ids: jax.Array) -> jax.Array:
            return bert.apply({"params": params}, ids, jnp.zeros_like(ids), True).pooled  # pyright: ignore[reportAttributeAccessIssue]

        parts = [np.asarray(run(params, part)) for part in in_chunks(ids, _BATCH)]
        return np.concatenate(parts)

    def _read(self, study: Study, count: int) -> Sentences:
        found = fill_in(
            self.config,
            self._params,
            self._store,
            study.name,
            "train",
            make_searcher("device", self.blocks),
            count,
        )
        own_likelihood, has_own = self._read_own(found.batch)
        source = np.asarray(found.batch.source_block)
        block_ids = np.concatenate([found.block_ids, source[:, None]], axis=1)
        null = self._embed_null()
        embeddings = np.where(
            (block_ids == NULL_BLOCK)[..., None], null, self.blocks[block_ids]
        )
        valid = np.isfinite(found.log_retrieval)
        holds = holding_answer(self._store, found.block_ids, found.batch)
        return Sentences(
            features=self._features(np.asarray(found.batch.query_ids)),
            embeddings=embeddings,
            log_likelihood=np.concatenate(
                [found.log_candidates, own_likelihood[:, None]], axis=1
            ),
            valid=np.concatenate([valid, has_own[:, None]], axis=1),
            holds=np.pad(holds, ((0, 0), (0, 1))),
            source=source,
        )

    def _read_own(self, batch: PretrainBatch) -> tuple[np.ndarray, np.ndarray]:
        """Returns log p(y|own,x) per sentence, and whether there is such a document."""
        of_models = Retriever(self.config), KnowledgeEncoder(self.config.bert)

        @jax.jit
        def read(params: Any, batch: PretrainBatch, own: Candidates) -> jax.Array:
            found = read_masks(*of_models, params, batch, own)
            likelihood = found.likelihood(batch.mask_ids, batch.mask_weights)
            return likelihood.log_candidates[:, 0]

        likelihood, valid = [], []
        for start in range(0, len(batch.source_block), _BATCH):
            part = jax.tree.map(lambda array, s=start: array[s : s + _BATCH], batch)
            own = own_candidates(
                self._store,
                part,
                document_length=LENGTHS.document,
                joined_length=LENGTHS.joined,
            )
            likelihood.append(np.asarray(read(self._params, part, own)))
            valid.append(own.valid[:, 0])
        return np.concatenate(likelihood), np.concatenate(valid)

    def _embed_null(self) -> np.ndarray:
        ids, segments = self._store.document_ids(
            np.array([NULL_BLOCK]), LENGTHS.document
        )
        embedder = document_embedder(self.config)
        return np.asarray(embedder(self._params["retriever"], ids, segments))[0]


def embed(config: RetrieverConfig, projection: Any, features: Any) -> jax.Array:
    """Projects features like the retriever's tower."""
    dense, norm = projection["projection"], projection["projection_norm"]
    x = features @ dense["kernel"] + dense["bias"]
    x = jax.nn.standardize(x, epsilon=config.layer_norm_epsilon)
    return (x * norm["scale"] + norm["bias"]) * config.temperature**-0.5


def teachers(sentences: Sentences) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns each teacher's log-likelihoods of the documents, and which it shows."""
    retrieved = sentences.valid.copy()
    retrieved[:, -1] = False
    is_own = np.zeros_like(retrieved)
    is_own[:, -1] = True
    shuffled = sentences.log_likelihood.copy()
    rng = np.random.default_rng(0)
    for row, shown in zip(shuffled, retrieved, strict=True):
        row[shown] = rng.permutation(row[shown])
    answered = (sentences.holds & retrieved).any(axis=1, keepdims=True)
    with_own = sentences.valid & sentences.valid[:, -1:]
    return {
        "reader": (sentences.log_likelihood, retrieved),
        "shuffled": (shuffled, retrieved),
        "answers": (np.where(sentences.holds, 0.0, -_WRONG), retrieved & answered),
        "reader, own": (sentences.log_likelihood, sentences.valid),
        "own": (np.where(is_own, 0.0, -_WRONG), with_own),
    }


def train(
    bench: Bench,
    taught: tuple[np.ndarray, np.ndarray],
    normalization: str,
    learning_rate: float,
    steps: int,
    seed: int,
) -> Any:
    """Returns the projection after training by one teacher."""
    sentences = bench.sentences
    log_likelihood, shown = taught
    rows = np.flatnonzero(shown[:, 1:].any(axis=1))
    arrays = jax.tree.map(
        lambda array: jnp.asarray(array[rows]),
        (
            *(sentences.features, sentences.embeddings, log_likelihood, shown),
            sentences.source,
        ),
    )
    blocks = jnp.asarray(bench.blocks)
    schedule = optax.linear_schedule(learning_rate, 0.1 * learning_rate, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    def loss(projection: Any, chosen: jax.Array) -> jax.Array:
        features, documents, log_p, shown, source = (a[chosen] for a in arrays)
        queries = embed(bench.config, projection, features)
        scores = jnp.einsum("bp,bkp->bk", queries, documents)
        scores = jnp.where(shown, scores, -jnp.inf)
        total = scores
        if normalization == "corpus":
            everything = queries @ blocks.T
            # The own block counts if it is among the documents.
            is_source = jnp.arange(len(blocks)) == source[:, None]
            hidden = is_source & ~shown[:, -1:]
            everything = jnp.where(hidden, -jnp.inf, everything)
            null = jnp.where(shown[:, :1], scores[:, :1], -jnp.inf)
            total = jnp.concatenate([everything, null], axis=1)
        marginal = jax.nn.logsumexp(scores + jnp.where(shown, log_p, 0.0), axis=1)
        return (jax.nn.logsumexp(total, axis=1) - marginal).mean()

    @jax.jit
    def step(projection: Any, state: Any, chosen: jax.Array) -> Any:
        updates, state = optimizer.update(
            jax.grad(loss)(projection, chosen), state, projection
        )
        return optax.apply_updates(projection, updates), state

    projection, state = bench.projection, optimizer.init(bench.projection)
    rng = np.random.default_rng(seed)
    size = min(_BATCH, len(rows))
    for _ in range(steps):
        chosen = rng.choice(len(rows), size, replace=False)
        projection, state = step(projection, state, chosen)
    return projection


def main() -> None:
    """Trains with every teacher and measures the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("corpus", "questions", "weights", "work", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--name", default="vital")
    parser.add_argument("--sentences", type=int, default=1600)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--reader_steps", type=int, default=900)
    parser.add_argument("--ict_steps", type=int, default=40)
    flags = parser.parse_args()
    given = ("corpus", "name", "questions", "weights", "work")
    steps = ("reader_steps", "ict_steps")
    study = Study(
        **{name: getattr(flags, name) for name in (*given, *steps)},
        split="dev",
        finetune_steps=0,
        span_scorer=False,
        score_unmasked=False,
        realm=REALM,
    )
    bench = Bench(study, make_start(study, "weak", 0), flags.sentences)
    before = bench.recall(bench.projection)
    result: dict[str, Any] = {
        "machine": machine(),
        "settings": {
            k: getattr(flags, k) for k in ("sentences", "learning_rate", "steps")
        },
        "seeds": flags.seeds,
        "before": {f"recall@{k}": float(v.mean()) for k, v in before.items()},
        "teachers": {},
    }
    for name, taught in teachers(bench.sentences).items():
        for normalization in NORMALIZATIONS:
            after = [
                bench.recall(
                    train(
                        bench,
                        taught,
                        normalization,
                        flags.learning_rate,
                        flags.steps,
                        seed,
                    )
                )
                for seed in range(flags.seeds)
            ]
            found = {
                f"recall@{k}": dataclasses.asdict(
                    paired_bootstrap_difference(
                        before[k], np.mean([recall[k] for recall in after], axis=0)
                    )
                )
                for k in RECALL_AT
            }
            result["teachers"][f"{name}, over the {normalization}"] = found
            print(
                name,
                normalization,
                {k: v["mean"] for k, v in found.items()},
                flush=True,
            )
    write_figures(flags.output, result)


if __name__ == "__main__":
    main()
