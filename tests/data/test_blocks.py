"""The block store: token layouts against plain loops, and refusal of damaged files."""

import errno
import itertools
import json
import shutil

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data import block_writer, blocks, store_files
from realm_jax.data.block_writer import Block, write_blocks
from realm_jax.data.blocks import BlockStore, BlockText
from realm_jax.data.document_table import document_rows
from realm_jax.data.salient_spans import Span
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.errors import BadInputError
from realm_jax.manifests import unseal
from realm_jax.prepare.block_parts import Summary, pack_blocks, unpack_blocks

WORDPIECE = WordPiece([*SPECIAL_PIECES, *(f"w{i}" for i in range(60))])
CLS, SEP = WORDPIECE.cls, WORDPIECE.sep
# (title, body) as ids; the last wordpiece of the vocabulary among them.
PIECES = [([5, 6], [10, 11, 12]), ([], [20]), ([7], [30, 31]), ([8] * 9, [64] * 7)]


def make_block(number):
    title_ids, body_ids = PIECES[number]
    body = " ".join(f"w{i - 5}" for i in body_ids)
    text = BlockText(
        title=f"Title {number} – 中𝒳",
        body=body,
        source_id=f"article-{number // 2}",
        sentences=[(0, len(body))],
        spans=[Span(0, 2, "DATE")],
    )
    return Block(np.array(title_ids, np.int32), np.array(body_ids, np.int32), text)


ALL = range(4)


