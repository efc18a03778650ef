"""Implements BERT's encoder (Devlin et al. 2019): embeddings, scanned layers, a pooler.

Parameters of the layers are stacked along a leading `layer` axis, so compile time does
not grow with depth.
"""

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import partitioning
from jaxtyping import Array, Bool, Float, Int

from realm_jax import hardware, ranges
from realm_jax.errors import BadInputError
from realm_jax.models import layers, packing

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
        error function, as in `transformers` and MiniLM). Where gin does not name it, a
        command takes it from the weights it starts with.
      layer_norm_epsilon: epsilon of every LayerNorm.
      dropout_rate: dropout of embeddings and residual branches, to the nearest 1/256
        (`layers.draw_kept`); of attention weights too unless these have a rate.
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
      scan_unroll: layers per iteration of the scan in programs with gradients. More
        of them take longer to compile and run a little faster on a CPU
        (docs/benchmarks.md). Programs without gradients have one; see `rolled`.
      attention_dropout_rate: dropout of attention weights; None is `dropout_rate`, as
        in BERT. Zero saves drawing a number for each pair of positions and head.
      attention_implementation: "xla", or "cudnn": on a GPU, its fused kernel for
        sequences that do not share rows. It keeps no attention weights, and takes
        bfloat16 and an `attention_dropout_rate` of 0. Elsewhere both are the same.
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
    attention_dropout_rate: float | None = None
    attention_implementation: Literal["xla", "cudnn"] = "xla"

    def __post_init__(self):
        ranges.require_ranges(
            self,
            vocab_size=ranges.whole(1),
            hidden_size=ranges.whole(1),
            num_layers=ranges.whole(1),
            num_heads=ranges.whole(1),
            mlp_size=ranges.whole(1),
            max_positions=ranges.whole(1),
            num_segments=ranges.whole(1),
            layer_norm_epsilon=ranges.POSITIVE,
            dropout_rate=ranges.SHARE_BELOW_1,
            attention_dropout_rate=ranges.SHARE_BELOW_1.or_none(),
            initializer_range=ranges.POSITIVE,
            scan_unroll=ranges.whole(1),
        )
        if self.hidden_size % self.num_heads:
            raise BadInputError(
                f"expected num_heads to divide hidden_size {self.hidden_size}, got "
                f"{self.num_heads}. Choose another num_heads."
            )
        require_choices(
            self,
            activation=layers.ACTIVATIONS,
            dtype=("float32", "bfloat16"),
            products=("float32", "bfloat16", _BY_PROCESSOR),
            remat=REMAT,
            attention_implementation=("xla", "cudnn"),
        )
        cudnn = self.attention_implementation == "cudnn"
        if cudnn and (self.dtype != "bfloat16" or self.attention_dropout):
            raise BadInputError(
                'expected dtype "bfloat16" and attention_dropout_rate 0.0 with '
                f'attention_implementation "cudnn", got {self.dtype!r} and '
                f'{self.attention_dropout}. Set them, or choose "xla".'
            )
        if cudnn and self.hidden_size // self.num_heads % 8:
            raise BadInputError(
                "expected heads of a multiple of 8 features with "
                f'attention_implementation "cudnn", got {self.hidden_size} features in '
                f'{self.num_heads} heads. Change num_heads, or choose "xla".'
            )

    @property
    def attends_by_cudnn(self) -> bool:
        """True if `attention_implementation` is "cudnn" and there is a GPU."""
        chosen = self.attention_implementation == "cudnn"
        return chosen and jax.default_backend() == "gpu"

    @property
    def rounds_products(self) -> bool:
        """True if `layers.Dense` rounds its operands to bfloat16; see `products`."""
        if self.dtype != "float32":
            return False
        if self.products == _BY_PROCESSOR:
            return jax.default_backend() == "cpu" and hardware.multiplies_bfloat16()
        return self.products == "bfloat16"

    @property
    def attention_dropout(self) -> float:
        """The rate at which attention weights are dropped."""
        given = self.attention_dropout_rate
        return self.dropout_rate if given is None else given

    @property
    def recomputes_within_layers(self) -> bool:
        """True if parts of a layer are computed again one by one; see `remat`."""
        return self.remat == _WITHIN_LAYERS

    def rolled(self) -> "BertConfig":
        """Returns the same encoder with a layer per iteration of its scan.

        Without gradients it runs about as fast, and compiles in half of the time.
        """
        return dataclasses.replace(self, scan_unroll=1)

    def make_encoder(self, name: str | None = None) -> "Encoder":
        """Returns the encoder, which other kinds override (`models/encoders.py`)."""
        return Bert(self, name=name)


def require_choices(config: Any, **choices: Iterable[str]) -> None:
    """Requires that settings of a model are among those known."""
    for name, known in choices.items():
        if getattr(config, name) not in tuple(known):
            raise BadInputError(
                f"expected {name} to be one of {', '.join(known)}, got "
                f"{getattr(config, name)!r}. Correct the model configuration."
            )


