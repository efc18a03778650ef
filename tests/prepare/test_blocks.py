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


def test_parts_outlive_a_failure_to_put_them_together(root, monkeypatch):
    def full_disk(*args, **kwargs):
        raise BadInputError("the disk is full")

    two_parts = config(root, part_bytes=8000)
    monkeypatch.setattr(blocks, "assemble", full_disk)
    with pytest.raises(BadInputError, match="disk is full"):
        prepare_blocks(two_parts, workers=HERE)
    monkeypatch.undo()
    assert len(list((root / "corpus.parts").glob("blocks-*/done/*"))) == 2
    # The next run needs no worker at all.
    monkeypatch.setattr(blocks.MakeBlocks, "__call__", full_disk)
    store = prepare_blocks(two_parts, workers=HERE)
    assert store.info["num_documents"] == 60
    assert not (root / "corpus.parts").exists()


def test_what_is_damaged_in_scratch_is_made_anew(root, monkeypatch, caplog):
    """The vocabulary, unpacked text and parts, each with a bit flipped, six times."""
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
    with pytest.raises(BadInputError, match="disk is full"):
        prepare_blocks(several, workers=HERE)
    left = files(scratch)
    kinds = {str(path.relative_to(scratch)).split("-")[0] for path in left}
    assert len(kinds) == 3, kinds
    for seed in range(6):
        damaged = flip_a_bit_of_each(scratch, seed)
        caplog.clear()
        with pytest.raises(BadInputError, match="disk is full"):
            prepare_blocks(several, workers=HERE)
        assert files(scratch) == left
        for path in damaged:
            assert f"{path} is damaged and is made anew" in caplog.text
    monkeypatch.undo()
    flip_a_bit_of_each(scratch, seed=6)
    prepare_blocks(several, workers=HERE)
    assert [path.read_bytes() for path in sorted((root / "corpus").iterdir())] == [
        path.read_bytes() for path in sorted((root / "undisturbed").iterdir())
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chunk_length": 50}, "chunk_length: 40, not 50"),
        ({"tagger": "given"}, "TAGGER: 'rules.*', not 'given'"),
        ({"vocabulary": VocabularyTraining(310)}, "vocabulary_size: 300, not 310"),
        (
            {"vocabulary": VocabularyTraining(300, lowercase=False)},
            "lowercase: True, not False",
        ),
        ({"vocabulary": None}, "VOCABULARY: its .* trained on it, not given"),
        ({"source": "other.jsonl"}, "SOURCE: .* other text than that of .*other.jsonl"),
        (
            {"source": "other.jsonl", "chunk_length": 50},
            "SOURCE: .*; chunk_length: 40, not 50",
        ),
    ],
)
def test_a_corpus_of_other_settings_is_refused_by_their_names(root, changes, said):
    store = prepare_blocks(config(root), workers=HERE)
    before = files(root / "corpus")
    (root / "other.jsonl").write_text('{"title": "a", "text": "b"}\n')
    if "source" in changes:
        changes = changes | {"source": str(root / "other.jsonl")}
    if changes.get("vocabulary", "") is None:
        changes = changes | {"vocabulary": store.vocabulary}
    told = []
    with pytest.raises(BadInputError, match=said) as caught:
        prepare_blocks(
            dataclasses.replace(config(root), **changes),
            lambda *progress: told.append(progress),
            workers=HERE,
        )
    assert f"rm -r {root}/corpus" in str(caught.value)
    assert not told
    assert files(root / "corpus") == before


def test_a_version_of_update_corpus_needs_no_source(root):
    prepare_blocks(config(root), workers=HERE)
    (root / "corpus" / PARENT_FILE).write_text("{}")
    (root / "articles.jsonl").write_text('{"title": "a", "text": "b"}\n')
    with pytest.raises(BadInputError, match=r'update-corpus has made, .* SOURCE=""'):
        prepare_blocks(config(root), workers=HERE)


def test_parts_of_other_code_are_not_used(root, monkeypatch):
    def full_disk(*args, **kwargs):
        raise BadInputError("the disk is full")

    two_parts = config(root, part_bytes=8000)
    monkeypatch.setattr(blocks, "assemble", full_disk)
    with pytest.raises(BadInputError, match="disk is full"):
        prepare_blocks(two_parts, workers=HERE)
    other = {"version": "9.9", "source": "0" * 64}
    monkeypatch.setattr(blocks, "package_code", lambda: other)
    monkeypatch.setattr(blocks.MakeBlocks, "__call__", full_disk)
    with pytest.raises(BadInputError, match="disk is full"):
        prepare_blocks(two_parts, workers=HERE)
    monkeypatch.undo()
    # Those of this code are still there.
    monkeypatch.setattr(blocks.MakeBlocks, "__call__", full_disk)
    store = prepare_blocks(two_parts, workers=HERE)
    assert store.info["made_by"] == package_code()


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
