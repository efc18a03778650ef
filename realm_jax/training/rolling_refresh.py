"""Renews an index that is part of the training state, within the steps.

rolling     with each update a slice of the corpus is embedded again, so that no row is
            older than PERIOD updates, and training never waits
write_back  after each update the embeddings of its candidates, which it computes
            anyway, replace their rows

Only one index is in memory. Checkpoints contain it, so that a resumed run continues
with exactly the same rows. On another number of devices the slices are others, so that
for one period a row may be up to two periods old.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Float, Int, PyTree

from realm_jax import axes
from realm_jax.index import device_search
from realm_jax.index.device_search import EmbeddingTable
from realm_jax.index.device_tokens import (
    DocumentLayout,
    TokenTable,
    documents,
    embedder_inputs,
)
from realm_jax.metrics import means as means_lib
from realm_jax.models.retriever import Retriever
from realm_jax.training.candidate_search import RetrievingInputs, RetrievingLoss
from realm_jax.training.finetune_loss import FinetuneInputs, FinetuneLoss
from realm_jax.training.state import TrainState
from realm_jax.training.step import step_key
from realm_jax.types import Array


@dataclasses.dataclass(frozen=True)
class Renewal:
    """Settings for renewing the index within steps.

    Attributes:
      period: updates in which every row is embedded once; None for no rolling.
      write_back: whether the candidates' embeddings replace their rows. They are those
        of training, and so have dropout if the model has it.
    """

    period: int | None
    write_back: bool
    batch_size: int = 512


@dataclasses.dataclass(frozen=True)
class RenewingLoss(RetrievingLoss):
    """`RetrievingLoss` over an index that the state holds and the updates renew."""

    renewal: Renewal = dataclasses.field(kw_only=True)

    def of_update(
        self, params: PyTree, state: TrainState, inputs: RetrievingInputs
    ) -> tuple[Array, tuple[means_lib.Means, EmbeddingTable | None]]:
        """See `Loss`; no gradient flows into the index."""
        renewal, index = self.renewal, state.index
        assert index is not None
        if renewal.period is not None:
            index = embed_slice(
                retriever=self.loss.retriever,
                layout=self.layout,
                mesh=self.mesh,
                renewal=renewal,
                index=index,
                tokens=inputs.tokens,
                params=state.params["retriever"],
                step=state.step,
            )
        loss, (metrics, candidates, embeddings) = self.with_embeddings(
            params, inputs.replace(embeddings=index), step_key(state)
        )
        if renewal.write_back:
            fresh = jax.lax.stop_gradient(embeddings)
            index = write_rows(index, candidates.block_ids, fresh, self.mesh)
        return loss, (metrics, index)

    def arguments(
        self, state: TrainState, inputs: RetrievingInputs
    ) -> tuple[PyTree, RetrievingInputs, jax.ShapeDtypeStruct]:
        """See `Loss`."""
        return super().arguments(state, inputs.replace(embeddings=state.index))


@dataclasses.dataclass(frozen=True)
class RenewingFinetuneLoss(FinetuneLoss):
    """`FinetuneLoss`, whose updates renew the index that the state holds.

    Its inputs are found before the update, in the index that the update before it left.
    """

    renewal: Renewal = dataclasses.field(kw_only=True)
    layout: DocumentLayout = dataclasses.field(kw_only=True)
    mesh: jax.sharding.Mesh = dataclasses.field(kw_only=True)

    def of_update(
        self, params: PyTree, state: TrainState, inputs: FinetuneInputs
    ) -> tuple[Array, tuple[means_lib.Means, EmbeddingTable | None]]:
        """See `Loss`."""
        assert state.index is not None
        assert inputs.tokens is not None
        loss, metrics = self(params, inputs, step_key(state))
        index = embed_slice(
            retriever=self.retriever,
            layout=self.layout,
            mesh=self.mesh,
            renewal=self.renewal,
            index=state.index,
            tokens=inputs.tokens,
            params=state.params["retriever"],
            step=state.step,
        )
        return loss, (metrics, index)


def embed_slice(
    retriever: Retriever,
    layout: DocumentLayout,
    mesh: jax.sharding.Mesh,
    renewal: Renewal,
    index: EmbeddingTable,
    tokens: TokenTable,
    params: PyTree,
    step: Int[Array, ""],
) -> EmbeddingTable:
    """Embeds the slice of rows due at this step; each device embeds its own rows."""
    assert renewal.period is not None
    num_devices, num_local = mesh.size, index.rows.shape[0] // mesh.size
    at_once = max(1, min(renewal.batch_size // num_devices, num_local))
    batches = -(-num_local // (renewal.period * at_once))
    count = min(batches * at_once, num_local)
    # The last slice ends with the last row, and so begins a little early.
    start = jnp.minimum((step % renewal.period) * count, num_local - count)
    by_device = NamedSharding(mesh, axes.partition_spec("block"))

    def local(array: Array) -> Array:
        """Reshapes to [device, row of it, ...]; no row leaves its device."""
        split = array.reshape(num_devices, num_local, *array.shape[1:])
        return jax.lax.with_sharding_constraint(split, by_device)

    def embed(first: Array) -> Float[Array, "device row projection"]:
        rows = jax.tree.map(
            lambda array: jax.lax.dynamic_slice_in_dim(local(array), first, at_once, 1),
            tokens,
        )
        flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), rows)
        embeddings = retriever.apply(
            {"params": params},
            *embedder_inputs(documents(flat), layout),
            method=Retriever.embed_documents,
        )
        return jnp.asarray(embeddings).reshape(num_devices, at_once, -1)

    def renew(index: EmbeddingTable, batch: Array) -> tuple[EmbeddingTable, None]:
        first = jnp.minimum(start + batch * at_once, num_local - at_once)
        fresh = as_rows(index, embed(first))

        def put(old: Array, new: Array) -> Array:
            changed = jax.lax.dynamic_update_slice_in_dim(local(old), new, first, 1)
            return changed.reshape(old.shape)

        return jax.tree.map(put, index, fresh.replace(num_blocks=None)), None

    fixed = index.replace(num_blocks=None)
    fixed, _ = jax.lax.scan(renew, fixed, jnp.arange(-(-count // at_once)))
    return fixed.replace(num_blocks=index.num_blocks)


def as_rows(
    index: EmbeddingTable, embeddings: Float[Array, "*row projection"]
) -> EmbeddingTable:
    """Returns embeddings as table rows, in its precision, with codes if it has them."""
    rows = embeddings.astype(index.rows.dtype)
    if index.codes is None:
        return EmbeddingTable(rows, None, None, index.num_blocks)
    return EmbeddingTable(rows, *device_search.quantize(rows), index.num_blocks)


def write_rows(
    index: EmbeddingTable,
    block_ids: Int[Array, "batch candidate"],
    embeddings: Float[Array, "batch candidate projection"],
    mesh: jax.sharding.Mesh,
) -> EmbeddingTable:
    """Replaces the rows of blocks; of repeated blocks the first embedding is used.

    Id -1 is ignored, and so is an embedding that is not finite, for an update that is
    skipped must not leave it in the index.
    """
    ids = block_ids.reshape(-1)
    flat = embeddings.reshape(len(ids), -1)
    ids = jnp.where(jnp.isfinite(flat).all(axis=1), ids, -1)
    fresh = as_rows(index, flat)
    # The order of two writes to one row is undefined, so repeats are dropped.
    order = jnp.argsort(ids, stable=True)
    sorted_ids = ids[order]
    repeats = jnp.concatenate([jnp.zeros(1, bool), sorted_ids[1:] == sorted_ids[:-1]])
    sorted_ids = jnp.where(repeats, -1, sorted_ids)
    fresh = jax.tree.map(lambda array: array[order], fresh.replace(num_blocks=None))

    def on_each_device(table: EmbeddingTable, ids: Array, fresh: EmbeddingTable):
        num_rows = table.rows.shape[0]
        places = ids - jax.lax.axis_index(axes.MESH_AXES) * num_rows
        mine = (ids >= 0) & (places >= 0) & (places < num_rows)
        places = jnp.where(mine, places, num_rows)
        return jax.tree.map(
            lambda old, new: old.at[places].set(new, mode="drop"), table, fresh
        )

    by_row, everywhere = axes.partition_spec("block"), jax.sharding.PartitionSpec()
    changed = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(by_row, everywhere, everywhere),
        out_specs=by_row,
        check_vma=False,
    )(index.replace(num_blocks=None), sorted_ids, fresh)
    return changed.replace(num_blocks=index.num_blocks)
