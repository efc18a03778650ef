"""Registers the SeqIO tasks of a prepared corpus, and other tasks.

Importing this module imports TensorFlow.
"""

import copy
import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator

import numpy as np
import seqio
import tensorflow as tf

from realm_jax.data import inverse_cloze, masking, random_masking
from realm_jax.data.blocks import BlockStore
from realm_jax.data.features import Example, FeatureSpecs, in_chunks, int32
from realm_jax.data.references import SentenceRows
from realm_jax.data.salient_spans import Tagger
from realm_jax.data.splits import (
    TRAIN,
    VALIDATION,
    VALIDATION_FRACTION,
    held_out,
    share_of_at_least_one,
)
from realm_jax.data.terms import TermTagger
from realm_jax.data.tokenizer_files import load_vocabulary
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.prepare.tf_datasets import expand, output_features, restore_shapes
from realm_jax.types import NULL_BLOCK

NUM_SHARDS = 64


class BlockSource(seqio.DataSource):
    """Ids of the blocks of a split, as int32 scalars.

    A shard is a range of blocks, of which each split takes its own: the held-out
    articles do not depend on the number of shards. The texts of a shard, which name the
    article of each block, are read when the shard is first used. Of a few articles at
    least one is held out, unless the fraction is 0; of a single article, a book, blocks
    are.

    Attributes:
      store: the corpus.
      provenance: fingerprints of corpus, vocabulary and settings, and the fraction of
        held-out articles.
      layout: the rows that the task's dataset has beside its features, None without.
    """

    layout: SentenceRows | None = None

    def __init__(self, store: BlockStore, num_shards: int, fraction: float):
        """Creates a source of the blocks of `store`."""
        super().__init__(splits=(TRAIN, VALIDATION))
        self.store = store
        self.provenance = {
            "corpus_fingerprint": store.fingerprint,
            "vocabulary_fingerprint": store.vocabulary.fingerprint,
            # Covers the spans, which the corpus fingerprint leaves out.
            "settings_fingerprint": store.info.get("settings_fingerprint", ""),
            # Examples of two shares must not be mixed: the held-out articles of one
            # may be trained on in the other.
            "validation_fraction": fraction,
        }
        self._fraction = fraction
        num_shards = min(num_shards, store.num_blocks)
        self._bounds = np.linspace(0, store.num_blocks, num_shards + 1).astype(int)
        self._held_out = functools.lru_cache(maxsize=None)(self._read_held_out)

    @property
    def supports_arbitrary_sharding(self) -> bool:
        """Always False: the shards are those of `list_shards`."""
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
        """Returns the ids of every `num_shards`-th shard, from `index` on."""
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
                f"{self._fraction} is held out, of few articles at least one); prepare "
                "more articles or change prepare.PrepareConfig.validation_fraction."
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
        return held_out(self._held_out_together(blocks), self._share)

    @functools.cached_property
    def _share(self) -> float:
        if self._num_articles > _FEW_ARTICLES or self.store.num_blocks > _FEW_BLOCKS:
            return self._fraction
        shards = itertools.pairwise(self._bounds)
        keys = (self._held_out_together(np.arange(*bounds)) for bounds in shards)
        return share_of_at_least_one(
            itertools.chain.from_iterable(keys), self._fraction
        )

    @property
    def _num_articles(self) -> int:
        return self.store.info.get("num_documents", self.store.num_blocks)

    def _held_out_together(self, blocks: np.ndarray) -> Iterator[str]:
        """Yields a key of each block; blocks of one key are in the same split."""
        if self._num_articles == 1:
            yield from (f"block {block}" for block in blocks)
            return
        for ids in in_chunks(blocks, _READ_BLOCKS):
            yield from (text.source_id for text in self.store.texts(ids))


