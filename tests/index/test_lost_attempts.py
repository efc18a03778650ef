"""Attempts that are damaged, or deleted under their builder, do not stop an index."""

import json
import threading

import pytest

from realm_jax.index import builder
from realm_jax.index.build import index_layouts
from realm_jax.index.embedding_cache import HASHES
from realm_jax.index.heartbeat import Heartbeat, Listener
from realm_jax.index.manifest import EMBEDDINGS
from realm_jax.storage import MissingObjectError
from tests.index.snapshot_files import CORPUS, write_rows, write_snapshot
from tests.index.snapshot_files import begin as begin_attempt
from tests.index.tiny_builder import (
    CONFIG,
    RETRIEVER,
    assert_embedded,
    index_series,
    publish,
)


def begin(store, blocks, retriever):
    """Leaves an attempt with ten rows; returns its folder."""
    stop = threading.Event()

    def watch(done, num_blocks):
        if done == 10:
            stop.set()

    builder.build_once(retriever, blocks, store, CONFIG, stop=stop, on_progress=watch)
    (name,) = (n for n in store.list("index/data") if n.endswith("/attempt.json"))
    return name.removesuffix("/progress/attempt.json")


def assert_built(store, blocks, retriever):
    """Runs a builder until its trainer is done."""
    publish(store, blocks, retriever)
    job = builder.IndexBuilder(store, blocks, CONFIG)
    Heartbeat(store, builder.TRAINER_ROLE).beat(retriever.step, "finished")
    assert job.run(threading.Event())
    assert_embedded(store, retriever, blocks)


def test_an_attempt_with_an_unreadable_header_is_absent(series):
    folder = "index/data/7-0123abcd/progress"
    for header in (
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 60_000,
        b'{"corpus_fingerprint": 3, "metadata": {}, "began": 1}',
        b'{"corpus_fingerprint": "c", "metadata": [], "began": 1}',
        b'{"corpus_fingerprint": "c", "metadata": {}, "began": "now"}',
    ):
        series.store.write(f"{folder}/{EMBEDDINGS}/0-8", b"done\n")
        series.store.write(f"{folder}/attempt.json", header)
        with pytest.raises(MissingObjectError):
            series.join(7, "0123abcd")
        assert series.resume(7, corpus_fingerprint=CORPUS) is None
    write_snapshot(series, 7)
    series.collect(keep=1)
    assert not any("0123abcd" in name for name in series.store.list())
    series.verify(series.read_manifest(7))


def altered(metadata, array):
    """The metadata of an array in other ways, by what is different."""
    chunks = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    grid = {"name": "regular", "configuration": {"chunk_shape": [1, chunks[1]]}}
    shape = metadata["shape"]
    codecs = [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "crc32c"}]
    yield "dtype", {**metadata, "data_type": "int32" if array == EMBEDDINGS else "int8"}
    yield "rows", {**metadata, "shape": [shape[0] + 5, shape[1]]}
    yield "width", {**metadata, "shape": [shape[0], shape[1] + 1]}
    yield "chunks", {**metadata, "chunk_grid": grid}
    if array == EMBEDDINGS:
        yield "codecs", {**metadata, "codecs": codecs}


@pytest.mark.parametrize("array", [EMBEDDINGS, HASHES])
def test_an_altered_array_is_begun_anew(store, blocks, retriever_at, array):
    folder = begin(store, blocks, retriever_at(3))
    name = f"{folder}/{array}/zarr.json"
    whole = store.read(name)
    changed = {
        what: json.dumps(values).encode()
        for what, values in altered(json.loads(whole), array)
    }
    layouts = index_layouts(blocks, RETRIEVER, CONFIG.embed)
    series = index_series(store)
    header = json.loads(store.read(f"{folder}/progress/attempt.json"))
    damaged = {"cut": whole[:-9], "empty": b""}
    for what, data in {"whole": whole, **changed, **damaged}.items():
        store.write(name, data)
        writer = series.resume(
            3,
            corpus_fingerprint=blocks.fingerprint,
            metadata=header["metadata"],
            layouts=layouts,
        )
        rows = [] if data != whole else [(0, 5), (5, 10)]
        assert writer.completed_rows(array) == rows, what
        for other, layout in layouts.items():
            writer.create_array(other, *layout)
        writer.discard()
    store.write(name, changed["chunks"])
    assert_built(store, blocks, retriever_at(3))


NOTES = ("x", "5", "-", "a-b", "5-x", "0-5-9", "1-3", "5-0", "0-99", "sub/0-5", "٣-٥")


def test_stray_files_among_the_notes_are_ignored(store, blocks, retriever_at):
    folder = begin(store, blocks, retriever_at(3))
    store.write(f"{folder}/progress/note", b"stray")
    store.write(f"{folder}/progress/other/0-5", b"stray")
    for note in NOTES:
        store.write(f"{folder}/progress/{EMBEDDINGS}/{note}", b"stray")
    writer = index_series(store).join(3, folder.rpartition("-")[2])
    assert writer.completed_rows(EMBEDDINGS)[:2] == [(0, 5), (0, 99)]
    assert_built(store, blocks, retriever_at(3))


def test_a_heartbeat_that_cannot_be_read_is_none_and_nothing_is_collected(series):
    for step in (1, 2, 3):
        write_snapshot(series, step)
    listener = Listener(series.store, builder.TRAINER_ROLE)
    trainer = Heartbeat(series.store, builder.TRAINER_ROLE)
    for text in (b"{", b"[" * 60_000, b'{"role": "trainer"}'):
        series.store.write("jobs/trainer.json", text)
        assert listener.listen()[0] is None
        # The trainer may use any of them.
        builder.collect_garbage(series.store, keep=1)
    trainer.beat(3, kept_index_steps=None)
    builder.collect_garbage(series.store, keep=1)
    assert series.steps() == [1, 2, 3]
    # One that is heard again is heard.
    assert listener.listen()[0].step == 3
    series.store.write("jobs/trainer.json", b"{")
    assert listener.listen()[0] is None


def delete_at(store, done_at, how_often=1):
    """A callback that deletes the attempt in progress, as another's collection does."""
    deleted = []

    def delete(done, num_blocks):
        if done >= done_at and len(deleted) < how_often:
            for name in store.list("index/data"):
                if name.endswith("/attempt.json"):
                    folder = name.removesuffix("/progress/attempt.json")
                    store.delete(name)
                    store.delete_folder(folder)
                    deleted.append(folder)

    return delete, deleted


def test_an_attempt_that_was_collected_is_begun_anew(store, blocks, retriever_at):
    delete, deleted = delete_at(store, 5, how_often=2)
    # And once more, just before the commit.
    before_commit, deleted_later = delete_at(store, 0)
    manifest = builder.build_once(
        retriever_at(3),
        blocks,
        store,
        CONFIG,
        on_progress=delete,
        require_wanted=lambda: before_commit(1, 1),
    )
    assert (len(deleted), len(deleted_later)) == (2, 1)
    assert manifest is not None
    assert_embedded(store, retriever_at(3), blocks)


def test_no_commit_names_an_attempt_whose_collection_has_begun(series):
    """The header goes first, and may be all that is gone."""
    writer = begin_attempt(series)
    write_rows(writer)
    series.store.delete(f"index/data/7-{writer.attempt}/progress/attempt.json")
    with pytest.raises(MissingObjectError, match="deleted"):
        writer.commit()
    assert series.steps() == []
