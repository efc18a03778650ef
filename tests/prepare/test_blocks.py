"""Making a block store: what stays of a run that failed, and what else stays."""

import dataclasses
import gzip
import sys

import pytest

from realm_jax.data.versions import PARENT_FILE
from realm_jax.errors import BadInputError
from realm_jax.prepare import blocks
from realm_jax.prepare.blocks import BlocksConfig, prepare_blocks
from realm_jax.prepare.fingerprints import package_code
from realm_jax.prepare.scratch import Workers
from realm_jax.prepare.vocabularies import VocabularyTraining
from tests import tiny_run
from tests.prepare.flipped_scratch import flip_a_bit_of_each
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
    before = files(scratch)
    prepare_blocks(config(root, scratch), workers=HERE)
    assert files(scratch) == before
    assert (root / "corpus" / "corpus.json").exists()


def test_parts_outlive_a_failure_unless_other_code_made_them(root, monkeypatch):
    def full_disk(*args, **kwargs):
        raise BadInputError("the disk is full")

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


def test_what_is_damaged_in_scratch_is_made_anew(root, monkeypatch, caplog):
    """The vocabulary, unpacked text and parts, each with a bit flipped."""
    articles = root / "articles.jsonl"
    packed = root / "articles.jsonl.gz"
    packed.write_bytes(gzip.compress(articles.read_bytes()))
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
    left = files(scratch)
    kinds = {str(path.relative_to(scratch)).split("-")[0] for path in left}
    assert len(kinds) == 3, kinds
    for seed in range(2):
        damaged = flip_a_bit_of_each(scratch, seed)
        caplog.clear()
        with refused("disk is full"):
            prepare_blocks(several, workers=HERE)
        assert files(scratch) == left
        for path in damaged:
            assert f"{path} is damaged and is made anew" in caplog.text
    monkeypatch.undo()
    flip_a_bit_of_each(scratch, seed=2)
    prepare_blocks(several, workers=HERE)
    assert [path.read_bytes() for path in sorted((root / "corpus").iterdir())] == [
        path.read_bytes() for path in sorted((root / "undisturbed").iterdir())
    ]


def test_a_corpus_of_other_settings_is_refused_by_their_names(root):
    store = prepare_blocks(config(root), workers=HERE)
    before = files(root / "corpus")
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
    assert files(root / "corpus") == before
    # A version that update-corpus has made needs no source.
    (root / "corpus" / PARENT_FILE).write_text("{}")
    with refused(r'update-corpus has made, .* SOURCE=""'):
        prepare_blocks(dataclasses.replace(config(root), **other), workers=HERE)


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_part_is_made_without_beam_and_the_same(root, monkeypatch):
    several = prepare_blocks(config(root, part_bytes=2000), workers=HERE)
    (root / "corpus").rename(root / "several")
    monkeypatch.setitem(sys.modules, "realm_jax.prepare.beam_parts", None)
    prepare_blocks(config(root), workers=HERE)
    assert several.num_blocks > 60
    assert [path.read_bytes() for path in sorted((root / "several").iterdir())] == [
        path.read_bytes() for path in sorted((root / "corpus").iterdir())
    ]
