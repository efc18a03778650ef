"""The loss of each stage: models combined with their objective.

A loss maps (parameters, a step's inputs, random key) to a scalar and its metrics.
Parameters are one tree with a subtree per model: "retriever" and "reader".

`microbatches` is the number of parts of a batch that pass through a model one after
the other, forward and backward. The loss and its gradient are unchanged, also where
examples are compared with each other, in the memory of one part.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Int, PyTree

from realm_jax.data.layout import NULL_DOCUMENT_LENGTH
from realm_jax.metrics.means import Means, mean_of, merge, padding_share
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.models.span_reader import SpanReader, SpanScores
from realm_jax.objectives import (
    inverse_cloze,
    masked_lm,
    open_qa,
    retrieval,
    span_selection,
)
from realm_jax.objectives.masked_lm import Marginalization
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.objectives.retrieval import Normalization
from realm_jax.training.reader_documents import KINDS, DocumentKind
from realm_jax.training.step import Loss
from realm_jax.training.unmasked_targets import UnmaskedTargets
from realm_jax.types import (
    Array,
    Candidates,
    InverseClozeBatch,
    PretrainBatch,
    QuestionBatch,
)


@flax.struct.dataclass
class PretrainInputs:
    """A REALM step's inputs: masked sentences and the documents found for them.

    Attributes:
      batch: the masked sentences.
      candidates: the documents found for them.
      embeddings: embeddings of the candidates, if the index has them and they do not
        change; None to compute them in the step.
    """

    batch: PretrainBatch
    candidates: Candidates
    embeddings: Float[Array, "batch candidate projection"] | None = None


@dataclasses.dataclass(frozen=True)
class PretrainLoss(Loss):
    """-log p(y|x), marginalised over the candidates (REALM, section 3).

    Queries and all candidates are embedded in the step, with live parameters, so that
    gradients reach both towers; the index only chose the candidates. With a frozen
    document tower, embeddings of the candidates may be passed in. Metrics beside the
    loss are over the candidates of a sentence, whatever the normalisation.
    """

    retriever: Retriever
    reader: KnowledgeEncoder
    marginalization: Marginalization = Marginalization.PER_SPAN
    normalization: Normalization = Normalization.CANDIDATES
    microbatches: int = 1

    def __call__(
        self, params: PyTree, inputs: PretrainInputs, key: jax.Array
    ) -> tuple[Array, Means]:
        """Averages over scored masks or examples; metrics are means over examples."""
        loss, metrics, _ = self.with_embeddings(params, inputs, key)
        return loss, metrics

    def with_embeddings(
        self, params: PyTree, inputs: PretrainInputs, key: jax.Array
    ) -> tuple[Array, Means, Float[Array, "batch candidate projection"]]:
        """Also returns the candidates' embeddings, which the step computes anyway."""
        likelihood, log_retrieval, (queries, documents) = self._forward(
            params, inputs, key
        )
        weights, count = likelihood.weights, likelihood.weights.sum()
        loss = likelihood.loss_total / jnp.maximum(likelihood.loss_count, 1.0)

        def per_example(values):
            return mean_of((values * weights).sum(), count)

        of_batch = {}
        if self.normalization is Normalization.BATCH:
            log_share = retrieval.log_share_of_batch(
                queries,
                documents,
                inputs.candidates.block_ids,
                inputs.batch.source_block,
                inputs.candidates.valid,
            )
            loss -= (log_share * weights).sum() / jnp.maximum(count, 1.0)
            of_batch = {"share_of_batch": per_example(jnp.exp(log_share))}

        entropy = -jnp.where(
            inputs.candidates.valid, jnp.exp(log_retrieval) * log_retrieval, 0.0
        ).sum(axis=-1)
        metrics = {
            "loss": mean_of(loss * likelihood.loss_count, likelihood.loss_count),
            "retrieval_utility": per_example(likelihood.retrieval_utility),
            "likelihood": per_example(jnp.exp(likelihood.log_marginal)),
            "null_likelihood": per_example(jnp.exp(likelihood.log_null)),
            "null_retrieval": per_example(jnp.exp(log_retrieval[:, 0])),
            "retrieval_entropy": per_example(entropy),
            "padding_share": padding_share(
                inputs.batch.query_ids,
                inputs.candidates.document_ids,
                inputs.candidates.joined_ids,
            ),
            **of_batch,
        }
        return loss, metrics, documents

    def likelihood(
        self, params: PyTree, inputs: PretrainInputs, key: jax.Array | None
    ) -> tuple[masked_lm.MaskedLikelihood, Array]:
        """Returns the likelihoods and log p(z|x); a `key` of None disables dropout."""
        likelihood, log_retrieval, _ = self._forward(params, inputs, key)
        return likelihood, log_retrieval

    def _forward(
        self, params: PyTree, inputs: PretrainInputs, key: jax.Array | None
    ) -> tuple[masked_lm.MaskedLikelihood, Array, tuple[Array, Array]]:
        batch, candidates = inputs.batch, inputs.candidates
        queries, documents, reading = _keys(key, 3)
        document_embeddings = inputs.embeddings
        if document_embeddings is None:
            document_embeddings = self._for_candidates(
                self.retriever,
                params["retriever"],
                (candidates.document_ids, candidates.document_segment_ids),
                method="embed_documents",
                key=documents,
                null_length=NULL_DOCUMENT_LENGTH,
            )
        query_embeddings = _apply(
            self.retriever,
            params["retriever"],
            batch.query_ids,
            method="embed_queries",
            key=queries,
            microbatches=self.microbatches,
        )
        log_retrieval = retrieval.retrieval_log_probs(
            query_embeddings, document_embeddings, candidates.valid
        )
        log_tokens = self._for_candidates(
            self.reader,
            params["reader"],
            (candidates.joined_ids, candidates.joined_segment_ids),
            # One axis for the candidates: every document sees the same masks.
            batch.mask_positions[:, None, :],
            batch.mask_ids[:, None, :],
            method="token_log_probs",
            key=reading,
            null_length=batch.query_ids.shape[1] + 1,
        )
        likelihood = masked_lm.marginal_likelihood(
            log_retrieval, log_tokens, batch.mask_weights, self.marginalization
        )
        return likelihood, log_retrieval, (query_embeddings, document_embeddings)

    def _for_candidates(
        self,
        model: nn.Module,
        params: PyTree,
        sequences: tuple[Array, Array],
        *inputs: Array,
        method: str,
        key: jax.Array | None,
        null_length: int,
    ) -> Array:
        """Runs a model on all candidates, [batch, candidate, ...].

        The null document is short: at the length of the others it would cost as much as
        they do, an eighth of an update with eight candidates.

        Args:
          model: retriever or reader.
          params: its parameters.
          sequences: wordpieces and segments, [batch, candidate, length].
          *inputs: further inputs, the same for all candidates.
          method: method of the model.
          key: dropout key, or None.
          null_length: wordpieces of the null document's sequence, at most.
        """
        null, others = _keys(key, 2)
        parts = (
            (null, [x[:, :1, :null_length] for x in sequences]),
            (others, [x[:, 1:] for x in sequences]),
        )
        outputs = [
            _apply(
                model,
                params,
                *part,
                *inputs,
                method=method,
                key=part_key,
                microbatches=self.microbatches,
            )
            for part_key, part in parts
            if part[0].shape[1]
        ]
        return jnp.concatenate(outputs, axis=1)


