"""The warm start's loss: ICT or distillation, and a masked LM for the reader.

The reader may also predict wordpieces that it sees (`draw_unmasked`). Of the wordpieces
that BERT is scored on, a tenth is left unchanged, so that the output at each position
keeps identifying the wordpiece there (Devlin et al. 2019, section 3.1). A salient mask
hides them all. An encoder made for sentence embeddings, such as MiniLM, then has to
learn from two masks per sentence how its features encode wordpieces, before it can copy
any; from visible wordpieces it learns that at once.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, PyTree

from realm_jax.data.batch_order import Stream, uniform
from realm_jax.data.wordpiece import WordPiece
from realm_jax.metrics.means import Means, mean_of, merge, padding_share
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.objectives import open_qa, retrieval
from realm_jax.training.packed_updates import PackedLengths, Sequences, compute_packed
from realm_jax.training.reader_documents import KINDS, DocumentKind
from realm_jax.training.step import Loss, run_model, split_key
from realm_jax.types import Array, InverseClozeBatch, PretrainBatch


@flax.struct.dataclass
class UnmaskedTargets:
    """Wordpieces that are predicted at their own position in the reader's input.

    Weights are 0.0 where a row has no target.
    """

    weights: Float[Array, "batch target"]
    positions: Int[Array, "batch target"]
    ids: Int[Array, "batch target"]


@flax.struct.dataclass
class ReaderInputs:
    """Masked sentences, each joined with one document.

    Attributes:
      kind: kind of the document, as an index into `reader_documents.KINDS`.
      has_answer: whether it is a retrieved block that contains the answer.
      span_is_answer: for each span of the body, whether it is a masked one; None for a
        reader without a span scorer.
      unmasked: unmasked wordpieces that are predicted, in the slots that the masks
        leave empty; None if only masked ones are.
    """

    batch: PretrainBatch
    joined_ids: Int[Array, "batch joined"]
    joined_segment_ids: Int[Array, "batch joined"]
    kind: Int[Array, " batch"]
    has_answer: Bool[Array, " batch"]
    span_is_answer: Bool[Array, "batch span"] | None = None
    unmasked: UnmaskedTargets | None = None


@flax.struct.dataclass
class TaughtQueries:
    """Queries with what a teacher has them find.

    Attributes:
      query_ids: `[CLS] x [SEP]`.
      block_embeddings: the index's embeddings of the teacher's best blocks, divided by
        the standard deviation of the scores that the query had as the run began.
      teacher: its p(z|x) over these.
    """

    query_ids: Int[Array, "batch query"]
    block_embeddings: Float[Array, "batch candidate projection"]
    teacher: Float[Array, "batch candidate"]


@flax.struct.dataclass
class WarmStartInputs:
    """The inputs of each model of a warm start; None for one that is not trained."""

    pairs: InverseClozeBatch | TaughtQueries | None
    reading: ReaderInputs | None


@dataclasses.dataclass(frozen=True)
class WarmStartLoss(Loss):
    """ICT or distillation of the retriever, a masked-LM start of the reader, or both.

    Both warm starts matter: a reader that cannot copy learns to ignore documents, and
    then the retriever gets no gradient (REALM, section 3.4, the cold-start problem).
    """

    retriever: Retriever
    reader: KnowledgeEncoder
    microbatches: int = 1
    packing: PackedLengths | None = None

    def __call__(
        self, params: PyTree, inputs: WarmStartInputs, key: jax.Array
    ) -> tuple[Array, Means]:
        """Returns the sum of the losses, each averaged over its own terms."""
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
        inputs: WarmStartInputs,
        key: jax.Array,
    ) -> tuple[Array, Means]:
        queries, documents, reading = split_key(key, 3)
        losses, metrics = [], {}
        if isinstance(inputs.pairs, TaughtQueries):
            loss, found = self._distillation_loss(
                params["retriever"], inputs.pairs, queries
            )
            losses, metrics = [loss], found
        elif inputs.pairs is not None:
            loss, found = self._retriever_loss(
                packing, params["retriever"], inputs.pairs, queries, documents
            )
            losses, metrics = [loss], found
        if inputs.reading is not None:
            loss, found = self._reader_loss(
                packing, params["reader"], inputs.reading, reading
            )
            losses, metrics = [*losses, loss], merge(metrics, found)
        total = jnp.stack(losses).sum()
        return total, {"loss": mean_of(total, 1.0), **metrics}

    def _retriever_loss(
        self,
        packing: PackedLengths,
        params: PyTree,
        pairs: InverseClozeBatch,
        queries: jax.Array | None,
        documents: jax.Array | None,
    ) -> tuple[Array, Means]:
        cloze = retrieval.inverse_cloze(
            self._embed_queries(params, pairs.query_ids, queries),
            run_model(
                self.retriever,
                params,
                pairs.document_ids,
                pairs.document_segment_ids,
                method="embed_documents",
                key=documents,
                microbatches=self.microbatches,
                packed_length=packing.document,
            ),
            pairs.block_ids,
        )
        return cloze.loss_total / cloze.count, {
            "retriever_loss": mean_of(cloze.loss_total, cloze.count),
            "in_batch_accuracy": mean_of(cloze.correct, cloze.count),
            "padding_share": padding_share(
                pairs.query_ids, packed=[(pairs.document_ids, packing.document)]
            ),
        }

    def _distillation_loss(
        self, params: PyTree, inputs: TaughtQueries, key: jax.Array | None
    ) -> tuple[Array, Means]:
        taught = retrieval.distillation(
            self._embed_queries(params, inputs.query_ids, key),
            inputs.block_embeddings,
            inputs.teacher,
        )
        return taught.loss_total / taught.count, {
            "retriever_loss": mean_of(taught.loss_total, taught.count),
            "teacher_agreement": mean_of(taught.agreed, taught.count),
            "padding_share": padding_share(inputs.query_ids),
        }

    def _embed_queries(
        self, params: PyTree, ids: Int[Array, "batch query"], key: jax.Array | None
    ) -> Float[Array, "batch projection"]:
        return run_model(
            self.retriever,
            params,
            ids,
            method="embed_queries",
            key=key,
            microbatches=self.microbatches,
        )

    def _reader_loss(
        self,
        packing: PackedLengths,
        params: PyTree,
        inputs: ReaderInputs,
        key: jax.Array | None,
    ) -> tuple[Array, Means]:
        batch, unmasked = inputs.batch, inputs.unmasked
        span_is_answer = inputs.span_is_answer
        positions, ids = batch.mask_positions, batch.mask_ids
        if unmasked is not None:
            positions = jnp.where(unmasked.weights > 0, unmasked.positions, positions)
            ids = jnp.where(unmasked.weights > 0, unmasked.ids, ids)
        read = run_model(
            self.reader,
            params,
            inputs.joined_ids,
            inputs.joined_segment_ids,
            positions,
            ids,
            method="token_log_probs" if span_is_answer is None else "tokens_and_spans",
            key=key,
            microbatches=self.microbatches,
            packed_length=packing.joined,
        )
        log_tokens, spans = (read, None) if span_is_answer is None else read
        weights = batch.mask_weights
        total, count = -(log_tokens * weights).sum(), weights.sum()

        def of_kind(kind: DocumentKind) -> Array:
            return inputs.kind == KINDS.index(kind)

        metrics = {
            f"reader_loss_{kind.value}": mean_of(
                -(log_tokens * weights * of_kind(kind)[:, None]).sum(),
                (weights * of_kind(kind)[:, None]).sum(),
            )
            for kind in KINDS
        }
        retrieved = of_kind(DocumentKind.RETRIEVED)
        loss = total / jnp.maximum(count, 1.0)
        if unmasked is not None:
            seen_total = -(log_tokens * unmasked.weights).sum()
            seen_count = unmasked.weights.sum()
            loss += seen_total / jnp.maximum(seen_count, 1.0)
            metrics["reader_loss_unmasked"] = mean_of(seen_total, seen_count)
        if span_is_answer is not None:
            selected = open_qa.span_selection(spans.logits, spans.valid, span_is_answer)
            loss += selected.loss_total / jnp.maximum(selected.count, 1.0)
            metrics["span_loss"] = mean_of(selected.loss_total, selected.count)
            metrics["span_accuracy"] = mean_of(selected.correct, selected.count)
        return loss, {
            "reader_loss": mean_of(total, count),
            **metrics,
            "answer_retrieved": mean_of(
                (inputs.has_answer & retrieved).sum(), retrieved.sum()
            ),
            "padding_share": padding_share(
                packed=[(inputs.joined_ids, packing.joined)]
            ),
        }


def _packable(lengths: PackedLengths, inputs: WarmStartInputs) -> Sequences:
    sequences: list[tuple[Array, int | None]] = []
    if isinstance(inputs.pairs, InverseClozeBatch):
        sequences.append((inputs.pairs.document_ids, lengths.document))
    if inputs.reading is not None:
        sequences.append((inputs.reading.joined_ids, lengths.joined))
    return sequences


def draw_unmasked(
    batch: PretrainBatch,
    joined_ids: Int[np.ndarray, "batch joined"],
    vocabulary: WordPiece,
    *,
    seed: int,
    step: int,
    rows: Int[np.ndarray, " batch"],
) -> UnmaskedTargets:
    """Draws a wordpiece for each slot that a row's masks leave empty.

    The reader then scores as many positions as before, and the step takes no longer.
    Wordpieces, no special ones, are drawn uniformly and with replacement; they depend
    on the seed, the step, the row of the whole batch (`rows`) and its text alone.
    """
    count = batch.mask_weights.shape[1]
    drawn = uniform(Stream.UNMASKED, seed, step, int(rows.max()) + 1, count)[rows]
    can_be = ~np.isin(joined_ids, _special_ids(vocabulary))
    # A row's wordpieces, those that can be drawn first, in order.
    order = np.argsort(~can_be, axis=1, kind="stable")
    number = can_be.sum(axis=1, keepdims=True)
    positions = np.take_along_axis(order, (drawn * number).astype(np.int64), axis=1)
    is_free = (np.asarray(batch.mask_weights) == 0) & (number > 0)
    return UnmaskedTargets(
        is_free.astype(np.float32),
        positions.astype(np.int32),
        np.take_along_axis(joined_ids, positions, axis=1),
    )


def _special_ids(vocabulary: WordPiece) -> list[int]:
    return [
        vocabulary.pad,
        vocabulary.unk,
        vocabulary.cls,
        vocabulary.sep,
        vocabulary.mask,
    ]