def register_corpus(
    name: str,
    store: BlockStore,
    *,
    tagger: Tagger | None = None,
    knowledge: BlockStore | None = None,
    query_length: int = masking.QUERY_LENGTH,
    inverse_cloze_query_length: int = inverse_cloze.QUERY_LENGTH,
    document_length: int = inverse_cloze.DOCUMENT_LENGTH,
    max_masks: int = masking.MAX_MASKS,
    num_shards: int = NUM_SHARDS,
    validation_fraction: float = VALIDATION_FRACTION,
    seed: int = 0,
) -> list[str]:
    """Registers a task of documents, one of pairs, and four of masked sentences.

    `<name>_blocks` contains the documents, `_ict` sentences and their blocks,
    `_salient` sentences with a salient span masked, `_terms` with a term masked (see
    `data.terms`), `_random_tokens` and `_random_spans` with random masks. Each has the
    splits train and validation.

    Args:
      tagger: None masks the spans stored in the corpus. Otherwise the salient task
        masks those that this tagger finds in the blocks: it runs when examples are
        made, shard by shard, and the corpus is not changed.
      knowledge: another prepared corpus that is searched for these sentences (X and Z
        in REALM, section 4.3). Then only the tasks of masked sentences are registered,
        without a source block.
      query_length: wordpieces of a masked sentence, special pieces included.
      inverse_cloze_query_length: the same of an inverse cloze query.
      document_length: the same of a document.
      seed: determines which inverse cloze queries are removed from their blocks, and
        the random masks.

    Returns:
      The names of the tasks.
    """
    blocks = BlockSource(store, num_shards, validation_fraction)
    if knowledge is not None:
        require_vocabulary(store, knowledge.vocabulary)
        blocks.provenance["corpus_fingerprint"] = knowledge.fingerprint
    masks = {"query_length": query_length, "max_masks": max_masks}
    pairs = inverse_cloze.PairRows(inverse_cloze_query_length, document_length)
    spans, pieces = masking.SpanRows(**masks), random_masking.PieceRows(**masks)
    tokens, words = (
        {**masks, "seed": seed, "draw": draw}
        for draw in (random_masking.draw_tokens, random_masking.draw_spans)
    )
    salient = {"query_length": query_length, "tagger": tagger}
    terms = {**salient, "tagger": TermTagger(functools.partial(_counted, store))}
    tasks = [
        ("ict", pairs, inverse_cloze.inverse_cloze_rows, {"seed": seed}),
        ("salient", spans, masking.salient_rows, salient),
        ("terms", spans, masking.salient_rows, terms),
        ("random_tokens", pieces, random_masking.random_rows, tokens),
        ("random_spans", pieces, random_masking.random_rows, words),
    ]
    if knowledge is None:
        add_task(
            f"{name}_blocks",
            blocks,
            functools.partial(block_examples, store, document_length=document_length),
            block_specs(document_length),
            store.vocabulary.size,
        )
    else:
        tasks = [task for task in tasks if task[1] is not pairs]
    for suffix, layout, make_rows, options in tasks:
        _add_sentences(
            f"{name}_{suffix}",
            _tagged_by(blocks, tagger if suffix == "salient" else None),
            layout,
            functools.partial(make_rows, **options),
            is_searched=knowledge is None,
        )
    suffixes = [] if knowledge is not None else ["blocks"]
    return [f"{name}_{suffix}" for suffix in (*suffixes, *(task[0] for task in tasks))]


def _counted(store: BlockStore) -> Iterator[str]:
    """Yields the bodies of the blocks that words are counted in, evenly spread."""
    count = min(store.num_blocks, _COUNTED_BLOCKS)
    spread = np.linspace(0, store.num_blocks - 1, count).astype(int)
    for ids in in_chunks(spread, _READ_BLOCKS):
        yield from (text.body for text in store.texts(ids))


def _add_sentences(
    name: str,
    source: BlockSource,
    layout: SentenceRows,
    make_rows: Callable[..., Example],
    *,
    is_searched: bool,
) -> None:
    """Registers a task of sentences of the source's blocks.

    Args:
      make_rows: (store, block ids) -> rows of `layout`.
      is_searched: whether the blocks are those that are searched. Otherwise examples
        have no source block there, and do not refer to sentences of it.
    """
    specs, columns = layout.specs, layout.columns
    if isinstance(layout, masking.MaskedRows):
        specs = masking.sentence_specs(layout.query_length, layout.max_masks)
    source = copy.copy(source)
    source.layout = layout if is_searched else None
    add_task(
        name,
        source,
        functools.partial(_laid_out, source.store, layout, make_rows, is_searched),
        specs,
        source.store.vocabulary.size,
        columns if is_searched else None,
    )


