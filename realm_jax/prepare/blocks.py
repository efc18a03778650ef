"""Makes a block store from documents, part by part: filters, splits, packs and tags.

Taggers are created by name: those of `data.salient_spans`, and checkpoints on disk.
"""

import dataclasses
import functools
import itertools
import pathlib
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from realm_jax import ranges
from realm_jax.data.block_writer import (
    Block,
    BlockWriter,
    EmptyCorpusError,
    document_rows,
)
from realm_jax.data.blocks import INFO_FILE, BlockStore
from realm_jax.data.corpus import chunk_each, settings_fingerprint
from realm_jax.data.salient_spans import (
    SPACY_MODEL,
    PreAnnotated,
    RuleTagger,
    SpacyTagger,
    Tagger,
)
from realm_jax.data.versions import PARENT_FILE
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.prepare.block_parts import (
    Summary,
    documents_of,
    pack_blocks,
    require_few_bad,
    unpack_blocks,
)
from realm_jax.prepare.documents.open import open_source
from realm_jax.prepare.documents.source import DocumentSource, Shard
from realm_jax.prepare.fingerprints import package_code
from realm_jax.prepare.scratch import (
    ALL_CORES,
    Report,
    Scratch,
    Workers,
    check_of,
    only_writer,
)
from realm_jax.prepare.vocabularies import VocabularyTraining

# Enough for the tokenizer and the tagger to work in batches, little to keep in memory.
_DOCUMENTS_PER_BATCH = 512
PART_VERSION = 5
"""Version of the format of parts: a killed run resumes only with parts of the same."""

_TAGGERS = {"spacy": SpacyTagger, "rules": RuleTagger, "given": PreAnnotated}
CHECKPOINT = "checkpoint:"
"""Prefix of a tagger's name, followed by the folder of a token classifier."""


def part_names(num_shards: int) -> list[str]:
    """Returns the name of the part of each shard of a source, in order."""
    return [f"{i:06d}-of-{num_shards:06d}" for i in range(num_shards)]


@dataclasses.dataclass(frozen=True)
class MakeBlocks:
    """Makes the blocks of a shard; see `beam_parts.MakePart`.

    Attributes:
      shards: the source's shards by the name of their part.
      tagger: name of the tagger, which each worker loads for itself.
    """

    source: DocumentSource
    shards: Mapping[str, Shard]
    vocabulary: WordPiece
    tagger: str
    chunk_length: int
    max_bad_lines: int

    def __call__(self, name: str, check: Callable[[], None]) -> bytes:
        """Returns the blocks of the shard and the counts of its records, serialised."""
        summary, blocks = Summary(), list[Block]()
        rows = [document_rows([], [])]
        records = self.source.read(self.shards[name])
        documents = documents_of(records, summary, self.max_bad_lines)
        tagger = loaded_tagger(self.tagger)
        while batch := list(itertools.islice(documents, _DOCUMENTS_PER_BATCH)):
            check()
            made = chunk_each(batch, self.vocabulary, tagger, self.chunk_length)
            summary.without_text += sum(not of_one for of_one in made.blocks)
            summary.shortened_titles += made.shortened_titles
            summary.divisions += made.divisions
            summary.unread_pieces += made.unread_pieces
            blocks += itertools.chain.from_iterable(made.blocks)
            rows.append(document_rows(batch, list(map(len, made.blocks))))
        return pack_blocks(blocks, np.concatenate(rows), summary)


def assemble(
    directory: str,
    parts: Iterator[bytes],
    *,
    vocabulary: WordPiece,
    chunk_length: int,
    max_bad_lines: int,
    metadata: Mapping[str, Any],
) -> BlockStore:
    """Writes the blocks of all parts, in order, to one store, and opens it."""
    total = Summary()
    with BlockWriter(directory, vocabulary, chunk_length) as writer:
        for part in parts:
            blocks, documents, summary = unpack_blocks(part)
            total.add(summary)
            for block in blocks:
                writer.add(block)
            writer.add_documents(documents)
        require_few_bad(total, max_bad_lines)
        writer.metadata |= {
            **metadata,
            "num_documents": total.documents,
            "summary": total.to_json(),
        }
    return BlockStore.open(directory)


