"""Implements the embedder: towers that map queries and documents to one space.

p(z|x) is the softmax over candidates of Embed_input(x) . Embed_doc(z), a raw inner
product (Guu et al. 2020, section 3.2). Each embedding is BERT's pooled [CLS], or the
mean over its wordpieces, followed by a projection, a LayerNorm and, in training,
dropout. A tower that starts as a published sentence encoder also has what that one
has: a dense layer, embeddings of length 1, words in front of a text (`prefix`), and,
if it keeps its width, no projection.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, PyTree

from realm_jax import ranges
from realm_jax.errors import BadInputError
from realm_jax.models import encoders, layers
from realm_jax.models.bert import PAD_ID, BertConfig, require_choices

QUERY_TOWER = "query_tower"
"""Key of the query tower's parameters, if there are two towers; all other parameters of
the retriever embed documents."""

DOCUMENT_TOWER = "document_tower"
"""Key of the document tower's parameters, if there are two towers."""

SETTINGS_OF_TRAINING = (
    "attention_dropout_rate",
    "attention_implementation",
    "broadcast_dropout",
    "dropout_rate",
    "initializer_range",
    "projection_dropout",
    "remat",
    "scan_unroll",
)
"""Settings of retriever and encoder that change embeddings by rounding at most."""

OF_SENTENCE_ENCODERS = (
    "dense_activation",
    "dense_size",
    "document_prefix",
    "normalize",
    "projected",
    "query_prefix",
)
"""Settings of the retriever that a published sentence encoder may need."""

_DENSE_ACTIVATIONS = {"identity": lambda x: x, "tanh": jnp.tanh}
# As torch.nn.functional.normalize has it.
_SMALLEST_LENGTH = 1e-12


def tie_towers(params: PyTree) -> PyTree:
    """Returns a retriever's parameters with the document tower for queries, too.

    Those of a single tower are tied, and returned as they are.
    """
    if DOCUMENT_TOWER not in params:
        return params
    return {**params, QUERY_TOWER: params[DOCUMENT_TOWER]}


@dataclass(frozen=True)
class RetrieverConfig:
    """Configuration of towers and projection.

    Attributes:
      bert: the encoder of each tower.
      projection_size: features of an embedding.
      pooling: "cls", BERT's pooled first position (REALM, ORQA); "cls_state", the first
        position of the last layer as it is (bge); or "mean", the mean over the last
        layer's wordpieces (Sentence-BERT, and so the MiniLM weights), which learns much
        faster from random initialisation.
      dense_size: features of the dense layer that a sentence encoder has after pooling;
        None if it has none.
      dense_activation: activation of that layer.
      normalize: whether a sentence encoder's features are divided by their length.
      projected: whether a projection follows, with its LayerNorm. Without one an
        embedding is the features, and `projection_size` is their number.
      shared: whether queries and documents share one tower (the authors' code) or have
        two (the paper's W_input and W_doc).
      layer_norm: whether to normalise projected embeddings. Without it training tends
        to collapse.
      layer_norm_epsilon: 1e-12 in the published embedder, 1e-3 in ORQA's.
      temperature: p(z|x) is the softmax of f(x, z) / temperature; 1.0 in the paper.
        Normalised embeddings of 128 features have inner products of up to 128, so that
        at 1.0 the best candidate may take all of p(z|x) and leave the others without a
        gradient. Both towers' embeddings are divided by its square root, so that inner
        products of indexed embeddings need no further scaling.
      projection_dropout: dropout of the normalised embedding in training.
      query_prefix: wordpieces that the query tower reads between [CLS] and a query,
        such as those of "query: ". They are added to the padded length.
      document_prefix: likewise for documents.
    """

    bert: BertConfig
    projection_size: int = 128
    pooling: Literal["cls", "cls_state", "mean"] = "cls"
    dense_size: int | None = None
    dense_activation: Literal["identity", "tanh"] = "identity"
    normalize: bool = False
    projected: bool = True
    shared: bool = True
    layer_norm: bool = True
    layer_norm_epsilon: float = 1e-12
    temperature: float = 1.0
    projection_dropout: float = 0.1
    query_prefix: tuple[int, ...] = ()
    document_prefix: tuple[int, ...] = ()

    def __post_init__(self):
        pieces = ranges.whole(1).each()
        ranges.require_ranges(
            self,
            projection_size=ranges.whole(1),
            dense_size=ranges.whole(1).or_none(),
            layer_norm_epsilon=ranges.POSITIVE,
            temperature=ranges.POSITIVE,
            projection_dropout=ranges.SHARE_BELOW_1,
            query_prefix=pieces,
            document_prefix=pieces,
        )
        for name in ("query_prefix", "document_prefix"):
            # JSON has lists, which have no hash.
            object.__setattr__(self, name, tuple(getattr(self, name)))
        require_choices(
            self,
            pooling=("cls", "cls_state", "mean"),
            dense_activation=_DENSE_ACTIVATIONS,
        )
        if not self.projected and self.projection_size != self.features:
            raise BadInputError(
                f"expected projection_size to be {self.features}, the encoder's "
                f"features, where projected is False, got {self.projection_size}. "
                "Correct the model configuration."
            )

    def rolled(self) -> "RetrieverConfig":
        """Returns the same retriever with its encoder rolled (`BertConfig.rolled`)."""
        return dataclasses.replace(self, bert=self.bert.rolled())

    @property
    def features(self) -> int:
        """Number of features before a projection."""
        return self.dense_size or self.bert.hidden_size

    def recorded(self) -> dict[str, Any]:
        """Returns the settings as JSON.

        Those that a sentence encoder alone has are left out where it is none, as in
        the records of older versions.
        """
        settings = dataclasses.asdict(self) | {"bert": encoders.recorded(self.bert)}
        for field in dataclasses.fields(self):
            value = settings[field.name]
            if field.name in OF_SENTENCE_ENCODERS and value == field.default:
                del settings[field.name]
            elif isinstance(value, tuple):
                settings[field.name] = list(value)
        return settings


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
        embedding = self._features(ids, segment_ids, deterministic, packed_length)
        if config.projected:
            embedding = self._dense(
                config.projection_size, ("embed", "projection"), "projection"
            )(embedding)
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

    def _features(
        self,
        ids: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"],
        deterministic: bool,
        packed_length: int | None,
    ) -> Float[Array, "batch embed"]:
        """Returns what a published sentence encoder takes for its embedding."""
        config = self.config
        bert = config.bert.make_encoder(name="bert")
        arguments = (ids, segment_ids, deterministic, packed_length)
        match config.pooling:
            case "mean":
                features = _mean(bert(*arguments).sequence, ids != PAD_ID)
            case "cls_state":
                features = bert.first(*arguments)
            case "cls":
                features = bert.pooled(*arguments)
        if config.dense_size is not None:
            dense = self._dense(config.dense_size, ("embed", None), "dense")
            features = _DENSE_ACTIVATIONS[config.dense_activation](dense(features))
        features = features.astype(jnp.float32)
        return _to_length_1(features) if config.normalize else features

    def _dense(
        self, features: int, kernel_axes: tuple[str, str | None], name: str
    ) -> layers.Dense:
        stddev = self.config.bert.initializer_range
        return layers.Dense((features,), kernel_axes, stddev, name=name)


