"""The processes that train, search and measure never import TensorFlow."""

import subprocess
import sys

import pytest

from tests import tiny_run

CODE = """
import pathlib, sys, tempfile

import realm_jax
from realm_jax.cli import ask, build_index, evaluate, finetune, pretrain, warm_start
from realm_jax.evaluation import run, server, watch
from realm_jax.evaluation.ask import AskConfig, AnswerService
from realm_jax.index import builder, searchers
from realm_jax.training import finetune as finetuning
from realm_jax.training import pretrain as pretraining
from realm_jax.training import warm_start as warm_starting
from tests import tiny_world as tiny

folder = pathlib.Path(tempfile.mkdtemp())
world = tiny.make(folder)
for stage, config in (
    (warm_starting, tiny.warm_start_config(world, folder / "w")),
    (pretraining, tiny.pretrain_config(world, folder / "p")),
    (finetuning, tiny.finetune_config(world, folder / "f")),
):
    assert stage.run(config, tiny.silent, tiny.NEVER)
finetuned = tiny.finetune_config(world, folder / "f")
asked = AskConfig(world.corpus, finetuned, embed=tiny.EMBED)
assert AnswerService(asked, tiny.NEVER).answer("who").answer.documents
model = realm_jax.load(folder / "f", world.corpus)
assert model.answer("who").documents
assert model.search("who", k=2)
assert realm_jax.open_corpus(world.corpus).num_blocks == model.corpus.num_blocks
heavy = {"tensorflow", "seqio", "tensorflow_datasets"} & set(sys.modules)
assert not heavy, heavy
print("trained and asked")
"""

PREPARED = """
import gzip, pathlib, sys, tempfile

from realm_jax.prepare.documents.open import open_source
from realm_jax.prepare.documents.source import read_all
from realm_jax.prepare.blocks import tagger_by_name

path = pathlib.Path(tempfile.mkdtemp(), "a.jsonl.gz")
path.write_bytes(gzip.compress(b'{"title": "Rhine", "text": "A river."}'))
assert len(list(read_all(open_source(str(path))))) == 1
tagger_by_name("rules")
heavy = {"tensorflow", "spacy", "realm_jax.models.bert"} & set(sys.modules)
assert not heavy, heavy
print("read")
"""

IMPORTED_ALONE = """
import sys

import realm_jax

assert {"load", "open_corpus", "Model"} <= set(dir(realm_jax))
heavy = {"jax", "numpy", "tensorflow", "realm_jax.api"} & set(sys.modules)
assert not heavy, heavy
assert realm_jax.load.__module__ == "realm_jax.api"
assert "tensorflow" not in sys.modules
print("imported")
"""


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=tiny_run.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.full
def test_stages_leave_tensorflow_alone():
    assert "trained and asked" in run(CODE)


@pytest.mark.full
def test_lines_and_rules_need_neither_tensorflow_nor_models():
    assert "read" in run(PREPARED)


@pytest.mark.process("imports are those of a process")
def test_importing_the_library_imports_nothing_heavy():
    assert "imported" in run(IMPORTED_ALONE)