PART_BYTES = 2 << 20
"""Approximate size of a part of a source, in bytes."""


@dataclasses.dataclass(frozen=True)
class BlocksConfig:
    """Configuration of a block store to be made.

    Attributes:
      source: source of the documents, or its name for `documents.open.open_source`.
      vocabulary: the tokenizer, or how to train one on the text.
      scratch: parent of the corpus's folder for parts, "" to place it beside the
        corpus.
      characters: characters that a trained vocabulary holds even if the text lacks
        them, such as those of the questions. A corpus that is there is not compared
        with them.
    """

    corpus: str
    source: str | DocumentSource
    vocabulary: WordPiece | VocabularyTraining
    tagger: str
    chunk_length: int
    part_bytes: int = PART_BYTES
    scratch: str = ""
    characters: str = ""

    def __post_init__(self):
        ranges.require_ranges(
            self,
            corpus=ranges.LOCAL_FOLDER,
            chunk_length=ranges.whole(4),
            part_bytes=ranges.whole(1),
        )


def prepare_blocks(
    config: BlocksConfig,
    report: Report = lambda *_: None,
    stop: threading.Event | None = None,
    workers: Workers = ALL_CORES,
) -> BlockStore:
    """Makes the block store if it is missing; resumes from parts of a killed run."""
    source = config.source
    if isinstance(source, str):
        source = open_source(source, shard_bytes=config.part_bytes)
    tagger = loaded_tagger(config.tagger).name
    fingerprint = source.fingerprint()
    info = pathlib.Path(config.corpus) / INFO_FILE
    if not info.exists():
        with only_writer(config.corpus):
            # Another process may have made it just now.
            if not info.exists():
                return _make(config, source, fingerprint, tagger, report, stop, workers)
    store = BlockStore.open(config.corpus)
    _require_same_settings(config, store, tagger, fingerprint)
    report("blocks", store.num_blocks, store.num_blocks)
    return store


def _make(
    config: BlocksConfig,
    source: DocumentSource,
    fingerprint: str,
    tagger: str,
    report: Report,
    stop: threading.Event | None,
    workers: Workers,
) -> BlockStore:
    scratch = Scratch(config.corpus, config.scratch)
    source.prepare_shards(scratch.folder("unpacked"))
    shards = source.shards()
    vocabulary = config.vocabulary
    if isinstance(vocabulary, VocabularyTraining):
        report("vocabulary", 0, 1)
        vocabulary = vocabulary.train(
            source,
            fingerprint,
            scratch.store(),
            name=config.source if isinstance(config.source, str) else "the source",
            characters=config.characters,
            max_bad_lines=workers.max_bad_lines,
        )
    settings = settings_fingerprint(
        vocabulary=vocabulary,
        tagger_name=tagger,
        chunk_length=config.chunk_length,
        source=fingerprint,
    )
    names = part_names(len(shards))
    make = MakeBlocks(
        source,
        dict(zip(names, shards, strict=True)),
        vocabulary,
        config.tagger,
        config.chunk_length,
        workers.max_bad_lines,
    )
    code = package_code()
    made_so = f"{settings[:16]}-{code['source'][:16]}"
    folder = f"blocks-{made_so}-{config.part_bytes}-{PART_VERSION}"
    parts = _parts(names, make, scratch, folder, report, stop, workers)
    try:
        store = assemble(
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
                "made_by": code,
            },
        )
    except EmptyCorpusError:
        # The parts are of no use to a later run. After any other failure, such as a
        # full disk, they need not be made again.
        scratch.clear()
        raise
    scratch.clear()
    return store


def _parts(
    names: Sequence[str],
    make: MakeBlocks,
    scratch: Scratch,
    folder: str,
    report: Report,
    stop: threading.Event | None,
    workers: Workers,
) -> Iterator[bytes]:
    """Makes the parts in a subfolder of the scratch folder, and reads them in order."""
    stop = stop or threading.Event()
    if len(names) == 1 and not workers.beam_flags:
        # Beam takes seconds to start, and one part has work for one process.
        part = make(names[0], check_of(stop))
        report("blocks", 1, 1)
        return iter([part])
    read = scratch.make_parts(
        folder, names, make, what="blocks", report=report, stop=stop, workers=workers
    )
    return map(read, names)


