"""The programs that are planned are those that are run."""

import dataclasses
import functools
import itertools
import json
import subprocess
import sys
from unittest import mock

import jax
import pytest

from realm_jax.data.blocks import BlockStore
from realm_jax.data.corpus_size import CorpusSize, of_corpus
from realm_jax.index.searchers import DeviceConfig
from realm_jax.placement import place_batch
from realm_jax.training import finetune, pretrain, warm_start
from realm_jax.training.loop import Loop
from realm_jax.training.optimizers import OptimizerConfig
from realm_jax.training.partitioning import make_mesh
from tests import tiny_run, tiny_world
from tpu_launch.planner import programs


class SeenError(Exception):
    """Ends a run at its first update."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_world.make(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    """Programs for this machine, unlike those of the other tests here."""
    with tiny_world.traced_once():
        yield


def first_update(run, config):
    """Returns state and inputs that a run would begin with."""
    seen = []

    def update(loop, inputs):
        stage = loop._stage
        seen.extend([stage.state, place_batch(stage.mesh, inputs)])
        raise SeenError

    with mock.patch.object(Loop, "update", update), pytest.raises(SeenError):
        run(config, tiny_world.silent, tiny_world.NEVER)
    return seen


PER_MODEL = functools.partial(OptimizerConfig, clip="per_model", retriever_rate=0.5)
SPANS_TOO = dataclasses.replace(tiny_world.models(), span_scorer=True)


@pytest.mark.parametrize(
    ("run", "make", "changes"),
    [
        (pretrain.run, tiny_world.pretrain_config, {}),
        (pretrain.run, tiny_world.pretrain_config, {"searcher": "scann"}),
        (pretrain.run, tiny_world.pretrain_config, {"device": DeviceConfig("int8")}),
        (pretrain.run, tiny_world.pretrain_config, {"own_block": True}),
        (pretrain.run, tiny_world.pretrain_config, {"refresh_mode": "rolling"}),
        (pretrain.run, tiny_world.pretrain_config, {"write_back": True}),
        (warm_start.run, tiny_world.warm_start_config, {}),
        (warm_start.run, tiny_world.warm_start_config, {"optimizer": PER_MODEL}),
        (warm_start.run, tiny_world.warm_start_config, {"score_unmasked": True}),
        (warm_start.run, tiny_world.warm_start_config, {"models": SPANS_TOO}),
        (warm_start.run, tiny_world.warm_start_config, {"task": ""}),
        (warm_start.run, tiny_world.warm_start_config, {"pairs_task": ""}),
        (finetune.run, tiny_world.finetune_config, {}),
        (finetune.run, tiny_world.finetune_config, {"train_num_read": 1}),
        (
            finetune.run,
            tiny_world.finetune_config,
            {"refresh_mode": "blocking", "num_embedded": 3},
        ),
    ],
)
def test_planned_shapes_are_the_arrays_of_a_run(world, tmp_path, run, make, changes):
    config = make(world, tmp_path, **changes)
    state, inputs = first_update(run, config)
    size = of_corpus(world.corpus, config.tasks)
    planned = programs.training(config, size, make_mesh(config.mesh))
    assert described(planned.state) == described(state)
    assert described(planned.inputs) == described(inputs)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (tiny_world.pretrain_config, {"searcher": "scann"}),
        (tiny_world.warm_start_config, {}),
        (tiny_world.finetune_config, {}),
    ],
)
def test_of_examples_that_are_not_here_lengths_and_defaults_are_planned(
    world, tmp_path, make, changes
):
    """With as many masks and answers as `prepare` gives them unless told otherwise."""
    config = make(world, tmp_path, **changes)
    planned = programs.training(config, CorpusSize(99), make_mesh(config.mesh))
    shapes = {name: shape for name, (shape, _) in described(planned.inputs).items()}
    for name, shape in shapes.items():
        assert shape[0] == config.batch_size, name
        if "mask_" in name:
            assert shape == (4, 10)
        if "query_ids" in name or "question_ids" in name:
            assert shape == (4, tiny_world.LENGTHS.query)
        if "answer_ids" in name:
            assert shape == (4, 8, 10)


def test_a_search_counts_once_and_renewing_the_index_not_at_all(world, tmp_path):
    """What the model needs, of two sizes of a corpus: forwards alone, no gradient."""

    def needed(num_blocks, **changes):
        config = tiny_world.pretrain_config(world, tmp_path, **changes)
        size = dataclasses.replace(of_corpus(world.corpus), num_blocks=num_blocks)
        mesh = make_mesh(config.mesh)
        planned = programs.training(config, size, mesh)
        table = planned.state.index or planned.inputs.embeddings
        with jax.set_mesh(mesh):
            needs = planned.loss.update_flops(planned.state, planned.inputs)
        return needs, table.rows.shape, config.batch_size

    fewer, (rows, dimension), batch = needed(1000)
    needs, (more_rows, _), _ = needed(9000)
    assert more_rows - rows >= 7000
    assert needs - fewer == 2 * batch * dimension * (more_rows - rows)
    assert needed(9000, refresh_mode="rolling")[0] == needs
    assert needed(9000, write_back=True)[0] == needs


def described(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path): (leaf.shape, str(leaf.dtype))
        for path, leaf in leaves
    }


def test_a_corpus_is_measured(world):
    size = of_corpus(world.corpus)
    store = BlockStore.open(world.corpus)
    lengths = [len(store.text(i).body.split()) for i in range(store.num_blocks)]
    assert size.num_blocks == store.num_blocks
    assert size.vocab_size == store.vocabulary.size
    # No fewer wordpieces than words, and the special ones.
    assert size.mean_length > sum(lengths) / len(lengths) + 3
    assert of_corpus("") is None
    assert of_corpus(f"{world.corpus}/nothing") is None


# Layers are unrolled: of a loop the compiler counts one turn.
_OPERATIONS_OF_A_DEVICE = """
import jax, json
from realm_jax.data.corpus_size import CorpusSize
from realm_jax.types import Lengths
from realm_jax.training.partitioning import MeshConfig, make_mesh
from tests.tpu_launch.planning import TINY, stage
from tpu_launch.planner import programs

bert = TINY | {"scan_unroll": 2, "dropout_rate": 0.0}
config = stage(
    bert=bert, lengths=Lengths(32, 64, 96), batch_size=16, num_candidates=4
)
counted = []
for number in (2, 4, 8):
    mesh = make_mesh(MeshConfig(), jax.devices()[:number])
    made = programs.training(config, CorpusSize(4096, 500), mesh)
    with jax.set_mesh(mesh):
        compiled = made.step.lower(made.state, made.inputs).compile()
    counted.append(compiled.cost_analysis()["flops"])
print(json.dumps(counted))
"""


@pytest.mark.full
def test_every_device_does_half_where_there_are_twice_as_many():
    """By the compiler's count of what one device of 2, 4 and 8 does."""
    counted = subprocess.check_output(
        [sys.executable, "-c", _OPERATIONS_OF_A_DEVICE],
        cwd=tiny_run.ROOT,
        env=tiny_run.environment() | {"JAX_NUM_CPU_DEVICES": "8"},
    )
    for fewer, more in itertools.pairwise(json.loads(counted)):
        assert fewer / more == pytest.approx(2, rel=0.05)