def write(directory, numbers=ALL):
    return write_blocks(
        directory, map(make_block, numbers), vocabulary=WORDPIECE, chunk_length=16
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write(tmp_path_factory.mktemp("blocks") / "store")


@pytest.fixture
def own_store(tmp_path):
    write(tmp_path / "store")
    return tmp_path / "store"


def pad(ids, segments, length):
    missing = [0] * (length - len(ids))
    return ids + missing, segments + missing


def document_loop(block_id, length):
    title, body = PIECES[block_id] if block_id >= 0 else ([], [])
    title = title[: length - 3]
    body = body[: length - 3 - len(title)]
    ids = [CLS, *title, SEP, *body, SEP]
    return pad(ids, [0] * (len(title) + 2) + [1] * (len(body) + 1), length)


def joined_loop(query, block_id, length):
    query = [int(i) for i in query if i != 0]
    body = PIECES[block_id][1] if block_id >= 0 else []
    body = body[: length - len(query) - 1]
    return pad([*query, *body, SEP], [0] * len(query) + [1] * (len(body) + 1), length)


BLOCK_IDS = st.lists(st.integers(-1, len(PIECES) - 1), max_size=6)


@given(block_ids=BLOCK_IDS, length=st.integers(3, 24))
def test_document_ids_equal_a_plain_loop(store, block_ids, length):
    ids, segments = store.document_ids(np.array(block_ids, int), length)
    rows = [document_loop(block_id, length) for block_id in block_ids]
    assert ids.dtype == segments.dtype == np.int32
    assert ids.shape == segments.shape == (len(block_ids), length)
    assert list(zip(ids.tolist(), segments.tolist(), strict=True)) == rows


@given(
    queries=st.lists(st.integers(0, 6), min_size=2, max_size=2),
    candidates=st.integers(1, 3),
    length=st.integers(9, 24),
    data=st.data(),
)
def test_joined_ids_equal_a_plain_loop(store, queries, candidates, length, data):
    query_ids = np.array([[CLS, *[9] * n, SEP, *[0] * (6 - n)] for n in queries])
    row = st.lists(
        st.integers(-1, len(PIECES) - 1), min_size=candidates, max_size=candidates
    )
    block_ids = np.array([data.draw(row), data.draw(row)])
    ids, segments = store.joined_ids(query_ids, block_ids, length)
    assert ids.dtype == segments.dtype == np.int32
    assert ids.shape == segments.shape == (2, candidates, length)
    for b, k in np.ndindex(2, candidates):
        expected = joined_loop(query_ids[b], block_ids[b, k], length)
        assert (ids[b, k].tolist(), segments[b, k].tolist()) == expected


def test_the_null_document_has_only_special_pieces(store):
    ids, segments = store.document_ids(np.array(-1), 5)
    assert ids.tolist() == [CLS, SEP, SEP, 0, 0]
    assert segments.tolist() == [0, 0, 1, 0, 0]
    query = np.array([[CLS, 9, SEP]])
    ids, segments = store.joined_ids(query, np.array([[-1]]), 6)
    assert ids.tolist() == [[[CLS, 9, SEP, SEP, 0, 0]]]
    assert segments.tolist() == [[[0, 0, 0, 1, 0, 0]]]


def test_bodies_and_lengths(store):
    block_ids = np.array([[0, -1], [2, 3]])
    assert store.body_ids(block_ids, 4).tolist() == [
        [[10, 11, 12, 0], [0, 0, 0, 0]],
        [[30, 31, 0, 0], [64, 64, 64, 64]],
    ]
    assert store.body_lengths(block_ids).tolist() == [[3, 0], [2, 7]]
    assert store.title_lengths(block_ids).tolist() == [[2, 0], [1, 9]]


@pytest.mark.parametrize("length", [1, 3, 9])
def test_consecutive_bodies_are_those_that_are_padded_elsewhere(store, length):
    block_ids = np.array([3, -1, 0, 0, 2])
    ids, ends = store.consecutive_bodies(block_ids, length)
    padded = store.body_ids(block_ids, length)
    expected = [[*row[row != 0].tolist(), 0] for row in padded]
    assert ids.tolist() == [piece for body in expected for piece in body]
    assert ids.dtype == store.vocabulary.id_dtype
    assert np.flatnonzero(ids == 0).tolist() == ends.tolist()
    assert store.consecutive_bodies(block_ids[:0], length)[0].tolist() == []


@pytest.mark.parametrize("size", [65_536, 65_537, 119_547])  # Multilingual BERT's.
def test_the_last_id_of_a_large_vocabulary_survives(size, tmp_path):
    vocabulary = WordPiece([*SPECIAL_PIECES, *(f"w{i}" for i in range(size - 5))])
    block = Block(np.array([5]), np.array([size - 1, 6]), make_block(0).text)
    part = unpack_blocks(pack_blocks([block], document_rows([], []), Summary()))
    write_blocks(
        tmp_path / "store", part.blocks, vocabulary=vocabulary, chunk_length=16
    )
    store = BlockStore.open(tmp_path / "store")
    assert store.body_ids(np.array([0]), 2).tolist() == [[size - 1, 6]]
    expected = [vocabulary.cls, 5, vocabulary.sep, size - 1, 6, vocabulary.sep]
    assert store.document_ids(np.array([0]), 6)[0].tolist() == [expected]


def test_texts_come_back_as_written(store):
    assert [store.text(i) for i in range(4)] == [make_block(i).text for i in range(4)]
    assert store.texts([3, 0, 3]) == [make_block(i).text for i in (3, 0, 3)]
    assert isinstance(store.text(0).spans[0], Span)
    assert store.texts([]) == []


def test_texts_over_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(block_writer, "_BLOCKS_PER_TEXT_FILE", 3)
    store = write(tmp_path / "store")
    assert len(list(store.directory.glob("texts-*"))) == 2
    assert store.texts([3, 1, 2, 0]) == [make_block(i).text for i in (3, 1, 2, 0)]


@pytest.mark.parametrize("wrong", [-2, 4])
def test_ids_out_of_range_are_refused(store, wrong):
    block_ids = np.array([[0, wrong]])
    calls = [
        lambda: store.document_ids(block_ids, 8),
        lambda: store.joined_ids(np.array([[CLS, SEP]]), block_ids, 8),
        lambda: store.body_ids(block_ids, 8),
        lambda: store.consecutive_bodies(block_ids[0], 8),
        lambda: store.body_lengths(block_ids),
        lambda: store.texts(block_ids[0]),
    ]
    for call in calls:
        with pytest.raises(BadInputError, match=f"got {wrong}; do these ids"):
            call()
    with pytest.raises(BadInputError, match="from 0 to 3, got -1"):
        store.text(-1)


def test_lengths_without_room_are_refused(store):
    with pytest.raises(BadInputError, match="document length of 2"):
        store.document_ids(np.array([0]), 2)
    with pytest.raises(BadInputError, match="above the query length 3, got 3"):
        store.joined_ids(np.array([[CLS, SEP, 0]]), np.array([[0]]), 3)


def test_same_blocks_same_bytes(own_store, tmp_path):
    write(tmp_path / "again")
    for path in own_store.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_fingerprint_follows_content_but_not_spans(own_store, tmp_path):
    def fingerprint(name, change):
        changed = [make_block(number) for number in range(4)]
        changed[1] = change(changed[1])
        directory = tmp_path / name
        write_blocks(directory, changed, vocabulary=WORDPIECE, chunk_length=16)
        return BlockStore.open(directory).fingerprint

    def with_text(**fields):
        return lambda b: Block(b.title_ids, b.body_ids, b.text._replace(**fields))

    original = BlockStore.open(own_store).fingerprint
    assert fingerprint("spans", with_text(spans=[])) == original
    different = {
        original,
        fingerprint("title", with_text(title="Other")),
        fingerprint("body", with_text(body="other")),
        fingerprint("id", lambda b: Block(b.title_ids, b.body_ids + 1, b.text)),
        fingerprint("split", lambda b: Block(b.body_ids, b.title_ids, b.text)),
        write(tmp_path / "fewer", range(3)).fingerprint,
    }
    assert len(different) == 6


def test_info_counts(own_store):
    info = blocks.read_info(own_store)
    counts = {name: value for name, value in info.items() if name.startswith("num_")}
    assert counts == {
        "num_blocks": 4,
        "num_wordpieces": 25,
        "num_sentences": 4,
        "num_spans": 4,
        "num_duplicate_blocks": 0,
    }
    assert info["chunk_length"] == 16
    assert info["vocabulary_fingerprint"] == WORDPIECE.fingerprint


FILES = [
    "ids.npy",
    "offsets.npy",
    "title_lengths.npy",
    "hashes.npy",
    "texts-00000.array_record",
    "vocab.txt",
]


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_missing_file_is_named_on_opening(own_store, name):
    path = own_store / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadInputError, match=rf"{name} has \d+ bytes, not \d+; "):
        BlockStore.open(own_store)
    path.unlink()
    with pytest.raises(BadInputError, match=f"{name} is missing; "):
        BlockStore.open(own_store)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_by_verify(own_store, name):
    BlockStore.open(own_store).verify()
    content = bytearray((own_store / name).read_bytes())
    content[-2] ^= 1
    store = BlockStore.open(own_store)
    (own_store / name).write_bytes(content)
    with pytest.raises(BadInputError, match=rf"{name} is damaged \(crc32c "):
        store.verify()


