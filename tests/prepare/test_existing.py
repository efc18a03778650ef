"""Examples of code and settings that have changed are never mixed, nor kept in silence.

Every run is one of `realm prepare`, which shares with others only what lies on disk.
"""

import json
import re
import shutil
import sys
from unittest import mock

import pytest

from realm_jax.cli.main import main
from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples
from realm_jax.errors import BadInputError
from realm_jax.manifests import seal, unseal
from realm_jax.prepare import examples, prepare
from tests import tiny_run
from tests.prepare.folders import contents, flip_a_bit_of_each

MODULE = """
import functools

import numpy as np

import mine_rules
from realm_jax.data import masking
from realm_jax.data.blocks import BlockStore
from realm_jax.prepare.seqio_tasks import BlockSource, add_task

LENGTHS = {{"query_length": 32, "max_masks": 6}}
CALLS = []


def years(store, block_ids):
    {bug}
    examples = masking.salient_examples(store, block_ids, **LENGTHS)
    answers = [store.vocabulary.decode(ids[ids > 0]) for ids in examples["mask_ids"]]
    kept = np.array([mine_rules.is_kept(answer) for answer in answers], bool)
    return {{name: array[kept] for name, array in examples.items()}}


store = BlockStore.open({corpus!r})
add_task(
    "mine_years",
    BlockSource(store, num_shards=8, fraction=0.2),
    functools.partial(years, store),
    masking.sentence_specs(**LENGTHS),
    store.vocabulary.size,
)
"""
CRASH = "CALLS.append(1); assert len(CALLS) < 5, 'too many calls'"
FEW = "--gin.EXAMPLES=['questions']"  # Beside those that a test is about.
LONGER = "--gin.prepare.PrepareConfig.max_masks=7"
IS_YEAR = "def is_kept(answer):\n    return answer.isdigit()\n"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Twenty articles; the working directory and its modules are the user's."""
    tiny_run.make_inputs(tmp_path, num_articles=20)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def realm(root, capsys, caplog, registry):
    """Runs `realm prepare` as if in a process of its own; returns its words."""

    def run(*flags, code=0):
        import seqio

        for name in [name for name in sys.modules if name.startswith("mine")]:
            del sys.modules[name]
        for name in list(seqio.TaskRegistry.names()):
            seqio.TaskRegistry.remove(name)
        examples.register.cache_clear()
        shutil.rmtree(root / "__pycache__", ignore_errors=True)
        capsys.readouterr()
        caplog.clear()
        ended = main([*tiny_run.arguments("prepare", root), *flags])
        printed = capsys.readouterr()
        said = " ".join((caplog.text + printed.out + printed.err).split())
        assert ended == code, said
        return said

    return run


def write_module(root, *, bug="", rules=IS_YEAR):
    text = MODULE.format(bug=bug, corpus=str(root / "corpus"))
    (root / "mine.py").write_text(text)
    (root / "mine_rules.py").write_text(rules)


def with_years(*flags):
    more = '--gin.prepare.PrepareConfig.more_tasks=["mine_years"]'
    return ["--import_module=mine", more, *flags]


def answers(root):
    """All masked answers of the module's task that lie on disk, as text, sorted."""
    vocabulary = BlockStore.open(root / "corpus").vocabulary
    folder = root / "corpus" / "examples" / "mine_years"
    rows = [
        row[row > 0]
        for split in ("train", "validation")
        for row in Examples.open(folder / split).features["mask_ids"]
    ]
    return sorted(map(vocabulary.decode, rows))


def years_of(root):
    """The years in the text, each in a sentence of its own and no part of a date."""
    text = (root / "articles.jsonl").read_text()
    return sorted(re.findall(r"(?:founded in|\. In) (\d{4})\b", text))


def rewritten(path, change):
    info = unseal(path.read_bytes())
    change(info)
    path.write_bytes(seal(info))


def test_a_mended_module_shares_no_part_with_the_one_that_crashed(
    root, realm, monkeypatch
):
    monkeypatch.setattr(prepare, "_FEW_BLOCKS", 0)
    realm(FEW)
    write_module(root, bug=CRASH, rules=IS_YEAR.replace(".isdigit()", " != ''"))
    with pytest.raises(Exception, match="too many calls"):
        realm(*with_years(FEW, "--workers=1"))
    parts = list((root / "corpus.parts").glob("examples/*/mine_years*"))
    assert len(parts) > 3
    write_module(root)
    realm(*with_years(FEW, "--workers=1"))
    assert answers(root) == years_of(root)
    assert len(years_of(root)) == 40


