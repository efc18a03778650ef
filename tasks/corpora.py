"""Registers a corpus with SeqIO: one call, five tasks.

    tasks.corpora.register("vital", source="runs/vital/corpus")

of a corpus that `realm prepare` has made, or

    tasks.corpora.register(
        "mine", source="articles.jsonl", corpus="runs/mine/corpus", tagger="spacy"
    )

of documents, whose blocks are then made by the first call. It gives `vital_blocks` (the
documents), `vital_ict` (sentences and their blocks), `vital_salient` (sentences with a
salient span masked), `vital_random_tokens` and `vital_random_spans` (sentences with
random masks, for comparison), each with the splits train and validation. Importing this
module imports TensorFlow.
"""

import copy
import functools
import hashlib
import os
from collections.abc import Callable

import numpy as np
import seqio

from realm_jax.data import inverse_cloze, masking
from realm_jax.data.blocks import BlockStore
from realm_jax.data.feature_converters import expand, output_features, restore_shapes
from realm_jax.data.features import Example, FeatureSpecs, int32
from realm_jax.data.random_masking import random_span_examples, random_token_examples
from realm_jax.data.salient_spans import Tagger
from realm_jax.data.splits import VALIDATION_FRACTION
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.types import NULL_BLOCK
from tasks.prepare_blocks import BlocksConfig, prepare_blocks
from tasks.sources import BlockSource
from tasks.taggers import tagger_by_name
from tasks.vocabularies import VocabularyTraining

NUM_SHARDS = 64


def register(
    name: str,
    source: str | os.PathLike[str],
    *,
    corpus: str | os.PathLike[str] | None = None,
    tagger: str | Tagger | None = None,
    vocabulary: str | os.PathLike[str] | WordPiece | None = None,
    knowledge: str | os.PathLike[str] | None = None,
    query_length: int = masking.QUERY_LENGTH,
    inverse_cloze_query_length: int = inverse_cloze.QUERY_LENGTH,
    document_length: int = inverse_cloze.DOCUMENT_LENGTH,
    max_masks: int = masking.MAX_MASKS,
    num_shards: int = NUM_SHARDS,
    validation_fraction: float = VALIDATION_FRACTION,
    seed: int = 0,
) -> list[str]:
    """Registers `<name>_blocks`, `_ict`, `_salient`, `_random_tokens`, `_random_spans`.

    Args:
      name: letters, digits and underscores.
      source: directory of a corpus, as `realm prepare` makes it; or, with `corpus`,
        documents, see `tasks.documents.open.open_source`.
      corpus: None if `source` is prepared. Otherwise the directory of the blocks made
        of its documents. The first call makes them on all cores, which takes as long as
        `realm prepare` takes for them; later ones open them.
      tagger: None masks the spans that were found in preparing. Otherwise the salient
        task has those that this tagger finds in the blocks, whatever is stored: it runs
        when examples are made, shard by shard, and the corpus stays as it is. A name
        (see `tasks.taggers`) or an object; its model is loaded here. With `corpus` the
        name of what tags the documents, None for "auto".
      vocabulary: what the corpus must have been prepared with, a `vocab.txt` or a
        tokenizer; None takes any. Blocks are stored as wordpieces: for another
        vocabulary prepare the corpus again. With `corpus` what it is made with, None to
        train one on the text.
      knowledge: the prepared corpus that is searched for these sentences, where it is
        another one (X and Z in REALM, section 4.3). Then only the tasks of masked
        sentences are registered, which name no block of their own.
      query_length: wordpieces of a masked sentence, special pieces included.
      inverse_cloze_query_length: the same of an inverse cloze query.
      document_length: the same of a document.
      max_masks: masked wordpieces that are scored.
      num_shards: into how many parts SeqIO can split the work.
      validation_fraction: share of the articles no training example is made from.
      seed: which inverse cloze queries are removed from their blocks, and what the
        random masks hide.

    Returns:
      The names of the tasks.

    Raises:
      BadInputError: there is no corpus at `source`, it has another vocabulary, there
        is no such tagger, a length leaves no room for an example, a task of this name
        is registered already, or documents cannot be made into blocks.
    """
    if corpus is None:
        store = BlockStore.open(source)
        if vocabulary is not None:
            _require_vocabulary(store, vocabulary)
        if isinstance(tagger, str):
            tagger = tagger_by_name(tagger)
    else:
        store = _prepared(source, corpus, tagger, vocabulary, document_length)
        tagger = None
    blocks = BlockSource(store, num_shards, validation_fraction)
    if knowledge is not None:
        searched = BlockStore.open(knowledge)
        _require_vocabulary(store, searched.vocabulary)
        blocks.provenance["corpus_fingerprint"] = searched.fingerprint
    tagged_blocks = _tagged_by(blocks, tagger)
    ict = {
        "query_length": inverse_cloze_query_length,
        "document_length": document_length,
    }
    masks = {"query_length": query_length, "max_masks": max_masks}
    of_blocks = block_specs(document_length)
    of_pairs = inverse_cloze.inverse_cloze_specs(**ict)
    of_masks = masking.sentence_specs(**masks)
    tasks = [
        ("blocks", block_examples, {"document_length": document_length}, of_blocks),
        ("ict", inverse_cloze.inverse_cloze_examples, {**ict, "seed": seed}, of_pairs),
        ("salient", masking.salient_examples, {**masks, "tagger": tagger}, of_masks),
        ("random_tokens", random_token_examples, {**masks, "seed": seed}, of_masks),
        ("random_spans", random_span_examples, {**masks, "seed": seed}, of_masks),
    ]
    if knowledge is not None:
        tasks = [
            (suffix, functools.partial(_of_no_block, make_examples), options, specs)
            for suffix, make_examples, options, specs in tasks
            if specs is of_masks
        ]
    for suffix, make_examples, options, specs in tasks:
        add_task(
            f"{name}_{suffix}",
            tagged_blocks if suffix == "salient" else blocks,
            functools.partial(make_examples, store, **options),
            specs,
            store.vocabulary.size,
        )
    return [f"{name}_{suffix}" for suffix, *_ in tasks]


