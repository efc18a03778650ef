import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import span_density
from realm_jax.data.batch_order import Spans, batch_rows, sentence_rows, shuffled
from realm_jax.data.examples import Examples, write_examples
from tests.flipped import flip
from tests.refused import refused

COUNTS = st.lists(st.integers(1, 9), min_size=1, max_size=40)
SEEDS = st.integers(0, 2**63)


def starts_of(counts):
    return np.concatenate([[0], np.cumsum(counts)])


def write(folder, counts, **features):
    """Writes examples of sentences with so many spans each."""
    ids = np.repeat(np.arange(len(counts)), counts)
    arrays = {"row": np.arange(len(ids)), "sentence_id": ids, **features}
    return write_examples(folder, [arrays], {})


def test_an_order_visits_every_item_once_and_is_one_of_its_own():
    orders = [shuffled(50, seed, epoch) for seed in range(3) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    for one, other in itertools.combinations(orders, 2):
        assert (one != other).any()


def test_orders_do_not_favour_a_place():
    positions = np.array([shuffled(10, 0, epoch) for epoch in range(2_000)])
    counts = np.array([(positions == row).sum(axis=0) for row in range(10)])
    # Chi-squared with 81 degrees of freedom is above 150 once in 200,000 times.
    assert ((counts - 200) ** 2 / 200).sum() < 150


def slow_mixed(bits):
    """SplitMix64's output function in Python's own integers."""
    bits = (bits + 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


def slow_row(counts, seed, place):
    """The row at a place of the endless stream, one number at a time."""
    epoch, place = divmod(place, len(counts))
    sentence = int(shuffled(len(counts), seed, epoch)[place])
    drawn = slow_mixed(slow_mixed(slow_mixed(seed) + epoch) + sentence)
    return sum(counts[:sentence]) + drawn % counts[sentence]


@given(
    counts=COUNTS, step=st.integers(0, 10**9), batch_size=st.integers(1, 20), seed=SEEDS
)
def test_rows_are_those_of_a_slow_twin(counts, step, batch_size, seed):
    rows = sentence_rows(starts_of(counts), step, batch_size=batch_size, seed=seed)
    places = range(step * batch_size, (step + 1) * batch_size)
    assert rows.tolist() == [slow_row(counts, seed, place) for place in places]


def test_splitmix64_is_the_published_one():
    # The first outputs of Vigna's splitmix64.c for the state 1234567.
    golden = 0x9E3779B97F4A7C15
    assert [slow_mixed((1234567 + i * golden) % 2**64) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(count=st.integers(1, 40), step=st.integers(0, 99), seed=SEEDS)
def test_sentences_of_one_span_are_in_the_order_of_examples(count, step, seed):
    rows = sentence_rows(np.arange(count + 1), step, batch_size=7, seed=seed)
    expected = batch_rows(count, step, batch_size=7, seed=seed)
    np.testing.assert_array_equal(rows, expected)


def test_orders_and_draws_stay_what_they_were():
    # A resumed run counts on it, whatever NumPy was installed in between.
    assert shuffled(8, 7, 2).tolist() == [6, 7, 4, 0, 1, 5, 3, 2]
    rows = sentence_rows(starts_of([3, 1, 4, 2]), 1, batch_size=6, seed=7)
    assert rows.tolist() == [4, 1, 1, 3, 8, 6]


def test_only_what_a_batch_needs_is_read_of_the_starts():
    class Counted(np.ndarray):
        read = 0

        def __getitem__(self, index):
            Counted.read += np.size(index)
            return np.asarray(self)[index]

    starts = (np.arange(1001) * 3).view(Counted)
    sentence_rows(starts, 0, batch_size=8, seed=0)
    assert Counted.read == 16


def test_all_spans_are_visited_if_asked_for_or_if_sentences_are_unknown(tmp_path):
    counts = [4, 1, 3]
    known = write(tmp_path / "known", counts)
    unknown = write_examples(tmp_path / "unknown", [{"row": np.arange(8)}], {})
    assert unknown.sentence_starts is None
    expected = batch_rows(8, 5, batch_size=6, seed=3)
    for examples, spans in [
        (known, Spans.ALL),
        (unknown, Spans.ALL),
        (unknown, Spans.ONE_PER_SENTENCE),
    ]:
        rows = examples.step_rows(5, batch_size=6, seed=3, spans=spans)
        np.testing.assert_array_equal(rows, expected)


def test_dense_blocks_do_not_dominate_an_epoch(tmp_path):
    """One block in ten has six spans in each of its two sentences."""
    counts, blocks = [1, 1] * 9 + [6, 6], np.repeat(range(10), 2)
    examples = write(tmp_path / "set", counts, source_block=np.repeat(blocks, counts))
    for spans, by_block in {
        Spans.ALL: [2] * 9 + [12],
        Spans.ONE_PER_SENTENCE: [2] * 10,
    }.items():
        found = span_density.epoch_by_block(examples, spans, num_blocks=10)
        assert found.tolist() == by_block
        assert span_density.share_of_densest(found) == by_block[-1] / sum(by_block)


def test_density_cannot_be_measured_without_blocks_or_sentences(tmp_path):
    older = write_examples(tmp_path / "older", [{"source_block": np.arange(3)}], {})
    news = write(tmp_path / "news", [1, 1], source_block=np.full(2, -1))
    for examples in (older, news, write(tmp_path / "questions", [1, 1])):
        with refused(f"{examples.directory}, got some without"):
            span_density.epoch_by_block(examples, Spans.ALL, num_blocks=3)


@settings(max_examples=40)
@given(
    ids=st.lists(st.integers(-4, 4), min_size=1, max_size=30),
    is_sorted=st.booleans(),
    size=st.integers(1, 7),
)
def test_starts_are_written_if_the_rows_of_each_sentence_follow_each_other(
    tmp_path_factory, ids, is_sorted, size
):
    ids = sorted(ids) if is_sorted else ids
    folder = tmp_path_factory.mktemp("examples") / "set"
    parts = [ids[i : i + size] for i in range(0, len(ids), size)]
    batches = [
        {"row": np.zeros(len(part)), "sentence_id": np.array(part, np.int64)}
        for part in ([], *parts, [])
    ]
    starts = write_examples(folder, batches, {}).sentence_starts
    assert (folder / "sentence_starts.npy").exists() == (starts is not None)
    if starts is None:
        assert ids != sorted(ids)
    else:
        groups = [len(list(rows)) for _, rows in itertools.groupby(ids)]
        assert starts.tolist() == [0, *itertools.accumulate(groups)]
        assert ids == sorted(ids)


def test_damaged_starts_are_named(tmp_path):
    """Without checksums, too."""
    write(tmp_path / "set", [2, 1])
    flip(tmp_path / "set/sentence_starts.npy")
    with refused(r"from 0 to 3 in .*/sentence_starts\.npy"):
        Examples.open(tmp_path / "set")


def test_together_asks_for_the_drawn_span_first(tmp_path):
    rows = 6
    arrays = {
        "query_ids": np.where(np.eye(rows, dtype=bool), 1, np.arange(2, 8)),
        "mask_positions": np.arange(rows)[:, None] * [1, 0, 0],
        "mask_ids": np.arange(2, 8)[:, None] * [1, 0, 0],
        "mask_weights": np.tile([1.0, 0.0, 0.0], (rows, 1)),
        "sentence_id": np.array([0, 0, 0, 0, 5, 5]),
    }
    examples = write_examples(tmp_path / "examples", [arrays], {})
    found = examples.together(np.array([2, 5]))
    # Three masks at most: the drawn one, then those after it, around to the first.
    assert found["mask_positions"].tolist() == [[2, 3, 0], [5, 4, 0]]
    assert found["mask_weights"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert found["query_ids"].tolist() == [[1, 3, 1, 1, 6, 7], [2, 3, 4, 5, 1, 1]]