@pytest.mark.parametrize("part_size", [3, 1 << 16])
def test_blocks_that_do_not_fit_their_neighbours_are_named_on_opening(
    own_store, monkeypatch, part_size
):
    """Whichever bit of an offset or of a title's length makes it so."""
    monkeypatch.setattr(store_files, "_PARTS_AT_ONCE", part_size)
    offsets = [0, *np.cumsum([len(title) + len(body) for title, body in PIECES])]
    found = 0
    for name, bits in {"offsets": 64, "title_lengths": 16}.items():
        path = own_store / f"{name}.npy"
        before = np.load(path)
        for place, bit in itertools.product(range(len(before)), range(bits)):
            changed = before.copy()
            changed[place] ^= changed.dtype.type(1) << changed.dtype.type(bit)
            np.save(path, changed)
            starts = changed if name == "offsets" else np.array(offsets)
            titles = [len(title) for title, _ in PIECES]
            titles = changed.tolist() if name == "title_lengths" else titles
            lengths = np.diff(np.array(starts.tolist(), object))
            if starts[0] == 0 and starts[-1] == 25 and (lengths >= titles).all():
                assert (BlockStore.open(own_store).body_lengths(ALL) >= 0).all()
                continue
            found += 1
            with pytest.raises(BadInputError, match=f"{name}.npy") as told:
                BlockStore.open(own_store)
            assert "\n" not in str(told.value)
        np.save(path, before)
    assert found > 300


