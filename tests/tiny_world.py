"""A dozen invented entities and models of one layer: whole stages run in seconds."""

import contextlib
import dataclasses
import functools
import pathlib
import threading
from typing import Any
from unittest import mock

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.invented_world import LENGTHS, MAX_MASKS, World, WorldConfig, make_world
from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import write_examples
from realm_jax.data.questions import question_examples, read_questions
from realm_jax.errors import NotReadyError
from realm_jax.index import build
from realm_jax.index.builder import BuilderConfig, IndexBuilder
from realm_jax.index.embed import EmbedConfig
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.storage import Store, open_store
from realm_jax.training import checkpoints, stage
from realm_jax.training.finetune import FinetuneConfig
from realm_jax.training.initialization import ModelFactory
from realm_jax.training.optimizers import OptimizerConfig
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.training.step import Loss, make_step
from realm_jax.training.warm_start import WarmStartConfig
from tests.json_lines import write_lines
from tests.waiting import PATIENCE

__all__ = ["LENGTHS", "MAX_MASKS"]

WORLD = WorldConfig(num_entities=12, num_relations=6, num_values=20, num_held_out=12)
EMBED = EmbedConfig(document_length=LENGTHS.document, batch_size=8, shard_blocks=8)
NEVER = threading.Event()


@dataclasses.dataclass(frozen=True)
class TinyWorld:
    """Where everything lies: the corpus has examples of every task.

    Attributes:
      corpus: folder of the block store; tasks "pairs", "stated", "asked" (train and
        validation) and "questions".
      questions: JSON lines of questions, of splits train and dev.
      world: the held-out facts.
    """

    corpus: str
    questions: str
    world: World


def make(folder: pathlib.Path, config: WorldConfig = WORLD) -> TinyWorld:
    """Invents a world below `folder`."""
    world = make_world(str(folder), config)
    store = BlockStore.open(world.corpus)
    path = write_lines(
        folder / "questions.jsonl",
        [
            {
                "id": f"q{i}",
                "question": question,
                "answers": [answer],
                "split": "dev" if i % 4 == 0 else "train",
            }
            for i, (question, answer) in enumerate(_ask_everything(store))
        ],
    )
    _write(
        store,
        "questions/train",
        question_examples(
            read_questions(path, "train"), store.vocabulary, query_length=LENGTHS.query
        ),
        {"vocabulary_fingerprint": store.vocabulary.fingerprint},
    )
    _write(
        store,
        "asked/validation",
        {
            field.name: np.asarray(getattr(world.held_out, field.name))
            for field in dataclasses.fields(world.held_out)
        },
        {"corpus_fingerprint": store.fingerprint},
    )
    return TinyWorld(world.corpus, path, world)


def _ask_everything(store: BlockStore):
    """Yields every sentence of the corpus without its value, and the value."""
    for block in range(store.num_blocks):
        text = store.text(block)
        for (start, end), span in zip(text.sentences, text.spans, strict=True):
            answer = text.body[span.start : span.end]
            yield text.body[start:end].replace(answer, "").strip(" ."), answer


def _write(store: BlockStore, place: str, arrays, metadata) -> None:
    folder = store.directory / "examples" / place
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_examples(folder, [arrays], metadata)


def models(
    *, shared: bool = False, hidden: int = 16, dropout: float = 0.1
) -> ModelFactory:
    """One layer of 16, embeddings of 8, two towers, dropout."""

    def bert(vocab_size: int) -> BertConfig:
        return BertConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_layers=1,
            num_heads=2,
            mlp_size=2 * hidden,
            max_positions=40,
            dropout_rate=dropout,
        )

    def retriever(bert: BertConfig) -> RetrieverConfig:
        return RetrieverConfig(
            bert, projection_size=8, shared=shared, projection_dropout=dropout
        )

    return ModelFactory(bert, retriever, LENGTHS)


def optimizer(total_steps: int) -> OptimizerConfig:
    """A rate at which a few steps move every parameter, however many there are.

    So runs of different lengths are one program, which is compiled once.
    """
    return OptimizerConfig(1e-2, 0, 100, final_fraction=1.0)


def _common(world: TinyWorld, model_dir, train_steps: int) -> dict[str, Any]:
    return {
        "model_dir": str(model_dir),
        "corpus": world.corpus,
        "train_steps": train_steps,
        "batch_size": 4,
        "models": models(),
        "optimizer": optimizer,
        "log_period": 1,
    }


