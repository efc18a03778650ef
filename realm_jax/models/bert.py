"""Implements BERT's encoder (Devlin et al. 2019): embeddings, scanned layers, a pooler.

Parameters of the layers are stacked along a leading `layer` axis, so compile time does
not grow with depth.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import partitioning
from jaxtyping import Array, Bool, Float, Int

from realm_jax import chips
from realm_jax.errors import BadInputError
from realm_jax.models import layers

PAD_ID = 0

_WITHIN_LAYERS = "attention"
_REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}

REMAT = ("none", _WITHIN_LAYERS, *_REMAT_POLICIES)
"""What `BertConfig.remat` may be: the fewest operations and the most memory first."""

_BY_PROCESSOR = "auto"


@dataclass(frozen=True)
class BertConfig:
    """Size and numerics of an encoder.

    Attributes:
      vocab_size: number of wordpieces; [PAD] is wordpiece 0.
      hidden_size: features of a position.
      num_layers: number of transformer layers.
      num_heads: number of attention heads; divides `hidden_size`.
      mlp_size: features between the two projections of a layer's MLP.
      max_positions: length of the longest sequence, in wordpieces.
      num_segments: number of segment ids.
      activation: "gelu_tanh" (the original BERT and REALM) or "gelu" (exact, by the
        error function, as in `transformers` and MiniLM).
      layer_norm_epsilon: epsilon of every LayerNorm.
      dropout_rate: dropout of embeddings, attention weights and residual branches.
      broadcast_dropout: share one mask among all positions of a sequence (in attention,
        among all queries of a head), as T5X does; BERT draws one for each position.
        Sharing takes a hundredth of the random numbers.
      dtype: "float32" or "bfloat16", for activations; parameters are float32.
      products: dtype of the operands of the layers' matrix products where activations
        are float32: "float32"; "bfloat16", accumulated in float32, which some
        processors compute twice as fast; or "auto", which is "bfloat16" on such a
        processor and "float32" on others. On TPUs and GPUs the compiler's default
        precision determines how "float32" is computed.
      remat: what the backward pass recomputes: "none"; "attention" (attention weights,
        activations and normalisation, which are quicker to compute again than to keep,
        at least on a CPU); "dots" (all but matrix products); or "full" (each layer from
        its input).
      initializer_range: standard deviation of the initial kernels.
      scan_unroll: layers per iteration of the scan. More of them take longer to compile
        and run faster on a CPU (by a quarter, for two layers per iteration).
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int
    max_positions: int = 512
    num_segments: int = 2
    activation: Literal["gelu_tanh", "gelu"] = "gelu_tanh"
    layer_norm_epsilon: float = 1e-12
    dropout_rate: float = 0.0
    broadcast_dropout: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    products: Literal["float32", "bfloat16", "auto"] = "float32"
    remat: Literal["none", "attention", "dots", "full"] = "attention"
    initializer_range: float = 0.02
    scan_unroll: int = 1

    def __post_init__(self):
        if self.hidden_size % self.num_heads:
            raise BadInputError(
                f"expected num_heads to divide hidden_size {self.hidden_size}, got "
                f"{self.num_heads}. Choose another num_heads."
            )
        for name, known in (
            ("activation", tuple(layers.ACTIVATIONS)),
            ("dtype", ("float32", "bfloat16")),
            ("products", ("float32", "bfloat16", _BY_PROCESSOR)),
            ("remat", REMAT),
        ):
            if getattr(self, name) not in known:
                raise BadInputError(
                    f"expected {name} to be one of {', '.join(known)}, got "
                    f"{getattr(self, name)!r}. Correct the model configuration."
                )

    @property
    def rounds_products(self) -> bool:
        """True if `layers.Dense` rounds its operands to bfloat16; see `products`."""
        if self.dtype != "float32":
            return False
        if self.products == _BY_PROCESSOR:
            return jax.default_backend() == "cpu" and chips.multiplies_bfloat16()
        return self.products == "bfloat16"

    @property
    def recomputes_within_layers(self) -> bool:
        """True if parts of a layer are computed again one by one; see `remat`."""
        return self.remat == _WITHIN_LAYERS


class Encoded(NamedTuple):
    """Output of the encoder.

    Attributes:
      sequence: hidden state of each position, in the dtype of the configuration.
      pooled: output of the tanh pooler on [CLS], in the same dtype.
    """

    sequence: Float[Array, "batch length embed"]
    pooled: Float[Array, "batch embed"]