def test_a_flipped_bit_of_the_manifest_is_named_on_opening(own_store):
    path = own_store / "corpus.json"
    sound = path.read_bytes()
    assert b'"chunk_length": 16,' in sound
    path.write_bytes(sound.replace(b'"chunk_length": 16,', b'"chunk_length": 17,'))
    with pytest.raises(
        BadInputError, match=r"/corpus\.json cannot be read \(its check"
    ):
        BlockStore.open(own_store)
    path.write_bytes(sound)
    BlockStore.open(own_store)


def as_of_an_earlier_release(path):
    """Writes a manifest as it was: unsealed, file checksums as hexadecimal digits."""
    info = unseal(path.read_bytes())
    for name, entry in info["files"].items():
        content = (path.parent / name).read_bytes()
        entry["crc32c"] = google_crc32c.Checksum(content).hexdigest().decode()
    path.write_text(json.dumps(info, indent=2, sort_keys=True, ensure_ascii=False))


def test_a_store_of_an_earlier_release_opens_and_is_verified(own_store):
    as_of_an_earlier_release(own_store / "corpus.json")
    store = BlockStore.open(own_store)
    store.verify()
    assert store.text(2) == make_block(2).text
    content = bytearray((own_store / "ids.npy").read_bytes())
    content[-2] ^= 1
    (own_store / "ids.npy").write_bytes(content)
    with pytest.raises(BadInputError, match=r"/ids\.npy is damaged \(crc32c "):
        store.verify()


def test_another_vocabulary_is_refused(own_store):
    path = own_store / "vocab.txt"
    path.write_text(path.read_text().replace("w9\n", "x9\n"))
    with pytest.raises(BadInputError, match="expected the vocabulary"):
        BlockStore.open(own_store)


def test_a_damaged_text_file_is_named_on_reading(own_store):
    path = own_store / "texts-00000.array_record"
    path.write_bytes(b"\xff" * path.stat().st_size)
    store = BlockStore.open(own_store)
    with pytest.raises(BadInputError, match=r"block texts in .*texts-00000"):
        store.text(0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "prepared corpus at .* cannot be read"),
        ("{", "prepared corpus at .* cannot be read"),
        ("[]", "prepared corpus at .* cannot be read"),
        (json.dumps({"format_version": 0}), "format version 2 at .*got version 0"),
    ],
)
def test_what_is_no_store_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "corpus.json").write_text(content)
    with pytest.raises(BadInputError, match=message) as caught:
        BlockStore.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_empty_corpus_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(BadInputError, match="got no block at all"):
        write(tmp_path / "store", [])
    assert list(tmp_path.iterdir()) == []


def test_a_taken_directory_is_left_alone(own_store):
    before = {path.name: path.read_bytes() for path in own_store.iterdir()}
    with pytest.raises(BadInputError, match="absent or empty"):
        write(own_store)
    assert {path.name: path.read_bytes() for path in own_store.iterdir()} == before


def test_an_empty_directory_may_become_a_store(tmp_path):
    (tmp_path / "store").mkdir()
    assert write(tmp_path / "store").num_blocks == 4


def test_an_interrupted_writer_leaves_nothing(tmp_path):
    def interrupted():
        yield 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "store", interrupted())
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_does_not_stop_the_next(tmp_path):
    (tmp_path / "store.partial").mkdir()
    (tmp_path / "store.partial" / "texts-00007.array_record").touch()
    write(tmp_path / "store").verify()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert len(list((tmp_path / "store").glob("texts-*"))) == 1


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments, **keywords):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(BadInputError, match="the disk is full") as caught:
        write(tmp_path / "store")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_array_records_full_disk_is_recognised(tmp_path, monkeypatch):
    """The library's own error, from a device that is always full."""

    real_writer = block_writer.ArrayRecordWriter

    def open_full_device(path, options):
        return real_writer("/dev/full", options)

    monkeypatch.setattr(block_writer, "ArrayRecordWriter", open_full_device)
    with pytest.raises(BadInputError, match="the disk is full"):
        write(tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def test_a_store_may_be_moved(own_store, tmp_path):
    shutil.move(own_store, tmp_path / "elsewhere")
    assert BlockStore.open(tmp_path / "elsewhere").text(2) == make_block(2).text
