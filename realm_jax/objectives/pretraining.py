"""Objectives of pre-training, by the names that `PretrainConfig.objective` takes.

REALM's marginal likelihood is built in. One of your own is a pure function that is
registered where it is defined; see `examples/own_objective.py`. A run that trains with
it imports that module first (`--import_module` of a command).
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from realm_jax.objectives.masked_lm import MaskedLikelihood
from realm_jax.registry import Registry
from realm_jax.types import Array


@flax.struct.dataclass
class Evidence:
    """What the models say of a batch of masked sentences and their candidates.

    Candidate 0 is the null document. Gradients reach both towers through the embeddings
    and `log_retrieval`, and the reader through `log_tokens`.

    Attributes:
      likelihood: of the masked spans, by candidate and marginalised over them.
      log_retrieval: log p(z|x) over the candidates of a sentence.
      log_share: what to add to it for p(z|x) over the batch; 0 where `normalization` is
        "candidates" (`retrieval.log_share_of_batch`).
      log_tokens: log p(token|z,x) of each masked wordpiece.
      mask_weights: 1.0 for a scored mask, 0.0 for padding.
      query_embeddings: of the sentences.
      document_embeddings: of the candidates.
      block_ids: block of each candidate, -1 for the null document.
      source_block: the block that a sentence was taken from, -1 if none.
      valid: False for an empty slot, whose log p(z|x) is -inf.
    """

    likelihood: MaskedLikelihood
    log_retrieval: Float[Array, "batch candidate"]
    log_share: Float[Array, " batch"]
    log_tokens: Float[Array, "batch candidate mask"]
    mask_weights: Float[Array, "batch mask"]
    query_embeddings: Float[Array, "batch projection"]
    document_embeddings: Float[Array, "batch candidate projection"]
    block_ids: Int[Array, "batch candidate"]
    source_block: Int[Array, " batch"]
    valid: Bool[Array, "batch candidate"]


Objective = Callable[
    [Evidence], tuple[Float[Array, ""], Mapping[str, tuple[Array, Array]]]
]
"""Maps the evidence to a scalar to minimise, and to metrics of its own as (sum, count).

It is hashable, as a function is. The report takes the scalar for nats of a sentence."""

MARGINAL_LIKELIHOOD = "marginal_likelihood"


def marginal_likelihood(
    evidence: Evidence,
) -> tuple[Float[Array, ""], Mapping[str, tuple[Array, Array]]]:
    """Computes the mean of -log p(y|x), or p(token|x) (REALM, equation 1)."""
    likelihood = evidence.likelihood
    # p(z|x) over the batch is a factor of every term.
    total = likelihood.loss_total - (evidence.log_share * likelihood.loss_terms).sum()
    return total / jnp.maximum(likelihood.loss_count, 1.0), {}


_OBJECTIVES: Registry[Objective] = Registry(
    "objective", {MARGINAL_LIKELIHOOD: marginal_likelihood}
)


def register_objective(name: str) -> Callable[[Objective], Objective]:
    """Returns a decorator that registers an objective under a name of its own."""
    return _OBJECTIVES.register(name)


def registered(name: Any) -> Objective:
    """Returns the objective that has a name, which may come from a gin file."""
    return _OBJECTIVES.get(name)
