"""Compiles one update for 2, 4 and 8 devices; prints what each of them does."""

import functools
import json

import jax

from realm_jax.data.corpus_size import CorpusSize
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.training.initialization import ModelFactory
from realm_jax.training.optimizers import OptimizerConfig
from realm_jax.training.partitioning import MeshConfig, make_mesh
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.types import Lengths
from tpu_launch.planner import programs

# Unrolled: of a loop the compiler counts one turn.
_BERT = functools.partial(
    BertConfig,
    hidden_size=128,
    num_layers=2,
    num_heads=2,
    mlp_size=512,
    scan_unroll=2,
)


def main() -> None:
    config = PretrainConfig(
        model_dir="m",
        corpus="c",
        task="t",
        train_steps=10,
        batch_size=16,
        num_candidates=4,
        models=ModelFactory(
            _BERT,
            functools.partial(RetrieverConfig, projection_size=16),
            Lengths(32, 64, 96),
        ),
        optimizer=OptimizerConfig,
    )
    counted = {}
    for number in (2, 4, 8):
        mesh = make_mesh(MeshConfig(), jax.devices()[:number])
        stage = programs.training(config, CorpusSize(4096, 500), mesh)
        with jax.set_mesh(mesh):
            compiled = stage.step.lower(stage.state, stage.inputs).compile()
        counted[number] = compiled.cost_analysis()["flops"]
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
