"""How tests end runs of stages, and what they look at afterwards."""

import jax
import numpy as np
import pytest

from realm_jax.evaluation.loading import FinetunedModel
from realm_jax.index.embed import document_embedder, embed_blocks
from realm_jax.index.manifest import EMBEDDINGS
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.storage import open_store
from realm_jax.training import finetune, pretrain, warm_start
from realm_jax.training.checkpoint_manifests import Which, finished_steps
from realm_jax.training.checkpoints import restore_params
from realm_jax.training.initialization import initial_params
from realm_jax.training.loop import Loop
from tests import tiny_world
from tests.tiny_world import EMBED, NEVER, read_item, silent

CONFIGS = {
    warm_start: tiny_world.warm_start_config,
    pretrain: tiny_world.pretrain_config,
    finetune: tiny_world.finetune_config,
}


def run_to_end(stage, world, folder, **changes):
    """Runs a stage of the tiny world; returns its configuration."""
    config = CONFIGS[stage](world, folder, **changes)
    assert stage.run(config, silent, NEVER)
    return config


class _Killed(BaseException):
    """Ends a run as a kill would: nothing catches it."""


def kill_run(stage, config, steps):
    """Kills a run after so many updates."""

    def report(step, total, values, what=""):
        if step == steps and not what:
            raise _Killed

    with pytest.raises(_Killed):
        stage.run(config, report, NEVER)


def stop_run(stage, config, steps):
    """Asks a run to stop after so many updates."""
    stop, report = tiny_world.stop_after(steps)
    assert not stage.run(config, report, stop)


def params_of(folder):
    """The parameters of the newest checkpoint."""
    return restore_params(open_store(folder)).tree


def state_of(folder, step, *more):
    """The arrays of a checkpoint: parameters, optimizer and key, and other items."""
    store = open_store(folder)
    return {item: read_item(store, step, item) for item in ("params", "rest", *more)}


def arrays_of(folder):
    """Every array of every checkpoint."""
    steps = finished_steps(open_store(folder))
    return jax.tree.leaves([state_of(folder, step) for step in steps])


def lines_of(folder):
    """The lines of metrics by step, without what a clock says."""
    clocks = ("_seconds", "_second")
    return {
        line["step"]: {k: value for k, value in line.items() if not k.endswith(clocks)}
        for line in read_metrics(str(folder))
    }


class _SeenError(Exception):
    """Ends a run."""


def inputs_of(monkeypatch, stage, config, steps=1):
    """The inputs of a stage's first updates, which are not made."""
    seen = []

    def update(loop, inputs):
        seen.append(inputs)
        if len(seen) == steps:
            raise _SeenError
        loop._stage.step += 1

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "update", update)
        patch.setattr(Loop, "log", lambda loop, *values, **now: None)
        with pytest.raises(_SeenError):
            stage.run(config, silent, NEVER)
    return seen


def index_of(folder):
    """The embeddings of the newest index."""
    series = SnapshotSeries(open_store(folder), INDEX_SERIES)
    return series.read_array(series.latest(), EMBEDDINGS)


def opened(config, corpus, checkpoint=Which.BEST):
    """A fine-tuned model."""
    return FinetunedModel.open(
        config, corpus, searcher="device", embed=EMBED, checkpoint=checkpoint
    )


def towers_of(corpus):
    """The settings of the tiny world's retriever."""
    return tiny_world.models().retriever_config(corpus.vocabulary.size)


def drawn_params(corpus, make_reader=KnowledgeEncoder):
    """What a stage of the tiny world draws with its seed."""
    config = towers_of(corpus)
    models = Retriever(config), make_reader(config.bert)
    return initial_params(*models, tiny_world.LENGTHS, seed=0)[0]


def embeddings_of(retriever_params, corpus):
    """The embeddings of all blocks."""
    embed, blocks = document_embedder(towers_of(corpus)), np.arange(corpus.num_blocks)
    return embed_blocks(embed, retriever_params, corpus, blocks, EMBED)
