"""A world of invented facts that no language model can know, and training on it.

Entities are named by two syllables; each has two blocks of three facts. A query is a
fact in other words than its block's, with the value masked. The entity's name alone
finds the right block half of the time: only the relation decides between its two.
"""

import dataclasses
import functools
import pathlib
import threading

import jax
import numpy as np

from realm_jax.answering.masks import read_masks
from realm_jax.answering.search import search_questions
from realm_jax.data.block_writer import Block, write_blocks
from realm_jax.data.blocks import BlockStore, BlockText
from realm_jax.data.examples import Examples, write_examples
from realm_jax.data.features import pieces_of_span, stack
from realm_jax.data.inverse_cloze import inverse_cloze_examples
from realm_jax.data.masking import (
    masked_example,
    pretrain_specs,
    salient_examples,
)
from realm_jax.data.salient_spans import Span
from realm_jax.data.wordpiece import WordPiece
from realm_jax.index.candidates import num_neighbours, pretrain_candidates
from realm_jax.index.embed import EmbedConfig, document_embedder, embed_blocks
from realm_jax.index.searchers import make_searcher
from realm_jax.models.bert import BertConfig
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.storage import open_store
from realm_jax.training import pretrain, warm_start
from realm_jax.training.checkpoints import restore_params
from realm_jax.training.initialization import ModelFactory
from realm_jax.training.optimizers import OptimizerConfig
from realm_jax.types import NULL_BLOCK, Lengths, PretrainBatch

LENGTHS = Lengths(query=10, document=28, joined=34)
MAX_MASKS = 2
NUM_CANDIDATES = 8
_FACTS_PER_BLOCK = 3
_WORDS_PER_RELATION = 3


@dataclasses.dataclass(frozen=True)
class WorldConfig:
    """Size of a world.

    Attributes:
      num_entities: number of entities; each has two blocks.
      num_relations: facts per entity; half of them are in each block.
      num_values: number of different answers.
      num_held_out: number of facts that training never asks for.
      seed: seed of everything that is invented.
    """

    num_entities: int = 300
    num_relations: int = 6
    num_values: int = 150
    num_held_out: int = 300
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class World:
    """A corpus with examples on disk.

    Attributes:
      held_out_blocks: the block that states each of them.
    """

    corpus: str
    held_out: PretrainBatch
    held_out_blocks: np.ndarray


@dataclasses.dataclass(frozen=True)
class Fact:
    """(entity, relation, value), stated in a block by one of two wordings."""

    entity: str
    relation: int
    value: str
    block: int
    wording: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """A model's knowledge of the held-out facts.

    Attributes:
      recall_at_1: share of facts whose block is found first.
      likelihood: mean p(y|x).
      null_likelihood: mean p(y|null,x).
    """

    recall_at_1: float
    likelihood: float
    null_likelihood: float


def make_world(folder: str, config: WorldConfig) -> World:
    """Invents a world and writes its corpus and examples below `folder`."""
    language = _Language(config)
    facts, blocks = language.invent()
    corpus = f"{folder}/corpus"
    store = write_blocks(
        corpus, blocks, vocabulary=language.vocabulary, chunk_length=LENGTHS.document
    )
    everything = np.arange(store.num_blocks)
    pairs = inverse_cloze_examples(
        store, everything, query_length=LENGTHS.query, document_length=LENGTHS.document
    )
    stated = salient_examples(
        store, everything, query_length=LENGTHS.query, max_masks=MAX_MASKS
    )
    specs = pretrain_specs(LENGTHS.query, MAX_MASKS)
    asked = stack([language.ask(fact) for fact in facts], specs)
    order = np.random.default_rng(config.seed).permutation(len(facts))
    held, trained = order[: config.num_held_out], order[config.num_held_out :]
    for task, examples in {
        "pairs": pairs,
        "stated": stated,
        "asked": {name: array[trained] for name, array in asked.items()},
    }.items():
        _write(store, corpus, task, examples)
    return World(
        corpus=corpus,
        held_out=PretrainBatch(**{name: array[held] for name, array in asked.items()}),
        held_out_blocks=np.array([facts[row].block for row in held]),
    )


