"""Defines the tasks of a corpus: of what, and how, their examples are made.

NumPy alone makes them. `seqio_tasks.py` registers the same tasks with SeqIO.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from realm_jax.data import inverse_cloze, masking, random_masking
from realm_jax.data.blocks import BlockStore
from realm_jax.data.documents import (
    TRAIN,
    VALIDATION,
    VALIDATION_FRACTION,
    held_out,
    share_of_at_least_one,
)
from realm_jax.data.features import (
    WORDPIECE_FEATURES,
    Example,
    FeatureSpecs,
    in_chunks,
    int32,
)
from realm_jax.data.questions import (
    MAX_ANSWER_LENGTH,
    MAX_ANSWERS,
    QUERY_LENGTH,
    Question,
    pattern_length,
    question_examples,
    question_specs,
    questions_fingerprint,
    require_patterns_fit,
)
from realm_jax.data.references import References, SentenceRows
from realm_jax.data.salient_spans import Tagger
from realm_jax.data.terms import TermTagger
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.types import NULL_BLOCK

NUM_SHARDS = 64
# Tokenized together.
_BATCH = 256
# One per cent of 2,000 articles is none once in five hundred million times; and of so
# few, the texts of so many blocks are read within seconds.
_FEW_ARTICLES = 2000
_FEW_BLOCKS = 1 << 17
# Their words are counted in seconds, once in every process that makes examples.
_COUNTED_BLOCKS = 1 << 15
_MASKS = ("query_length", "max_masks", "validation_fraction", "seed")
_PAIRS = (
    "inverse_cloze_query_length",
    "document_length",
    "validation_fraction",
    "seed",
)


class BlockSplits:
    """The blocks of a corpus in two splits, shard by shard.

    A shard is a range of blocks, of which each split takes its own: the held-out
    articles do not depend on the number of shards. The texts of a shard, which name the
    article of each block, are read when the shard is first used. Of a few articles at
    least one is held out, unless the fraction is 0; of a single article, a book, blocks
    are.
    """

    def __init__(self, store: BlockStore, num_shards: int, fraction: float):
        """Splits the blocks of a store, `fraction` of its articles being held out."""
        self.store = store
        self._fraction = fraction
        self.num_shards = min(num_shards, store.num_blocks)
        self._bounds = np.linspace(0, store.num_blocks, self.num_shards + 1).astype(int)
        self._held_out = functools.lru_cache(maxsize=None)(self._read_held_out)

    def ids(
        self, split: str, shards: range | None = None
    ) -> Int32[np.ndarray, " block"]:
        """Returns the blocks of some shards of a split; None is all, at least one."""
        parts = [np.zeros(0, np.int32)]
        for shard in range(self.num_shards) if shards is None else shards:
            held = self._held_out(shard)
            kept = np.flatnonzero(held if split == VALIDATION else ~held)
            parts.append((self._bounds[shard] + kept).astype(np.int32))
        ids = np.concatenate(parts)
        if not len(ids) and shards is None:
            raise BadInputError(
                f"expected articles in the split {split!r}, got none of the "
                f"{self.store.num_blocks} blocks of {self.store.directory} (a share "
                f"of {self._fraction} is held out, of few articles at least one); "
                "prepare more articles or change "
                "prepare.PrepareConfig.validation_fraction."
            )
        return ids

    def _read_held_out(self, shard: int) -> np.ndarray:
        return held_out(self._held_out_together(shard), self._share)

    @functools.cached_property
    def _share(self) -> float:
        is_large = self.store.num_blocks > _FEW_BLOCKS
        if is_large or self._num_articles > _FEW_ARTICLES:
            return self._fraction
        keys = map(self._held_out_together, range(self.num_shards))
        return share_of_at_least_one(
            itertools.chain.from_iterable(keys), self._fraction
        )

    @property
    def _num_articles(self) -> int:
        return self.store.info.get("num_documents", self.store.num_blocks)

    def _held_out_together(self, shard: int) -> Iterator[str]:
        """Yields a key of each block; blocks of one key are in the same split."""
        blocks = np.arange(self._bounds[shard], self._bounds[shard + 1])
        if self._num_articles == 1:
            yield from (f"block {block}" for block in blocks)
            return
        yield from (text.source_id for text in self.store.iter_texts(blocks))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusTask:
    """A task whose examples are made of blocks, or of questions.

    Attributes:
      ids: (split, shards or None for all) -> blocks, or rows of questions.
      make: ids -> arrays of `specs`, or of the rows of `references`.
      specs: the features of an example, and of masked sentences their id.
      provenance: what the examples are made from, for their metadata.
      settings: names of the `examples.TaskSettings` that the examples depend on.
      blocks: the blocks that they are made of, if any.
      references: what rows refer to; None if examples are stored whole.
    """

    name: str
    vocabulary: WordPiece
    splits: Sequence[str]
    ids: Callable[[str, range | None], Int32[np.ndarray, " id"]]
    make: Callable[[np.ndarray], Example]
    specs: FeatureSpecs
    provenance: Mapping[str, str | float]
    settings: Sequence[str]
    blocks: BlockSplits | None = None
    references: References | None = None

    def num_shards(self, split: str) -> int:
        """Returns the number of parts in which the examples of a split are made."""
        del split
        return self.blocks.num_shards if self.blocks else 1

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """Types of wordpieces as narrow as the vocabulary; see `write_examples`."""
        return narrow_dtypes(dict.fromkeys(self.specs, self.vocabulary.size))

    def batches(self, split: str, shard: int, count: int) -> Iterator[Example]:
        """Yields what is stored of the examples of a shard out of `count`, in order."""
        shards = range(shard, shard + 1) if count > 1 else None
        for ids in in_chunks(self.ids(split, shards), _BATCH):
            made = self.make(ids)
            if self.references is None:
                made = {name: made[name] for name in self.specs}
            if all(map(len, made.values())):
                yield made

    def examples(self, ids: np.ndarray) -> Example:
        """Returns whole examples, beside the rows that they are made of."""
        made = self.make(ids)
        if self.references is None:
            return made
        return {**made, **self.references.layout.lay_out(self.references.corpus, made)}


def narrow_dtypes(vocab_sizes: Mapping[str, int]) -> dict[str, np.dtype]:
    """Returns the width of the vocabulary for each feature of wordpieces, by name.

    A vocabulary that needs as many bits as a batch has is left out, and one whose size
    a task does not state.
    """
    dtypes = {
        name: np.min_scalar_type(size - 1)
        for name, size in vocab_sizes.items()
        if name in WORDPIECE_FEATURES and size > 1
    }
    return {name: dtype for name, dtype in dtypes.items() if dtype.itemsize < 4}


def corpus_tasks(
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
) -> list[CorpusTask]:
    """Returns a task of documents, one of pairs, and four of masked sentences.

    `<name>_blocks` contains the documents, `_ict` sentences and their blocks,
    `_salient` sentences with a salient span masked, `_terms` with a term masked (see
    `data.terms`), `_random_tokens` and `_random_spans` with random masks. Each has the
    splits train and validation.

    Args:
      tagger: None masks the spans stored in the corpus. Otherwise the salient task
        masks those that this tagger finds in the blocks: it runs when examples are
        made, shard by shard, and the corpus is not changed.
      knowledge: another prepared corpus that is searched for these sentences (X and Z
        in REALM, section 4.3). Then there are only the tasks of masked sentences,
        without a source block.
      query_length: wordpieces of a masked sentence, special pieces included.
      inverse_cloze_query_length: the same of an inverse cloze query.
      document_length: the same of a document.
      seed: determines which inverse cloze queries are removed from their blocks, and
        the random masks.
    """
    blocks = BlockSplits(store, num_shards, validation_fraction)
    provenance = block_provenance(store, validation_fraction)
    if knowledge is not None:
        require_vocabulary(store, knowledge.vocabulary)
        provenance["corpus_fingerprint"] = knowledge.fingerprint

    def task(suffix: str, **fields) -> CorpusTask:
        given = {"name": f"{name}_{suffix}", "vocabulary": store.vocabulary}
        given |= {"splits": (TRAIN, VALIDATION), "ids": blocks.ids, "blocks": blocks}
        return CorpusTask(**{**given, "provenance": provenance, **fields})

    def sentences(
        suffix: str, layout: SentenceRows, make_rows: Callable[..., Example], **options
    ) -> CorpusTask:
        make = functools.partial(make_rows, store, **options)
        if knowledge is not None:
            make = functools.partial(_without_source, store, layout, make)
        is_pair = isinstance(layout, inverse_cloze.PairRows)
        return task(
            suffix,
            make=make,
            specs=layout.specs if is_pair else masking.sentence_specs(**masks),
            settings=_PAIRS if is_pair else _MASKS,
            references=References(layout, store) if knowledge is None else None,
        )

    masks = {"query_length": query_length, "max_masks": max_masks}
    pairs = inverse_cloze.PairRows(inverse_cloze_query_length, document_length)
    spans, pieces = masking.SpanRows(**masks), random_masking.PieceRows(**masks)
    found = {"make_rows": masking.salient_rows, "query_length": query_length}
    drawn = {"make_rows": random_masking.random_rows, **masks, "seed": seed}
    terms = TermTagger(functools.partial(_counted, store))
    salient = sentences("salient", spans, tagger=tagger, **found)
    if tagger is not None:
        salient = dataclasses.replace(salient, provenance=_tagged(provenance, tagger))
    masked = [
        salient,
        sentences("terms", spans, tagger=terms, **found),
        sentences("random_tokens", pieces, draw=random_masking.draw_tokens, **drawn),
        sentences("random_spans", pieces, draw=random_masking.draw_spans, **drawn),
    ]
    if knowledge is not None:
        return masked
    documents = task(
        "blocks",
        make=functools.partial(_documents, store, document_length),
        specs={
            "block_id": int32(),
            "document_ids": int32(document_length),
            "document_segment_ids": int32(document_length),
        },
        settings=("document_length", "validation_fraction"),
    )
    paired = sentences("ict", pairs, inverse_cloze.inverse_cloze_rows, seed=seed)
    return [documents, paired, *masked]


def block_provenance(store: BlockStore, fraction: float) -> dict[str, str | float]:
    """Returns the provenance of examples of blocks, a share of which is held out."""
    return {
        "corpus_fingerprint": store.fingerprint,
        "vocabulary_fingerprint": store.vocabulary.fingerprint,
        # Covers the spans, which the corpus fingerprint leaves out.
        "settings_fingerprint": store.info.get("settings_fingerprint", ""),
        # Examples of two shares must not be mixed: the held-out articles of one may be
        # trained on in the other.
        "validation_fraction": fraction,
    }


def require_vocabulary(store: BlockStore, wanted: WordPiece) -> None:
    """Requires that a corpus was prepared with a given vocabulary."""
    if wanted.fingerprint != store.vocabulary.fingerprint:
        raise BadInputError(
            f"expected the corpus {store.directory} in the vocabulary "
            f"{wanted.fingerprint[:12]} ({wanted.size} pieces), got "
            f"{store.vocabulary.fingerprint[:12]} ({store.vocabulary.size} pieces); "
            "prepare the corpus again with this vocabulary, or leave it out."
        )


def question_task(
    name: str,
    questions: Sequence[Question],
    vocabulary: WordPiece,
    *,
    query_length: int = QUERY_LENGTH,
    max_answers: int = MAX_ANSWERS,
    max_answer_length: int = MAX_ANSWER_LENGTH,
    max_pattern_length: int | None = None,
) -> CorpusTask:
    """Returns a task with rows of a `types.QuestionBatch`, and the questions' splits.

    Args:
      max_answer_length: longest answer the reader can find, in wordpieces.
      max_pattern_length: longest regular expression as an answer, in characters. None
        is that of `pattern_length`; sets to be mixed need the same.
    """
    if max_pattern_length is None:
        max_pattern_length = pattern_length(questions)
    require_patterns_fit(questions, max_pattern_length)
    lengths = {
        "query_length": query_length,
        "max_answers": max_answers,
        "max_answer_length": max_answer_length,
        "max_pattern_length": max_pattern_length,
    }
    rows: dict[str, list[int]] = {}
    for row, question in enumerate(questions):
        rows.setdefault(question.split, []).append(row)
    return CorpusTask(
        name=name,
        vocabulary=vocabulary,
        splits=tuple(rows),
        ids=lambda split, shards: np.array(rows[split], np.int32),
        make=lambda ids: question_examples(
            [questions[row] for row in ids], vocabulary, **lengths
        ),
        specs=question_specs(**lengths),
        provenance={
            "vocabulary_fingerprint": vocabulary.fingerprint,
            "questions_fingerprint": questions_fingerprint(questions),
        },
        settings=("query_length",),
    )


def _counted(store: BlockStore) -> Iterator[str]:
    """Yields the bodies of the blocks that words are counted in, evenly spread."""
    count = min(store.num_blocks, _COUNTED_BLOCKS)
    spread = np.linspace(0, store.num_blocks - 1, count).astype(int)
    return (text.body for text in store.iter_texts(spread))


def _without_source(
    store: BlockStore,
    layout: SentenceRows,
    make_rows: Callable[[np.ndarray], Example],
    block_ids: np.ndarray,
) -> Example:
    """Returns sentences of blocks that are not among those that are searched."""
    rows = make_rows(block_ids)
    examples = layout.lay_out(store, rows)
    source_block = np.full_like(examples["source_block"], NULL_BLOCK)
    return {**rows, **examples, "source_block": source_block}


def _documents(
    store: BlockStore, document_length: int, block_ids: np.ndarray
) -> Example:
    ids, segments = store.document_ids(block_ids, document_length)
    return {
        "block_id": np.asarray(block_ids, np.int32),
        "document_ids": ids,
        "document_segment_ids": segments,
    }


def _tagged(
    provenance: Mapping[str, str | float], tagger: Tagger
) -> dict[str, str | float]:
    """Returns a provenance whose fingerprint of settings depends on the tagger."""
    settings = f"{provenance['settings_fingerprint']}\0{tagger.name}"
    digest = hashlib.sha256(settings.encode()).hexdigest()
    return {**provenance, "settings_fingerprint": digest, "tagger": tagger.name}
