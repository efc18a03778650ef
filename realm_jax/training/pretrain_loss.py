"""REALM's loss: the likelihood of masked wordpieces, over retrieved documents."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from clu.metrics import Average
from flax import linen as nn
from jaxtyping import Float, PyTree

from realm_jax.data.layout import NULL_DOCUMENT_LENGTH
from realm_jax.errors import BadInputError
from realm_jax.metrics.means import Means, mean_of, padding_share
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.objectives import masked_lm, pretraining, retrieval
from realm_jax.objectives.masked_lm import Marginalization
from realm_jax.objectives.pretraining import Evidence, Objective
from realm_jax.objectives.retrieval import Normalization
from realm_jax.training.packed_updates import (
    PackedLengths,
    Sequences,
    compute_packed,
)
from realm_jax.training.step import Loss, run_model, split_key
from realm_jax.types import Array, Candidates, PretrainBatch


@flax.struct.dataclass
class PretrainInputs:
    """Masked sentences and the documents found for them.

    Embeddings of these are None where the step computes them.
    """

    batch: PretrainBatch
    candidates: Candidates
    embeddings: Float[Array, "batch candidate projection"] | None = None


@dataclasses.dataclass(frozen=True)
class PretrainLoss(Loss):
    """An objective of masked sentences and their candidates (REALM, section 3).

    Queries and all candidates are embedded in the step, with live parameters, so that
    gradients reach both towers; the index only chose the candidates. With a frozen
    document tower, embeddings of the candidates may be passed in. Metrics beside the
    loss are over the candidates of a sentence, whatever the normalisation. The null
    document is never packed.
    """

    retriever: Retriever
    reader: KnowledgeEncoder
    marginalization: Marginalization = Marginalization.PER_SPAN
    normalization: Normalization = Normalization.CANDIDATES
    microbatches: int = 1
    packing: PackedLengths | None = None
    objective: Objective = pretraining.marginal_likelihood

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
        loss, (metrics, documents), packed = compute_packed(
            self._compute,
            self.packing,
            lambda lengths: self._packable(lengths, inputs),
            self.microbatches,
            params,
            inputs,
            key,
        )
        return loss, {**metrics, **packed}, documents

    def _packable(self, lengths: PackedLengths, inputs: PretrainInputs) -> Sequences:
        """Returns the sequences that are packed, and the length of their rows."""
        queries = inputs.batch.query_ids, lengths.query
        joined = inputs.candidates.joined_ids[:, 1:], lengths.joined
        if inputs.embeddings is not None:
            return [queries, joined]
        documents = inputs.candidates.document_ids[:, 1:], lengths.document
        return [queries, documents, joined]

    def _compute(
        self,
        packing: PackedLengths,
        params: PyTree,
        inputs: PretrainInputs,
        key: jax.Array,
    ) -> tuple[Array, tuple[Means, Float[Array, "batch candidate projection"]]]:
        evidence = self._forward(packing, params, inputs, key)
        likelihood, log_retrieval = evidence.likelihood, evidence.log_retrieval
        weights, count = likelihood.weights, likelihood.weights.sum()

        def per_example(values):
            return mean_of((values * weights).sum(), count)

        of_batch = {}
        if self.normalization is Normalization.BATCH:
            log_share = retrieval.log_share_of_batch(
                evidence.query_embeddings,
                evidence.document_embeddings,
                evidence.block_ids,
                evidence.source_block,
                evidence.valid,
            )
            evidence = evidence.replace(log_share=log_share)
            of_batch = {"share_of_batch": per_example(jnp.exp(log_share))}

        loss, of_objective = self.objective(evidence)
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
            "padding_share": self._padding_share(packing, inputs),
            **of_batch,
        }
        if taken := sorted(metrics.keys() & of_objective.keys()):
            raise BadInputError(
                f"expected new names for the metrics of an objective, got {taken}, "
                "which every pre-training step measures; rename them"
            )
        metrics |= {name: mean_of(*sums) for name, sums in of_objective.items()}
        return loss, (metrics, evidence.document_embeddings)

    def _padding_share(self, lengths: PackedLengths, inputs: PretrainInputs) -> Average:
        """Returns the share of padding among the positions that models compute."""
        query_ids, candidates = inputs.batch.query_ids, inputs.candidates
        alone = [candidates.joined_ids[:, :1, : _null_length(query_ids)]]
        if inputs.embeddings is None:
            alone.append(candidates.document_ids[:, :1, :NULL_DOCUMENT_LENGTH])
        return padding_share(*alone, packed=self._packable(lengths, inputs))

    def _forward(
        self,
        packing: PackedLengths,
        params: PyTree,
        inputs: PretrainInputs,
        key: jax.Array,
    ) -> Evidence:
        batch, candidates = inputs.batch, inputs.candidates
        queries, documents, reading = split_key(key, 3)
        document_embeddings = inputs.embeddings
        if document_embeddings is None:
            document_embeddings = self._for_candidates(
                self.retriever,
                params["retriever"],
                (candidates.document_ids, candidates.document_segment_ids),
                method="embed_documents",
                key=documents,
                null_length=NULL_DOCUMENT_LENGTH,
                packed_length=packing.document,
            )
        query_embeddings = run_model(
            self.retriever,
            params["retriever"],
            batch.query_ids,
            method="embed_queries",
            key=queries,
            microbatches=self.microbatches,
            packed_length=packing.query,
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
            null_length=_null_length(batch.query_ids),
            packed_length=packing.joined,
        )
        likelihood = masked_lm.marginal_likelihood(
            log_retrieval, log_tokens, batch.mask_weights, self.marginalization
        )
        return Evidence(
            likelihood=likelihood,
            log_retrieval=log_retrieval,
            log_share=jnp.zeros_like(likelihood.weights),
            log_tokens=log_tokens,
            mask_weights=batch.mask_weights,
            query_embeddings=query_embeddings,
            document_embeddings=document_embeddings,
            block_ids=candidates.block_ids,
            source_block=batch.source_block,
            valid=candidates.valid,
        )

    def _for_candidates(
        self,
        model: nn.Module,
        params: PyTree,
        sequences: tuple[Array, Array],
        *inputs: Array,
        method: str,
        key: jax.Array | None,
        null_length: int,
        packed_length: int | None,
    ) -> Array:
        """Runs a model on all candidates, of shape [batch, candidate, length].

        The null document is short: at the length of the others it would cost as much as
        they do, an eighth of an update with eight candidates.
        """
        null, others = split_key(key, 2)
        parts = (
            (null, [x[:, :1, :null_length] for x in sequences], None),
            (others, [x[:, 1:] for x in sequences], packed_length),
        )
        outputs = [
            run_model(
                model,
                params,
                *part,
                *inputs,
                method=method,
                key=part_key,
                microbatches=self.microbatches,
                packed_length=row,
            )
            for part_key, part, row in parts
            if part[0].shape[1]
        ]
        return jnp.concatenate(outputs, axis=1)


def _null_length(query_ids: Array) -> int:
    """Returns the wordpieces of a sentence joined with the null document, at most."""
    return query_ids.shape[1] + 1