class _Language:
    """Words, and sentences that state facts."""

    def __init__(self, config: WorldConfig):
        self._config = config
        self._rng = np.random.default_rng(config.seed)
        consonants, vowels = "bdfgklmnprstvz", "aeiou"
        syllables = [c + v for c in consonants for v in vowels]
        self._rng.shuffle(syllables)
        self._first, self._second = syllables[:35], syllables[35:]
        # Words have three letters or more, so that none is a name.
        words = [f"{a}{b}{c}" for a in syllables for b in "lnrs" for c in vowels]
        self._rng.shuffle(words)
        self._relations = [
            tuple(words.pop() for _ in range(2 * _WORDS_PER_RELATION))
            for _ in range(config.num_relations)
        ]
        self._values = [words.pop() for _ in range(config.num_values)]
        self.vocabulary = WordPiece(
            ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "."]
            + self._first
            + [f"##{syllable}" for syllable in self._second]
            + [word for relation in self._relations for word in relation]
            + self._values
        )

    def invent(self) -> tuple[list[Fact], list[Block]]:
        """Returns all facts, and the blocks that state them."""
        names = [a + b for a in self._first for b in self._second]
        entities = self._rng.permutation(names)[: self._config.num_entities]
        facts, blocks = [], []
        for entity in entities:
            relations = self._rng.permutation(self._config.num_relations)
            for half in relations.reshape(-1, _FACTS_PER_BLOCK):
                stated = [
                    Fact(
                        str(entity),
                        int(relation),
                        str(self._rng.choice(self._values)),
                        len(blocks),
                        int(self._rng.integers(2)),
                    )
                    for relation in half
                ]
                facts += stated
                blocks.append(self._block(stated))
        return facts, blocks

    def ask(self, fact: Fact) -> dict[str, np.ndarray]:
        """Returns the fact in the words its block does not use, its value masked."""
        sentence, value = self._say(fact, 1 - fact.wording)
        encoding = self.vocabulary.encode(sentence)
        masked = pieces_of_span(encoding.offsets, value)
        return masked_example(
            encoding.ids,
            np.arange(masked.start, masked.stop),
            vocabulary=self.vocabulary,
            source_block=NULL_BLOCK,
            query_length=LENGTHS.query,
            max_masks=MAX_MASKS,
        )

    def _say(self, fact: Fact, wording: int) -> tuple[str, tuple[int, int]]:
        """Returns a sentence and the position of its value."""
        a, b, c, d, e, f = self._relations[fact.relation]
        before = (f"{fact.entity} {a} {b} {c}", f"{d} {e} {f} {fact.entity}")[wording]
        start = len(before) + 1
        return f"{before} {fact.value} .", (start, start + len(fact.value))

    def _block(self, facts: list[Fact]) -> Block:
        body, sentences, spans = "", [], []
        for fact in facts:
            sentence, (start, end) = self._say(fact, fact.wording)
            offset = len(body) + (1 if body else 0)
            body = f"{body} {sentence}".strip()
            sentences.append((offset, offset + len(sentence)))
            spans.append(Span(offset + start, offset + end, "VALUE"))
        text = BlockText("", body, facts[0].entity, sentences, spans)
        return Block(np.zeros(0, np.int32), self.vocabulary.encode(body).ids, text)


