"""MiniLM as the quickstart trains it, shared by the benches of its stages."""

import functools
from typing import Any

import numpy as np

from realm_jax.data.blocks import BlockStore
from realm_jax.data.words import continues_word
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.searchers import Searcher
from realm_jax.index.source import IndexSource
from realm_jax.metrics.retrieval import relevant_blocks
from realm_jax.models.bert import BertConfig
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.storage import open_store
from realm_jax.training.checkpoints import Restored, restore_params
from realm_jax.training.index_metrics import HeldOutQuestions
from realm_jax.training.initialization import ModelFactory
from realm_jax.training.masked_spans import HeldOutSpans, MaskedSpans
from realm_jax.training.optimizers import OptimizerConfig
from realm_jax.training.reader_documents import holds_answer
from realm_jax.training.stage import open_examples
from realm_jax.training.warm_start import ReaderMixture, WarmStartConfig
from realm_jax.types import Lengths, PretrainBatch

LENGTHS = Lengths(query=64, document=96, joined=112)
EMBED = EmbedConfig(document_length=LENGTHS.document)
NUM_CANDIDATES = 5


def models(start: str, *, span_scorer: bool = False) -> ModelFactory:
    """Returns MiniLM in two towers and a reader, without dropout."""

    def bert(vocab_size: int) -> BertConfig:
        return BertConfig(
            vocab_size=vocab_size,
            hidden_size=384,
            num_layers=6,
            num_heads=12,
            mlp_size=1536,
            activation="gelu",
            scan_unroll=6,
            products="auto",
        )

    def retriever(bert: BertConfig) -> RetrieverConfig:
        return RetrieverConfig(
            bert,
            pooling="mean" if start == "strong" else "cls",
            shared=False,
            temperature=4.0,
            projection_dropout=0.0,
        )

    return ModelFactory(bert, retriever, LENGTHS, span_scorer)


def optimizer(learning_rate: float, retriever_rate: float, warmup: int):
    """Returns linear warmup and decay, with each model clipped by its own norm."""
    return functools.partial(
        OptimizerConfig,
        learning_rate,
        warmup,
        final_fraction=0.1,
        retriever_rate=retriever_rate,
        clip="per_model",
    )


def reader_config(
    model_dir: str, corpus: str, name: str, weights: str, steps: int
) -> WarmStartConfig:
    """Returns the quickstart's warm start, of the reader alone.

    The corpus is prepared in the vocabulary of the weights, a folder of MiniLM; its
    name begins the names of its tasks.
    """
    return WarmStartConfig(
        model_dir=model_dir,
        corpus=corpus,
        task=f"{name}_salient",
        train_steps=steps,
        batch_size=16,
        reader_batch_size=16,
        models=models("strong"),
        optimizer=optimizer(5e-4, 1.0, 20),
        warm_start=weights,
        projection="pca",
        mixture=ReaderMixture(0.75, 0.1, 0.15),
        spans="together",
        embed=EMBED,
        log_period=20,
        checkpoint_period=100,
    )


def held_out_questions(
    store: BlockStore, questions: str
) -> tuple[np.ndarray, list[frozenset[int]]]:
    """Returns the wordpieces of the questions of train and dev, and their blocks."""
    splits = [
        HeldOutQuestions(store, questions, split, LENGTHS.query)
        for split in ("train", "dev")
    ]
    asked = [question for split in splits for question in split.questions]
    ids = np.concatenate([split.ids for split in splits])
    return ids, relevant_blocks(store, asked)


def restored(model_dir: str) -> Restored:
    """Returns the parameters of the last checkpoint."""
    found = restore_params(open_store(model_dir))
    assert found is not None
    return found


def load_searcher(
    model_dir: str, store: BlockStore, config: RetrieverConfig, step: int
) -> Searcher:
    """Returns a searcher of the index that belongs to a checkpoint."""
    source = IndexSource(open_store(model_dir), store, config, EMBED, "device")
    index = source.load(step)
    assert index is not None
    return index.searcher


def holding_answer(
    store: BlockStore, block_ids: np.ndarray, batch: PretrainBatch
) -> np.ndarray:
    """Returns which blocks that were found for masked sentences hold the answer."""
    continues = continues_word(store.vocabulary.pieces)
    return holds_answer(store, block_ids, batch, LENGTHS.joined, continues)


def fill_in(
    config: RetrieverConfig,
    params: Any,
    store: BlockStore,
    name: str,
    split: str,
    searcher: Searcher,
    max_examples: int,
) -> MaskedSpans:
    """Predicts masked sentences of a corpus with the documents that are found."""
    spans = HeldOutSpans(
        Retriever(config),
        KnowledgeEncoder(config.bert),
        corpus=store,
        examples=open_examples(store, f"{name}_salient", split),
        num_candidates=NUM_CANDIDATES,
        lengths=LENGTHS,
        max_examples=max_examples,
    )
    return spans.fill_in(params, searcher)
