"""A corpus that was changed is the one that preparing the changed text makes."""

import json
import pathlib
import shutil
import tempfile
import threading
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from realm_jax.cli.main import main
from realm_jax.data import block_writer
from realm_jax.data.block_records import write_corpus
from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples
from realm_jax.data.salient_spans import RuleTagger
from realm_jax.data.versions import PARENT_FILE, SUCCESSOR_FILE, newest_version
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.manifests import unseal
from realm_jax.prepare import blocks, update_corpus
from realm_jax.prepare.blocks import BlocksConfig, prepare_blocks
from realm_jax.prepare.scratch import Workers, only_writer
from realm_jax.prepare.update_corpus import UpdateConfig
from tests import tiny_run
from tests.json_lines import write_lines
from tests.prepare.folders import flip_a_bit_of_each
from tests.refused import refused

HERE = Workers(1)
# What the new version says of its making, where text alone decides everything else.
OWN = {"source", "settings_fingerprint"}
SENTENCES = (
    "Karel Dorm founded it in 1542.",
    "The river Fosk is near.",
    "On 16 February 1701 the mills burnt down!",
    "Čudo lies by Élan.",
    "서울은 한국의 수도다.",
)


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    return WordPiece.train(SENTENCES, 200, folder / "vocab.txt")


def prepare(root, name, records, vocabulary, chunk_length=24):
    """Makes root/name of records as `realm prepare` does."""
    source = write_lines(root / f"{name}.jsonl", records)
    settings = {"tagger": "rules", "chunk_length": chunk_length}
    config = BlocksConfig(str(root / name), source, vocabulary, **settings)
    prepare_blocks(config, workers=HERE)
    return root / name


def update(root, changed, *, old="old", new="new", **others):
    path = write_lines(root / f"{new}.changes.jsonl", changed)
    config = UpdateConfig(str(root / old), path, str(root / new), **others)
    return update_corpus.run(config, workers=HERE)


