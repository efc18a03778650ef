"""Computes the masked-language-model likelihood, marginalised over documents.

Shapes follow `realm_jax.types`; logarithms are natural, likelihoods are in nats.
"""

import enum

import flax.struct
import jax
from jaxtyping import Float

from realm_jax.types import Array


class Marginalization(enum.Enum):
    """Placement of the sum over documents.

    PER_TOKEN: each masked wordpiece is marginalised separately, as in the authors'
      code.
    PER_SPAN: the wordpieces of one example are multiplied inside p(y|z,x) first, as in
      the paper (REALM, section 3.2).
    """

    PER_TOKEN = "per_token"
    PER_SPAN = "per_span"


@flax.struct.dataclass
class MaskedLikelihood:
    """Likelihoods of a batch of masked sentences.

    Attributes:
      loss_total: summed negative log-likelihood.
      loss_terms: the number of its terms of each example: its masks (`PER_TOKEN`), or 1
        (`PER_SPAN`); 0 for one without a scored mask.
      log_marginal: log p(y|x) of each example's whole span.
      log_null: log p(y|null,x), the span given the null document alone.
      log_candidates: log p(y|z,x), the span given each candidate.
      weights: 1.0 for an example that has a scored mask, else 0.0.
    """

    loss_total: Float[Array, ""]
    loss_terms: Float[Array, " batch"]
    log_marginal: Float[Array, " batch"]
    log_null: Float[Array, " batch"]
    log_candidates: Float[Array, "batch candidate"]
    weights: Float[Array, " batch"]

    @property
    def loss_count(self) -> Float[Array, ""]:
        """The number of terms of the loss."""
        return self.loss_terms.sum()

    @property
    def retrieval_utility(self) -> Float[Array, " batch"]:
        """The gain from retrieval, log p(y|x) - log p(y|null,x) (REALM, section 5)."""
        return self.log_marginal - self.log_null


def marginal_likelihood(
    log_retrieval: Float[Array, "batch candidate"],
    log_tokens: Float[Array, "batch candidate mask"],
    mask_weights: Float[Array, "batch mask"],
    marginalization: Marginalization,
) -> MaskedLikelihood:
    """Computes -log p(y|x) = -log sum_z p(y|z,x) p(z|x) (REALM, equation 1).

    Args:
      log_retrieval: log p(z|x); the null document is candidate 0.
      log_tokens: log p(token|z,x) of each masked wordpiece.
      mask_weights: 1.0 for a scored mask, 0.0 for padding.
      marginalization: placement of the sum over documents in the loss. The likelihoods
        in the result are per span with either value.
    """
    log_tokens = log_tokens * mask_weights[:, None, :]
    log_candidates = log_tokens.sum(axis=-1)
    log_marginal = jax.nn.logsumexp(log_retrieval + log_candidates, axis=-1)
    weights = (mask_weights.sum(axis=-1) > 0).astype(log_tokens.dtype)
    match marginalization:
        case Marginalization.PER_TOKEN:
            mixture = jax.nn.logsumexp(log_retrieval[:, :, None] + log_tokens, axis=1)
            loss_total = -(mixture * mask_weights).sum()
            loss_terms = mask_weights.sum(axis=-1)
        case Marginalization.PER_SPAN:
            loss_total = -(log_marginal * weights).sum()
            loss_terms = weights
    return MaskedLikelihood(
        loss_total=loss_total,
        loss_terms=loss_terms,
        log_marginal=log_marginal,
        log_null=log_candidates[:, 0],
        log_candidates=log_candidates,
        weights=weights,
    )
