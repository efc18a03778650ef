"""The block store: token layouts against plain loops, and refusal of damaged files."""

import dataclasses
import errno
import itertools
import json
import shutil
from unittest import mock

import google_crc32c
import numpy as np
import pytest

from realm_jax.data import block_writer, blocks, store_files
from realm_jax.data.block_writer import Block, document_rows, write_blocks
from realm_jax.data.blocks import BlockStore, BlockText
from realm_jax.data.salient_spans import Span
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.manifests import unseal
from realm_jax.prepare.block_parts import Summary, pack_blocks, unpack_blocks
from tests.flipped import flip
from tests.refused import refused

WORDPIECE = WordPiece([*SPECIAL_PIECES, *(f"w{i}" for i in range(60))])
CLS, SEP = WORDPIECE.cls, WORDPIECE.sep
# (title, body) as ids; the last wordpiece of the vocabulary among them.
PIECES = [([5, 6], [10, 11, 12]), ([], [20]), ([7], [30, 31]), ([8] * 9, [64] * 7)]


def make_block(number):
    title_ids, body_ids = PIECES[number]
    body = " ".join(f"w{i - 5}" for i in body_ids)
    marked = f"article-{number // 2}", [(0, len(body))], [Span(0, 2, "DATE")]
    text = BlockText(f"Title {number} – 中𝒳", body, *marked)
    return Block(np.array(title_ids, np.int32), np.array(body_ids, np.int32), text)


BLOCKS = [make_block(number) for number in range(len(PIECES))]
TEXTS = [block.text for block in BLOCKS]


def write(directory, blocks=BLOCKS):
    return write_blocks(directory, blocks, vocabulary=WORDPIECE, chunk_length=16)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write(tmp_path_factory.mktemp("blocks") / "store")


@pytest.fixture
def own_store(tmp_path):
    return write(tmp_path / "store").directory


def test_ids_of_documents_and_of_queries_with_bodies(store):
    """As tests of the layout make them; here with the null document, and any shape."""
    ids, segments = store.document_ids(np.array([[0, -1], [2, 3]]), 9)
    assert ids.dtype == segments.dtype == np.int32
    assert ids.tolist() == [
        [[CLS, 5, 6, SEP, 10, 11, 12, SEP, 0], [CLS, SEP, SEP, 0, 0, 0, 0, 0, 0]],
        [[CLS, 7, SEP, 30, 31, SEP, 0, 0, 0], [CLS, *[8] * 6, SEP, SEP]],
    ]
    assert segments.tolist() == [
        [[0, 0, 0, 0, 1, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0, 0, 0, 0]],
        [[0, 0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 1]],
    ]
    assert store.document_ids(np.zeros(0, int), 9)[0].shape == (0, 9)
    queries = np.array([[CLS, 9, SEP, 0], [CLS, 9, 9, SEP]])
    ids, segments = store.joined_ids(queries, np.array([[0, -1], [3, 2]]), 7)
    assert ids.dtype == segments.dtype == np.int32
    assert ids.tolist() == [
        [[CLS, 9, SEP, 10, 11, 12, SEP], [CLS, 9, SEP, SEP, 0, 0, 0]],
        [[CLS, 9, 9, SEP, 64, 64, SEP], [CLS, 9, 9, SEP, 30, 31, SEP]],
    ]
    assert segments.tolist() == [
        [[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0, 0]],
        [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1]],
    ]


def test_bodies_and_lengths(store):
    block_ids = np.array([[0, -1], [2, 3]])
    assert store.body_ids(block_ids, 4).tolist() == [
        [[10, 11, 12, 0], [0, 0, 0, 0]],
        [[30, 31, 0, 0], [64, 64, 64, 64]],
    ]
    assert store.body_lengths(block_ids).tolist() == [[3, 0], [2, 7]]
    assert store.title_lengths(block_ids).tolist() == [[2, 0], [1, 9]]


def test_consecutive_bodies_are_those_that_are_padded_elsewhere(store):
    block_ids = np.array([3, -1, 0, 0, 2])
    for length in (1, 3, 9):
        ids, ends = store.consecutive_bodies(block_ids, length)
        padded = store.body_ids(block_ids, length)
        expected = [[*row[row != 0].tolist(), 0] for row in padded]
        assert ids.tolist() == list(itertools.chain.from_iterable(expected))
        assert ids.dtype == store.vocabulary.id_dtype
        assert np.flatnonzero(ids == 0).tolist() == ends.tolist()
        assert store.consecutive_bodies(block_ids[:0], length)[0].tolist() == []