def test_damaged_parts_of_examples_are_made_anew(root, realm, monkeypatch):
    realm("--workers=1")
    monkeypatch.setattr(prepare, "_FEW_BLOCKS", 0)
    made = contents(root / "corpus")
    shutil.rmtree(root / "corpus" / "examples")
    full_disk = mock.Mock(side_effect=BadInputError("expected room on the disk"))
    with monkeypatch.context() as patch:
        patch.setattr(examples, "write_split", full_disk)
        realm("--workers=1", code=2)
    damaged = flip_a_bit_of_each(root / "corpus.parts", seed=0)
    assert len(damaged) > 3
    assert realm("--workers=1").count("is damaged and is made anew") == len(damaged)
    assert contents(root / "corpus") == made


def test_examples_are_not_kept_when_their_module_or_settings_change(root, realm):
    realm(FEW)
    write_module(root)
    realm(*with_years(FEW))
    assert answers(root) == years_of(root)
    # A comment changes nothing.
    with (root / "mine.py").open("a") as file:
        file.write("# Years only.\n")
    realm(*with_years(FEW))
    said = realm(*with_years(FEW, LONGER), code=2)
    assert re.search("mine_years.*their max_masks is 6, not 7", said), said
    # What the module imports has changed.
    write_module(root, rules="def is_kept(answer):\n    return answer > '15'\n")
    folder = root / "corpus" / "examples" / "mine_years"
    said = realm(*with_years(FEW), code=2)
    assert re.search(f"the module mine_rules has changed since.*rm -r {folder}$", said)
    assert answers(root) == years_of(root)
    # The other tasks are not the module's.
    realm(FEW, "--import_module=mine")
    shutil.rmtree(folder)
    realm(*with_years(FEW))
    later = {year for year in years_of(root) if year > "15"}
    assert set(filter(str.isdigit, answers(root))) == later
    # The corpus that the module reads is another one now.
    other = {"corpus_fingerprint": "0" * 64}
    path = folder / "train/examples.json"
    rewritten(path, lambda info: info["metadata"].update(other))
    assert "they were made for another corpus" in realm(*with_years(FEW), code=2)


def test_a_changed_question_file_is_not_ignored(root, realm):
    realm(FEW)
    path = root / "questions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    # The same questions, spelled otherwise.
    spelled = [dict(reversed(line.items())) for line in lines]
    path.write_text("\n".join(map(json.dumps, spelled)))
    realm(FEW)
    splits = {"train": "train", "dev": "test", "test": "test"}
    for changed in (
        [lines[0] | {"title": "Town4"}, *lines[1:]],
        [lines[0] | {"topic": "rivers"}, *lines[1:]],
        [line | {"split": splits[line["split"]]} for line in lines],
    ):
        path.write_text("\n".join(map(json.dumps, changed)))
        removal = f"rm -r {root}/corpus/examples/towns_questions"
        assert realm(FEW, code=2).endswith(removal)


def test_a_split_that_is_no_longer_asked_is_not_left_behind(root, realm):
    """Examples of an earlier release do not record their questions."""
    realm(FEW)
    path = root / "questions.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if '"dev"' not in line))
    for manifest in (root / "corpus/examples").rglob("examples.json"):
        rewritten(manifest, forget)
    for split in ("train", "test"):
        shutil.rmtree(root / "corpus/examples/towns_questions" / split)
    assert "got dev too" in realm(FEW, code=2)


def test_what_a_killed_run_left_of_a_split_does_not_keep_it_from_going_on(root, realm):
    realm(FEW)
    made = contents(root / "corpus")
    folder = root / "corpus/examples/towns_questions"
    (folder / "train").rename(folder / "train.partial")
    realm(FEW)
    assert contents(root / "corpus") == made


def forget(info):
    """Leaves of a manifest what the release before wrote."""
    metadata = info.get("metadata", info)
    del metadata["made_by"]
    metadata.pop("questions_fingerprint", None)


def test_what_other_code_or_an_earlier_release_made_is_kept_and_said(
    root, realm, monkeypatch
):
    realm()
    write_module(root)
    realm(*with_years())
    assert "kept" not in realm()
    with monkeypatch.context() as patch:
        other = {"version": "9.9", "source": "0" * 64}
        patch.setattr(examples, "package_code", lambda: other)
        said = realm()
    assert "unknown" not in said
    assert "other code of realm_jax made them" in said
    assert "their max_masks is 6, not 7" in realm(LONGER, code=2)
    manifests = [*(root / "corpus").rglob("examples.json"), root / "corpus/corpus.json"]
    assert len(manifests) == 10
    for path in manifests:
        rewritten(path, forget)
    before = {path: path.read_bytes() for path in manifests}
    said = realm(*with_years())
    assert said.count("is unknown") == 1
    for path in manifests:
        of_corpus = path.name == "corpus.json"
        assert str(path.parent if of_corpus else path.parent.parent) in said
    assert {path: path.read_bytes() for path in manifests} == before
    # What it did record is compared as ever.
    assert "their seed is 0, not 3" in realm("--gin.SEED=3", code=2)
    assert "they are of other lengths" in realm(LONGER, code=2)
