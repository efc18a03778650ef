"""Every file that is read, changed in arbitrary ways: read as it was, or refused.

Files whose contents a checksum covers are read equal or not at all. Of the others, and
of manifests that are malformed and sealed all the same, only malformed ones are known.
The chunks and files of a snapshot are damaged in tests/index/test_snapshots.py, and
lines of metrics in tests/metrics/test_metrics_file.py.
"""

import dataclasses
import functools
import itertools
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import flax.traverse_util
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realm_jax.data.block_writer import Block, write_blocks
from realm_jax.data.blocks import BlockStore, BlockText, read_documents, read_info
from realm_jax.data.documents import Document
from realm_jax.data.examples import Examples, write_examples
from realm_jax.data.tokenizer_files import load_vocabulary
from realm_jax.data.versions import (
    PARENT_FILE,
    SUCCESSOR_FILE,
    is_version_of,
    link_versions,
    newest_version,
)
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.errors import BadInputError
from realm_jax.index.heartbeat import Heartbeat, read_heartbeat
from realm_jax.index.manifest import EMBEDDINGS
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.manifests import seal
from realm_jax.run_record import RunRecord, Trained, read_records, write_record
from realm_jax.storage import open_store
from realm_jax.training import checkpoint_manifests
from realm_jax.weights import bert, token_classification
from realm_jax.weights.tensors import read_tensors
from tests.corpus_builder import build_corpus
from tests.index.snapshot_files import write_snapshot
from tests.weights import tiny_classifier