class Encoded(NamedTuple):
    """Output of the encoder.

    Attributes:
      sequence: hidden state of each position, in the dtype of the configuration.
      pooled: output of the tanh pooler on [CLS], in the same dtype.
    """

    sequence: Float[Array, "batch length embed"]
    pooled: Float[Array, "batch embed"]


class Encoder(nn.Module):
    """What towers and readers need of an encoder.

    An encoder of one's own defines `__call__` and `token_logits`, and makes parameters
    with `models/layers.py`, which records how they are sharded.
    """

    config: BertConfig

    def __call__(
        self,
        ids: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"],
        deterministic: bool = True,
        packed_length: int | None = None,
    ) -> Encoded:
        """Encodes padded sequences.

        Args:
          ids: wordpieces, 0 where padded.
          segment_ids: 0 or 1; arbitrary where padded.
          deterministic: disables dropout; otherwise an rng named "dropout" is needed.
          packed_length: wordpieces of a row that two of the sequences may share, which
            must fit it (`packing.fits`); None for a row for each. The states of padding
            are then arbitrary.
        """
        raise NotImplementedError  # Each encoder has its own.

    def token_logits(self, x: Float[Array, "... embed"]) -> Float[Array, "... vocab"]:
        """Returns float32 logits of wordpieces, of the masked-LM head's features."""
        raise NotImplementedError  # Each encoder has its own.

    def encode_positions(
        self,
        ids: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"],
        positions: Int[Array, "batch position"],
        deterministic: bool = True,
        packed_length: int | None = None,
    ) -> Float[Array, "batch position embed"]:
        """Returns the last hidden states of some positions; arguments as `__call__`."""
        encoded = self(ids, segment_ids, deterministic, packed_length)
        return _at(positions, encoded.sequence)

    def pooled(
        self,
        ids: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"],
        deterministic: bool = True,
        packed_length: int | None = None,
    ) -> Float[Array, "batch embed"]:
        """Returns what stands for a whole sequence; arguments as `__call__`."""
        return self(ids, segment_ids, deterministic, packed_length).pooled

    def first(
        self,
        ids: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"],
        deterministic: bool = True,
        packed_length: int | None = None,
    ) -> Float[Array, "batch embed"]:
        """Returns the last hidden state of [CLS]; arguments as `__call__`."""
        first = jnp.zeros((len(ids), 1), jnp.int32)
        x = self.encode_positions(ids, segment_ids, first, deterministic, packed_length)
        return x[:, 0]


class EncoderLayer(nn.Module):
    """Attention and MLP, each followed by a residual connection and a LayerNorm."""

    config: BertConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        attends: Bool[Array, "batch length_or_1 length"],
        deterministic: bool,
        positions: Int[Array, "batch position"] | None = None,
    ) -> tuple[Float[Array, "batch position embed"], None]:
        """Returns the next layer's input, and None as the scan's stacked output.

        `attends` is whether a position attends to another, [batch, query, key];
        `positions` are those that are computed, all if None.
        """
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        attention = layers.SelfAttention(
            num_heads=config.num_heads,
            dropout_rate=config.attention_dropout,
            broadcast_dropout=config.broadcast_dropout,
            stddev=config.initializer_range,
            dtype=dtype,
            rounds=config.rounds_products,
            recomputes=config.recomputes_within_layers,
            cudnn=config.attends_by_cudnn,
            name="attention",
        )
        if positions is None:
            attended = attention(x, attends, deterministic)
        else:
            read = _at(positions, x)
            if attends.shape[1] > 1:
                attends = _at(positions, attends)
            attended = attention(x, attends, deterministic, read)
            x = read
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
        dropout = layers.Dropout(config.dropout_rate, config.broadcast_dropout)
        branch = dropout(branch, deterministic=deterministic)
        norm = layers.LayerNorm(
            config.layer_norm_epsilon,
            jnp.dtype(config.dtype),
            config.recomputes_within_layers,
            name=name,
        )
        return layers.constrain(norm(x + branch), "batch", "length", "activation_embed")