def contents(folder):
    """The bytes of every file of a corpus, and what corpus.json says."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    info = unseal(files.pop("corpus.json"))
    for name in (SUCCESSOR_FILE, PARENT_FILE):
        files.pop(name, None)
    return files, {name: info[name] for name in info.keys() - OWN}


def edited(records, changed):
    """The changed source, by plain lists."""
    for change in changed:
        kept = [] if change.get("deleted") else [change]
        result, seen = [], False
        for record in records:
            if record["id"] != change["id"]:
                result.append(record)
            elif not seen:
                result += kept
                seen = True
        records = result if seen else [*result, *kept]
    return records


texts = st.lists(st.sampled_from(SENTENCES), max_size=5).map(" ".join)
titles = st.sampled_from(["", " ", "Ansk", "Čudo 1542"])


@st.composite
def documents(draw, ids):
    record = {"id": draw(ids), "title": draw(titles), "text": draw(texts)}
    if draw(st.booleans()) and len(record["text"]) > 4:
        record["spans"] = [[0, 4, "NAME"]]
    return record


@st.composite
def edits(draw):
    """Records with an id twice now and then, and changes with every id once."""
    ids = st.integers(0, 9).map(str)
    records = draw(st.lists(documents(ids), min_size=1, max_size=14))
    changed = []
    for name in draw(st.permutations(range(13)))[: draw(st.integers(1, 8))]:
        record = draw(documents(st.just(str(name))))
        there = any(record["id"] == str(name) for record in records)
        if there and draw(st.booleans()):
            record = {"id": str(name), "deleted": True}
        changed.append(record)
    return records, changed


@settings(max_examples=15)
@given(edits())
def test_the_bytes_are_those_of_preparing_the_changed_text(vocabulary, edit):
    records, changed = edit
    with (
        tempfile.TemporaryDirectory() as folder,
        # Several copies, runs of rows and text files also of a corpus this small.
        mock.patch.object(block_writer, "_BLOCKS_PER_TEXT_FILE", 5),
        mock.patch.object(block_writer, "_COPIED_AT_ONCE", 3),
        mock.patch.object(update_corpus, "_DOCUMENTS_AT_ONCE", 4),
    ):
        root = pathlib.Path(folder)
        try:
            old = prepare(root, "old", records, vocabulary)
            twin = prepare(root, "twin", edited(records, changed), vocabulary)
        except BadInputError:
            assume(False)  # No text at all, before or after.
        before = {path: path.read_bytes() for path in old.iterdir()}
        result = update(root, changed)
        assert contents(root / "new") == contents(twin)
        result.store.verify()
        assert {path: path.read_bytes() for path in before} == before
        assert newest_version(old) == (root / "new").resolve()
        ids = {record["id"] for record in records}
        deleted = sum("deleted" in change for change in changed)
        replaced = sum(change["id"] in ids for change in changed) - deleted
        counted = (result.added, result.replaced, result.deleted)
        assert counted == (len(changed) - deleted - replaced, replaced, deleted)


def towns(count=30):
    return [
        {
            "id": f"town-{i}",
            "title": f"Town {i}",
            "text": f"Town {i} was founded in {1200 + i} by Karel Dorm. {SENTENCES[1]}",
        }
        for i in range(count)
    ]


CHANGED = [
    {"id": "town-3", "deleted": True},
    {"id": "town-30", "title": "Town 30", "text": SENTENCES[0]},
    {"id": "town-11", "title": "Town 11", "text": "It was founded by Maria Brel."},
]


@pytest.fixture
def old(tmp_path, vocabulary):
    return prepare(tmp_path, "old", towns(), vocabulary)


def test_what_cannot_be_done_is_told_in_a_line_and_leaves_nothing(old, tmp_path):
    unknown = [{"id": f"x{i}", "deleted": True} for i in range(3)]
    deleted = [{"id": f"town-{i}", "deleted": True} for i in range(30)]
    blank = [{"id": f"town-{i}", "title": "", "text": " "} for i in range(30)]
    for changed, said in [
        ([{"id": "town-99", "deleted": True}], "got the id 'town-99', which it does"),
        (unknown, "got the id 'x0' and 2 more, which it does not have"),
        ([CHANGED[0], CHANGED[2], CHANGED[0]], "once in .*, got 'town-3' 2 times"),
        ([CHANGED[0], {"title": "a", "text": "b"}], r"line 2: expected an 'id' with"),
        ([{"id": "a", "deleted": "yes"}], r"line 1: expected an 'id' with 'text'"),
        ([{"id": "a", "title": "a"}], r"line 1: expected .* a string 'text'"),
        ([{"id": [1], "deleted": True}], "line 1: expected 'id' to be a string or a"),
        (["text"], "line 1: expected a JSON object, got"),
        ([], r"JSON lines of changes at .*, but it is empty"),
        (deleted, "not one block would be left"),
        (blank, "not one block would be left"),
    ]:
        with refused(said):
            update(tmp_path, changed)
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"old", "old.jsonl", "new.changes.jsonl"}
    assert not (old / SUCCESSOR_FILE).exists()
    (tmp_path / "blank").write_text("\n \n")
    config = UpdateConfig(str(old), str(tmp_path / "blank"), str(tmp_path / "new"))
    with refused(r"expected changes in .*blank, got none"):
        update_corpus.run(config)


def test_a_folder_that_is_taken_and_a_second_successor_are_refused(old, tmp_path):
    update(tmp_path, CHANGED)
    with refused("old to have no successor yet, got"):
        update(tmp_path, CHANGED, new="third")
    with refused("new to be absent or empty"):
        update(tmp_path, CHANGED[:1])
    with refused("old to be absent or empty"):
        update(tmp_path, CHANGED, old="new", new="old")
    assert not (tmp_path / "third").exists()


def test_a_corpus_that_is_damaged_or_of_an_earlier_version_is_refused(old, tmp_path):
    ids = old / "ids.npy"
    sound = ids.read_bytes()
    ids.write_bytes(sound[:-1] + b"\xff")
    with refused(r"/ids\.npy is damaged \(crc32c "):
        update(tmp_path, CHANGED)
    ids.write_bytes(sound)
    info = unseal((old / "corpus.json").read_bytes())
    del info["files"]["documents.npy"]
    (old / "corpus.json").write_text(json.dumps(info))
    with refused(r"expected documents\.npy in .*old"):
        update(tmp_path, CHANGED)
    assert not (tmp_path / "new").exists()


def test_a_corpus_of_imported_blocks_is_refused(tmp_path, vocabulary):
    path = tmp_path / "block_records.npy"
    np.save(path, np.array([b"one mill", b"two"], object), allow_pickle=True)
    write_corpus(str(tmp_path / "old"), path, vocabulary)
    with refused("got imported blocks, which belong to no documents"):
        update(tmp_path, CHANGED)


def test_the_tagger_must_be_that_of_the_corpus(old, tmp_path, monkeypatch):
    with refused(r"expected the tagger rules-3, .* got giv"):
        update(tmp_path, CHANGED, tagger="given")
    with refused(r"folder of checkpoint-0f, .* TAGGER as checkpoint:F"):
        blocks.option_of("checkpoint-0f")
    monkeypatch.setattr(RuleTagger, "name", "rules-99")
    blocks.loaded_tagger.cache_clear()
    with refused(r"expected the tagger rules-3, .*rules-99"):
        update(tmp_path, CHANGED)
    # Who only deletes needs none.
    update(tmp_path, CHANGED[:1])
    blocks.loaded_tagger.cache_clear()


def test_what_was_killed_before_the_versions_were_linked_is_linked(
    old, tmp_path, monkeypatch
):
    chunk_each = mock.Mock(wraps=blocks.chunk_each)
    killed = mock.Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "chunk_each", chunk_each)
        patch.setattr(update_corpus, "link_versions", killed)
        with pytest.raises(KeyboardInterrupt):
            update(tmp_path, CHANGED)
    assert newest_version(old) == old
    # A deletion is a document without text; nothing that stays is tokenized or tagged.
    [((documents, *_), _)] = chunk_each.call_args_list
    assert [one.source_id for one in documents] == ["town-3", "town-30", "town-11"]
    before = (tmp_path / "new" / "ids.npy").stat()
    result = update(tmp_path, CHANGED)
    assert (tmp_path / "new" / "ids.npy").stat() == before
    assert newest_version(old) == (tmp_path / "new").resolve()
    assert (result.added, result.replaced, result.deleted) == (1, 1, 1)
    assert result.new_blocks == 2
    assert result.store.num_blocks > 4


def test_one_process_makes_a_version(old, tmp_path):
    changed = [{"id": "9", "title": "", "text": SENTENCES[0]}]
    with only_writer(str(tmp_path / "new")), refused("one is at work"):
        update(tmp_path, changed)
    update(tmp_path, changed)


def test_it_stops_when_asked_and_goes_on(old, tmp_path):
    stop = threading.Event()
    changes = write_lines(tmp_path / "new.changes.jsonl", CHANGED)
    config = UpdateConfig(str(old), changes, str(tmp_path / "new"))

    def report(what, done, total):
        if what == "blocks":
            stop.set()

    with pytest.raises(StoppedError):
        update_corpus.run(config, report, stop)
    assert not (tmp_path / "new").exists()
    assert update_corpus.run(config).store.info["num_documents"] == 30
    assert not list(tmp_path.glob("new.p*"))


def test_damaged_blocks_of_changes_are_made_anew(old, tmp_path, monkeypatch, caplog):
    full_disk = mock.Mock(side_effect=BadInputError("the disk is full"))
    with monkeypatch.context() as patch, refused("disk is full"):
        patch.setattr(update_corpus, "write_changed", full_disk)
        update(tmp_path, CHANGED)
    flip_a_bit_of_each(tmp_path / "new.parts", seed=0)
    update(tmp_path, CHANGED)
    assert "is damaged and is made anew" in caplog.text
    shutil.copytree(old, tmp_path / "copy")
    (tmp_path / "copy" / SUCCESSOR_FILE).unlink()
    update(tmp_path, CHANGED, new="twin", old="copy")
    assert contents(tmp_path / "new") == contents(tmp_path / "twin")


@pytest.mark.usefixtures("registry")
def test_the_command_and_the_examples_of_what_it_made(tmp_path, vocabulary, capsys):
    tiny_run.make_inputs(tmp_path)
    articles = (tmp_path / "articles.jsonl").read_text().splitlines()
    records = [json.loads(article) for article in articles]
    corpus = prepare(tmp_path, "corpus", records, vocabulary, chunk_length=40)
    write_lines(tmp_path / "changes.jsonl", CHANGED)
    arguments = tiny_run.arguments("update-corpus", tmp_path)
    assert main(arguments) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "0 added, 2 replaced, 1 deleted; 2 blocks are new" in said
    assert newest_version(corpus) == (tmp_path / "corpus2").resolve()
    # Nobody has the changed text in one file.
    macros = {"CORPUS": str(tmp_path / "corpus2"), "SOURCE": "", "QUESTIONS": ""}
    arguments = tiny_run.arguments("prepare", tmp_path, **macros)
    assert main([*arguments, "--workers=1"]) == 0
    store = BlockStore.open(tmp_path / "corpus2")
    for split in ("train", "validation"):
        examples = Examples.open(tmp_path / f"corpus2/examples/towns_salient/{split}")
        assert examples.metadata["corpus_fingerprint"] == store.fingerprint
    longer = "--gin.prepare.PrepareConfig.chunk_length=50"
    assert main([*arguments, longer]) == 2
    assert "expected the chunk_length 40 of" in capsys.readouterr().err
