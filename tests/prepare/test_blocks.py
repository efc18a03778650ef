"""Records to blocks: parts, counts, and what stays of a run that failed."""

import dataclasses
import fcntl
import gzip
import sys
from unittest import mock

import pytest

from realm_jax.cli.prepare import summary as told
from realm_jax.data.versions import PARENT_FILE
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.prepare import blocks
from realm_jax.prepare.block_parts import Summary
from realm_jax.prepare.blocks import BlocksConfig, prepare_blocks
from realm_jax.prepare.documents.open import open_source
from realm_jax.prepare.fingerprints import package_code
from realm_jax.prepare.scratch import Workers, only_writer
from realm_jax.prepare.vocabularies import VocabularyTraining
from tests import tiny_run
from tests.prepare.folders import contents, flip_a_bit_of_each
from tests.refused import refused

HERE = Workers(1)


@pytest.fixture
def root(tmp_path):
    tiny_run.make_inputs(tmp_path)
    return tmp_path


def config(root, scratch="", **others):
    return BlocksConfig(
        corpus=str(root / "corpus"),
        source=str(root / "articles.jsonl"),
        vocabulary=VocabularyTraining(300),
        tagger="rules",
        chunk_length=40,
        scratch=str(scratch),
        **others,
    )


def test_a_scratch_folder_keeps_what_else_is_in_it(root):
    """Parts are removed with their folder, so it must be the corpus's own."""
    scratch = root / "scratch"
    (scratch / "mine").mkdir(parents=True)
    (scratch / "mine" / "thesis.txt").write_text("years of work")
    (scratch / "corpus.txt").write_text("more of it")
    before = contents(scratch)
    prepare_blocks(config(root, scratch), workers=HERE)
    assert contents(scratch) == before
    assert (root / "corpus" / "corpus.json").exists()


def test_parts_outlive_a_failure_unless_other_code_made_them(root, monkeypatch):
    full_disk = mock.Mock(side_effect=BadInputError("the disk is full"))
    two_parts = config(root, part_bytes=8000)
    with monkeypatch.context() as patch, refused("disk is full"):
        patch.setattr(blocks, "assemble", full_disk)
        prepare_blocks(two_parts, workers=HERE)
    assert len(list((root / "corpus.parts").glob("blocks-*/done/*"))) == 2
    monkeypatch.setattr(blocks.MakeBlocks, "__call__", full_disk)
    other = {"version": "9.9", "source": "0" * 64}
    with monkeypatch.context() as patch, refused("disk is full"):
        patch.setattr(blocks, "package_code", lambda: other)
        prepare_blocks(two_parts, workers=HERE)
    # Of this code's parts none is made again.
    store = prepare_blocks(two_parts, workers=HERE)
    assert store.info["made_by"] == package_code()
    assert store.info["num_documents"] == 60
    assert not (root / "corpus.parts").exists()


def test_one_process_makes_a_corpus(root, monkeypatch):
    lock = root / "corpus.lock"
    corpus = str(root / "corpus")
    with only_writer(corpus):
        for _ in range(2):
            with refused("expected no other process to prepare .* is at work; wait"):
                prepare_blocks(config(root), workers=HERE)
        assert not (root / "corpus.parts").exists()
    assert not lock.exists()
    # As a killed process leaves it.
    lock.touch()
    prepare_blocks(config(root), workers=HERE)
    assert not lock.exists()
    # A corpus that is complete is only read.
    with only_writer(corpus):
        prepare_blocks(config(root), workers=HERE)
    flock = fcntl.flock

    def released(file, how):
        """Another process lets go between opening and locking."""
        monkeypatch.undo()
        lock.unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", released)
    with only_writer(corpus), refused("is at work"), only_writer(corpus):
        pass


def test_what_is_damaged_in_scratch_is_made_anew(root, monkeypatch, caplog):
    """The vocabulary, unpacked text and parts, each with a bit flipped."""
    packed = root / "articles.jsonl.gz"
    packed.write_bytes(gzip.compress((root / "articles.jsonl").read_bytes()))
    several = config(root, part_bytes=packed.stat().st_size - 1)
    several = dataclasses.replace(several, source=str(packed))
    prepare_blocks(several, workers=HERE)
    (root / "corpus").rename(root / "undisturbed")
    scratch = root / "corpus.parts"

    def read_and_die(directory, parts, **kwargs):
        assert len(list(parts)) > 1
        raise BadInputError("the disk is full")

    monkeypatch.setattr(blocks, "assemble", read_and_die)
    with refused("disk is full"):
        prepare_blocks(several, workers=HERE)
    left = contents(scratch)
    kinds = {path.split("-")[0] for path in left}
    assert len(kinds) == 3, kinds
    for seed in range(2):
        damaged = flip_a_bit_of_each(scratch, seed)
        caplog.clear()
        with refused("disk is full"):
            prepare_blocks(several, workers=HERE)
        assert contents(scratch) == left
        for path in damaged:
            assert f"{path} is damaged and is made anew" in caplog.text
    monkeypatch.undo()
    flip_a_bit_of_each(scratch, seed=2)
    prepare_blocks(several, workers=HERE)
    assert contents(root / "corpus") == contents(root / "undisturbed")


