"""A query tower learns from BM25, and nothing else changes."""

import dataclasses

import bm25s
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from realm_jax.data.batch_order import Spans, Stream, uniform
from realm_jax.data.blocks import BlockStore
from realm_jax.data.features import query_rows
from realm_jax.data.pseudo_queries import NUM_DRAWS, pseudo_query
from realm_jax.data.words import answer_tokens
from realm_jax.evaluation.export import export_retriever
from realm_jax.evaluation.recorded import Overrides
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.models.retriever import Retriever, RetrieverConfig, tie_towers
from realm_jax.training import bm25_teacher, warm_start
from realm_jax.training.initialization import ModelFactory
from realm_jax.training.stage import open_examples
from realm_jax.training.warm_start import ReaderMixture
from tests import tiny_world
from tests.refused import refused
from tests.tiny_encoder import write_bert
from tests.tiny_world import LENGTHS, NEVER, assert_same_bits, differing, silent
from tests.training.runs import index_of, inputs_of, params_of, state_of, stop_run

WEIGHT = 0.5


def retriever(bert):
    """A sentence encoder at its own width."""
    return RetrieverConfig(
        bert,
        projection_size=16,
        pooling="mean",
        normalize=True,
        projected=False,
        shared=False,
        temperature=0.05,
    )


@pytest.fixture(scope="module")
def encoder(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    bert = write_bert(folder, corpus.vocabulary.pieces, max_positions=40)
    # Without the pooler that mean pooling does not read: many published files lack it.
    path = folder / "model.safetensors"
    tensors = load_file(path)
    kept = {name: value for name, value in tensors.items() if "pooler" not in name}
    assert len(kept) < len(tensors)
    save_file(kept, path)

    def with_dropout(vocab_size):
        return dataclasses.replace(bert, dropout_rate=0.1)

    return str(folder), ModelFactory(with_dropout, retriever, LENGTHS)


def config_of(world, encoder, folder, **changes):
    weights, models = encoder
    values = {
        "task": "",
        "bm25_weight": WEIGHT,
        "models": models,
        "embed": tiny_world.EMBED,
        "retriever_warm_start": weights,
    }
    return tiny_world.warm_start_config(world, folder, **(values | changes))


@pytest.fixture(scope="module")
def told():
    """The progress of `taught`."""
    return []


@pytest.fixture(scope="module")
def taught(world, encoder, told, tmp_path_factory):
    folder = tmp_path_factory.mktemp("taught")

    def report(done, total, values, what=""):
        told.append((what, done, total))

    assert warm_start.run(config_of(world, encoder, folder), report, NEVER)
    return folder


def test_the_query_tower_alone_changes(world, encoder, taught, tmp_path):
    at_start = config_of(world, encoder, tmp_path, train_steps=0)
    assert warm_start.run(at_start, silent, NEVER)
    begun, trained = params_of(tmp_path), params_of(taught)
    changed = differing(begun, trained)
    assert changed
    assert all(name.startswith("retriever/query_tower/") for name in changed)
    assert_same_bits(tie_towers(trained["retriever"]), begun["retriever"])
    for line in read_metrics(str(taught)):
        assert line["loss"] == pytest.approx(line["retriever_loss"])
        assert line["retriever_loss"] > 0
        assert 0 <= line["teacher_agreement"] <= 1


def drawn(config, corpus):
    """The pseudo-queries of the first update, and their blocks."""
    pairs = open_examples(corpus, config.pairs_task, "train")
    size, spans = config.batch_size, Spans(config.spans)
    rows = pairs.step_rows(0, batch_size=size, seed=config.seed, spans=spans)
    own = pairs.batch(rows)["block_ids"]
    numbers = uniform(Stream.PSEUDO_QUERIES, config.seed, 0, size, NUM_DRAWS)
    return [*map(pseudo_query, corpus.texts(own), numbers)], own


def test_the_teacher_is_the_encoder_with_bm25_beside_it(
    world, encoder, corpus, taught, monkeypatch, tmp_path
):
    """Against a loop over the queries, in float64, with bm25s itself.

    Every other block counts as a copy of the one before it.
    """
    monkeypatch.setattr(bm25_teacher, "TAUGHT_BLOCKS", 7)
    opened = BlockStore.open

    def open_with_copies(*given, **options):
        store = opened(*given, **options)
        store.content_hashes = np.array(store.content_hashes)
        store.content_hashes[1::2] = store.content_hashes[::2]
        return store

    monkeypatch.setattr(BlockStore, "open", open_with_copies)
    config = config_of(world, encoder, tmp_path)
    (inputs,) = inputs_of(monkeypatch, warm_start, config)
    found, (texts, own) = inputs.pairs, drawn(config, corpus)
    towers = Retriever(config.models.retriever_config(corpus.vocabulary.size))
    begun = {"params": tie_towers(params_of(taught)["retriever"])}
    rows = index_of(tmp_path).astype(np.float64)
    bm25 = bm25s.BM25(method="lucene", k1=0.9, b=0.4)
    blocks = corpus.texts(np.arange(corpus.num_blocks))
    words = [answer_tokens(f"{block.title} {block.body}") for block in blocks]
    bm25.index(words, show_progress=False)
    for row, text in enumerate(texts):
        ids = query_rows([text], LENGTHS.query, corpus.vocabulary)
        query = np.asarray(towers.apply(begun, ids, method="embed_queries")[0])
        by_words = np.array(bm25.get_scores(answer_tokens(text)), np.float64)
        dense = rows @ query
        scores = dense / dense.std() + WEIGHT * by_words / by_words.std()
        scores[[own[row], own[row] ^ 1]] = -np.inf
        best = np.argsort(-scores)[:7]
        order = np.argsort(-found.teacher[row])
        likelihood = np.exp(scores[best] - scores[best[0]])
        np.testing.assert_allclose(
            found.teacher[row][order], likelihood / likelihood.sum(), rtol=5e-3
        )
        np.testing.assert_allclose(
            found.block_embeddings[row][order], rows[best] / dense.std(), rtol=5e-3
        )


def test_a_resumed_run_is_the_same(world, encoder, taught, tmp_path):
    config = config_of(world, encoder, tmp_path)
    stop_run(warm_start, config, 2)
    assert warm_start.run(config, silent, NEVER)
    assert_same_bits(state_of(tmp_path, 3), state_of(taught, 3))


def test_how_much_of_the_corpus_is_embedded_is_shown_before_the_first_update(
    taught, told, corpus
):
    embedded, updates = told[:-3], told[-3:]
    done, size = [done for _, done, _ in embedded], corpus.num_blocks
    assert len(done) > 1
    assert done == sorted(done)
    assert embedded[-1] == ("blocks embedded", size, size)
    assert {(what, total) for what, _, total in embedded} == {("blocks embedded", size)}
    assert updates == [("", done, 3) for done in (1, 2, 3)]


def test_the_encoder_that_it_began_with_can_be_opened_and_exported(
    world, encoder, taught, tmp_path
):
    given, exported = Overrides(corpus=world.corpus), {}
    for name, before in (("begun", True), ("taught", False)):
        folder = str(tmp_path / name)
        exported[name] = export_retriever(
            str(taught), folder, given, before_training=before, embeddings=("npy",)
        )
    assert exported == {"begun": ["."], "taught": ["query", "document"]}
    published = load_file(f"{encoder[0]}/model.safetensors")
    same = {"begun": True, "taught/document": True, "taught/query": False}
    for name, is_same in same.items():
        written = load_file(tmp_path / name / "model.safetensors")
        assert written.keys() >= published.keys()
        equal = [np.array_equal(written[key], published[key]) for key in published]
        assert all(equal) is is_same
    begun, trained = (np.load(tmp_path / n / "embeddings.npy") for n in exported)
    np.testing.assert_array_equal(begun, trained)
    card = (tmp_path / "begun" / "README.md").read_text()
    assert "| training | none, it is the encoder as it was |" in card
    assert "updates" not in card


def test_it_learns_what_bm25_knows(world, encoder, tmp_path):
    config = config_of(world, encoder, tmp_path, train_steps=60)
    assert warm_start.run(config, silent, NEVER)
    losses = [line["retriever_loss"] for line in read_metrics(str(tmp_path))]
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])


