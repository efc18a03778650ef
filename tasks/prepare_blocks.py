"""Documents to a block store: source, filter, sentences, blocks and tags, in parts."""

import dataclasses
import pathlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from realm_jax.data.block_writer import EmptyCorpusError
from realm_jax.data.blocks import INFO_FILE, BlockStore
from realm_jax.data.corpus import settings_fingerprint
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError, StoppedError
from tasks import make_blocks
from tasks.documents.open import open_source
from tasks.documents.source import DocumentSource
from tasks.scratch import ALL_CORES, Report, Scratch, Workers
from tasks.taggers import loaded_tagger
from tasks.vocabularies import VocabularyTraining

PART_BYTES = 2 << 20
"""About how much of a source is one part."""


@dataclasses.dataclass(frozen=True)
class BlocksConfig:
    """A block store to make.

    Attributes:
      corpus: folder to make.
      source: of the documents, or how `tasks.documents.open.open_source` calls it.
      vocabulary: the tokenizer, or how one is trained on the text.
      tagger: of salient spans, see `tasks.taggers.tagger_by_name`.
      chunk_length: wordpieces of a block with its title and special pieces.
      part_bytes: about how much of the source is one part.
      scratch: where the corpus gets a folder for parts, "" for beside it.
    """

    corpus: str
    source: str | DocumentSource
    vocabulary: WordPiece | VocabularyTraining
    tagger: str
    chunk_length: int
    part_bytes: int = PART_BYTES
    scratch: str = ""


def prepare_blocks(
    config: BlocksConfig,
    report: Report = lambda *_: None,
    stop: threading.Event | None = None,
    workers: Workers = ALL_CORES,
) -> BlockStore:
    """Makes the block store where it is missing; goes on with what a killed run made.

    Raises:
      BadInputError: the source is missing, empty or malformed, or the folder holds
        another corpus.
      StoppedError: asked to stop.
    """
    source = config.source
    if isinstance(source, str):
        source = open_source(source, shard_bytes=config.part_bytes)
    tagger = loaded_tagger(config.tagger).name
    fingerprint = source.fingerprint()
    if (pathlib.Path(config.corpus) / INFO_FILE).exists():
        store = BlockStore.open(config.corpus)
        _require_same_settings(config, store, tagger, fingerprint)
        report("blocks", store.num_blocks, store.num_blocks)
        return store
    scratch = Scratch(config.corpus, config.scratch)
    source.prepare_shards(scratch.folder("unpacked"))
    shards = source.shards()
    vocabulary = config.vocabulary
    if isinstance(vocabulary, VocabularyTraining):
        report("vocabulary", 0, 1)
        vocabulary = vocabulary.train(source, fingerprint, scratch.store())
    settings = settings_fingerprint(
        vocabulary=vocabulary,
        tagger_name=tagger,
        chunk_length=config.chunk_length,
        source=fingerprint,
    )
    names = make_blocks.part_names(len(shards))
    make = make_blocks.MakeBlocks(
        source,
        dict(zip(names, shards, strict=True)),
        vocabulary,
        config.tagger,
        config.chunk_length,
        workers.max_bad_lines,
    )
    folder = f"blocks-{settings[:16]}-{config.part_bytes}-{make_blocks.PART_VERSION}"
    parts = _parts(names, make, scratch, folder, report, stop, workers)
    try:
        store = make_blocks.assemble(
            config.corpus,
            parts,
            vocabulary=vocabulary,
            chunk_length=config.chunk_length,
            max_bad_lines=workers.max_bad_lines,
            metadata={
                "tagger": tagger,
                "source": fingerprint,
                "settings_fingerprint": settings,
                "vocabulary_training": _training(config),
            },
        )
    except EmptyCorpusError:
        # Of no use to a later run. Whatever else goes wrong, such as a full disk, is
        # mended without making the parts again.
        scratch.clear()
        raise
    scratch.clear()
    return store


def _parts(
    names: Sequence[str],
    make: make_blocks.MakeBlocks,
    scratch: Scratch,
    folder: str,
    report: Report,
    stop: threading.Event | None,
    workers: Workers,
) -> Iterator[bytes]:
    """Makes the parts in a folder of the scratch folder, and reads them in order."""
    stop = stop or threading.Event()
    if len(names) == 1 and not workers.beam_flags:
        # Beam takes seconds to start, and one part has work for one process.

        def check() -> None:
            if stop.is_set():
                raise StoppedError("stopped; the same command begins anew")

        part = make(names[0], check)
        report("blocks", 1, 1)
        return iter([part])
    parts = scratch.make_parts(
        folder, names, make, what="blocks", report=report, stop=stop, workers=workers
    )
    return map(parts.read, names)


def _training(config: BlocksConfig) -> Mapping[str, Any] | None:
    """How the vocabulary was trained, None if it was given."""
    if isinstance(config.vocabulary, VocabularyTraining):
        return dataclasses.asdict(config.vocabulary)
    return None


def _require_same_settings(
    config: BlocksConfig, store: BlockStore, tagger: str, source: str
) -> None:
    vocabulary = config.vocabulary
    wanted = settings_fingerprint(
        vocabulary=vocabulary
        if isinstance(vocabulary, WordPiece)
        else store.vocabulary,
        tagger_name=tagger,
        chunk_length=config.chunk_length,
        source=source,
    )
    trained = store.info.get("vocabulary_training")
    same = store.info.get("settings_fingerprint") == wanted
    if not same or trained != _training(config):
        raise BadInputError(
            f"expected {config.corpus} to be absent or made from {config.source} with "
            f"these settings, but it holds another corpus (tagger "
            f"{store.info.get('tagger')!r}, {store.chunk_length} wordpieces a block, "
            f"{store.vocabulary.size} in a vocabulary that was "
            f"{'trained on it' if trained else 'given'}); remove it or choose "
            "another CORPUS"
        )