def test_the_last_id_of_a_large_vocabulary_survives(tmp_path):
    size = 119_547  # Multilingual BERT's.
    vocabulary = WordPiece([*SPECIAL_PIECES, *(f"w{i}" for i in range(size - 5))])
    block = Block(np.array([5]), np.array([size - 1, 6]), TEXTS[0])
    part = unpack_blocks(pack_blocks([block], document_rows([], []), Summary()))
    store = write_blocks(
        tmp_path / "store", part.blocks, vocabulary=vocabulary, chunk_length=16
    )
    expected = [vocabulary.cls, 5, vocabulary.sep, size - 1, 6, vocabulary.sep]
    assert store.document_ids(np.array([0]), 6)[0].tolist() == [expected]


def test_texts_come_back_as_written(store, tmp_path, monkeypatch):
    assert [store.text(i) for i in range(4)] == TEXTS
    assert store.texts([3, 0, 3]) == [TEXTS[i] for i in (3, 0, 3)]
    assert isinstance(store.text(0).spans[0], Span)
    assert store.texts([]) == []
    monkeypatch.setattr(block_writer, "_BLOCKS_PER_TEXT_FILE", 3)
    several = write(tmp_path / "store")
    assert len(list(several.directory.glob("texts-*"))) == 2
    order = [3, 1, 2, 0]
    assert several.texts(order) == [TEXTS[i] for i in order]
    monkeypatch.setattr(blocks, "_TEXTS_AT_A_TIME", 3)
    assert list(several.iter_texts(np.array(order))) == several.texts(order)
    assert list(several.iter_texts()) == TEXTS


def test_ids_and_lengths_out_of_range_are_refused(store):
    for wrong in (-2, 4):
        block_ids = np.array([[0, wrong]])
        for call in (
            lambda ids: store.document_ids(ids, 8),
            lambda ids: store.joined_ids(np.array([[CLS, SEP]]), ids, 8),
            lambda ids: store.body_ids(ids, 8),
            lambda ids: store.consecutive_bodies(ids[0], 8),
            store.body_lengths,
            lambda ids: store.texts(ids[0]),
        ):
            with refused(f"got {wrong}; do these ids"):
                call(block_ids)
    with refused("from 0 to 3, got -1"):
        store.text(-1)
    with refused("document length of 2"):
        store.document_ids(np.array([0]), 2)
    with refused("above the query length 3, got 3"):
        store.joined_ids(np.array([[CLS, SEP, 0]]), np.array([[0]]), 3)


def test_fingerprint_follows_content_but_not_spans(store, tmp_path):
    first, block, *others = BLOCKS
    changes = [
        {"text": block.text._replace(title="Other")},
        {"text": block.text._replace(body="other")},
        {"body_ids": block.body_ids + 1},
        {"title_ids": block.body_ids, "body_ids": block.title_ids},
        {"text": block.text._replace(spans=[])},
    ]
    changed = [[first, dataclasses.replace(block, **c), *others] for c in changes]
    *different, without_spans = (
        write(tmp_path / str(i), made).fingerprint for i, made in enumerate(changed)
    )
    assert without_spans == store.fingerprint
    fewer = write(tmp_path / "fewer", BLOCKS[:3]).fingerprint
    assert len({store.fingerprint, fewer, *different}) == 6


def test_info_counts(own_store):
    expected = {
        "num_blocks": 4,
        "num_wordpieces": 25,
        "num_sentences": 4,
        "num_spans": 4,
        "num_duplicate_blocks": 0,
        "chunk_length": 16,
        "vocabulary_fingerprint": WORDPIECE.fingerprint,
    }
    assert blocks.read_info(own_store).items() >= expected.items()


ARRAYS = ("ids.npy", "offsets.npy", "title_lengths.npy", "hashes.npy")
FILES = (*ARRAYS, "texts-00000.array_record", "vocab.txt")


def test_a_truncated_missing_or_flipped_file_is_named(own_store):
    for name in FILES:
        path = own_store / name
        sound = path.read_bytes()
        store = BlockStore.open(own_store)
        store.verify()
        flip(path, -2)
        with refused(rf"{name} is damaged \(crc32c "):
            store.verify()
        path.write_bytes(sound[:-1])
        with refused(rf"{name} has \d+ bytes, not \d+; "):
            BlockStore.open(own_store)
        path.unlink()
        with refused(f"{name} is missing; "):
            BlockStore.open(own_store)
        path.write_bytes(sound)