def pretrain_config(world: TinyWorld, model_dir, **changes: Any) -> PretrainConfig:
    """Eight steps, a new index every third, a checkpoint every fourth and no other."""
    values = _common(world, model_dir, train_steps=8) | {
        "task": "asked",
        "num_candidates": 4,
        "refresh_mode": "blocking",
        "refresh_period": 3,
        "embed": EMBED,
        "checkpoint_period": 4,
        "wait_seconds": 60.0,
        "held_out_examples": 0,
    }
    return PretrainConfig(**(values | changes))


def warm_start_config(world: TinyWorld, model_dir, **changes: Any) -> WarmStartConfig:
    """Three steps of ICT and masked-LM."""
    values = _common(world, model_dir, train_steps=3) | {
        "task": "stated",
        "pairs_task": "pairs",
        "reader_batch_size": 4,
    }
    return WarmStartConfig(**(values | changes))


def finetune_config(world: TinyWorld, model_dir, **changes: Any) -> FinetuneConfig:
    """Three steps over all blocks, two of which are read."""
    values = _common(world, model_dir, train_steps=3) | {
        "task": "questions",
        "num_retrieved": 24,
        "num_read": 2,
        "max_span": 3,
        "embed": EMBED,
    }
    return FinetuneConfig(**(values | changes))


def silent(step: int, total: int, values, what: str = "") -> None:
    pass


def stop_after(steps: int):
    """Returns a stop event, and a report that sets it after so many updates."""
    stop = threading.Event()

    def report(step: int, total: int, values, what: str = "") -> None:
        if step >= steps and not what:
            stop.set()

    return stop, report


def read_item(store: Store, step: int, item: str) -> Any:
    """One item of a checkpoint ("params", "rest", "index") as NumPy arrays."""
    return checkpoints._read_on_host(store.url(f"checkpoints/{step}"), item)


def assert_same_bits(left: Any, right: Any) -> None:
    """Two trees hold the same numbers, to the last bit."""
    jax.tree.map(np.testing.assert_array_equal, left, right)


def assert_close(left: Any, right: Any, rtol: float, atol: float) -> None:
    """Two trees hold the same numbers, but for rounding."""
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(close, left, right)


def differing(left: Any, right: Any) -> set[str]:
    """Paths of the parameters that two trees do not share."""
    one, other = (
        flax.traverse_util.flatten_dict(jax.device_get(tree), sep="/")
        for tree in (left, right)
    )
    assert one.keys() == other.keys()
    return {name for name in one if not np.array_equal(one[name], other[name])}


def count_embedded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that grows by the blocks that each build of an index embeds.

    The sample that is compared before the commit is not among them.
    """
    counts: list[int] = []
    embed_shards = build.embed_shards

    def counting(embed, params, store, shards, config):
        counts.append(sum(map(len, shards)))
        return embed_shards(embed, params, store, shards, config)

    monkeypatch.setattr(build, "embed_shards", counting)
    return counts


# A step is traced anew for each optimizer that is made, though it be the same.
_TRACED_ONCE = {
    name: functools.cache(getattr(stage, name))
    for name in ("make_optimizer", "make_step")
}


@contextlib.contextmanager
def traced_once():
    """Stages trace and compile the same few programs in every test: once."""
    with mock.patch.multiple(stage, **_TRACED_ONCE):
        yield


@dataclasses.dataclass(frozen=True)
class PoisonedLoss(Loss):
    """A loss whose gradient is NaN in some updates, counted from 1."""

    loss: Loss
    bad: tuple[int, ...]

    def __call__(self, params, inputs, key):
        return self.loss(params, inputs, key)

    def of_update(self, params, state, inputs):
        value, rest = self.loss.of_update(params, state, inputs)
        is_bad = jnp.isin(state.step + 1, jnp.asarray(self.bad))
        return value * jnp.where(is_bad, jnp.nan, 1.0), rest


@functools.cache
def _poisoned_step(bad, loss, *rest, **options):
    """Cached, so that tests trace the same program once."""
    return make_step(PoisonedLoss(loss, bad), *rest, **options)


@contextlib.contextmanager
def builder_beside(config: PretrainConfig, corpus: BlockStore):
    """An index builder in a thread, where the run needs one."""
    if config.refresh_mode != "async":
        yield
        return
    stop = threading.Event()
    building = BuilderConfig(embed=EMBED, keep=9, poll_seconds=0.02)
    job = IndexBuilder(open_store(config.model_dir), corpus, building)

    def run():
        # It ends in this way where its trainer fails.
        with contextlib.suppress(NotReadyError):
            job.run(stop)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(PATIENCE)


def poisoned(*bad: int):
    """Stages train with a gradient that is NaN in these updates, counted from 1."""
    step = functools.partial(_poisoned_step, bad)
    return mock.patch.object(stage, "make_step", step)
