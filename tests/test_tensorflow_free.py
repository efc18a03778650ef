"""The processes that train, search and measure never import TensorFlow."""

import subprocess
import sys

import pytest

from tests import tiny_run

TRAINED_AND_ASKED = """
import pathlib, tempfile

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
"""

PREPARED = """
import gzip, pathlib, tempfile

from realm_jax.prepare.documents.open import open_source
from realm_jax.prepare.documents.source import read_all
from realm_jax.prepare.blocks import tagger_by_name

path = pathlib.Path(tempfile.mkdtemp(), "a.jsonl.gz")
path.write_bytes(gzip.compress(b'{"title": "Rhine", "text": "A river."}'))
assert len(list(read_all(open_source(str(path))))) == 1
tagger_by_name("rules")
"""

SEARCHED = """
import numpy

from realm_jax.index.searchers import make_searcher

make_searcher("scann", numpy.ones((2, 4), "f"))
"""

STORED = """
import tempfile

from realm_jax.storage import open_store

open_store(tempfile.mkdtemp()).write("x", b"1")
"""

IMPORTED_ALONE = """
import sys

import realm_jax

assert {"load", "open_corpus", "Model"} <= set(dir(realm_jax))
heavy = {"jax", "numpy", "realm_jax.api"} & set(sys.modules)
assert not heavy, heavy
assert realm_jax.load.__module__ == "realm_jax.api"
"""


def require_without(code, *modules):
    """Runs a program, which must end well and have imported none of these modules."""
    found = f"set({modules}) & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nassert not {found}, {found}"],
        env=tiny_run.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.full
@pytest.mark.parametrize(
    ("code", "others"),
    [
        (TRAINED_AND_ASKED, ["seqio", "tensorflow_datasets"]),
        (PREPARED, ["spacy", "realm_jax.models.bert"]),
        (SEARCHED, []),
        (STORED, ["google.cloud"]),
    ],
)
def test_tensorflow_is_left_alone(code, others):
    """And each leaves alone what else it does not need."""
    require_without(code, "tensorflow", *others)


@pytest.mark.process("imports are those of a process")
def test_importing_the_library_imports_nothing_heavy():
    require_without(IMPORTED_ALONE, "tensorflow")
