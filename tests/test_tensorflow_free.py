"""The processes that train, search and measure never import TensorFlow."""

import subprocess
import sys

from tests import tiny_run

CODE = """
import pathlib, sys, tempfile

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
heavy = {"tensorflow", "seqio", "tensorflow_datasets"} & set(sys.modules)
assert not heavy, heavy
print("trained and asked")
"""


def test_stages_leave_tensorflow_alone():
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=tiny_run.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trained and asked" in done.stdout