IS_FULL = settings.get_current_profile_name() == "full"
SLOW = [HealthCheck.too_slow]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A file, how it is read, and whether a checksum covers what it says."""

    path: Path
    read: Callable[[], Any]
    is_covered: bool = True


def make_corpus(folder: Path) -> dict[str, Kind]:
    words = ["a", "town", "on", "the", "river", "was", "founded", "in", ".", "1700"]
    documents = [
        Document(f"town {n}", "A town on the river. It was founded in 1700.", str(n))
        for n in range(5)
    ]
    vocabulary = WordPiece([*SPECIAL_PIECES, *words])
    build_corpus(documents, folder / "corpus", vocabulary, chunk_length=32)

    def read():
        store = BlockStore.open(folder / "corpus")
        store.verify()
        texts = store.texts(np.arange(store.num_blocks))
        ids, segments = store.document_ids(np.arange(store.num_blocks), 24)
        table = read_documents(store)
        return store.info, texts, ids.tobytes(), segments.tobytes(), table.tobytes()

    paths = sorted((folder / "corpus").iterdir())
    return {path.name: Kind(path, read) for path in paths}


def make_versions(folder: Path) -> dict[str, Kind]:
    """Two corpora of one vocabulary, whose order each of them names."""
    vocabulary = WordPiece([*SPECIAL_PIECES, "old", "new"])
    folders = [folder / "old", folder / "new"]
    for place in folders:
        ids = np.array([vocabulary.pieces.index(place.name)], np.int32)
        block = Block(ids, ids, BlockText("", place.name, "a", [(0, 3)], []))
        write_blocks(place, [block], vocabulary=vocabulary, chunk_length=16)
    link_versions(*folders)
    old, new = folders
    fingerprint = read_info(old)["fingerprint"]
    return {
        "successor": Kind(old / SUCCESSOR_FILE, lambda: newest_version(old)),
        "parent": Kind(
            new / PARENT_FILE,
            lambda: is_version_of(new, fingerprint),
            is_covered=False,
        ),
    }


def make_examples(folder: Path) -> dict[str, Kind]:
    rows = np.arange(6)
    batch = {"ids": np.int32(rows[:, None] * np.arange(3)), "sentence_id": rows // 2}
    write_examples(folder / "examples", [batch], {"task": "t"})

    def read():
        examples = Examples.open(folder / "examples", {"task": "t"})
        examples.verify()
        starts = examples.sentence_starts
        return (
            {name: array.tobytes() for name, array in examples.features.items()},
            None if starts is None else starts.tobytes(),
        )

    paths = sorted((folder / "examples").iterdir())
    return {f"examples {path.name}": Kind(path, read) for path in paths}


def make_snapshot(folder: Path) -> dict[str, Kind]:
    series = SnapshotSeries(open_store(folder / "model"), "index")
    manifest = write_snapshot(series, 7, scale=1.5)
    data = folder / "model/index/data" / f"7-{manifest.attempt}"

    def join():
        writer = series.join(7, manifest.attempt)
        return writer.corpus_fingerprint, writer.metadata, writer.began

    return {
        "commit": Kind(
            folder / "model/index/commits/7.json", lambda: series.read_manifest(7)
        ),
        "attempt.json": Kind(data / "progress/attempt.json", join),
        "zarr.json": Kind(
            data / EMBEDDINGS / "zarr.json",
            lambda: series.read_array(manifest, EMBEDDINGS).tobytes(),
        ),
    }


def make_model(folder: Path) -> dict[str, Kind]:
    store = open_store(folder / "model")
    store.write("checkpoints/3/params/x", b"weights")
    checkpoint_manifests.write_manifest(store, 3, {"index_step": 2})
    Heartbeat(store, "trainer").beat(3, index_step=2, kept_index_steps=[2])
    trained = Trained("pretrain", {"shared": True}, {"query": 8}, "a", "b", {"seed": 0})
    began = "2026-01-01T00:00:00+00:00"
    write_record(store, RunRecord("pretrain", began, "0", None, 0, [], {}, "", trained))

    def read_checkpoint():
        if problem := checkpoint_manifests.find_damage(store, 3):
            raise BadInputError(problem)
        return checkpoint_manifests.all_details(store)

    def read_status():
        status = read_heartbeat(store, "trainer")
        return status and (status.is_alive(60.0), status.extra.get("index_step"))

    top = folder / "model"
    return {
        "checkpoint": Kind(top / "checkpoints/3.json", read_checkpoint),
        "heartbeat": Kind(top / "jobs/trainer.json", read_status, is_covered=False),
        "start": Kind(top / "settings/pretrain-0001.json", lambda: read_records(store)),
    }


def make_weights(folder: Path) -> dict[str, Kind]:
    tensors = tiny_classifier.tensors_of_torch()
    for name in ("torch", "flax"):
        place = folder / name
        place.mkdir()
        (place / "config.json").write_text(json.dumps(tiny_classifier.CONFIG))
        (place / "vocab.txt").write_text("\n".join(tiny_classifier.VOCABULARY))
        (place / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    safetensors.numpy.save_file(tensors, folder / "torch/model.safetensors")
    tree = flax.traverse_util.unflatten_dict(tensors, sep=".")
    (folder / "flax/flax_model.msgpack").write_bytes(
        flax.serialization.msgpack_serialize(tree)
    )

    def read_weights(place: Path):
        return [value.astype(float) for value in read_tensors(place).values()]

    def read_vocabulary():
        return load_vocabulary(folder / "torch/vocab.txt").pieces

    def read_config():
        config = bert.config_from_json(folder / "torch")
        return config, token_classification._labels(folder / "torch/config.json")

    readers = {
        "torch/model.safetensors": lambda: read_weights(folder / "torch"),
        "flax/flax_model.msgpack": lambda: read_weights(folder / "flax"),
        "torch/tokenizer_config.json": read_vocabulary,
        "torch/vocab.txt": read_vocabulary,
        "torch/config.json": read_config,
    }
    return {
        name: Kind(folder / name, read, is_covered=False)
        for name, read in readers.items()
    }


MAKERS = (
    *(make_corpus, make_versions, make_examples),
    *(make_snapshot, make_model, make_weights),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The kinds of file that each maker makes, by name."""
    return {make: make(tmp_path_factory.mktemp(make.__name__)) for make in MAKERS}


@pytest.fixture(scope="module")
def kinds(made):
    found = functools.reduce(operator.or_, made.values())
    assert len(found) == 24
    return found


@pytest.fixture(scope="module")
def json_kinds(kinds):
    found = [kind for kind in kinds.values() if _is_json(kind.path)]
    assert len(found) == 12
    return found


def _is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except ValueError:
        return False


def read_or_refuse(kind: Kind, data: bytes) -> Any:
    """Returns what is read of a file with these bytes, the error if it is refused."""
    before = kind.path.read_bytes()
    kind.path.write_bytes(data)
    try:
        found = kind.read()
    except BadInputError as error:
        found = error
    finally:
        kind.path.write_bytes(before)
    assert not isinstance(found, BadInputError) or "\n" not in str(found)
    return found