def _prepared(
    source: str | os.PathLike[str],
    corpus: str | os.PathLike[str],
    tagger: str | Tagger | None,
    vocabulary: str | os.PathLike[str] | WordPiece | None,
    document_length: int,
) -> BlockStore:
    """Makes blocks of documents, or opens those that were made of them before."""
    if not isinstance(tagger, str | None):
        raise BadInputError(
            f"expected the name of a tagger for documents, got an object "
            f"({tagger.name}): processes that tag load it for themselves."
        )
    if vocabulary is not None and not isinstance(vocabulary, WordPiece):
        vocabulary = WordPiece.load(vocabulary)
    config = BlocksConfig(
        corpus=os.fspath(corpus),
        source=os.fspath(source),
        vocabulary=vocabulary or VocabularyTraining(),
        tagger=tagger or "auto",
        chunk_length=document_length,
    )
    return prepare_blocks(config)


def _of_no_block(
    make_examples: Callable[..., Example], *args: object, **options: object
) -> Example:
    """Masked sentences that were taken from no block of the corpus that is searched."""
    examples = make_examples(*args, **options)
    source_block = np.full_like(examples["source_block"], NULL_BLOCK)
    return {**examples, "source_block": source_block}


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
    """Returns the blocks as `BlockStore.document_ids` makes them, with their ids."""
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
) -> None:
    """Registers a task whose examples a NumPy function makes of what a source yields.

    Raises:
      BadInputError: the name is taken, or SeqIO does not allow it.
    """
    try:
        seqio.TaskRegistry.add(
            name,
            # SeqIO's protocol asks for more than its own base class promises.
            source=source,  # pyright: ignore[reportArgumentType]
            preprocessors=[
                functools.partial(expand, make_examples=make_examples, specs=specs),
                seqio.CacheDatasetPlaceholder(),
                functools.partial(restore_shapes, specs=specs),
            ],
            output_features=output_features(specs, vocab_size),
        )
    except ValueError as error:
        raise BadInputError(
            f"expected a new task name of letters, digits and underscores, got "
            f"{name!r} ({error}); choose another."
        ) from error


def _require_vocabulary(
    store: BlockStore, wanted: str | os.PathLike[str] | WordPiece
) -> None:
    if not isinstance(wanted, WordPiece):
        wanted = WordPiece.load(
            wanted,
            lowercase=store.vocabulary.lowercase,
            strip_accents=store.vocabulary.strip_accents,
        )
    if wanted.fingerprint != store.vocabulary.fingerprint:
        raise BadInputError(
            f"expected the corpus {store.directory} in the vocabulary "
            f"{wanted.fingerprint[:12]} ({wanted.size} pieces), got "
            f"{store.vocabulary.fingerprint[:12]} ({store.vocabulary.size} pieces); "
            "prepare the corpus again with this vocabulary, or leave it out."
        )


def _tagged_by(blocks: BlockSource, tagger: Tagger | None) -> BlockSource:
    """Returns the source under fingerprints that tell other spans apart."""
    if tagger is None:
        return blocks
    tagged = copy.copy(blocks)  # It shares what was read of the articles.
    settings = f"{blocks.provenance['settings_fingerprint']}\0{tagger.name}"
    tagged.provenance = {
        **blocks.provenance,
        "settings_fingerprint": hashlib.sha256(settings.encode()).hexdigest(),
        "tagger": tagger.name,
    }
    return tagged


def provenance(provider: seqio.Task | seqio.Mixture) -> dict[str, str | float]:
    """Returns what the examples of a task are made from: fingerprints and shares.

    Sources tell theirs in an attribute `provenance`. A mixture has what all its tasks
    have in common.
    """
    tasks = provider.tasks if isinstance(provider, seqio.Mixture) else [provider]
    known = [getattr(task.source, "provenance", {}) for task in tasks]
    return {
        name: value
        for name, value in known[0].items()
        if all(other.get(name) == value for other in known)
    }
