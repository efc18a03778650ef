"""Measures the speed and memory of preparing examples from text.

    python -m bench.data wordpiece articles.jsonl.gz --vocabulary vocab.txt
    python -m bench.data blocks articles.jsonl.gz --vocabulary vocab.txt --repeat 1 10
    python -m bench.data update articles.jsonl.gz --vocabulary vocab.txt --changed 10
    python -m bench.data tags articles.jsonl.gz --vocabulary vocab.txt --tagger rules
    python -m bench.data access --blocks 1000000
    python -m bench.data examples runs/my/corpus/examples/my_salient/train
    python -m bench.data verify runs/my/corpus --blocks 239174 5000000

Each command prints one JSON object; --output also writes it to a file.
"""

import argparse
import gzip
import itertools
import json
import os
import pathlib
import resource
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import BertWordPieceTokenizer

from bench.command import make_parser, write_figures
from bench.machine import machine, peak_gib, today
from bench.tokenize import BATCH, batched, documents_of
from realm_jax.data.block_writer import Block, write_blocks
from realm_jax.data.blocks import (
    INFO_FILE,
    VOCABULARY_FILE,
    BlockStore,
    BlockText,
    text_file,
)
from realm_jax.data.corpus import chunk_each
from realm_jax.data.examples import Examples
from realm_jax.data.salient_spans import PreAnnotated
from realm_jax.data.store_files import require_sound
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.errors import BadInputError
from realm_jax.prepare import update_corpus
from realm_jax.prepare.blocks import BlocksConfig, prepare_blocks, tagger_by_name
from realm_jax.prepare.scratch import Workers
from realm_jax.prepare.update_corpus import UpdateConfig
from realm_jax.storage import file_stat

_CHUNK_LENGTH = 288


