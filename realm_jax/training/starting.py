"""Provides the initial parameters of a new run of a training stage."""

import logging

from jaxtyping import PyTree

from realm_jax import multihost
from realm_jax.data.blocks import BlockStore
from realm_jax.index.embed import EmbedConfig
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.training import initialization
from realm_jax.training.checkpoint_manifests import Which
from realm_jax.training.projection import Projection, fit_projection
from realm_jax.training.stage_config import StageConfig
from realm_jax.weights.tensors import weights_file


def starting_params(
    params: PyTree,
    config: StageConfig,
    retriever_config: RetrieverConfig,
    corpus: BlockStore,
) -> PyTree:
    """Replaces random parameters by those of the run's sources, if it has any."""
    started = initialization.warm_start_params(
        params,
        config.warm_start,
        retriever_config,
        corpus.vocabulary,
        retriever_source=config.retriever_warm_start,
        reader_source=config.reader_warm_start,
        checkpoint=Which(config.warm_start_checkpoint),
    )
    if not config.starts_from_nothing:
        _warn_of_random_models(config)
    source = config.retriever_source
    kind, lengths = Projection(config.projection), config.models.lengths
    # The checkpoint of an earlier stage already has a projection.
    if (
        not retriever_config.projected
        or kind is Projection.RANDOM
        or not source
        or weights_file(source) is None
    ):
        return started
    retriever = fit_projection(
        started["retriever"],
        retriever_config,
        corpus,
        EmbedConfig(document_length=lengths.document),
        kind,
        lengths.query,
    )
    return {**started, "retriever": retriever}


def _warn_of_random_models(config: StageConfig) -> None:
    for model in ("retriever", "reader"):
        own = getattr(config, f"{model}_warm_start")
        if not (own or config.warm_start) and multihost.is_first():
            logging.warning(
                "the %s starts from random parameters: neither WARM_START nor "
                "%s_WARM_START says from what",
                model,
                model.upper(),
            )
