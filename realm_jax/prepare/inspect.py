"""Lists registered tasks with their sizes, and renders their first examples as text.

Importing this module imports TensorFlow.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import seqio
import tensorflow as tf

from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples
from realm_jax.data.features import pieces_of_span
from realm_jax.data.questions import decode_patterns
from realm_jax.data.wordpiece import MASK, WordPiece
from realm_jax.errors import BadInputError
from realm_jax.prepare import seqio_tasks
from realm_jax.prepare.examples import examples_folder
from realm_jax.prepare.seqio_tasks import BlockSource
from realm_jax.prepare.text_sample import MASKS

Mark = Callable[[str], str]
"""Highlights a mask, an answer or a span, e.g. by colour."""

# The split of a block depends on its text, and reading all texts of Wikipedia takes
# minutes.
_MAX_COUNTED_BLOCKS = 1 << 20


class Summary(NamedTuple):
    """One split of a task.

    Attributes:
      split: name of the split; "" for a mixture that has none.
      content: readable description of the content, with counts.
    """

    task: str
    split: str
    content: str


def register_prepared(name: str, corpus: str | os.PathLike[str]) -> list[str]:
    """Registers the tasks of a corpus as its examples were made; returns their names.

    Settings that examples do not record are the defaults of
    `seqio_tasks.register_corpus`.
    """
    store = BlockStore.open(corpus)
    settings: dict[str, Any] = {"document_length": store.chunk_length}
    made = (_materialised(store, f"{name}_{kind}") for kind in MASKS)
    if masked := next(filter(None, made), None):
        settings["query_length"] = masked.features["query_ids"].shape[1]
        settings["max_masks"] = masked.features["mask_ids"].shape[1]
        for setting in ("validation_fraction", "seed"):
            if setting in masked.metadata:
                settings[setting] = masked.metadata[setting]
    if pairs := _materialised(store, f"{name}_ict"):
        length = pairs.features["query_ids"].shape[1]
        settings["inverse_cloze_query_length"] = length
        settings["document_length"] = pairs.features["document_ids"].shape[1]
    return seqio_tasks.register_corpus(name, store, **settings)


def summaries(names: Iterable[str] | None = None) -> list[Summary]:
    """Returns a summary of every split of registered tasks, sorted by name."""
    if names is None:
        names = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
    rows = []
    for name in sorted(names):
        provider = seqio_tasks.find_task(name)
        rows += [
            Summary(name, split, _content(provider, split))
            for split in _splits(provider) or [""]
        ]
    return rows


def show(name: str, split: str, count: int, mark: Mark = str) -> Iterator[list[str]]:
    """Yields the first examples of a task or mixture, each as lines of text.

    Args:
      split: one of its splits, or "" for the first of them.
      mark: applied to `[MASK]`, and to answers and spans, which are in brackets.
    """
    provider = seqio_tasks.find_task(name)
    splits = _splits(provider)
    if split and split not in splits:
        raise BadInputError(
            f"expected a split of {name} ({', '.join(splits)}), got {split!r}; name "
            "one of these."
        )
    split = split or splits[0]
    source = provider.source if isinstance(provider, seqio.Task) else None
    store = source.store if isinstance(source, BlockSource) else None
    features = dict(provider.output_features)
    vocabulary = find_vocabulary(provider)
    found = False
    for example in _examples(provider, split, count):
        found = True
        yield _describe(example, vocabulary, store, features, mark)
    if not found:
        raise BadInputError(
            f"expected examples in the split {split!r} of {name}, got none; its source "
            "has nothing to make them of, see `realm tasks`."
        )


def find_vocabulary(provider: seqio.Task | seqio.Mixture) -> WordPiece | None:
    """Returns the tokenizer of a task's wordpieces, None if no source has it.

    Registered sources are matched by the fingerprint of their vocabulary.
    """
    wanted = seqio_tasks.provenance(provider).get("vocabulary_fingerprint")
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
        counts = [_block_count(source, split)]
        if made := _materialised(source.store, provider.name, split):
            starts = made.sentence_starts
            of = "" if starts is None else f" of {len(starts) - 1:,} sentences"
            counts.append(f"{len(made):,} examples{of} prepared")
        return ", ".join(counts)
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


def _materialised(
    store: BlockStore, task: str, split: str = "train"
) -> Examples | None:
    folder = examples_folder(store.directory, task, split)
    return Examples.open(folder) if folder.exists() else None


def _examples(
    provider: seqio.Task | seqio.Mixture, split: str, count: int
) -> Iterator[Mapping[str, Any]]:
    """Yields examples shard by shard, so that the first ones read only a part."""
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
            seqio_tasks.raise_bad_input(error)
            raise
        if not left:
            return


def _describe(
    example: Mapping[str, Any],
    vocabulary: WordPiece | None,
    store: BlockStore | None,
    features: Mapping[str, Any],
    mark: Mark,
) -> list[str]:
    """Renders an example as lines, each of which begins with a label.

    Masked sentences are shown with `[MASK]` as the model sees them, and again with the
    answers in brackets; pairs and blocks with title and body, blocks with the spans of
    the corpus in brackets; questions with the answers that the reader can find. Other
    examples have a line for every feature.
    """
    names = example.keys()
    if vocabulary is not None:
        if {"query_ids", "mask_positions", "mask_ids", "mask_weights"} <= names:
            return _masked(example, vocabulary, store, mark)
        if {"query_ids", "document_ids", "document_segment_ids"} <= names:
            return [
                f"query     {_row(example['query_ids'], vocabulary)}",
                *_document(example, vocabulary),
                *_from(example.get("block_ids", -1), store),
            ]
        if {"block_id", "document_ids", "document_segment_ids"} <= names:
            return _block(example, vocabulary, store, mark)
        if {"question_ids", "answer_ids"} <= names:
            return _question(example, vocabulary, mark)
    width = max(9, *map(len, names))
    return [
        f"{name:<{width}} {_any(value, features.get(name))}"
        for name, value in example.items()
    ]


def _masked(
    example: Mapping[str, Any],
    vocabulary: WordPiece,
    store: BlockStore | None,
    mark: Mark,
) -> list[str]:
    query = example["query_ids"]
    scored = example["mask_weights"] > 0
    filled = query.copy()
    filled[example["mask_positions"][scored]] = example["mask_ids"][scored]
    runs = _runs(example["mask_positions"][scored])
    unscored = int((filled == vocabulary.mask).sum())
    lines = [
        f"query     {_row(query, vocabulary).replace(MASK, mark(MASK))}",
        f"answers   {_bracketed(filled, runs, vocabulary, mark)}",
    ]
    if unscored:
        lines.append(f"          ({unscored} more masked, and not scored)")
    return [*lines, *_from(example.get("source_block", -1), store)]


def _block(
    example: Mapping[str, Any],
    vocabulary: WordPiece,
    store: BlockStore | None,
    mark: Mark,
) -> list[str]:
    block = int(example["block_id"])
    lines = _document(example, vocabulary)
    if store is not None:
        text = store.text(block)
        offsets = vocabulary.encode(text.body).offsets
        body = _parts(example, vocabulary)[1]
        spans = [pieces_of_span(offsets, (start, end)) for start, end, _ in text.spans]
        runs = [(s.start, s.stop) for s in spans if s.start < s.stop <= len(body)]
        lines[1] = f"body      {_bracketed(body, runs, vocabulary, mark)}"
    return [*lines, f"from      block {block}"]


def _question(
    example: Mapping[str, Any], vocabulary: WordPiece, mark: Mark
) -> list[str]:
    answers = [vocabulary.decode(answer) for answer in example["answer_ids"]]
    answers += decode_patterns(example.get("answer_patterns", ()))
    found = [mark(f"[{answer}]") for answer in answers if answer]
    return [
        f"question  {_row(example['question_ids'], vocabulary)}",
        f"answers   {' '.join(found) or '(none that the reader can find)'}",
    ]


def _document(example: Mapping[str, Any], vocabulary: WordPiece) -> list[str]:
    title, body = _parts(example, vocabulary)
    return [
        f"title     {vocabulary.decode(title)}",
        f"body      {vocabulary.decode(body)}",
    ]


def _parts(
    example: Mapping[str, Any], vocabulary: WordPiece
) -> tuple[np.ndarray, np.ndarray]:
    """Returns title and body of `[CLS] title [SEP] body [SEP]`."""
    ids, segments = example["document_ids"], example["document_segment_ids"]
    is_special = (ids == vocabulary.cls) | (ids == vocabulary.sep)
    kept = (ids != vocabulary.pad) & ~is_special
    return ids[kept & (segments == 0)], ids[kept & (segments == 1)]


def _from(block: Any, store: BlockStore | None) -> list[str]:
    if int(block) < 0:
        return []
    title = "" if store is None else f", {store.text(int(block)).title!r}"
    return [f"from      block {int(block)}{title}"]


def _row(ids: np.ndarray, vocabulary: WordPiece) -> str:
    """Returns the text between `[CLS]` and `[SEP]`."""
    return vocabulary.decode(ids[ids != vocabulary.pad][1:-1])


def _runs(positions: np.ndarray) -> list[tuple[int, int]]:
    """Groups ascending positions into runs [start, end)."""
    runs = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    return [(run[0], run[-1] + 1) for run in runs if len(run)]


def _bracketed(
    ids: np.ndarray, runs: Iterable[tuple[int, int]], vocabulary: WordPiece, mark: Mark
) -> str:
    """Returns the text of a row with the runs in brackets."""
    special = (vocabulary.pad, vocabulary.cls, vocabulary.sep)
    bounds = [0, *itertools.chain.from_iterable(runs), len(ids)]
    texts = vocabulary.decode_parts(
        [i for i in ids[start:end] if i not in special]
        for start, end in itertools.pairwise(bounds)
    )
    for run in range(1, len(texts), 2):
        text = texts[run].lstrip()
        space = texts[run].removesuffix(text)
        texts[run] = f"{space}{mark(f'[{text}]')}"
    return "".join(texts)


def _any(value: Any, feature: Any) -> str:
    """Returns a feature of an arbitrary task as text."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    value = np.asarray(value)
    if value.dtype == object:
        return " | ".join(text.decode(errors="replace") for text in value.ravel())
    vocabulary = getattr(feature, "vocabulary", None)
    is_text = value.ndim == 1 and np.issubdtype(value.dtype, np.integer)
    if is_text and not isinstance(vocabulary, seqio.PassThroughVocabulary | None):
        return vocabulary.decode(value.tolist())
    return np.array2string(value, threshold=24, edgeitems=8).replace("\n", " ")