def edited(data: bytes, draw: Callable[..., Any]) -> bytes:
    """Returns bytes after one change, as a disk or an editor makes it."""
    start = draw(st.integers(0, max(0, len(data) - 1)))
    # Headers come first, and say most.
    start = draw(st.sampled_from([start, start % 128]))
    stop = draw(st.integers(start, min(len(data), start + 40)))
    words = [b"-", b"0", b"99999999999999999999", b"null", b"[", b"{", b'"']
    piece = draw(st.binary(max_size=8) | st.sampled_from(words))
    how = draw(st.sampled_from(["flip", "replace", "truncate"]))
    if how == "flip" and start < len(data):
        flipped = data[start] ^ 1 << draw(st.integers(0, 7))
        return data[:start] + bytes([flipped]) + data[start + 1 :]
    return data[:start] if how == "truncate" else data[:start] + piece + data[stop:]


@pytest.mark.parametrize("make", MAKERS)
@settings(max_examples=300 if IS_FULL else 90, suppress_health_check=SLOW)
@given(st.data())
def test_changed_bytes_are_refused_in_one_line_or_change_nothing(made, make, data):
    kind = data.draw(st.sampled_from([*made[make].values()]))
    before = kind.read()
    changed = kind.path.read_bytes()
    for _ in range(data.draw(st.integers(1, 3))):
        changed = edited(changed, data.draw)
    found = read_or_refuse(kind, changed)
    assert not kind.is_covered or isinstance(found, BadInputError) or found == before


OTHERS = st.sampled_from(
    [
        *(None, True, -1, 0, 1.5, 10**30, float("nan"), "", "x", "\ud800", "a\0b"),
        *("x" * 300, [], [[]], ["x"], {}, {"": 0}),
    ]
)


def replaced(value: Any, draw: Callable[..., Any]) -> Any:
    """Returns a JSON value in which one inner value is another or missing."""
    if isinstance(value, (dict, list)) and value:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = draw(st.sampled_from(keys))
        if draw(st.integers(0, 3)):
            value[key] = replaced(value[key], draw)
        elif isinstance(value, dict):
            del value[key]
        else:
            value.pop(key)
        return value
    return draw(OTHERS)


def body_of(kind: Kind) -> tuple[dict[str, Any], bool]:
    """Returns what a JSON file says, and whether under a checksum."""
    body = json.loads(kind.path.read_bytes())
    return body, body.pop("crc32c", None) is not None


@settings(max_examples=2000 if IS_FULL else 400, suppress_health_check=SLOW)
@given(st.data())
def test_sound_json_of_another_form_is_refused_in_one_line(json_kinds, data):
    """Its checksum may fit, or be left out as in earlier releases."""
    kind = data.draw(st.sampled_from(json_kinds))
    body, was_sealed = body_of(kind)
    body = replaced(body, data.draw)
    is_sealed = was_sealed and isinstance(body, dict) and data.draw(st.booleans())
    read_or_refuse(kind, seal(body) if is_sealed else json.dumps(body).encode())


def test_values_that_do_not_fit_are_refused_under_a_checksum_that_does(kinds):
    for name, keys, value in (
        ("corpus.json", ["blocks_per_text_file"], 0),
        ("corpus.json", ["vocabulary_fingerprint"], "f" * 64),
        ("corpus.json", ["files"], {}),  # Of a version without a table of documents.
        ("commit", ["arrays", EMBEDDINGS, "shape"], [23]),
        ("zarr.json", ["shape"], [22, 4]),
        ("checkpoint", ["files"], {"x": {"size": "9"}}),
    ):
        body, was_sealed = body_of(kinds[name])
        *path, last = keys
        functools.reduce(operator.getitem, path, body)[last] = value
        changed = seal(body) if was_sealed else json.dumps(body).encode()
        found = read_or_refuse(kinds[name], changed)
        assert isinstance(found, BadInputError), (name, keys)


def test_deep_json_is_refused(json_kinds):
    for kind, opening in itertools.product(json_kinds, (b"[", b'{"a":', b'{"files":')):
        for depth in (900, 990, 60_000):
            found = read_or_refuse(kind, opening * depth)
            assert isinstance(found, BadInputError) or not kind.is_covered, kind.path


NUMPY = b"\x93NUMPY"


def test_what_is_no_array_is_refused(kinds):
    for name, header in itertools.product(
        ("offsets.npy", "examples ids.npy"),
        (
            b"PK\x03\x04",
            b"\x80\x04N.",
            NUMPY + b"\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (",
            NUMPY + b"\x01\x00\x04\x00((((",
            NUMPY + b"\x02\x00\xff\xff\xff\x7f{",
            NUMPY + b"\x09\x09",
            NUMPY,
            b"",
        ),
    ):
        data = kinds[name].path.read_bytes()
        padded = header + b" " * max(0, len(data) - len(header))
        assert isinstance(read_or_refuse(kinds[name], padded), BadInputError), header
