"""Which tasks are registered, how much is in them, and their first examples as text.

Importing this module imports TensorFlow.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import seqio
import tensorflow as tf

from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from tasks import corpora, materialise
from tasks.readable import Mark, Origin, describe
from tasks.sources import BlockSource

# Which split a block is in says its text: reading all of those of Wikipedia takes
# minutes.
_MAX_COUNTED_BLOCKS = 1 << 20
_EXAMPLES = "examples"


class Summary(NamedTuple):
    """One split of a task.

    Attributes:
      task: its name.
      split: the split; "" for a mixture that has none.
      content: what is in it, with counts, in words.
    """

    task: str
    split: str
    content: str


def register_prepared(name: str, corpus: str | os.PathLike[str]) -> list[str]:
    """Registers a corpus with the settings its materialised examples were made with.

    Settings that no examples tell are the defaults of `corpora.register`.

    Returns:
      The names of the tasks.

    Raises:
      BadInputError: as `corpora.register`, or examples are damaged.
    """
    store = BlockStore.open(corpus)
    settings: dict[str, Any] = {"document_length": store.chunk_length}
    if masked := _materialised(store, f"{name}_salient"):
        settings["query_length"] = masked.features["query_ids"].shape[1]
        settings["max_masks"] = masked.features["mask_ids"].shape[1]
        for setting in ("validation_fraction", "seed"):
            if setting in masked.metadata:
                settings[setting] = masked.metadata[setting]
    if pairs := _materialised(store, f"{name}_ict"):
        length = pairs.features["query_ids"].shape[1]
        settings["inverse_cloze_query_length"] = length
        settings["document_length"] = pairs.features["document_ids"].shape[1]
    return corpora.register(name, corpus, **settings)


def summaries(names: Iterable[str] | None = None) -> list[Summary]:
    """Returns what is registered, by name, with a row for each split.

    Args:
      names: tasks and mixtures; None takes all.

    Raises:
      BadInputError: a name is unknown, or examples on disk are damaged.
    """
    if names is None:
        names = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
    rows = []
    for name in sorted(names):
        provider = materialise.find_task(name)
        rows += [
            Summary(name, split, _content(provider, split))
            for split in _splits(provider) or [""]
        ]
    return rows


def show(name: str, split: str, count: int, mark: Mark = str) -> Iterator[list[str]]:
    """Yields the first examples of a task or mixture, each as lines of text.

    Args:
      name: of the task or mixture.
      split: one of its splits, or "" for the first of them.
      count: how many examples, at most.
      mark: applied to `[MASK]`, to answers and to spans, which stand in brackets.

    Raises:
      BadInputError: the task or the split is unknown, or no example can be made.
    """
    provider = materialise.find_task(name)
    splits = _splits(provider)
    if split and split not in splits:
        raise BadInputError(
            f"expected a split of {name} ({', '.join(splits)}), got {split!r}; name "
            "one of these."
        )
    split = split or splits[0]
    origin = Origin(find_vocabulary(provider), _store(provider), _features(provider))
    found = False
    for example in _examples(provider, split, count):
        found = True
        yield describe(example, origin, mark)
    if not found:
        raise BadInputError(
            f"expected examples in the split {split!r} of {name}, got none; its source "
            "has nothing to make them of, see `realm tasks`."
        )


def find_vocabulary(provider: seqio.Task | seqio.Mixture) -> WordPiece | None:
    """Returns the tokenizer of a task's wordpieces, if any registered source has it."""
    wanted = corpora.provenance(provider).get("vocabulary_fingerprint")
    tasks = [seqio.TaskRegistry.get(name) for name in seqio.TaskRegistry.names()]
    for task in tasks:
        store = getattr(task.source, "store", task.source)
        vocabulary = getattr(store, "vocabulary", None)
        if isinstance(vocabulary, WordPiece) and vocabulary.fingerprint == wanted:
            return vocabulary
    return None


def _splits(provider: seqio.Task | seqio.Mixture) -> list[str]:
    splits = list(provider.splits)
    return sorted(splits, key=lambda split: (split != "train", splits.index(split)))


def _content(provider: seqio.Task | seqio.Mixture, split: str) -> str:
    if isinstance(provider, seqio.Mixture):
        return f"mixture of {', '.join(sorted(task.name for task in provider.tasks))}"
    source = provider.source
    if isinstance(source, BlockSource):
        made = _materialised(source.store, provider.name, split)
        prepared = "" if made is None else f", {_example_count(made)} prepared"
        return f"{_block_count(source, split)}{prepared}"
    count = source.num_input_examples(split)
    return "examples, not counted" if count is None else f"{count:,} examples"


def _block_count(source: BlockSource, split: str) -> str:
    total = source.store.num_blocks
    if total > _MAX_COUNTED_BLOCKS:
        return f"a share of {total:,} blocks"
    try:
        blocks = source.get_dataset(split, shuffle=False).cardinality()
    except BadInputError:  # No article is in this split.
        return "0 blocks"
    return f"{int(blocks):,} blocks"


def _example_count(examples: Examples) -> str:
    starts = examples.sentence_starts
    sentences = "" if starts is None else f" of {len(starts) - 1:,} sentences"
    return f"{len(examples):,} examples{sentences}"


def _materialised(
    store: BlockStore, task: str, split: str = "train"
) -> Examples | None:
    folder = Path(store.directory) / _EXAMPLES / task / split
    return Examples.open(folder) if folder.exists() else None


def _examples(
    provider: seqio.Task | seqio.Mixture, split: str, count: int
) -> Iterator[Mapping[str, Any]]:
    """Yields examples shard by shard: the first ones need not read the whole corpus."""
    shards = 1
    if isinstance(provider, seqio.Task) and isinstance(provider.source, BlockSource):
        shards = len(provider.source.list_shards(split))
    left = count
    for index in range(shards):
        try:
            dataset = provider.get_dataset(
                split=split,
                shuffle=False,
                seed=0,
                num_epochs=1,
                shard_info=seqio.ShardInfo(index, shards) if shards > 1 else None,
            )
            for example in dataset.take(left).as_numpy_iterator():
                yield example
                left -= 1
        except tf.errors.OpError as error:
            raise materialise.unwrapped(error) from error
        if not left:
            return


def _store(provider: seqio.Task | seqio.Mixture) -> BlockStore | None:
    source = provider.source if isinstance(provider, seqio.Task) else None
    return source.store if isinstance(source, BlockSource) else None


def _features(provider: seqio.Task | seqio.Mixture) -> Mapping[str, Any]:
    return dict(provider.output_features)
