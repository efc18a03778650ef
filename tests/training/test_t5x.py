"""T5X trains our stages; skipped where it is not on the path (docs/t5x.md)."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.index.candidates import pretrain_candidates
from realm_jax.training import finetune, pretrain, warm_start
from realm_jax.training.optimizers import OptimizerConfig, make_optimizer, stop_gradient
from realm_jax.training.pretrain_loss import PretrainInputs
from realm_jax.training.state import create_state
from realm_jax.training.step import make_step, step_key
from realm_jax.training.warm_start_loss import WarmStartInputs
from realm_jax.types import InverseClozeBatch, Neighbours, PretrainBatch
from tests import tiny_world
from tests.refused import refused
from tests.training.runs import CONFIGS, inputs_of

pytest.importorskip("t5x.trainer", reason="T5X is not on the path, see docs/t5x.md")
from t5x import partitioning
from t5x import trainer as t5x_trainer

from realm_jax import t5x


def pairs(run):
    examples = run.open_examples("pairs", "train")
    return WarmStartInputs(InverseClozeBatch(**run.batch(examples, 0)), None)


def sentences(run):
    """Sentences with blocks that stand for what a search has found."""
    batch = PretrainBatch(**run.batch(run.open_examples("asked", "train"), 0))
    ids = np.arange(4 * 12).reshape(4, 12) * 7 % run.corpus.num_blocks
    candidates = pretrain_candidates(
        run.corpus,
        Neighbours(ids, np.zeros(ids.shape)),
        batch,
        num_candidates=4,
        document_length=tiny_world.LENGTHS.document,
        joined_length=tiny_world.LENGTHS.joined,
    )
    return PretrainInputs(batch, candidates)


def optimizer(total_steps):
    """A large epsilon: Adam would make a step of the rounding of a zero gradient."""
    return OptimizerConfig(1e-2, 0, 100, epsilon=1.0)


def config_of(stage, world, folder):
    only_pairs = {"task": ""} if stage is warm_start else {}
    return CONFIGS[stage](world, folder, optimizer=optimizer, **only_pairs)


@pytest.fixture(params=CONFIGS)
def run_and_inputs(request, world, tmp_path, monkeypatch):
    """A stage for T5X, and inputs of an update."""
    config = config_of(request.param, world, tmp_path)
    run = t5x.T5XStage(config)
    if request.param is finetune:
        return run, inputs_of(monkeypatch, finetune, config)[0]
    return run, {warm_start: pairs, pretrain: sentences}[request.param](run)


def started(model):
    """The partitioner and the initial state of T5X, and the axes of that."""
    partitioner = partitioning.PjitPartitioner(
        num_partitions=1, logical_axis_rules=t5x.logical_axis_rules()
    )
    initializer = t5x.StateInitializer(
        optimizer_def=model.optimizer_def,
        init_fn=model.get_initial_variables,
        input_shapes={},
        partitioner=partitioner,
    )
    state = initializer.from_scratch(jax.random.PRNGKey(1))
    return partitioner, state, initializer.train_state_axes


def test_a_step_is_our_own(run_and_inputs):
    """Of ICT, pre-training and fine-tuning, from equal parameters; dropout included."""
    run, inputs = run_and_inputs
    inputs = jax.tree.map(jnp.asarray, inputs)
    config, shapes, model = run.config, run.shapes, t5x.Model(run)
    partitioner, state, state_axes = started(model)
    batch = t5x.to_batch(inputs)
    updates = make_optimizer(optimizer(config.train_steps), shapes.frozen)
    params = jax.device_get(jax.tree.map(np.asarray, dict(state.params.unfreeze())))
    ours = create_state(params, updates, config.seed)

    def loss(params):
        return shapes.loss.of_update(stop_gradient(params, shapes.frozen), ours, inputs)

    def gradient_by_t5x(state):
        key = jax.random.key_data(step_key(ours))
        return t5x_trainer.accumulate_grads_microbatched(model, state, batch, key, None)

    our_gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (expected, _), gradient = our_gradient(ours.params)
    theirs, metrics, _ = jax.jit(gradient_by_t5x)(state)
    assert_close(theirs.unfreeze(), gradient)
    assert metrics["loss"].compute() == pytest.approx(float(expected), abs=1e-5)
    assert float(expected) > 0.1

    trainer = t5x_trainer.Trainer(
        model=model,
        train_state=state,
        partitioner=partitioner,
        eval_names=[],
        summary_dir=None,
        train_state_axes=state_axes,
        # Folded with the number of the step, as ours is.
        rng=jax.random.PRNGKey(config.seed),
        learning_rate_fn=lambda step: 0.0,
        num_microbatches=None,
    )
    with trainer:
        trainer.train(iter([batch]), 1).result()
        after = trainer.train_state
    updated, _ = make_step(shapes.loss, updates, shapes.frozen)(ours, inputs)
    assert int(after.step) == int(updated.step) == 1
    assert_close(after.params.unfreeze(), updated.params)


def assert_close(left, right):
    tiny_world.assert_close(*jax.device_get((left, right)), rtol=1e-7, atol=1e-5)


@pytest.mark.parametrize(
    ("stage", "changes", "named"),
    [
        (warm_start, {}, "PAIRS_TASK='pairs' with TASK='stated'"),
        (warm_start, {"task": "", "bm25_weight": 0.5}, "BM25_WEIGHT=0.5"),
        (pretrain, {"write_back": True}, "write_back"),
        (pretrain, {"refresh_mode": "rolling"}, "'rolling'"),
    ],
)
def test_what_needs_our_own_trainer_is_refused(world, tmp_path, stage, changes, named):
    with refused(named):
        t5x.T5XStage(CONFIGS[stage](world, tmp_path, **changes))


def test_another_batch_size_is_refused(world, tmp_path):
    run = t5x.T5XStage(config_of(warm_start, world, tmp_path))
    with refused(r"BATCH_SIZE \(4\), got 8"):
        t5x.get_dataset(SimpleNamespace(batch_size=8), 0, 1, None, run=run)


def test_processes_share_a_batch(world, tmp_path):
    """The parts of two processes are what one would make."""
    config = config_of(warm_start, world, tmp_path)
    parts = []
    for index, count in ((0, 1), (0, 2), (1, 2)):
        run = t5x.T5XStage(config)
        run.make_part(index, count)
        parts.append(run.batch(run.open_examples("pairs", "train"), 3))
    whole, *halves = parts
    for name, rows in whole.items():
        joined = np.concatenate([half[name] for half in halves])
        np.testing.assert_array_equal(joined, rows)


def test_our_axes_on_the_mesh_of_t5x():
    rules = dict(t5x.logical_axis_rules())
    assert rules["batch"] == "data"
    assert rules["heads"] == rules["mlp"] == rules["vocab"] == "model"
    assert rules["embed"] is rules["layer"] is None
    assert dict(t5x.logical_axis_rules(2))["embed"] == "data"


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    with refused("a checkpoint of T5X"):
        t5x.make_model_directory(str(tmp_path))