class EncoderLayer(nn.Module):
    """Attention and MLP, each followed by a residual connection and a LayerNorm."""

    config: BertConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        is_token: Bool[Array, "batch length"],
        deterministic: bool,
    ) -> tuple[Float[Array, "batch length embed"], None]:
        """Returns the next layer's input, and None as the scan's stacked output."""
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        attended = layers.SelfAttention(
            num_heads=config.num_heads,
            dropout_rate=config.dropout_rate,
            broadcast_dropout=config.broadcast_dropout,
            stddev=config.initializer_range,
            dtype=dtype,
            rounds=config.rounds_products,
            recomputes=config.recomputes_within_layers,
            name="attention",
        )(x, is_token, deterministic)
        x = self._add_and_norm(x, attended, "attention_norm", deterministic)

        hidden = self._dense(config.mlp_size, ("embed", "mlp"), "mlp_input")(x)
        activation = layers.ACTIVATIONS[config.activation]
        if config.recomputes_within_layers:
            activation = jax.checkpoint(activation)
        hidden = activation(hidden)
        hidden = layers.constrain(hidden, "batch", "length", "activation_mlp")
        hidden = self._dense(config.hidden_size, ("mlp", "embed"), "mlp_output")(hidden)
        return self._add_and_norm(x, hidden, "mlp_norm", deterministic), None

    def _dense(self, features: int, axis_names: tuple[str, str], name: str):
        return layers.Dense(
            features=(features,),
            kernel_axes=axis_names,
            stddev=self.config.initializer_range,
            dtype=jnp.dtype(self.config.dtype),
            rounds=self.config.rounds_products,
            name=name,
        )

    def _add_and_norm(self, x, branch, name: str, deterministic: bool):
        config = self.config
        dropout = layers.dropout(config.dropout_rate, config.broadcast_dropout)
        branch = dropout(branch, deterministic=deterministic)
        norm = layers.LayerNorm(
            config.layer_norm_epsilon,
            jnp.dtype(config.dtype),
            config.recomputes_within_layers,
            name=name,
        )
        return layers.constrain(norm(x + branch), "batch", "length", "activation_embed")


class Bert(nn.Module):
    """BERT's encoder."""

    config: BertConfig

    def setup(self):
        """Creates embeddings, layers and pooler."""
        config, dtype = self.config, jnp.dtype(self.config.dtype)

        def embedding(rows: int, row_axis: str) -> layers.Embedding:
            return layers.Embedding(
                rows, config.hidden_size, row_axis, config.initializer_range, dtype
            )

        self.token_embedding = embedding(config.vocab_size, "vocab")
        self.position_embedding = embedding(config.max_positions, "position")
        self.segment_embedding = embedding(config.num_segments, "segment")
        self.embedding_norm = layers.LayerNorm(config.layer_norm_epsilon, dtype)
        self.dropout = layers.dropout(config.dropout_rate, config.broadcast_dropout)
        self.layers = _stacked_layers(config)
        self.pooler = layers.Dense(
            features=(config.hidden_size,),
            kernel_axes=("embed", None),
            stddev=config.initializer_range,
            dtype=dtype,
        )

    def __call__(
        self,
        ids: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"],
        deterministic: bool = True,
    ) -> Encoded:
        """Encodes padded sequences.

        Args:
          ids: wordpieces, 0 where padded.
          segment_ids: 0 or 1; arbitrary where padded.
          deterministic: disables dropout; otherwise an rng named "dropout" is needed.

        Raises:
          BadInputError: sequences are longer than `max_positions`.
        """
        length = ids.shape[1]
        if length > self.config.max_positions:
            raise BadInputError(
                f"expected sequences of at most {self.config.max_positions} wordpieces "
                f"(max_positions), got {length}. Shorten them or enlarge the model."
            )
        x = (
            self.token_embedding(ids)
            + self.position_embedding.first_rows(length)
            + self._embed_segments(segment_ids)
        )
        x = self.dropout(self.embedding_norm(x), deterministic=deterministic)
        x = layers.constrain(x, "batch", "length", "activation_embed")
        x, _ = self.layers(x, ids != PAD_ID, deterministic)
        return Encoded(sequence=x, pooled=jnp.tanh(self.pooler(x[:, 0])))

    def token_logits(self, x: Float[Array, "... embed"]) -> Float[Array, "... vocab"]:
        """Returns float32 inner products with every token embedding."""
        return self.token_embedding.attend(x)

    def _embed_segments(self, segment_ids):
        # A product with a one-hot matrix: the gradient of a gather is a scatter, which
        # is slow where many rows add up in a few.
        one_hot = jax.nn.one_hot(segment_ids, self.config.num_segments)
        table = self.segment_embedding.first_rows(self.config.num_segments)
        return one_hot.astype(table.dtype) @ table


def _stacked_layers(config: BertConfig) -> nn.Module:
    """Returns `num_layers` encoder layers as one scan."""
    layer = EncoderLayer
    if config.remat in _REMAT_POLICIES:
        layer = nn.remat(
            layer,
            policy=_REMAT_POLICIES[config.remat],
            prevent_cse=False,  # The scan's loop already prevents it.
            static_argnums=(3,),
        )
    # Annotated for a single axis; `nn.scan`, which it calls, takes one for each input.
    scan_with_axes: Any = partitioning.scan_with_axes
    scan = scan_with_axes(
        layer,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(nn.broadcast, nn.broadcast),
        length=config.num_layers,
        unroll=config.scan_unroll,
        axis_name="layer",
    )
    return scan(config)
