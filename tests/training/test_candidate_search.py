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
from tests.training.runs import embeddings_of, towers_of
from tests.waiting import PATIENCE, Clock

KEY = jax.random.key(5)
MESH = make_mesh(MeshConfig())
NUM_CANDIDATES = 4


def layout_of(corpus):
    return DocumentLayout.of(LENGTHS, corpus.vocabulary)


@pytest.fixture(scope="module")
def losses(corpus):
    """Over given candidates, and over those of a search."""
    config = towers_of(corpus)
    loss = PretrainLoss(Retriever(config), KnowledgeEncoder(config.bert))
    return loss, RetrievingLoss(loss, NUM_CANDIDATES, layout_of(corpus), MESH)


@pytest.fixture(scope="module")
def params(corpus):
    return draw(corpus.vocabulary.size, KnowledgeEncoder)


@pytest.fixture(scope="module")
def batch(corpus):
    examples = Examples.open(corpus.directory / "examples" / "asked" / "train")
    return PretrainBatch(**examples.batch(np.arange(16)))


def host_search(corpus, **options):
    config = towers_of(corpus)
    return HostSearch(config, corpus, LENGTHS, NUM_CANDIDATES, MESH, 16, **options)


@pytest.fixture(scope="module")
def searched(corpus, params):
    """Makes the inputs of a step in both ways: on the host, and to search within it."""
    embeddings = embeddings_of(params["retriever"], corpus)
    index = LoadedIndex(DeviceSearcher(embeddings, mesh=MESH), None)

    def inputs(batch, **options):
        on_host = host_search(corpus, ahead=False, **options)
        within = DeviceSearch(corpus, layout_of(corpus), MESH, **options)
        of_step = (0, params["retriever"], index, lambda step: batch)
        return on_host(*of_step), within(*of_step)

    return inputs


def assert_same(found, expected):
    for field in dataclasses.fields(expected):
        np.testing.assert_array_equal(
            getattr(found, field.name), getattr(expected, field.name), field.name
        )


def test_the_candidates_and_the_loss_are_the_same(searched, losses, params, batch):
    loss, retrieving = losses
    given, inputs = searched(batch)
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


def test_with_own_blocks_the_candidates_are_the_same(searched, losses, params, corpus):
    _, retrieving = losses
    batch = first_pieces(corpus)
    given, inputs = searched(batch, own_block=True)
    expected = given.candidates
    assert_same(jax.jit(retrieving.candidates)(params["retriever"], inputs), expected)
    own = np.asarray(expected.block_ids)[:, -1]
    assert expected.block_ids.shape == (16, NUM_CANDIDATES)
    assert (own == np.where(expected.valid[:, -1], batch.source_block, -1)).all()
    assert expected.valid[:, -1].any()


@pytest.mark.full
def test_loss_and_gradient_are_the_same(searched, losses, params, batch):
    (expected, wanted), (gradient, found) = (
        jax.jit(jax.grad(loss, has_aux=True))(params, inputs, KEY)
        for loss, inputs in zip(losses, searched(batch), strict=True)
    )
    assert compute(found) == pytest.approx(compute(wanted), rel=1e-4, abs=1e-6)
    assert 0 < compute(found)["padding_share"] < 1
    tiny_world.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)


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


@pytest.fixture
def searching(corpus, params, batch):
    """Makes a search on the host with a searcher: a function of step and index."""

    def make(searcher, **options):
        search = host_search(corpus, **options)
        first = LoadedIndex(searcher, types.SimpleNamespace(step=0))

        def run(step, index=first):
            search(step, params["retriever"], index, lambda step: batch)

        return run, search.details

    return make


def test_the_next_search_goes_on_while_a_step_runs(searching):
    searcher = SlowSearcher()
    search, details = searching(searcher)
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
    """Ends a search once it is waited for, and `left` seconds have passed."""

    def __init__(self, clock, searcher):
        super().__init__(clock.monotonic)
        self.left = 0  # For one that is done.
        self._clock = clock
        self._searcher = searcher

    @contextlib.contextmanager
    def part(self, part):
        with super().part(part):
            if part is Part.SEARCH and self.left:
                self._clock.seconds += self.left
                self._searcher.may.set()
            yield


def test_only_what_is_left_of_a_search_is_waited_for(searching):
    searcher = SlowSearcher()
    stopwatch = LateStopwatch(Clock(), searcher)
    search, details = searching(searcher, stopwatch=stopwatch)

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
