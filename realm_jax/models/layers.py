"""Provides dense, norm, attention and embedding layers, and creates parameters.

Parameters are float32 and every one is created by `parameter`, which checks its
logical axes against `realm_jax.axes` and records them in the `params_axes` collection
(T5X reads that collection). Activations are float32 or bfloat16; softmax and LayerNorm
are computed in float32 either way.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import partitioning, spmd
from jaxtyping import Array, Bool, Float, Int

from realm_jax import axes
from realm_jax.errors import BadInputError

Initializer = nn.initializers.Initializer

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_tanh": functools.partial(nn.gelu, approximate=True),
    "gelu": functools.partial(nn.gelu, approximate=False),
}

# Added to the attention scores of padding. Finite, so that a row of padding alone (the
# unused tail of a batch) gives numbers and not NaN.
_MASKED_SCORE = -1e9


def parameter(
    module: nn.Module,
    name: str,
    initializer: Initializer,
    shape: Sequence[int],
    axis_names: Sequence[str | None],
) -> jax.Array:
    """Creates a float32 parameter, records its logical axes and shards it by them.

    It is named within the module that owns it, has a logical axis for each dimension,
    of which None is replicated, and its initializer is called with key, shape and
    dtype.
    """
    axes.partition_spec(*axis_names)
    created = partitioning.param_with_axes(
        name,
        initializer,
        tuple(shape),
        jnp.float32,
        axes=tuple(axis_names),  # pyright: ignore[reportArgumentType]
        module=module,
    )
    # The constraint also applies to the gradient, which is summed with this sharding.
    return constrain(created, *axis_names)


def constrain(x: jax.Array, *axis_names: str | None) -> jax.Array:
    """Constrains the sharding of an activation on the current mesh by its logical axes.

    There is one for each dimension; None is replicated. Without a mesh this only checks
    the names. The mesh is the one of `jax.set_mesh`, or T5X's, which comes with Flax's
    axis rules.
    """
    spec = axes.partition_spec(*axis_names)
    if len(axis_names) != x.ndim:
        raise BadInputError(
            f"expected one logical axis for each of the {x.ndim} dimensions of shape "
            f"{x.shape}, got {axis_names}. Name every dimension."
        )
    if jax.sharding.get_abstract_mesh().empty:
        return x
    if rules := nn.get_logical_axis_rules():
        spec = spmd.logical_to_mesh_axes(axis_names, rules)
    return jax.lax.with_sharding_constraint(x, spec)


@jax.custom_vjp
def bfloat16_product(
    x: Float[Array, "row inputs"], kernel: Float[Array, "inputs outputs"]
) -> Float[Array, "row outputs"]:
    """Returns x @ kernel, both rounded to bfloat16 and accumulated in float32.

    The two products of its gradient are computed in the same way. On a TPU this is
    XLA's default precision for float32; on a CPU it must be requested.
    """
    return _rounded_product(x, kernel, ((1,), (0,)))


def _rounded_product(left, right, contracted):
    return jax.lax.dot_general(
        left.astype(jnp.bfloat16),
        right.astype(jnp.bfloat16),
        (contracted, ((), ())),
        preferred_element_type=jnp.float32,
    )


def _forward(x, kernel):
    return bfloat16_product(x, kernel), (x, kernel)


def _backward(operands, gradient):
    x, kernel = operands
    return (
        _rounded_product(gradient, kernel, ((1,), (1,))),
        _rounded_product(x, gradient, ((0,), (0,))),
    )


bfloat16_product.defvjp(_forward, _backward)


class Dense(nn.Module):
    """`x @ kernel + bias` over the last axes of `x`.

    Attributes:
      features: sizes of the output axes.
      kernel_axes: logical axes of the kernel, input axes first.
      stddev: standard deviation of the kernel's truncated normal initialisation.
      dtype: dtype of the product and the result.
      rounds: whether a float32 product is computed by `bfloat16_product`. One of
        bfloat16 is not: its rule for gradients would hide it from remat="dots".
    """

    features: tuple[int, ...]
    kernel_axes: tuple[str | None, ...]
    stddev: float = 0.02
    dtype: jnp.dtype = jnp.dtype("float32")
    rounds: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "... inputs"]) -> Float[Array, "... outputs"]:
        """Returns `x` with its input axes replaced by `features`."""
        num_inputs = len(self.kernel_axes) - len(self.features)
        leading, inputs = x.shape[:-num_inputs], x.shape[-num_inputs:]
        kernel = parameter(
            self,
            "kernel",
            nn.initializers.truncated_normal(self.stddev),
            (*inputs, *self.features),
            self.kernel_axes,
        )
        bias = parameter(
            self,
            "bias",
            nn.initializers.zeros,
            self.features,
            self.kernel_axes[num_inputs:],
        )
        # A product of two matrices: with more axes, XLA's CPU backend transposes both
        # operands for the kernel's gradient, which halves the speed of a step.
        flat = x.reshape(-1, math.prod(inputs)).astype(self.dtype)
        matrix = kernel.reshape(flat.shape[-1], -1).astype(self.dtype)
        outputs = bfloat16_product(flat, matrix) if self.rounds else flat @ matrix
        outputs = outputs + bias.reshape(-1).astype(self.dtype)
        return outputs.reshape(*leading, *self.features)


class LayerNorm(nn.Module):
    """LayerNorm over the last axis, computed in float32.

    Attributes:
      epsilon: added to the variance. 1e-12 in BERT and in the published REALM
        embedder, 1e-3 in ORQA's span reader.
      recomputes: whether the backward pass keeps only the input.
    """

    epsilon: float = 1e-12
    dtype: jnp.dtype = jnp.dtype("float32")
    recomputes: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "... features"]) -> Float[Array, "... features"]:
        """Returns `x` with mean 0 and variance 1, scaled and shifted."""
        size = (x.shape[-1],)
        scale = parameter(self, "scale", nn.initializers.ones, size, ("norm",))
        bias = parameter(self, "bias", nn.initializers.zeros, size, ("norm",))
        compute = jax.checkpoint(_normalize) if self.recomputes else _normalize
        return compute(x, scale, bias, self.epsilon).astype(self.dtype)


def _normalize(
    x: Float[Array, "... features"],
    scale: Float[Array, " features"],
    bias: Float[Array, " features"],
    epsilon: float,
) -> Float[Array, "... features"]:
    """Returns LayerNorm in float32."""
    x = x.astype(jnp.float32)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + epsilon) * scale + bias


class Embedding(nn.Module):
    """An embedding table, with a vector for each id.

    Attributes:
      row_axis: logical axis of the rows.
      stddev: standard deviation of the truncated normal initialisation.
    """

    num_embeddings: int
    features: int
    row_axis: str
    stddev: float = 0.02
    dtype: jnp.dtype = jnp.dtype("float32")

    def setup(self):
        """Creates the table."""
        self.table = parameter(
            self,
            "embedding",
            nn.initializers.truncated_normal(self.stddev),
            (self.num_embeddings, self.features),
            (self.row_axis, "embed"),
        )

    def __call__(
        self, ids: Int[Array, "batch length"]
    ) -> Float[Array, "batch length embed"]:
        """Returns the rows of the table at `ids`."""
        # Gather the table's columns first. Left sharded, they would shard the result
        # by features; it is to be sharded by batch, and the partitioner can only
        # reshard it by replicating the whole result on every device.
        table = constrain(self.table, self.row_axis, "activation_embed")
        # Cast after the gather, so that the gradient is summed in the table's dtype.
        rows = jnp.take(table, ids, axis=0, mode="clip").astype(self.dtype)
        return constrain(rows, "batch", "length", "activation_embed")

    def first_rows(self, count: int) -> Float[Array, "rows embed"]:
        """Returns the first `count` rows; positions need no gather."""
        return self.table[:count].astype(self.dtype)

    def attend(self, x: Float[Array, "... embed"]) -> Float[Array, "... rows"]:
        """Returns float32 inner products of `x` with every row (a tied decoder)."""
        return jnp.einsum(
            "...e,ve->...v",
            x.astype(self.dtype),
            self.table.astype(self.dtype),
            preferred_element_type=jnp.float32,
        )


def draw_kept(
    key: jax.Array, rate: float, shape: Sequence[int]
) -> Bool[Array, "*dims row column"]:
    """Draws which elements dropout keeps, each with `keep_probability(rate)`.

    A random word of 32 bits decides on four elements: on a CPU, drawing one for each
    takes more time than all else of dropout. The shape has at least two dimensions;
    words are shared along the last but one.
    """
    *dims, rows, columns = shape
    words = jax.random.bits(key, (*dims, -(-rows // _DRAWS), columns))
    # Not bit-cast to bytes: TPUs pad an innermost dimension of four to 128.
    draws = jnp.concatenate([words >> (8 * i) & 0xFF for i in range(_DRAWS)], axis=-2)
    return draws[..., :rows, :] < round(keep_probability(rate) * _LEVELS)


_DRAWS, _LEVELS = 4, 256


def keep_probability(rate: float) -> float:
    """Returns 1 - rate, rounded to a multiple of 1/256, which `draw_kept` can draw."""
    return max(1, round((1.0 - rate) * _LEVELS)) / _LEVELS


class Dropout(nn.Module):
    """Dropout of [..., length, features].

    Attributes:
      rate: probability of a zero, see `keep_probability`.
      broadcast: whether all positions share one mask.
    """

    rate: float
    broadcast: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "*dims length features"], deterministic: bool
    ) -> Float[Array, "*dims length features"]:
        """Returns `x` with the mean it has, and a part of it set to 0."""
        if deterministic or keep_probability(self.rate) == 1.0:
            return x
        *dims, length, features = x.shape
        shape = (*dims, 1 if self.broadcast else length, features)
        kept = draw_kept(self.make_rng("dropout"), self.rate, shape)
        return jnp.where(kept, x / keep_probability(self.rate), jnp.zeros_like(x))


class SelfAttention(nn.Module):
    """Multi-head self-attention as in BERT, including the output projection.

    Attributes:
      dropout_rate: dropout of the attention probabilities.
      broadcast_dropout: share one dropout mask among all queries.
      stddev: standard deviation of the kernels' initialisation.
      dtype: dtype of projections and result; the softmax is float32.
      rounds: as in `Dense`, for all projections.
      recomputes: whether the backward pass computes the attention weights again. They
        are `length` numbers for each query and head, many more than it needs otherwise.
      cudnn: whether rows of one sequence are attended to by cuDNN's fused kernel, which
        keeps no attention weights. It has no dropout.
    """

    num_heads: int
    dropout_rate: float = 0.0
    broadcast_dropout: bool = False
    stddev: float = 0.02
    dtype: jnp.dtype = jnp.dtype("float32")
    rounds: bool = False
    recomputes: bool = False
    cudnn: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        attends: Bool[Array, "batch query_or_1 length"],
        deterministic: bool = True,
        queries: Float[Array, "batch query embed"] | None = None,
    ) -> Float[Array, "batch query embed"]:
        """Returns the attention output at each position, or of some of them.

        `attends` is whether a query attends to a position, False at padding; `queries`
        are the positions that attend, all of `x` if None.
        """
        embed = x.shape[-1]
        head_dim = embed // self.num_heads

        def project(name: str, x: Array) -> Float[Array, "batch length heads head_dim"]:
            projected = Dense(
                features=(self.num_heads, head_dim),
                kernel_axes=("embed", "heads", "head_dim"),
                stddev=self.stddev,
                dtype=self.dtype,
                rounds=self.rounds,
                name=name,
            )(x)
            return constrain(projected, "batch", "length", "activation_heads", None)

        query = project("query", x if queries is None else queries)
        key, value = project("key", x), project("value", x)
        # JAX calls the kernel with gradients for even lengths alone.
        even = query.shape[1] % 2 == 0 and key.shape[1] % 2 == 0
        if self.cudnn and attends.shape[1] == 1 and even:
            gathered = attend_by_cudnn(query, key, value, attends[:, 0])
        else:
            gathered = self._attend(query, key, value, attends, deterministic)
        return Dense(
            features=(embed,),
            kernel_axes=("heads", "head_dim", "embed"),
            stddev=self.stddev,
            dtype=self.dtype,
            rounds=self.rounds,
            name="output",
        )(gathered)

    def _attend(self, query, key, value, attends, deterministic: bool):
        """Returns the attention output, [batch, query, heads, head_dim]."""
        query, key, value = (
            constrain(
                by_position.swapaxes(1, 2), "batch", "activation_heads", "length", None
            )
            for by_position in (query, key, value)
        )
        keep = keep_probability(self.dropout_rate)
        kept = None if deterministic or keep == 1.0 else self.kept_weights(query, key)
        compute = jax.checkpoint(attend) if self.recomputes else attend
        return compute(query, key, value, attends, kept, 1.0 / keep).swapaxes(1, 2)

    def kept_weights(
        self,
        query: Float[Array, "batch heads query head_dim"],
        key: Float[Array, "batch heads length head_dim"],
    ) -> Bool[Array, "batch heads #query length"]:
        """Draws which attention weights dropout keeps."""
        batch, heads, queries, _ = query.shape
        queries = 1 if self.broadcast_dropout else queries
        shape = (batch, heads, queries, key.shape[2])
        return draw_kept(self.make_rng("dropout"), self.dropout_rate, shape)


def attend(
    query: Float[Array, "batch heads query head_dim"],
    key: Float[Array, "batch heads length head_dim"],
    value: Float[Array, "batch heads length head_dim"],
    attends: Bool[Array, "batch query_or_1 length"],
    kept: Bool[Array, "batch heads #query length"] | None,
    scale: float,
) -> Float[Array, "batch heads query head_dim"]:
    """Returns scaled dot-product attention; the softmax is float32.

    `attends` is whether a query attends to a position, False at padding. Of the weights
    those are `kept` that dropout keeps, times `scale`; None keeps all.
    """
    scores = jnp.einsum(
        "bhqd,bhkd->bhqk",
        query * query.shape[-1] ** -0.5,
        key,
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(attends[:, None], scores, _MASKED_SCORE)
    weights = nn.softmax(scores, axis=-1).astype(value.dtype)
    if kept is not None:
        weights = jnp.where(kept, weights * scale, 0.0).astype(value.dtype)
    return jnp.einsum("bhqk,bhkd->bhqd", weights, value)


def attend_by_cudnn(
    query: Float[Array, "batch query heads head_dim"],
    key: Float[Array, "batch length heads head_dim"],
    value: Float[Array, "batch length heads head_dim"],
    attends: Bool[Array, "batch length"],
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "batch query heads head_dim"]:
    """Returns scaled dot-product attention to positions that end in padding.

    `attends` is False at padding. A sequence of padding alone attends to its first
    position.
    """
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        key_value_seq_lengths=jnp.maximum(attends.sum(axis=-1, dtype=jnp.int32), 1),
        implementation=implementation,
    )
