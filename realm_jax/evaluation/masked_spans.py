"""Masked spans that training never saw: does retrieval help to fill them in?"""

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PyTree

from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples
from realm_jax.evaluation.report_data import ExampleDocument, MaskedExample
from realm_jax.index.candidates import num_neighbours, pretrain_candidates
from realm_jax.index.embed import query_embedder
from realm_jax.index.searchers import Searcher
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.objectives.masked_lm import Marginalization
from realm_jax.training.initialization import Lengths
from realm_jax.training.losses import PretrainInputs, PretrainLoss
from realm_jax.types import NULL_BLOCK, Array, Candidates, PretrainBatch

_BATCH = 8
_SNIPPET = 240


@dataclasses.dataclass(frozen=True)
class MaskedSpans:
    """What a model makes of masked spans, row by row.

    Attributes:
      batch: the masked sentences.
      block_ids: the documents that were read; -1 is the null document.
      correct: 1.0 where every masked wordpiece was guessed right, over all documents.
      null_correct: the same given the null document alone.
      log_retrieval: log p(z|x).
      log_candidates: log p(y|z,x) of the whole span.
      log_marginal: log p(y|x).
      log_null: log p(y|null,x).
    """

    batch: PretrainBatch
    block_ids: Int[np.ndarray, "example candidate"]
    correct: Float[np.ndarray, " example"]
    null_correct: Float[np.ndarray, " example"]
    log_retrieval: Float[np.ndarray, "example candidate"]
    log_candidates: Float[np.ndarray, "example candidate"]
    log_marginal: Float[np.ndarray, " example"]
    log_null: Float[np.ndarray, " example"]

    @property
    def utility(self) -> Float[np.ndarray, " example"]:
        """Retrieval utility, log p(y|x) - log p(y|null,x), in nats."""
        return self.log_marginal - self.log_null


def evaluate_masked_spans(
    retriever: Retriever,
    reader: KnowledgeEncoder,
    params: PyTree,
    *,
    corpus: BlockStore,
    searcher: Searcher,
    examples: Examples,
    num_candidates: int,
    lengths: Lengths,
    max_examples: int,
) -> MaskedSpans:
    """Fills in the first masked spans of a held-out set.

    A wordpiece is guessed as argmax_v sum_z p(z|x) p(v|z,x), the mixture that the model
    is trained on, and given the null document as argmax_v p(v|null,x).

    Args:
      retriever: the towers.
      reader: the knowledge-augmented encoder.
      params: {"retriever": ..., "reader": ...}.
      corpus: the blocks.
      searcher: an index of this very retriever.
      examples: masked sentences.
      num_candidates: documents per sentence, the null document included.
      lengths: padded lengths.
      max_examples: how many of them, evenly spread, at most.
    """
    loss = PretrainLoss(retriever, reader, Marginalization.PER_SPAN)

    embed = query_embedder(retriever.config)

    # Parameters are an argument: those closed over would be compiled in as constants.
    @jax.jit
    def fill(params: PyTree, inputs: PretrainInputs) -> tuple[Array, ...]:
        likelihood, log_retrieval = loss.likelihood(params, inputs, None)
        guessed, null_guessed = _guess(reader, params, inputs, log_retrieval)
        return (
            _all_right(guessed, inputs.batch),
            _all_right(null_guessed, inputs.batch),
            log_retrieval,
            likelihood.log_candidates,
            likelihood.log_marginal,
            likelihood.log_null,
        )

    rows = []
    for batch in _batches(examples, max_examples):
        neighbours = searcher.search(
            embed(params["retriever"], batch.query_ids), num_neighbours(num_candidates)
        )
        candidates = pretrain_candidates(
            corpus,
            jax.device_get(neighbours),
            batch,
            num_candidates=num_candidates,
            document_length=lengths.document,
            joined_length=lengths.joined,
        )
        filled = jax.device_get(fill(params, PretrainInputs(batch, candidates)))
        rows.append((batch, candidates.block_ids, *filled))
    count = min(max_examples, len(examples))
    parts = jax.tree.map(lambda *arrays: np.concatenate(arrays)[:count], *rows)
    return MaskedSpans(*parts)


def _batches(examples: Examples, max_examples: int) -> Iterator[PretrainBatch]:
    """Evenly spread rows in batches of one shape; the last is filled up."""
    count = min(max_examples, len(examples))
    rows = np.linspace(0, len(examples) - 1, count).astype(int)
    rows = np.pad(rows, (0, -count % _BATCH), mode="edge")
    for some in rows.reshape(-1, _BATCH):
        yield PretrainBatch(**examples.batch(some))


def _guess(
    reader: KnowledgeEncoder,
    params: PyTree,
    inputs: PretrainInputs,
    log_retrieval: Array,
) -> tuple[Array, Array]:
    """Best wordpieces over all documents and given the null document: [batch, mask]."""
    candidates: Candidates = inputs.candidates
    logits = reader.apply(
        {"params": params["reader"]},
        candidates.joined_ids,
        candidates.joined_segment_ids,
        inputs.batch.mask_positions[:, None, :],
    )
    log_probs = jax.nn.log_softmax(cast(jax.Array, logits), axis=-1)
    mixture = jax.nn.logsumexp(log_probs + log_retrieval[:, :, None, None], axis=1)
    return mixture.argmax(axis=-1), log_probs[:, 0].argmax(axis=-1)


def _all_right(guessed: Array, batch: PretrainBatch) -> Array:
    unscored = batch.mask_weights == 0
    return ((guessed == batch.mask_ids) | unscored).all(axis=-1).astype(jnp.float32)


def masked_examples(
    spans: MaskedSpans, corpus: BlockStore, count: int
) -> list[MaskedExample]:
    """Sentences in the manner of REALM's table 3: not only the flattering ones.

    Two thirds are those that retrieval helped most, the rest those it helped least.

    Args:
      spans: what was measured.
      corpus: the blocks.
      count: how many sentences.
    """
    order = np.argsort(-spans.utility, kind="stable")
    count = min(count, len(order))
    least = count // 3
    rows = np.concatenate([order[: count - least], order[len(order) - least :]])
    return [_masked_example(spans, corpus, row) for row in rows]


def _masked_example(spans: MaskedSpans, corpus: BlockStore, row: int) -> MaskedExample:
    decode = corpus.vocabulary.decode
    query = spans.batch.query_ids[row]
    # [CLS] x [SEP] without its specials; the masks are one run.
    pieces = query[query != 0][1:-1]
    masked = np.flatnonzero(pieces == corpus.vocabulary.mask)
    scored = spans.batch.mask_weights[row] > 0
    documents = []
    for column in np.argsort(-spans.log_retrieval[row]):
        block = int(spans.block_ids[row, column])
        if not np.isfinite(spans.log_retrieval[row, column]):
            continue
        text = corpus.text(block) if block != NULL_BLOCK else None
        documents.append(
            ExampleDocument(
                block_id=block,
                title=text.title if text else "",
                snippet=textwrap.shorten(text.body, _SNIPPET) if text else "",
                retrieval_probability=float(np.exp(spans.log_retrieval[row, column])),
                answer_probability=float(np.exp(spans.log_candidates[row, column])),
            )
        )
    return MaskedExample(
        before=decode(pieces[: masked[0]]),
        answer=decode(spans.batch.mask_ids[row][scored]),
        after=decode(pieces[masked[-1] + 1 :]),
        documents=documents,
        marginal=float(np.exp(spans.log_marginal[row])),
    )
