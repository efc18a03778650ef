"""Stages to plan in tests, and the machines that they are planned for."""

import functools

from realm_jax.data.corpus_size import CorpusSize
from realm_jax.hardware import HardwareConfig
from realm_jax.index.searchers import DeviceConfig
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.training.initialization import ModelFactory
from realm_jax.training.optimizers import OptimizerConfig
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.types import Lengths
from tpu_launch.planner.devices import Setting

PAPER = CorpusSize()
TINY = {"hidden_size": 128, "num_layers": 2, "num_heads": 2, "mlp_size": 512}
BFLOAT16 = DeviceConfig("bfloat16", approximate=True)


def base(vocab_size, **changes):
    sizes = {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "mlp_size": 3072}
    settings = {"dropout_rate": 0.1, "dtype": "bfloat16", **sizes, **changes}
    return BertConfig(vocab_size=vocab_size, **settings)


def stage(kind=PretrainConfig, *, bert=None, lengths=None, **changes):
    """A stage of BERT-base with two towers, but for the changes."""
    encoder = functools.partial(base, **(bert or {}))
    towers = functools.partial(RetrieverConfig, shared=False)
    settings = {
        "model_dir": "m",
        "corpus": "c",
        "task": "t",
        "train_steps": 200_000,
        "batch_size": 512,
        "models": ModelFactory(encoder, towers, lengths or Lengths()),
        "optimizer": OptimizerConfig,
    }
    return kind(**(settings | changes))


def on(
    trainer, builder="", corpus=PAPER, compiles=False, say=lambda text: None, **more
):
    """Machines; `more` are settings of the hardware."""
    return Setting(
        corpus, HardwareConfig(trainer, builder=builder, **more), compiles, say
    )