def test_the_reader_may_start_beside_it(world, encoder, tmp_path):
    config = config_of(
        world, encoder, tmp_path, task="stated", mixture=ReaderMixture(0.5, 0, 0.5)
    )
    assert warm_start.run(config, silent, NEVER)
    for line in read_metrics(str(tmp_path)):
        both = line["retriever_loss"] + line["reader_loss"]
        assert line["loss"] == pytest.approx(both, rel=1e-5)
        assert 0 < line["padding_share"] < 1


def test_refused(world, encoder, tmp_path):
    with refused("PAIRS_TASK"):
        config_of(world, encoder, tmp_path, task="stated", pairs_task="")
    with refused("SHARED_TOWERS=False"):
        config_of(world, encoder, tmp_path, models=tiny_world.models(shared=True))
    # Towers that were drawn.
    drawn = {"models": tiny_world.models(), "retriever_warm_start": ""}
    with refused("two towers that start alike"):
        warm_start.run(config_of(world, encoder, tmp_path, **drawn), silent, NEVER)


def test_a_large_corpus_and_long_sentences_are_refused_before_any_is_embedded(
    world, encoder, tmp_path, monkeypatch
):
    weights, models = encoder
    short = dataclasses.replace(models, lengths=dataclasses.replace(LENGTHS, query=9))
    with refused("QUERY_LENGTH of at least 10"):
        config = config_of(world, (weights, short), tmp_path, task="stated")
        warm_start.run(config, silent, NEVER)
    monkeypatch.setattr(bm25_teacher, "MAX_BLOCKS", 23)
    with refused("at most 23 blocks in .* with BM25_WEIGHT, got 24, "):
        warm_start.run(config_of(world, encoder, tmp_path), silent, NEVER)
    assert not (tmp_path / "index").exists()