def _write(store: BlockStore, corpus: str, task: str, examples) -> Examples:
    folder = pathlib.Path(corpus) / "examples" / task / "train"
    folder.parent.mkdir(parents=True)
    metadata = {"task": task, "corpus_fingerprint": store.fingerprint}
    return write_examples(folder, [examples], metadata)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings for learning the world; the defaults are those that work.

    Attributes:
      warm_start_steps: updates of ICT and of the reader's masked-LM start.
      refresh_period: steps between two indexes.
      initializer_range: standard deviation of the initial kernels. 0.08 is about
        1/sqrt(128), which preserves the variance of a kernel's inputs. With BERT's
        0.02, which is meant for a width of 768, the reader does no better than chance
        among a block's three values after 1,000 steps.
      frozen: parameters that REALM does not train; ("retriever",) is the control.
    """

    warm_start_steps: int = 1000
    pretrain_steps: int = 360
    learning_rate: float = 3e-4
    refresh_period: int = 20
    layer_norm: bool = True
    initializer_range: float = 0.08
    frozen: tuple[str, ...] = ()
    seed: int = 0

    def models(self) -> ModelFactory:
        """Returns models of two layers of width 128."""

        def bert(vocab_size: int) -> BertConfig:
            return BertConfig(
                vocab_size=vocab_size,
                hidden_size=128,
                num_layers=2,
                num_heads=2,
                mlp_size=512,
                max_positions=64,
                scan_unroll=2,
                initializer_range=self.initializer_range,
            )

        def retriever(bert: BertConfig) -> RetrieverConfig:
            return RetrieverConfig(
                bert, layer_norm=self.layer_norm, projection_dropout=0.0
            )

        return ModelFactory(bert, retriever, LENGTHS)


def run_warm_start(world: World, recipe: Recipe, model_dir: str) -> None:
    """Trains ICT, and the reader on a block's sentence joined with that block."""
    config = warm_start.WarmStartConfig(
        model_dir=model_dir,
        corpus=world.corpus,
        task="stated",
        pairs_task="pairs",
        train_steps=recipe.warm_start_steps,
        batch_size=64,
        reader_batch_size=64,
        models=recipe.models(),
        optimizer=lambda total_steps: OptimizerConfig(1e-3, 20, total_steps),
        seed=recipe.seed,
        log_period=50,
    )
    warm_start.run(config, lambda *_: None, threading.Event())


def run_pretrain(world: World, recipe: Recipe, model_dir: str, start: str) -> None:
    """Trains REALM on the facts in other words, without labels."""
    config = pretrain.PretrainConfig(
        model_dir=model_dir,
        corpus=world.corpus,
        task="asked",
        train_steps=recipe.pretrain_steps,
        batch_size=32,
        num_candidates=NUM_CANDIDATES,
        refresh_mode="blocking",
        refresh_period=recipe.refresh_period,
        models=recipe.models(),
        optimizer=lambda total_steps: OptimizerConfig(
            recipe.learning_rate, 10, total_steps, final_fraction=0.1
        ),
        warm_start=start,
        frozen=recipe.frozen,
        embed=EmbedConfig(document_length=LENGTHS.document, batch_size=200),
        seed=recipe.seed,
        log_period=20,
    )
    pretrain.run(config, lambda *_: None, threading.Event())


def measure(world: World, recipe: Recipe, model_dir: str) -> Measured:
    """Measures a trained model on the held-out facts, over a fresh index."""
    restored = restore_params(open_store(model_dir))
    assert restored is not None
    params, store = restored.tree, BlockStore.open(world.corpus)
    config = recipe.models().retriever_config(store.vocabulary.size)
    embeddings = embed_blocks(
        document_embedder(config),
        params["retriever"],
        store,
        np.arange(store.num_blocks),
        EmbedConfig(document_length=LENGTHS.document, batch_size=200),
    )
    neighbours = search_questions(
        config,
        params["retriever"],
        make_searcher("device", embeddings),
        np.asarray(world.held_out.query_ids),
        num_neighbours(NUM_CANDIDATES),
    )
    candidates = pretrain_candidates(
        store,
        neighbours,
        world.held_out,
        num_candidates=NUM_CANDIDATES,
        document_length=LENGTHS.document,
        joined_length=LENGTHS.joined,
    )
    of_models = Retriever(config), KnowledgeEncoder(config.bert)
    read = jax.jit(functools.partial(read_masks, *of_models))
    likelihood = read(params, world.held_out, candidates).likelihood(
        world.held_out.mask_ids, world.held_out.mask_weights
    )
    found = np.asarray(neighbours.ids)[:, 0] == world.held_out_blocks
    return Measured(
        recall_at_1=float(found.mean()),
        likelihood=float(np.exp(likelihood.log_marginal).mean()),
        null_likelihood=float(np.exp(likelihood.log_null).mean()),
    )