def test_a_corpus_of_other_settings_is_refused_by_their_names(root):
    store = prepare_blocks(config(root), workers=HERE)
    before = contents(root / "corpus")
    (root / "other.jsonl").write_text('{"title": "a", "text": "b"}\n')
    other = {"source": str(root / "other.jsonl")}
    cased = {"vocabulary": VocabularyTraining(300, lowercase=False)}
    told = []
    for changes, said in [
        ({"chunk_length": 50}, "chunk_length: 40, not 50"),
        ({"tagger": "given"}, "TAGGER: 'rules.*', not 'given'"),
        ({"vocabulary": VocabularyTraining(310)}, "vocabulary_size: 300, not 310"),
        (cased, "lowercase: True, not False"),
        ({"vocabulary": store.vocabulary}, "VOCABULARY: its .* trained on it, not giv"),
        (other, "SOURCE: .* other text than that of .*other.jsonl"),
        (other | {"chunk_length": 50}, "SOURCE: .*; chunk_length: 40, not 50"),
    ]:
        with refused(f"{said}.*rm -r {root}/corpus"):
            changed = dataclasses.replace(config(root), **changes)
            prepare_blocks(changed, lambda *line: told.append(line), workers=HERE)
    assert not told
    assert contents(root / "corpus") == before
    # A version that update-corpus has made needs no source.
    (root / "corpus" / PARENT_FILE).write_text("{}")
    with refused(r'update-corpus has made, .* SOURCE=""'):
        prepare_blocks(dataclasses.replace(config(root), **other), workers=HERE)


def test_one_part_is_made_without_beam_and_the_same(root, monkeypatch):
    several = prepare_blocks(config(root, part_bytes=2000), workers=HERE)
    (root / "corpus").rename(root / "several")
    monkeypatch.setitem(sys.modules, "realm_jax.prepare.beam_parts", None)
    prepare_blocks(config(root), workers=HERE)
    assert several.num_blocks > 60
    assert contents(root / "several") == contents(root / "corpus")


@pytest.fixture
def lines(root):
    return (root / "articles.jsonl").read_text().splitlines()


def build(folder, lines, *, shard_bytes=2000):
    """Builds folder/corpus of these lines, of which one may be damaged.

    Every part is made as a worker makes it.
    """
    folder.mkdir()
    (folder / "lines.jsonl").write_text("\n".join(lines))
    source = open_source(str(folder / "lines.jsonl"), shard_bytes=shard_bytes)
    shards = source.shards()
    names = blocks.part_names(len(shards))
    vocabulary = WordPiece.train(lines, 300, folder / "vocab.txt")
    settings = {"vocabulary": vocabulary, "chunk_length": 40, "max_bad_lines": 1}
    of_parts = dict(zip(names, shards, strict=True))
    make = blocks.MakeBlocks(source, of_parts, tagger="rules", **settings)
    parts = [make(name, lambda: None) for name in names]
    return blocks.assemble(str(folder / "corpus"), iter(parts), metadata={}, **settings)


def test_what_was_not_used_is_counted(lines, tmp_path):
    lines[7:7] = ["no JSON"]
    lines[30:30] = ['{"title": "", "text": "Nameless stands alone here."}']
    lines += ['{"title": "Empty", "text": " "}', lines[0]]
    store = build(tmp_path / "a", lines)
    counts = Summary.from_json(store.info["summary"])
    assert counts.documents == store.info["num_documents"] == 63
    assert counts.without_text == counts.without_title == counts.bad_records == 1
    [first] = counts.first_bad
    assert first.where.endswith("line 8")
    town = sum(text.title == "Town0" for text in store.texts(range(store.num_blocks)))
    # The article that came twice.
    assert store.info["num_duplicate_blocks"] * 2 == town > 0
    said = " ".join(told(store.info))
    for words in ("63 documents", "1 damaged", "1 without a title", "line 8"):
        assert words in said


def test_more_damage_than_can_be_borne_leaves_nothing(lines, tmp_path):
    lines[3], lines[50] = "{}", "{}"
    # In parts of their own, and in one.
    for size in (2000, 1 << 20):
        folder = tmp_path / str(size)
        with refused(r"line 4: .*2 damaged.*max_bad_lines=1"):
            build(folder, lines, shard_bytes=size)
        assert {path.name for path in folder.iterdir()} == {"lines.jsonl", "vocab.txt"}