def measure_wordpiece(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compares token ids with those of `tokenizers`' BERT, and both speeds."""
    ours = WordPiece.load(arguments.vocabulary)
    theirs = BertWordPieceTokenizer(arguments.vocabulary, lowercase=True)
    texts = [document.text for document in documents_of(arguments.corpus)]
    seconds = {"ours": 0.0, "theirs": 0.0}
    different = 0
    for turn, batch in enumerate(batched(texts)):
        runs: list[tuple[str, Callable]] = [
            ("ours", lambda batch=batch: [e.ids for e in ours.encode_batch(batch)]),
            ("theirs", lambda batch=batch: _peer_ids(theirs, batch)),
        ]
        encoded = {}
        # They alternate, so that a busy machine slows down both alike.
        for name, run in runs if turn % 2 else reversed(runs):
            began = time.perf_counter()
            encoded[name] = run()
            seconds[name] += time.perf_counter() - began
        different += sum(
            not np.array_equal(mine, other)
            for mine, other in zip(encoded["ours"], encoded["theirs"], strict=True)
        )
    return {
        "passages": len(texts),
        "different": different,
        "seconds": seconds,
        "speed_ratio": seconds["theirs"] / seconds["ours"],
    }


def measure_blocks(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures `realm prepare` without tags, on the corpus and on repetitions of it."""
    measured = {}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        for times in arguments.repeat:
            source = _repeated(arguments.corpus, times, pathlib.Path(folder))
            config = BlocksConfig(
                corpus=f"{folder}/corpus_{times}",
                source=str(source),
                vocabulary=WordPiece.load(arguments.vocabulary),
                chunk_length=_CHUNK_LENGTH,
                tagger="given",
            )
            began = time.perf_counter()
            store = prepare_blocks(config, workers=Workers(arguments.workers))
            measured[f"{times} x"] = {
                "seconds": time.perf_counter() - began,
                "blocks": store.num_blocks,
                # The maximum of all processes so far.
                "worker_gib": peak_gib(resource.RUSAGE_CHILDREN),
                "main_gib": peak_gib(),
            }
    return {"workers": arguments.workers, "runs": measured}


def measure_update(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compares a new version of a corpus with preparing the changed text again."""
    seconds = {}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as name:
        folder = pathlib.Path(name)
        with gzip.open(arguments.corpus) as file:
            lines = file.readlines()
        changes = _changed(lines, arguments.changed)
        edited = [changes.get(number, line) for number, line in enumerate(lines)]
        for path, content in {"old": lines, "anew": edited}.items():
            (folder / f"{path}.jsonl").write_bytes(b"".join(content))
            began = time.perf_counter()
            config = BlocksConfig(
                corpus=str(folder / path),
                source=str(folder / f"{path}.jsonl"),
                vocabulary=WordPiece.load(arguments.vocabulary),
                chunk_length=_CHUNK_LENGTH,
                tagger=arguments.tagger,
            )
            prepared = prepare_blocks(config, workers=Workers(arguments.workers))
            seconds[path] = time.perf_counter() - began
        (folder / "changes.jsonl").write_bytes(b"".join(changes.values()))
        began = time.perf_counter()
        update = update_corpus.run(
            UpdateConfig(
                str(folder / "old"), str(folder / "changes.jsonl"), str(folder / "new")
            )
        )
        seconds["update"] = time.perf_counter() - began
    if update.store.fingerprint != prepared.fingerprint:
        raise RuntimeError("the new version is another corpus than the one made anew")
    return {
        "documents": len(lines),
        "changed": update.replaced,
        "blocks": prepared.num_blocks,
        "new_blocks": update.new_blocks,
        "seconds": seconds,
        # The maximum so far; it is at least what the update itself needs.
        "main_gib": peak_gib(),
    }


def _changed(lines: list[bytes], count: int) -> dict[int, bytes]:
    """Returns new lines for evenly spread documents, with another last sentence."""
    changed = {}
    for number in range(0, len(lines), len(lines) // count)[:count]:
        record = json.loads(lines[number])
        record["text"] += " Maria Brel wrote this in 2026."
        changed[number] = json.dumps(record).encode() + b"\n"
    return changed


def measure_tags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures the cost of tagging in blocks beyond that of the tagger itself."""
    vocabulary = WordPiece.load(arguments.vocabulary)
    tagger = tagger_by_name(arguments.tagger)
    documents = list(itertools.islice(documents_of(arguments.corpus), arguments.limit))
    seconds = {"with_tags": 0.0, "without": 0.0, "tagger": 0.0}
    for batch in batched(documents):
        began = time.perf_counter()
        made = chunk_each(batch, vocabulary, PreAnnotated(), _CHUNK_LENGTH).blocks
        seconds["without"] += time.perf_counter() - began
        bodies = [block.text.body for blocks in made for block in blocks]
        began = time.perf_counter()
        tagger.tag(bodies)
        seconds["tagger"] += time.perf_counter() - began
        began = time.perf_counter()
        chunk_each(batch, vocabulary, tagger, _CHUNK_LENGTH)
        seconds["with_tags"] += time.perf_counter() - began
    added = seconds["with_tags"] - seconds["without"]
    return {
        "tagger": tagger.name,
        "documents": len(documents),
        "seconds": seconds,
        "overhead": added / seconds["tagger"] - 1.0,
    }


def measure_access(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures gathering random blocks of a large store, as a training step does."""
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        _random_store(pathlib.Path(folder) / "store", arguments.blocks)
        before = _resident_mib()
        began = time.perf_counter()
        store = BlockStore.open(pathlib.Path(folder) / "store")
        opened = time.perf_counter() - began
        resident = _resident_mib() - before
        generator = np.random.default_rng(0)
        shape = (arguments.batches, 512, 8)
        block_ids = generator.integers(store.num_blocks, size=shape)
        began = time.perf_counter()
        for batch in block_ids:
            store.document_ids(batch, _CHUNK_LENGTH)
        gathered = time.perf_counter() - began
    return {
        "blocks": arguments.blocks,
        "open_seconds": opened,
        "open_resident_mib": resident,
        "blocks_per_second": block_ids.size / gathered,
    }


def measure_examples(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures reading batches of materialised examples."""
    examples = Examples.open(arguments.examples)
    began = 0.0
    for step in range(arguments.batches + 1):
        examples.batch(examples.step_rows(step, batch_size=BATCH, seed=0))
        began = began or time.perf_counter()
    seconds = time.perf_counter() - began
    return {
        "examples": len(examples),
        "examples_per_second": arguments.batches * BATCH / seconds,
    }


def measure_verify(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures comparing checksums of a corpus and of enlarged ones, as stages do.

    Cold means that no page of a file is in the memory of this machine; what is below
    it, such as the cache of a virtual disk's host, is as it is.
    """
    measured = {}
    for blocks in arguments.blocks:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as name:
            folder = pathlib.Path(name)
            table = _enlarged(pathlib.Path(arguments.corpus), blocks, folder)
            num_bytes = sum(file["size"] for file in table.values())
            seconds: dict[str, list[float]] = {"cold": [], "warm": []}
            for cache in list(seconds) * arguments.repeat:
                if cache == "cold":
                    _drop_from_memory(folder)
                began = time.perf_counter()
                require_sound(folder, table, contents=True)
                seconds[cache].append(time.perf_counter() - began)
        measured[f"{blocks} blocks"] = {
            "files": len(table),
            "gb": num_bytes / 1e9,
            "seconds": seconds,
            "gb_per_second": {
                cache: num_bytes / 1e9 / float(np.median(times))
                for cache, times in seconds.items()
            },
        }
    return measured


def _enlarged(
    corpus: pathlib.Path, num_blocks: int, folder: pathlib.Path
) -> dict[str, dict[str, int]]:
    """Writes files of the sizes that so many blocks take; returns their table."""
    info = json.loads((corpus / INFO_FILE).read_text())
    per_file = info["blocks_per_text_file"]
    table = {}
    for name, file in info["files"].items():
        size = file["size"]
        if name != VOCABULARY_FILE:
            size = size * num_blocks // info["num_blocks"]
        parts = [name]
        if name == text_file(0):
            parts = [text_file(i) for i in range(-(-num_blocks // per_file))]
        elif name.startswith("texts-"):
            raise BadInputError(f"expected one file of texts in {corpus}, got several")
        content = (corpus / name).read_bytes()
        for part in parts:
            _write_repeated(folder / part, content, size // len(parts))
            stat = file_stat(folder / part)
            table[part] = {"size": stat.size, "crc32c": stat.crc32c}
    return table


def _write_repeated(path: pathlib.Path, content: bytes, size: int) -> None:
    with path.open("wb") as file:
        for start in range(0, size, len(content)):
            file.write(content[: size - start])
        file.flush()
        os.fsync(file.fileno())


def _drop_from_memory(folder: pathlib.Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _peer_ids(tokenizer: BertWordPieceTokenizer, texts: list[str]) -> list[list[int]]:
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def _repeated(corpus: str, times: int, folder: pathlib.Path) -> pathlib.Path:
    """Writes the corpus repeatedly to one file, as consecutive gzip members."""
    path = folder / f"{times}_x.jsonl.gz"
    content = pathlib.Path(corpus).read_bytes()
    if not corpus.endswith(".gz"):
        content = gzip.compress(content, 1)
    with path.open("wb") as file:
        for _ in range(times):
            file.write(content)
    return path


def _random_store(directory: pathlib.Path, num_blocks: int) -> None:
    pieces = [*SPECIAL_PIECES, *(f"w{i}" for i in range(30_000))]
    generator = np.random.default_rng(0)
    ids = generator.integers(len(SPECIAL_PIECES), len(pieces), 1 << 20, np.uint16)
    starts = generator.integers(len(ids) - 300, size=num_blocks)
    lengths = generator.integers(120, 280, size=num_blocks)
    text = BlockText("", "", "", [], [])
    write_blocks(
        directory,
        (
            Block(ids[start : start + 5], ids[start + 5 : start + length], text)
            for start, length in zip(starts, lengths, strict=True)
        ),
        vocabulary=WordPiece(pieces),
        chunk_length=_CHUNK_LENGTH,
    )


def _resident_mib() -> float:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--output", help="write the JSON object here too")
    parser.add_argument("--scratch", help="folder for what is built and dropped")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in {
        "wordpiece": measure_wordpiece,
        "blocks": measure_blocks,
        "update": measure_update,
        "tags": measure_tags,
    }.items():
        command = commands.add_parser(name, help=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("corpus", help="JSON lines, plain or .gz")
        command.add_argument("--vocabulary", required=True, help="a BERT vocab.txt")
        if name in ("blocks", "update"):
            command.add_argument("--workers", type=int, default=2)
        if name == "blocks":
            command.add_argument("--repeat", type=int, nargs="+", default=[1])
        if name in ("update", "tags"):
            command.add_argument("--tagger", default="rules")
        if name == "update":
            command.add_argument("--changed", type=int, default=10)
        if name == "tags":
            command.add_argument("--limit", type=int, default=20_000)
    command = commands.add_parser("access", help=measure_access.__doc__)
    command.set_defaults(run=measure_access)
    command.add_argument("--blocks", type=int, default=1_000_000)
    command.add_argument("--batches", type=int, default=200)
    command = commands.add_parser("examples", help=measure_examples.__doc__)
    command.set_defaults(run=measure_examples)
    command.add_argument("examples", help="CORPUS/examples/TASK/SPLIT")
    command.add_argument("--batches", type=int, default=500)
    command = commands.add_parser("verify", help=measure_verify.__doc__)
    command.set_defaults(run=measure_verify)
    command.add_argument("corpus", help="as `realm prepare` made, below 65,536 blocks")
    command.add_argument("--blocks", type=int, nargs="+", default=[239_174])
    command.add_argument("--repeat", type=int, default=3)
    return parser


def main() -> None:
    """Runs one measurement."""
    arguments = _parser().parse_args()
    measured = {
        "date": today(),
        "machine": machine(),
        arguments.command: arguments.run(arguments),
    }
    print(json.dumps(measured, indent=1))
    if arguments.output:
        write_figures(arguments.output, measured)


if __name__ == "__main__":
    main()