def _laid_out(
    store: BlockStore,
    layout: SentenceRows,
    make_rows: Callable[..., Example],
    is_searched: bool,
    block_ids: np.ndarray,
) -> Example:
    """Returns the examples of blocks, and the rows that they were made of."""
    rows = make_rows(store, block_ids)
    examples = layout.lay_out(store, rows)
    if not is_searched:
        source_block = np.full_like(examples["source_block"], NULL_BLOCK)
        examples["source_block"] = source_block
    return {**rows, **examples}


def block_specs(document_length: int) -> FeatureSpecs:
    """Returns the features of one example of `<name>_blocks`."""
    return {
        "block_id": int32(),
        "document_ids": int32(document_length),
        "document_segment_ids": int32(document_length),
    }


def block_examples(
    store: BlockStore, block_ids: np.ndarray, *, document_length: int
) -> Example:
    """Returns block ids with the output of `BlockStore.document_ids`."""
    ids, segments = store.document_ids(block_ids, document_length)
    return {
        "block_id": np.asarray(block_ids, np.int32),
        "document_ids": ids,
        "document_segment_ids": segments,
    }


def add_task(
    name: str,
    source: seqio.DataSource,
    make_examples: Callable[..., Example],
    specs: FeatureSpecs,
    vocab_size: int,
    columns: FeatureSpecs | None = None,
) -> None:
    """Registers a task that maps the elements of a source with a NumPy function.

    Args:
      name: letters, digits and underscores.
      source: a source of scalars.
      make_examples: maps an array of scalars to any number of examples.
      columns: further arrays that the function returns and that the dataset has beside
        the features of the task; see `references.py`.
    """
    made = {**specs, **(columns or {})}
    try:
        seqio.TaskRegistry.add(
            name,
            # SeqIO's protocol requires more than its own base class declares.
            source=source,  # pyright: ignore[reportArgumentType]
            preprocessors=[
                functools.partial(expand, make_examples=make_examples, specs=made),
                seqio.CacheDatasetPlaceholder(),
                functools.partial(restore_shapes, specs=specs, columns=columns),
            ],
            output_features=output_features(specs, vocab_size),
        )
    except ValueError as error:
        raise BadInputError(
            f"expected a new task name of letters, digits and underscores, got "
            f"{name!r} ({error}); choose another."
        ) from error


def require_vocabulary(
    store: BlockStore, wanted: str | os.PathLike[str] | WordPiece
) -> None:
    """Checks that a corpus was prepared with a given vocabulary."""
    if not isinstance(wanted, WordPiece):
        wanted = load_vocabulary(wanted, **store.vocabulary.settings)
    if wanted.fingerprint != store.vocabulary.fingerprint:
        raise BadInputError(
            f"expected the corpus {store.directory} in the vocabulary "
            f"{wanted.fingerprint[:12]} ({wanted.size} pieces), got "
            f"{store.vocabulary.fingerprint[:12]} ({store.vocabulary.size} pieces); "
            "prepare the corpus again with this vocabulary, or leave it out."
        )


def _tagged_by(blocks: BlockSource, tagger: Tagger | None) -> BlockSource:
    """Returns the source with fingerprints that depend on the tagger."""
    if tagger is None:
        return blocks
    tagged = copy.copy(blocks)  # Shares the cache of held-out blocks.
    settings = f"{blocks.provenance['settings_fingerprint']}\0{tagger.name}"
    tagged.provenance = {
        **blocks.provenance,
        "settings_fingerprint": hashlib.sha256(settings.encode()).hexdigest(),
        "tagger": tagger.name,
    }
    return tagged


def provenance(provider: seqio.Task | seqio.Mixture) -> dict[str, str | float]:
    """Returns the provenance of a task's examples: fingerprints and shares.

    Sources provide it as an attribute `provenance`. A mixture has the values that all
    its tasks have in common.
    """
    tasks = provider.tasks if isinstance(provider, seqio.Mixture) else [provider]
    known = [getattr(task.source, "provenance", {}) for task in tasks]
    return {
        name: value
        for name, value in known[0].items()
        if all(other.get(name) == value for other in known)
    }


_READ_BLOCKS = 4096
# One per cent of 2,000 articles is none once in five hundred million times; and of so
# few, the texts of so many blocks are read within seconds.
_FEW_ARTICLES = 2000
_FEW_BLOCKS = 1 << 17
# Their words are counted in seconds, once in every process that makes examples.
_COUNTED_BLOCKS = 1 << 15
_SHUFFLE_BUFFER = 1 << 20