def _training(config: BlocksConfig) -> Mapping[str, Any] | None:
    """Returns the settings of the vocabulary's training, None if it was given."""
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
    if same and trained == _training(config):
        return
    differences = _differences(config, store, tagger, source)
    raise BadInputError(
        f"expected {config.corpus} to be absent or made from {config.source} with "
        f"these settings, but it holds another corpus: {'; '.join(differences)}; give "
        "the settings that it was made with, choose another CORPUS, or remove it: rm "
        f"-r {shlex.quote(config.corpus)}"
    )


def _differences(
    config: BlocksConfig, store: BlockStore, tagger: str, source: str
) -> list[str]:
    """Returns how the corpus that is there differs from the one that is asked for."""
    found = []
    if store.info.get("source") != source:
        updated = (pathlib.Path(config.corpus) / PARENT_FILE).exists()
        found.append(
            'SOURCE: it is a version that update-corpus has made, for which SOURCE=""'
            if updated
            else f"SOURCE: it was made from other text than that of {config.source}"
        )
    if store.info.get("tagger") != tagger:
        found.append(f"TAGGER: {store.info.get('tagger')!r}, not {tagger!r}")
    if store.chunk_length != config.chunk_length:
        found.append(f"chunk_length: {store.chunk_length}, not {config.chunk_length}")
    trained, asked = store.info.get("vocabulary_training"), _training(config)
    if trained and asked:
        names = {"size": "vocabulary_size"}
        found += [
            f"{names.get(name, name)}: {trained.get(name)}, not {value}"
            for name, value in asked.items()
            if trained.get(name) != value
        ]
    elif trained or asked:
        was, wanted = ("trained on it", "given") if trained else ("given", "trained")
        found.append(
            f"VOCABULARY: its {store.vocabulary.size} wordpieces were {was}, not "
            f"{wanted}"
        )
    elif getattr(config.vocabulary, "fingerprint", "") != store.vocabulary.fingerprint:
        found.append("VOCABULARY: it has other wordpieces, or rules for case")
    return found or ["it has another format"]


def tagger_by_name(name: str) -> Tagger:
    """Returns a tagger.

    Args:
      name: "spacy", "rules", "given" (only spans that documents provide), "auto" (spaCy
        where it is installed, otherwise rules), or "checkpoint:FOLDER" with the folder
        of a BERT token classifier, see `weights.token_classification`.
    """
    folder = name.removeprefix(CHECKPOINT)
    if folder != name and folder:
        # Imports JAX and the model, which the other taggers do without.
        from realm_jax.weights.token_classification import CheckpointTagger

        return CheckpointTagger(folder)
    if name == "auto":
        has_spacy = all(find_spec(package) for package in ("spacy", SPACY_MODEL))
        name = "spacy" if has_spacy else "rules"
    if name not in _TAGGERS:
        raise BadInputError(
            f"expected a tagger out of auto, {', '.join(_TAGGERS)} or "
            f"{CHECKPOINT}FOLDER, got {name!r}; correct the name."
        )
    return _TAGGERS[name]()


@functools.lru_cache(maxsize=1)
def loaded_tagger(name: str) -> Tagger:
    """Returns `tagger_by_name`, cached per process because loading takes seconds."""
    return tagger_by_name(name)


def option_of(name: str, given: str = "") -> str:
    """Returns the argument of `tagger_by_name` for the tagger recorded in a corpus.

    Args:
      given: the argument, where the user sets it; "" to derive it from the name.
    """
    option = given or name.partition("-")[0]
    if option == CHECKPOINT.removesuffix(":"):
        raise BadInputError(
            f"expected the folder of {name}, the tagger that the corpus was made with, "
            f"got none; give TAGGER as {CHECKPOINT}FOLDER."
        )
    found = loaded_tagger(option).name
    if found != name:
        raise BadInputError(
            f"expected the tagger {name}, which the corpus was made with, got {found}; "
            "install or name that one, or prepare the corpus again."
        )
    return option