def _mean(
    x: Float[Array, "batch length embed"], mask: Bool[Array, "batch length"]
) -> Float[Array, "batch embed"]:
    weights = mask.astype(x.dtype)
    count = jnp.maximum(weights.sum(axis=1, keepdims=True), 1)
    return jnp.einsum("bl,ble->be", weights / count, x)


def _to_length_1(x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    # Not the norm, whose gradient at zero is not a number.
    return x * jax.lax.rsqrt(jnp.maximum(square, _SMALLEST_LENGTH**2))


def _with_prefix(
    prefix: tuple[int, ...], row: Int[Array, "... length"]
) -> Int[Array, "... longer"]:
    """Inserts wordpieces, or their segments, after the first position of each row."""
    inserted = jnp.broadcast_to(
        jnp.array(prefix, row.dtype), (*row.shape[:-1], len(prefix))
    )
    return jnp.concatenate([row[..., :1], inserted, row[..., 1:]], axis=-1)


def _with_two_prefixes(
    prefix: tuple[int, ...], packed_length: int | None
) -> int | None:
    return None if packed_length is None else packed_length + 2 * len(prefix)


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
        self,
        ids: Int[Array, "... query"],
        deterministic: bool = True,
        packed_length: int | None = None,
    ) -> Float[Array, "... projection"]:
        """Embeds `[CLS] x [SEP]`, with the configuration's prefix before x.

        See `Encoder` for the rest.
        """
        tower = self.tower if self.config.shared else self.query_tower
        if prefix := self.config.query_prefix:
            ids = _with_prefix(prefix, ids)
            packed_length = _with_two_prefixes(prefix, packed_length)
        return tower(ids, jnp.zeros_like(ids), deterministic, packed_length)

    def embed_documents(
        self,
        ids: Int[Array, "... document"],
        segment_ids: Int[Array, "... document"],
        deterministic: bool = True,
        packed_length: int | None = None,
    ) -> Float[Array, "... projection"]:
        """Embeds `[CLS] title [SEP] body [SEP]`, with its prefix before the title.

        Segments are 0 for the title and 1 for the body; see `Encoder` for the rest.
        """
        tower = self.tower if self.config.shared else self.document_tower
        if prefix := self.config.document_prefix:
            ids = _with_prefix(prefix, ids)
            segment_ids = _with_prefix((0,) * len(prefix), segment_ids)
            packed_length = _with_two_prefixes(prefix, packed_length)
        return tower(ids, segment_ids, deterministic, packed_length)
