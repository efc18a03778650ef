"""The step that searches within itself against one that is given its candidates."""

import contextlib
import dataclasses
import threading
import types

import jax
import numpy as np
import pytest

from realm_jax.data.examples import Examples
from realm_jax.index.device_tokens import DocumentLayout
from realm_jax.index.searchers import DeviceSearcher
from realm_jax.index.source import LoadedIndex
from realm_jax.metrics.means import compute
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.training.candidate_search import DeviceSearch, HostSearch, RetrievingLoss
from realm_jax.training.partitioning import MeshConfig, make_mesh
from realm_jax.training.pretrain_loss import PretrainLoss
from realm_jax.training.step_timing import Part, Stopwatch
from realm_jax.types import Neighbours, PretrainBatch
from tests import tiny_world
from tests.tiny_world import LENGTHS
from tests.training.loss_twins import draw
from tests.training.runs import embeddings_of
from tests.waiting import PATIENCE, Clock

KEY = jax.random.key(5)
MESH = make_mesh(MeshConfig())
NUM_CANDIDATES = 4


@pytest.fixture(scope="module")
def losses(corpus):
    """Over given candidates, and over those of a search."""
    config = tiny_world.models().retriever_config(corpus.vocabulary.size)
    loss = PretrainLoss(Retriever(config), KnowledgeEncoder(config.bert))
    layout = DocumentLayout.of(LENGTHS, corpus.vocabulary)
    return loss, RetrievingLoss(loss, NUM_CANDIDATES, layout, MESH)


@pytest.fixture(scope="module")
def both(corpus):
    """The two ways to a step's inputs, parameters, an index, and masked sentences."""
    config = tiny_world.models().retriever_config(corpus.vocabulary.size)
    params = draw(corpus.vocabulary.size, KnowledgeEncoder)
    embeddings = embeddings_of(params["retriever"], corpus)
    index = LoadedIndex(DeviceSearcher(embeddings, mesh=MESH), None)
    on_host = HostSearch(config, corpus, LENGTHS, NUM_CANDIDATES, MESH, 16, ahead=False)
    within = DeviceSearch(corpus, DocumentLayout.of(LENGTHS, corpus.vocabulary), MESH)
    examples = Examples.open(corpus.directory / "examples" / "asked" / "train")
    batch = PretrainBatch(**examples.batch(np.arange(16)))
    return on_host, within, params, index, batch


def assert_same(found, expected):
    for field in dataclasses.fields(expected):
        np.testing.assert_array_equal(
            getattr(found, field.name), getattr(expected, field.name), field.name
        )


def test_the_candidates_and_the_loss_are_the_same(both, losses):
    on_host, within, params, index, batch = both
    loss, retrieving = losses
    of_step = (0, params["retriever"], index, lambda step: batch)
    given, inputs = on_host(*of_step), within(*of_step)
    expected = given.candidates
    assert_same(jax.jit(retrieving.candidates)(params["retriever"], inputs), expected)
    assert (np.asarray(expected.block_ids)[:, 1:] >= 0).all()
    found, wanted = (
        float(jax.jit(of_inputs)(params, of_search, KEY)[0])
        for of_inputs, of_search in ((retrieving, inputs), (loss, given))
    )
    assert found == pytest.approx(wanted, rel=1e-4)


def first_pieces(corpus):
    """The first four pieces of sixteen blocks as sentences, one of them masked."""
    special, blocks = corpus.vocabulary, np.arange(16, dtype=np.int32)
    query_ids = np.zeros((16, LENGTHS.query), np.int32)
    query_ids[:, 0], query_ids[:, 5] = special.cls, special.sep
    query_ids[:, 1:5] = corpus.body_ids(blocks, 4)
    masked = query_ids[:, 2:3].copy()
    query_ids[:, 2] = special.mask
    positions, weights = np.full((16, 1), 2, np.int32), np.ones((16, 1), np.float32)
    return PretrainBatch(query_ids, positions, masked, weights, source_block=blocks)