def test_blocks_that_do_not_fit_their_neighbours_are_named_on_opening(
    own_store, monkeypatch
):
    """Whichever bit of an offset or of a title's length makes it so, of every size."""
    monkeypatch.setattr(store_files, "_PARTS_AT_ONCE", 3)
    ends = np.cumsum([len(title) + len(body) for title, body in PIECES])
    titles = [len(title) for title, _ in PIECES]
    sound = {"offsets": [0, *ends.tolist()], "title_lengths": titles}
    found = 0
    bits_of_offsets = (*range(6), 8, 15, 16, 31, 32, 47, 62, 63)
    for name, bits in {"offsets": bits_of_offsets, "title_lengths": range(16)}.items():
        path = own_store / f"{name}.npy"
        before = np.load(path)
        for place, bit in itertools.product(range(len(before)), bits):
            changed = before.copy()
            changed[place] ^= changed.dtype.type(1) << changed.dtype.type(bit)
            np.save(path, changed)
            starts, titles = (sound | {name: changed.tolist()}).values()
            lengths = np.diff(np.array(starts, object))
            if starts[0] == 0 and starts[-1] == 25 and (lengths >= titles).all():
                assert (BlockStore.open(own_store).body_lengths(range(4)) >= 0).all()
                continue
            found += 1
            with refused(f"{name}.npy"):
                BlockStore.open(own_store)
        np.save(path, before)
    assert found > 100


def test_what_is_no_store_is_refused(own_store):
    path = own_store / "corpus.json"
    changed = path.read_bytes().replace(b'"chunk_length": 16,', b'"chunk_length": 17,')
    for content, message in [
        (changed, r"/corpus\.json cannot be read \(its check"),
        (b"{", "prepared corpus at .* cannot be read"),
        (b"[]", "prepared corpus at .* cannot be read"),
        (b'{"format_version": 0}', "format version 2 at .*got version 0"),
    ]:
        path.write_bytes(content)
        with refused(message):
            BlockStore.open(own_store)
    path.unlink()
    with refused("prepared corpus at .* cannot be read"):
        BlockStore.open(own_store)


def test_a_store_of_an_earlier_release_opens_and_is_verified(own_store):
    """Its manifest is not sealed, and has checksums as hexadecimal digits."""
    path = own_store / "corpus.json"
    info = unseal(path.read_bytes())
    for name, entry in info["files"].items():
        content = (own_store / name).read_bytes()
        entry["crc32c"] = google_crc32c.Checksum(content).hexdigest().decode()
    path.write_text(json.dumps(info, indent=2, sort_keys=True, ensure_ascii=False))
    store = BlockStore.open(own_store)
    store.verify()
    assert store.text(2) == TEXTS[2]
    flip(own_store / "ids.npy", -2)
    with refused(r"/ids\.npy is damaged \(crc32c "):
        store.verify()


def test_another_vocabulary_and_damaged_texts_are_refused(own_store):
    path = own_store / "texts-00000.array_record"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with refused(r"block texts in .*texts-00000"):
        BlockStore.open(own_store).text(0)
    path = own_store / "vocab.txt"
    path.write_text(path.read_text().replace("w9\n", "x9\n"))
    with refused("expected the vocabulary"):
        BlockStore.open(own_store)


def test_what_fails_leaves_nothing(tmp_path, monkeypatch):
    def interrupted():
        yield BLOCKS[0]
        raise KeyboardInterrupt

    with refused("got no block at all"):
        write(tmp_path / "store", [])
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "store", interrupted())
    with monkeypatch.context() as patch, refused("the disk is full"):
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(np, "save", mock.Mock(side_effect=full))
        write(tmp_path / "store")
    # The library's own error, from a device that is always full.
    with monkeypatch.context() as patch, refused("the disk is full"):
        writer, name = block_writer.ArrayRecordWriter, "ArrayRecordWriter"
        patch.setattr(block_writer, name, lambda _, how: writer("/dev/full", how))
        write(tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def test_a_taken_directory_is_left_alone(own_store):
    before = {path.name: path.read_bytes() for path in own_store.iterdir()}
    with refused("absent or empty"):
        write(own_store)
    assert {path.name: path.read_bytes() for path in own_store.iterdir()} == before


def test_neither_what_a_killed_writer_left_nor_an_empty_folder_stops_the_next(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store.partial").mkdir()
    (tmp_path / "store.partial" / "texts-00007.array_record").touch()
    write(tmp_path / "store").verify()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert len(list((tmp_path / "store").glob("texts-*"))) == 1
    shutil.move(tmp_path / "store", tmp_path / "elsewhere")
    assert BlockStore.open(tmp_path / "elsewhere").text(2) == TEXTS[2]