class Bert(Encoder):
    """BERT's encoder."""

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
        self.dropout = layers.Dropout(config.dropout_rate, config.broadcast_dropout)
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
        packed_length: int | None = None,
    ) -> Encoded:
        """See `Encoder`."""
        self._require_positions(ids)
        if packed_length is None:
            x = self._embed(ids, segment_ids, None, deterministic)
            x, _ = self.layers(x, (ids != PAD_ID)[:, None], deterministic)
            return Encoded(sequence=x, pooled=self._pool(x[:, 0]))
        packed = packing.pack(ids, segment_ids, packed_length)
        x = self._embed(packed.ids, packed.segment_ids, packed.positions, deterministic)
        x, _ = self.layers(x, packing.within_sequences(packed.sequences), deterministic)
        every = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        sequence = packed.unpack(_at(packed.places(every), x))
        return Encoded(sequence=sequence, pooled=self._pool(sequence[:, 0]))

    def encode_positions(
        self,
        ids: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"],
        positions: Int[Array, "batch position"],
        deterministic: bool = True,
        packed_length: int | None = None,
    ) -> Float[Array, "batch position embed"]:
        """See `Encoder`; the last layer computes no other positions, to save work."""
        if self.is_initializing():
            return _at(positions, self(ids, segment_ids, deterministic).sequence)
        self._require_positions(ids)
        if packed_length is None:
            x = self._embed(ids, segment_ids, None, deterministic)
            attends = (ids != PAD_ID)[:, None]
            return self._read(x, attends, positions, deterministic)
        packed = packing.pack(ids, segment_ids, packed_length)
        x = self._embed(packed.ids, packed.segment_ids, packed.positions, deterministic)
        attends = packing.within_sequences(packed.sequences)
        places = packed.places(positions)
        return packed.unpack(self._read(x, attends, places, deterministic))

    def pooled(
        self,
        ids: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"],
        deterministic: bool = True,
        packed_length: int | None = None,
    ) -> Float[Array, "batch embed"]:
        """Returns the output of the tanh pooler on [CLS]; arguments as `__call__`."""
        return self._pool(self.first(ids, segment_ids, deterministic, packed_length))

    def token_logits(self, x: Float[Array, "... embed"]) -> Float[Array, "... vocab"]:
        """Returns float32 inner products with every token embedding."""
        return self.token_embedding.attend(x)

    def _require_positions(self, ids: Int[Array, "batch length"]) -> None:
        length = ids.shape[1]
        if length > self.config.max_positions:
            raise BadInputError(
                f"expected sequences of at most {self.config.max_positions} wordpieces "
                f"(max_positions), got {length}. Shorten them or enlarge the model."
            )

    def _embed(
        self,
        ids: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"],
        positions: Int[Array, "batch length"] | None,
        deterministic: bool,
    ) -> Float[Array, "batch length embed"]:
        """Returns the input of the first layer; positions of None count from 0."""
        if positions is None:
            of_position = self.position_embedding.first_rows(ids.shape[1])
        else:
            of_position = self.position_embedding(positions)
        x = self.token_embedding(ids) + of_position + self._embed_segments(segment_ids)
        x = self.dropout(self.embedding_norm(x), deterministic=deterministic)
        return layers.constrain(x, "batch", "length", "activation_embed")

    def _read(
        self,
        x: Float[Array, "batch length embed"],
        attends: Bool[Array, "batch length_or_1 length"],
        positions: Int[Array, "batch position"],
        deterministic: bool,
    ) -> Float[Array, "batch position embed"]:
        """Runs `self.layers`, but computes only some positions of the last layer."""
        config = self.config
        rate = max(config.dropout_rate, config.attention_dropout)
        drops = not deterministic and rate > 0
        key = self.make_rng("dropout") if drops else jax.random.key(0)
        stacked = (
            self.layers.variables["params"],
            jax.random.split(key, config.num_layers),
        )

        def run(layer, x, of_layer, *positions):
            params, key = of_layer
            arguments = (x, attends, deterministic, *positions)
            rngs = {"dropout": key} if drops else None
            return layer(config, parent=None).apply(
                {"params": params}, *arguments, rngs=rngs
            )

        x, _ = jax.lax.scan(
            functools.partial(run, _rematerialized(config)),
            x,
            jax.tree.map(lambda array: array[:-1], stacked),
            unroll=config.scan_unroll,
        )
        last = jax.tree.map(lambda array: array[-1], stacked)
        x, _ = run(EncoderLayer, x, last, positions)
        return x

    def _pool(self, first: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        return jnp.tanh(self.pooler(first))

    def _embed_segments(self, segment_ids):
        # A product with a one-hot matrix: the gradient of a gather is a scatter, which
        # is slow where many rows add up in a few.
        one_hot = jax.nn.one_hot(segment_ids, self.config.num_segments)
        table = self.segment_embedding.first_rows(self.config.num_segments)
        return one_hot.astype(table.dtype) @ table


def _at(positions: Int[Array, "batch position"], array: Array) -> Array:
    """Returns [batch, position, ...], the entries of [batch, length, ...]."""
    return jnp.take_along_axis(array, positions[..., None], axis=1, mode="clip")


def _rematerialized(config: BertConfig) -> type[EncoderLayer]:
    """Returns the layer of a scan, which is computed again as `config.remat` says."""
    if config.remat not in _REMAT_POLICIES:
        return EncoderLayer
    return nn.remat(
        EncoderLayer,
        policy=_REMAT_POLICIES[config.remat],
        prevent_cse=False,  # The scan's loop already prevents it.
        static_argnums=(3,),
    )


def _stacked_layers(config: BertConfig) -> nn.Module:
    """Returns `num_layers` encoder layers as one scan."""
    # Annotated for a single axis; `nn.scan`, which it calls, takes one for each input.
    scan_with_axes: Any = partitioning.scan_with_axes
    scan = scan_with_axes(
        _rematerialized(config),
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(nn.broadcast, nn.broadcast),
        length=config.num_layers,
        unroll=config.scan_unroll,
        axis_name="layer",
    )
    return scan(config)