def test_with_own_blocks_the_candidates_are_the_same(both, losses, corpus):
    _, _, params, index, _ = both
    loss, retrieving = losses
    batch = first_pieces(corpus)
    settings = (corpus, LENGTHS, NUM_CANDIDATES, MESH, 16)
    own = {"own_block": True}
    on_host = HostSearch(loss.retriever.config, *settings, ahead=False, **own)
    layout = DocumentLayout.of(LENGTHS, corpus.vocabulary)
    within = DeviceSearch(corpus, layout, MESH, **own)
    of_step = (0, params["retriever"], index, lambda step: batch)
    expected, inputs = on_host(*of_step).candidates, within(*of_step)
    assert_same(jax.jit(retrieving.candidates)(params["retriever"], inputs), expected)
    own = np.asarray(expected.block_ids)[:, -1]
    assert expected.block_ids.shape == (16, NUM_CANDIDATES)
    assert (own == np.where(expected.valid[:, -1], batch.source_block, -1)).all()
    assert expected.valid[:, -1].any()


@pytest.mark.full
def test_loss_and_gradient_are_the_same(both, losses):
    on_host, within, params, index, batch = both
    loss, retrieving = losses

    def run(search, loss):
        inputs = search(0, params["retriever"], index, lambda step: batch)
        gradient, metrics = jax.jit(jax.grad(loss, has_aux=True))(params, inputs, KEY)
        return gradient, compute(metrics)

    gradient, found = run(within, retrieving)
    expected_gradient, expected = run(on_host, loss)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert 0 < found["padding_share"] < 1
    tiny_world.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-5)


class SlowSearcher:
    """Finds blocks 0 to k, once it may."""

    def __init__(self):
        self.may = threading.Event()
        self.asked = threading.Event()

    def search(self, queries, k):
        self.asked.set()
        assert self.may.wait(PATIENCE)
        ids = np.tile(np.arange(k, dtype=np.int32), (len(queries), 1))
        return Neighbours(ids, np.zeros(ids.shape, np.float32))


def searching(both, corpus, searcher, **options):
    """A search on the host with this searcher: a function of step and index."""
    _, _, params, _, batch = both
    config = tiny_world.models().retriever_config(corpus.vocabulary.size)
    settings = (corpus, LENGTHS, NUM_CANDIDATES, MESH, 16)
    search = HostSearch(config, *settings, **options)
    first = LoadedIndex(searcher, types.SimpleNamespace(step=0))

    def run(step, index=first):
        search(step, params["retriever"], index, lambda step: batch)

    return run, search.details


def test_the_next_search_goes_on_while_a_step_runs(both, corpus):
    searcher = SlowSearcher()
    search, details = searching(both, corpus, searcher)
    searcher.may.set()
    search(0)
    details()
    searcher.may.clear()
    searcher.asked.clear()
    search(1)
    assert searcher.asked.wait(PATIENCE)  # Now the step would run.
    searcher.may.set()
    assert details()["found_ahead"]["step"] == 2
    # With another index in use it is searched anew.
    other = LoadedIndex(SlowSearcher(), types.SimpleNamespace(step=5))
    other.searcher.may.set()
    search(2, other)
    assert other.searcher.asked.is_set()


class LateStopwatch(Stopwatch):
    """Ends a search once it is waited for, and so many seconds have passed.

    Attributes:
      left: the seconds that the search still takes; 0 for one that is done.
    """

    def __init__(self, clock, searcher):
        super().__init__(clock.monotonic)
        self.left = 0
        self._clock = clock
        self._searcher = searcher

    @contextlib.contextmanager
    def part(self, part):
        with super().part(part):
            if part is Part.SEARCH and self.left:
                self._clock.seconds += self.left
                self._searcher.may.set()
            yield


def test_only_what_is_left_of_a_search_is_waited_for(both, corpus):
    searcher = SlowSearcher()
    stopwatch = LateStopwatch(Clock(), searcher)
    search, details = searching(both, corpus, searcher, stopwatch=stopwatch)

    def waited(step):
        stopwatch.take()
        search(step)
        return stopwatch.take()[Part.SEARCH]

    searcher.may.set()
    waited(0)
    details()  # The one ahead is done: nothing is left to wait for.
    searcher.may.clear()
    assert waited(1) == 0
    stopwatch.left = 7
    assert waited(2) == 7
    details()
