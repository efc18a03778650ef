"""A SeqIO source over the blocks of a corpus: it yields ids, tasks make the rest."""

import functools

import numpy as np
import seqio
import tensorflow as tf

from realm_jax.data.blocks import BlockStore
from realm_jax.data.features import in_chunks
from realm_jax.data.splits import TRAIN, VALIDATION, held_out
from realm_jax.errors import BadInputError

_READ_BLOCKS = 4096
_SHUFFLE_BUFFER = 1 << 20


class BlockSource(seqio.DataSource):
    """Ids of the blocks of a split, as int32 scalars.

    A shard is a range of blocks, of which each split takes its own: the articles held
    out are the same however many shards there are. Texts are read (for the article a
    block belongs to) when a shard is first asked for, and only those of that shard.
    """

    def __init__(self, store: BlockStore, num_shards: int, fraction: float):
        """Describes the blocks of `store`.

        Args:
          store: the corpus.
          num_shards: into how many ranges its blocks are cut.
          fraction: share of the articles in the validation split.
        """
        super().__init__(splits=(TRAIN, VALIDATION))
        self.store = store
        self.provenance = {
            "corpus_fingerprint": store.fingerprint,
            "vocabulary_fingerprint": store.vocabulary.fingerprint,
            # Changes with the spans too, of which the corpus fingerprint is unaware.
            "settings_fingerprint": store.info.get("settings_fingerprint", ""),
            # Examples of two shares must not meet: each one's held out articles may
            # be trained on in the other.
            "validation_fraction": fraction,
        }
        self._fraction = fraction
        num_shards = min(num_shards, store.num_blocks)
        self._bounds = np.linspace(0, store.num_blocks, num_shards + 1).astype(int)
        self._held_out = functools.lru_cache(maxsize=None)(self._read_held_out)

    @property
    def supports_arbitrary_sharding(self) -> bool:
        """False: shards are those of `list_shards`."""
        return False

    def list_shards(self, split: str) -> list[str]:
        """Returns the name of each shard."""
        count = len(self._bounds) - 1
        return [f"{split}-{index:05d}-of-{count:05d}" for index in range(count)]

    def get_dataset(
        self,
        split: str = TRAIN,
        shuffle: bool = True,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        **unused,
    ) -> tf.data.Dataset:
        """Returns the ids of every `num_shards`-th shard, from `index` on.

        Raises:
          BadInputError: no article at all is in this split.
        """
        shards = range(len(self._bounds) - 1)
        if shard_info is not None:
            shards = shards[shard_info.index :: shard_info.num_shards]
        ids = np.concatenate(
            [np.zeros(0, np.int32), *(self._ids(split, shard) for shard in shards)]
        )
        if not len(ids) and shard_info is None:
            raise BadInputError(
                f"expected articles in the split {split!r}, got none of the "
                f"{self.store.num_blocks} blocks of {self.store.directory} (a share of "
                f"{self._fraction} is held out); change validation_fraction."
            )
        dataset = tf.data.Dataset.from_tensor_slices(ids)
        if shuffle and len(ids):
            dataset = dataset.shuffle(min(len(ids), _SHUFFLE_BUFFER), seed=seed)
        return dataset

    def _ids(self, split: str, shard: int) -> np.ndarray:
        held = self._held_out(shard)
        kept = held if split == VALIDATION else ~held
        return (self._bounds[shard] + np.flatnonzero(kept)).astype(np.int32)

    def _read_held_out(self, shard: int) -> np.ndarray:
        blocks = np.arange(self._bounds[shard], self._bounds[shard + 1])
        parts = [
            held_out((t.source_id for t in self.store.texts(ids)), self._fraction)
            for ids in in_chunks(blocks, _READ_BLOCKS)
        ]
        return np.concatenate(parts)
