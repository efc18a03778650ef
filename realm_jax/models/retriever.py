"""Implements the embedder: towers that map queries and documents to one space.

p(z|x) is the softmax over candidates of Embed_input(x) . Embed_doc(z), a raw inner
product (Guu et al. 2020, section 3.2). Each embedding is BERT's pooled [CLS], or the
mean over its wordpieces, followed by a projection, a LayerNorm and, in training,
dropout.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from realm_jax import ranges
from realm_jax.errors import BadInputError
from realm_jax.models import layers
from realm_jax.models.bert import PAD_ID, Bert, BertConfig

QUERY_TOWER = "query_tower"
"""Key of the query tower's parameters, if there are two towers; all other parameters of
the retriever embed documents."""

DOCUMENT_TOWER = "document_tower"
"""Key of the document tower's parameters, if there are two towers."""

SETTINGS_OF_TRAINING = (
    "attention_dropout_rate",
    "broadcast_dropout",
    "dropout_rate",
    "initializer_range",
    "projection_dropout",
    "remat",
    "scan_unroll",
)
"""Settings of retriever and encoder that do not change embeddings."""


@dataclass(frozen=True)
class RetrieverConfig:
    """Configuration of towers and projection.

    Attributes:
      bert: the encoder of each tower.
      projection_size: features of an embedding.
      pooling: "cls", BERT's pooled first position (REALM, ORQA), or "mean", the mean
        over the last layer's wordpieces (Sentence-BERT, and so the MiniLM weights),
        which learns much faster from random initialisation.
      shared: whether queries and documents share one tower (the authors' code) or have
        two (the paper's W_input and W_doc).
      layer_norm: whether to normalise embeddings. Without it training tends to
        collapse.
      layer_norm_epsilon: 1e-12 in the published embedder, 1e-3 in ORQA's.
      temperature: p(z|x) is the softmax of f(x, z) / temperature; 1.0 in the paper.
        Normalised embeddings of 128 features have inner products of up to 128, so that
        at 1.0 the best candidate may take all of p(z|x) and leave the others without a
        gradient. Both towers' embeddings are divided by its square root, so that inner
        products of indexed embeddings need no further scaling.
      projection_dropout: dropout of the normalised embedding in training.
    """

    bert: BertConfig
    projection_size: int = 128
    pooling: Literal["cls", "mean"] = "cls"
    shared: bool = True
    layer_norm: bool = True
    layer_norm_epsilon: float = 1e-12
    temperature: float = 1.0
    projection_dropout: float = 0.1

    def __post_init__(self):
        ranges.require_ranges(
            self,
            projection_size=ranges.whole(1),
            layer_norm_epsilon=ranges.POSITIVE,
            temperature=ranges.POSITIVE,
            projection_dropout=ranges.SHARE_BELOW_1,
        )
        if self.pooling not in ("cls", "mean"):
            raise BadInputError(
                f"expected pooling to be one of cls, mean, got {self.pooling!r}. "
                "Correct the model configuration."
            )


class Tower(nn.Module):
    """A tower, which maps a sequence of wordpieces to an embedding."""

    config: RetrieverConfig

    @nn.compact
    def __call__(
        self,
        ids: Int[Array, "... length"],
        segment_ids: Int[Array, "... length"],
        deterministic: bool,
        packed_length: int | None = None,
    ) -> Float[Array, "... projection"]:
        """Returns a float32 embedding for each sequence; leading axes are kept."""
        config, leading = self.config, ids.shape[:-1]
        ids = ids.reshape(-1, ids.shape[-1])
        segment_ids = segment_ids.reshape(ids.shape)
        bert = Bert(config.bert, name="bert")
        if config.pooling == "mean":
            encoded = bert(ids, segment_ids, deterministic, packed_length)
            pooled = _mean(encoded.sequence, ids != PAD_ID)
        else:
            pooled = bert.pooled(ids, segment_ids, deterministic, packed_length)
        embedding = layers.Dense(
            features=(config.projection_size,),
            kernel_axes=("embed", "projection"),
            stddev=config.bert.initializer_range,
            name="projection",
        )(pooled)
        if config.layer_norm:
            embedding = layers.LayerNorm(
                config.layer_norm_epsilon, name="projection_norm"
            )(embedding)
        embedding = embedding * config.temperature**-0.5
        embedding = nn.Dropout(config.projection_dropout)(
            embedding, deterministic=deterministic
        )
        embedding = layers.constrain(embedding, "batch", "projection")
        return embedding.reshape(*leading, config.projection_size)


def _mean(
    x: Float[Array, "batch length embed"], mask: Bool[Array, "batch length"]
) -> Float[Array, "batch embed"]:
    weights = mask.astype(x.dtype)
    count = jnp.maximum(weights.sum(axis=1, keepdims=True), 1)
    return jnp.einsum("bl,ble->be", weights / count, x)


class Retriever(nn.Module):
    """Query and document towers."""

    config: RetrieverConfig

    def setup(self):
        """Creates one tower or two."""
        if self.config.shared:
            self.tower = Tower(self.config)
        else:
            # Their names are QUERY_TOWER and DOCUMENT_TOWER.
            self.query_tower = Tower(self.config)
            self.document_tower = Tower(self.config)

    def __call__(
        self,
        query_ids: Int[Array, "batch query"],
        document_ids: Int[Array, "... document"],
        document_segment_ids: Int[Array, "... document"],
        deterministic: bool = True,
    ) -> tuple[Float[Array, "batch projection"], Float[Array, "... projection"]]:
        """Embeds queries and documents; `init` through it creates both towers."""
        return (
            self.embed_queries(query_ids, deterministic),
            self.embed_documents(document_ids, document_segment_ids, deterministic),
        )

    def embed_queries(
        self, ids: Int[Array, "... query"], deterministic: bool = True
    ) -> Float[Array, "... projection"]:
        """Embeds `[CLS] x [SEP]`.

        Args:
          ids: wordpieces, 0 where padded.
          deterministic: disables dropout; otherwise an rng named "dropout" is needed.
        """
        tower = self.tower if self.config.shared else self.query_tower
        return tower(ids, jnp.zeros_like(ids), deterministic)

    def embed_documents(
        self,
        ids: Int[Array, "... document"],
        segment_ids: Int[Array, "... document"],
        deterministic: bool = True,
        packed_length: int | None = None,
    ) -> Float[Array, "... projection"]:
        """Embeds `[CLS] title [SEP] body [SEP]`.

        Args:
          ids: wordpieces, 0 where padded.
          segment_ids: 0 for the title, 1 for the body.
          deterministic: disables dropout; otherwise an rng named "dropout" is needed.
          packed_length: wordpieces of a row that two documents share; see `Bert`.
        """
        tower = self.tower if self.config.shared else self.document_tower
        return tower(ids, segment_ids, deterministic, packed_length)
