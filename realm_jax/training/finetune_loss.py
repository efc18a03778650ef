"""The loss of fine-tuning on questions: the retriever's and the span reader's."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, PyTree

from realm_jax.index.device_tokens import TokenTable
from realm_jax.metrics.means import Means, mean_of, padding_share
from realm_jax.models.retriever import Retriever
from realm_jax.models.span_reader import SpanReader, SpanScores
from realm_jax.objectives import open_qa
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.training.packed_updates import PackedLengths, Sequences, compute_packed
from realm_jax.training.step import Loss, run_model, split_key
from realm_jax.types import Array, QuestionBatch


@flax.struct.dataclass
class FinetuneInputs:
    """Questions with the blocks that the index found.

    Attributes:
      block_embeddings: the index's embeddings of the retrieved blocks, best first.
      block_valid: False for an empty slot.
      block_has_answer: whether the block's body contains an answer.
      joined_ids, joined_segment_ids: question and body of the blocks that are read,
        which are the first of the retrieved ones.
      span_is_answer: for each of the reader's spans, whether it is an answer.
      document_ids, document_segment_ids: the blocks that the step embeds itself, which
        are the first of the retrieved ones; None to embed none.
      tokens: the wordpieces of the corpus, where updates renew the index
        (`rolling_refresh.py`).
    """

    questions: QuestionBatch
    block_embeddings: Float[Array, "batch neighbour projection"]
    block_valid: Bool[Array, "batch neighbour"]
    block_has_answer: Bool[Array, "batch neighbour"]
    joined_ids: Int[Array, "batch candidate joined"]
    joined_segment_ids: Int[Array, "batch candidate joined"]
    span_is_answer: Bool[Array, "batch candidate span"]
    document_ids: Int[Array, "batch embedded document"] | None = None
    document_segment_ids: Int[Array, "batch embedded document"] | None = None
    tokens: TokenTable | None = None


@dataclasses.dataclass(frozen=True)
class FinetuneLoss(Loss):
    """Retriever loss plus reader loss (ORQA, section 5).

    Of the retrieved blocks, those that the inputs have as documents are embedded with
    live parameters, so that the document tower has a gradient through them. Those
    behind them keep the index's embeddings, which are constants.
    """

    retriever: Retriever
    reader: SpanReader
    marginalization: AnswerMarginalization = AnswerMarginalization.JOINT_SOFTMAX
    microbatches: int = 1
    packing: PackedLengths | None = None

    def __call__(
        self, params: PyTree, inputs: FinetuneInputs, key: jax.Array
    ) -> tuple[Array, Means]:
        """Returns retriever loss plus reader loss, averaged over the questions."""
        loss, metrics, packed = compute_packed(
            self._compute,
            self.packing,
            lambda lengths: _packable(lengths, inputs),
            self.microbatches,
            params,
            inputs,
            key,
        )
        return loss, {**metrics, **packed}

    def _compute(
        self,
        packing: PackedLengths,
        params: PyTree,
        inputs: FinetuneInputs,
        key: jax.Array,
    ) -> tuple[Array, Means]:
        # Two keys where no document is embedded, as ever.
        count = 2 if inputs.document_ids is None else 3
        queries, reading, *documents = split_key(key, count)
        embeddings = run_model(
            self.retriever,
            params["retriever"],
            inputs.questions.question_ids,
            method="embed_queries",
            key=queries,
            microbatches=self.microbatches,
            packed_length=packing.query,
        )
        blocks = self._embed_blocks(packing, params, inputs, *documents)
        scores = jnp.einsum("bp,bnp->bn", embeddings, blocks)
        scores = jnp.where(inputs.block_valid, scores, -jnp.inf)
        spans: SpanScores = run_model(
            self.reader,
            params["reader"],
            inputs.joined_ids,
            inputs.joined_segment_ids,
            key=reading,
            microbatches=self.microbatches,
            packed_length=packing.joined,
        )
        num_read = inputs.joined_ids.shape[1]
        log_spans = open_qa.span_log_probs(
            scores[:, :num_read],
            spans.logits,
            spans.valid & inputs.block_valid[:, :num_read, None],
            self.marginalization,
        )
        result = open_qa.open_qa(
            scores, inputs.block_has_answer, log_spans, inputs.span_is_answer
        )
        loss = result.loss_total / result.count
        return loss, {
            "loss": mean_of(result.loss_total, result.count),
            "retriever_loss": mean_of(result.retriever_total, result.retriever_count),
            "reader_loss": mean_of(result.reader_total, result.reader_count),
            "answer_retrieved": mean_of(result.retriever_count, result.count),
            "answer_read": mean_of(result.reader_count, result.count),
            "padding_share": padding_share(packed=_packable(packing, inputs)),
        }

    def _embed_blocks(
        self,
        packing: PackedLengths,
        params: PyTree,
        inputs: FinetuneInputs,
        key: jax.Array | None = None,
    ) -> Float[Array, "batch neighbour projection"]:
        """Returns live embeddings of the first blocks, the index's of the others."""
        ids, segment_ids = inputs.document_ids, inputs.document_segment_ids
        if ids is None or segment_ids is None:
            return inputs.block_embeddings
        live = run_model(
            self.retriever,
            params["retriever"],
            ids,
            segment_ids,
            method="embed_documents",
            key=key,
            microbatches=self.microbatches,
            packed_length=packing.document,
        )
        others = inputs.block_embeddings[:, live.shape[1] :]
        return jnp.concatenate([live, others], axis=1)


def _packable(lengths: PackedLengths, inputs: FinetuneInputs) -> Sequences:
    queries = inputs.questions.question_ids, lengths.query
    joined = inputs.joined_ids, lengths.joined
    if inputs.document_ids is None:
        return [queries, joined]
    return [queries, (inputs.document_ids, lengths.document), joined]