@flax.struct.dataclass
class ReaderInputs:
    """Masked sentences, each joined with one document.

    Attributes:
      batch: the masked sentences.
      joined_ids, joined_segment_ids: sentence and document.
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
class WarmStartInputs:
    """The inputs of each model of a warm start; None for a model that is not trained.

    Attributes:
      pairs: sentence-block pairs for the retriever.
      reading: masked sentences joined with documents, for the reader.
    """

    pairs: InverseClozeBatch | None
    reading: ReaderInputs | None


@dataclasses.dataclass(frozen=True)
class WarmStartLoss(Loss):
    """ICT for the retriever plus a masked-LM start of the reader, or one of them.

    Both warm starts matter: a reader that cannot copy learns to ignore documents, and
    then the retriever gets no gradient (REALM, section 3.4, the cold-start problem).
    """

    retriever: Retriever
    reader: KnowledgeEncoder
    microbatches: int = 1

    def __call__(
        self, params: PyTree, inputs: WarmStartInputs, key: jax.Array
    ) -> tuple[Array, Means]:
        """Returns the sum of the losses, each averaged over its own terms."""
        queries, documents, reading = _keys(key, 3)
        losses, metrics = [], {}
        if inputs.pairs is not None:
            loss, found = self._retriever_loss(
                params["retriever"], inputs.pairs, queries, documents
            )
            losses, metrics = [loss], found
        if inputs.reading is not None:
            loss, found = self._reader_loss(params["reader"], inputs.reading, reading)
            losses, metrics = [*losses, loss], merge(metrics, found)
        total = jnp.stack(losses).sum()
        return total, {"loss": mean_of(total, 1.0), **metrics}

    def _retriever_loss(
        self,
        params: PyTree,
        pairs: InverseClozeBatch,
        queries: jax.Array | None,
        documents: jax.Array | None,
    ) -> tuple[Array, Means]:
        cloze = inverse_cloze.inverse_cloze(
            _apply(
                self.retriever,
                params,
                pairs.query_ids,
                method="embed_queries",
                key=queries,
                microbatches=self.microbatches,
            ),
            _apply(
                self.retriever,
                params,
                pairs.document_ids,
                pairs.document_segment_ids,
                method="embed_documents",
                key=documents,
                microbatches=self.microbatches,
            ),
            pairs.block_ids,
        )
        return cloze.loss_total / cloze.count, {
            "retriever_loss": mean_of(cloze.loss_total, cloze.count),
            "in_batch_accuracy": mean_of(cloze.correct, cloze.count),
            "padding_share": padding_share(pairs.query_ids, pairs.document_ids),
        }

    def _reader_loss(
        self, params: PyTree, inputs: ReaderInputs, key: jax.Array | None
    ) -> tuple[Array, Means]:
        batch, unmasked = inputs.batch, inputs.unmasked
        span_is_answer = inputs.span_is_answer
        positions, ids = batch.mask_positions, batch.mask_ids
        if unmasked is not None:
            positions = jnp.where(unmasked.weights > 0, unmasked.positions, positions)
            ids = jnp.where(unmasked.weights > 0, unmasked.ids, ids)
        read = _apply(
            self.reader,
            params,
            inputs.joined_ids,
            inputs.joined_segment_ids,
            positions,
            ids,
            method="token_log_probs" if span_is_answer is None else "tokens_and_spans",
            key=key,
            microbatches=self.microbatches,
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
            selected = span_selection.span_selection(
                spans.logits, spans.valid, span_is_answer
            )
            loss += selected.loss_total / jnp.maximum(selected.count, 1.0)
            metrics["span_loss"] = mean_of(selected.loss_total, selected.count)
            metrics["span_accuracy"] = mean_of(selected.correct, selected.count)
        return loss, {
            "reader_loss": mean_of(total, count),
            **metrics,
            "answer_retrieved": mean_of(
                (inputs.has_answer & retrieved).sum(), retrieved.sum()
            ),
            "padding_share": padding_share(inputs.joined_ids),
        }


@flax.struct.dataclass
class FinetuneInputs:
    """Questions with the blocks that the frozen index found.

    Attributes:
      questions: the questions of the step.
      block_embeddings: frozen embeddings of the retrieved blocks, best first.
      block_valid: False for an empty slot.
      block_has_answer: whether the block's body contains an answer.
      joined_ids, joined_segment_ids: question and body of the blocks that are read,
        which are the first of the retrieved ones.
      span_is_answer: for each of the reader's spans, whether it is an answer.
    """

    questions: QuestionBatch
    block_embeddings: Array
    block_valid: Array
    block_has_answer: Array
    joined_ids: Array
    joined_segment_ids: Array
    span_is_answer: Array


@dataclasses.dataclass(frozen=True)
class FinetuneLoss(Loss):
    """Retriever loss plus reader loss over a frozen index (ORQA, section 5)."""

    retriever: Retriever
    reader: SpanReader
    marginalization: AnswerMarginalization = AnswerMarginalization.JOINT_SOFTMAX
    microbatches: int = 1

    def __call__(
        self, params: PyTree, inputs: FinetuneInputs, key: jax.Array
    ) -> tuple[Array, Means]:
        """Returns retriever loss plus reader loss, averaged over the questions."""
        queries, reading = _keys(key, 2)
        embeddings = _apply(
            self.retriever,
            params["retriever"],
            inputs.questions.question_ids,
            method="embed_queries",
            key=queries,
            microbatches=self.microbatches,
        )
        scores = jnp.einsum("bp,bnp->bn", embeddings, inputs.block_embeddings)
        scores = jnp.where(inputs.block_valid, scores, -jnp.inf)
        spans: SpanScores = _apply(
            self.reader,
            params["reader"],
            inputs.joined_ids,
            inputs.joined_segment_ids,
            key=reading,
            microbatches=self.microbatches,
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
            "padding_share": padding_share(
                inputs.questions.question_ids, inputs.joined_ids
            ),
        }


def _keys(key: jax.Array | None, count: int) -> list[jax.Array | None]:
    """Returns one dropout key per forward pass; None for each without a key."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def _apply(
    model: nn.Module,
    params: PyTree,
    *inputs: Array,
    key: jax.Array | None,
    method: str | None = None,
    microbatches: int = 1,
) -> Any:
    """Runs a model; a `key` of None disables dropout."""

    def run(key: jax.Array | None, *inputs: Array) -> Any:
        return model.apply(
            {"params": params},
            *inputs,
            deterministic=key is None,
            method=method,
            rngs=None if key is None else {"dropout": key},
        )

    if microbatches == 1:
        return run(key, *inputs)
    keys = None if key is None else jax.random.split(key, microbatches)
    # The backward pass recomputes each part; only its inputs are kept.
    outputs = jax.lax.map(
        lambda part: jax.checkpoint(run)(*part),
        (keys, *(_split(array, microbatches) for array in inputs)),
    )
    return jax.tree.map(_join, outputs)


def _split(array: Array, parts: int) -> Array:
    """Reshapes [batch, ...] to [part, example, ...].

    Every n-th example goes to the same part, so that each part is spread over the
    devices as the batch is.
    """
    return jnp.swapaxes(array.reshape(-1, parts, *array.shape[1:]), 0, 1)


def _join(array: Array) -> Array:
    """Inverts `_split`."""
    return jnp.swapaxes(array, 0, 1).reshape(-1, *array.shape[2:])
