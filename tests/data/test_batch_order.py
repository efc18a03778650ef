import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import span_density
from realm_jax.data.batch_order import Spans, batch_rows, sentence_rows, shuffled
from realm_jax.data.examples import Examples, write_examples
from realm_jax.errors import BadInputError

COUNTS = st.lists(st.integers(1, 9), min_size=1, max_size=40)
SEEDS = st.integers(0, 2**63)


def starts_of(counts):
    return np.concatenate([[0], np.cumsum(counts)])


def write(folder, counts, ids=None):
    """Examples `row` of sentences with so many spans each."""
    if ids is None:
        ids = range(len(counts))
    arrays = {
        "row": np.arange(sum(counts)),
        "sentence_id": np.repeat(np.array(ids), counts),
    }
    return write_examples(folder, [arrays], {})


@settings(deadline=None)
@given(
    count=st.integers(1, 40),
    batch_size=st.integers(1, 60),
    seed=st.integers(0, 2**63),
)
def test_every_epoch_visits_every_example_once(count, batch_size, seed):
    steps = range(3 * count // batch_size + 2)
    stream = np.concatenate(
        [batch_rows(count, step, batch_size=batch_size, seed=seed) for step in steps]
    )
    for start in range(0, len(stream) - count + 1, count):
        epoch = stream[start : start + count]
        assert sorted(epoch) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [shuffled(50, seed, epoch) for seed in range(3) for epoch in range(3)]
    for one, other in itertools.combinations(orders, 2):
        assert (one != other).any()


def test_orders_do_not_favour_a_place():
    positions = np.array([shuffled(10, 0, epoch) for epoch in range(2_000)])
    counts = np.array([(positions == row).sum(axis=0) for row in range(10)])
    # Chi-squared with 81 degrees of freedom is above 150 once in 200,000 times.
    assert ((counts - 200) ** 2 / 200).sum() < 150


def test_orders_stay_what_they_were():
    # A resumed run counts on it, whatever NumPy was installed in between.
    assert shuffled(8, 7, 2).tolist() == [6, 7, 4, 0, 1, 5, 3, 2]


@settings(deadline=None)
@given(counts=COUNTS, batch_size=st.integers(1, 60), seed=SEEDS)
def test_every_epoch_visits_every_sentence_once(counts, batch_size, seed):
    spans = [(i, j) for i, count in enumerate(counts) for j in range(count)]
    steps = range(3 * len(counts) // batch_size + 2)
    stream = [
        spans[row][0]
        for step in steps
        for row in sentence_rows(
            starts_of(counts), step, batch_size=batch_size, seed=seed
        )
    ]
    for start in range(0, len(stream) - len(counts) + 1, len(counts)):
        epoch = stream[start : start + len(counts)]
        assert sorted(epoch) == list(range(len(counts)))


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


@settings(deadline=None)
@given(
    counts=COUNTS,
    step=st.integers(0, 10**9),
    batch_size=st.integers(1, 20),
    seed=SEEDS,
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


@settings(deadline=None)
@given(counts=COUNTS, parts=st.integers(1, 5), per_step=st.integers(1, 6), seed=SEEDS)
def test_the_stream_is_the_same_however_it_is_cut(counts, parts, per_step, seed):
    """A step of many rows is those of as many smaller steps, in order."""
    starts = starts_of(counts)
    whole = sentence_rows(starts, 3, batch_size=parts * per_step, seed=seed)
    cut = [
        sentence_rows(starts, 3 * parts + part, batch_size=per_step, seed=seed)
        for part in range(parts)
    ]
    np.testing.assert_array_equal(whole, np.concatenate(cut))


@settings(deadline=None)
@given(count=st.integers(1, 40), step=st.integers(0, 99), seed=SEEDS)
def test_sentences_of_one_span_are_in_the_order_of_examples(count, step, seed):
    rows = sentence_rows(np.arange(count + 1), step, batch_size=7, seed=seed)
    np.testing.assert_array_equal(
        rows, batch_rows(count, step, batch_size=7, seed=seed)
    )


def test_over_many_epochs_every_span_of_a_sentence_is_drawn_about_equally_often():
    counts, epochs = [1, 2, 3, 7, 1, 5], 3_000
    rows = sentence_rows(starts_of(counts), 0, batch_size=6 * epochs, seed=4)
    drawn = np.bincount(rows, minlength=sum(counts))
    expected = np.repeat(epochs / np.array(counts), counts)
    # Chi-squared with 13 degrees of freedom is above 45 once in 50,000 times.
    assert ((drawn - expected) ** 2 / expected).sum() < 45


@pytest.mark.parametrize("along", ["epoch", "sentence", "seed"])
def test_draws_that_follow_each_other_are_independent(along):
    """Neighbours in epoch, sentence or seed agree as often as chance has it."""
    count = 4_000
    if along == "epoch":  # One sentence: a batch is so many epochs.
        drawn = sentence_rows(np.array([0, 4]), 0, batch_size=count, seed=0)
    elif along == "sentence":
        rows = sentence_rows(np.arange(count + 1) * 4, 0, batch_size=count, seed=0)
        drawn = np.sort(rows) % 4
    else:
        drawn = np.concatenate(
            [
                sentence_rows(np.array([0, 4]), 0, batch_size=1, seed=seed)
                for seed in range(count)
            ]
        )
    pairs = np.bincount(drawn[:-1] * 4 + drawn[1:], minlength=16)
    # Chi-squared with 15 degrees of freedom is above 49 once in 50,000 times.
    assert ((pairs - count / 16) ** 2 / (count / 16)).sum() < 49


def test_draws_stay_what_they_were():
    # A resumed run counts on it, whatever NumPy was installed in between.
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


@settings(deadline=None, max_examples=30)
@given(
    counts=COUNTS,
    hosts=st.sampled_from([1, 2, 3, 4, 6, 12]),
    spans=st.sampled_from(Spans),
    seed=SEEDS,
)
def test_hosts_share_the_batch_whatever_their_number(
    tmp_path_factory, counts, hosts, spans, seed
):
    examples = write(tmp_path_factory.mktemp("examples") / "set", counts)
    options = {"batch_size": 12, "seed": seed, "spans": spans}
    whole = examples.batches(**options, start_step=2)
    parts = [
        examples.batches(**options, start_step=2, num_hosts=hosts, host=host)
        for host in range(hosts)
    ]
    for step in (2, 3):
        expected = examples.step_rows(step, **options)
        np.testing.assert_array_equal(next(whole)["row"], expected)
        together = np.concatenate([next(part)["row"] for part in parts])
        np.testing.assert_array_equal(together, expected)


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
    """A tenth of the blocks has six spans a sentence; the others have one or two."""
    rng = np.random.default_rng(0)
    blocks = np.repeat(np.arange(200), 4)
    counts = np.where(blocks < 20, 6, rng.integers(1, 3, len(blocks)))
    arrays = {
        "source_block": np.repeat(blocks, counts),
        "sentence_id": np.repeat(np.arange(len(counts)), counts),
    }
    examples = write_examples(tmp_path / "set", [arrays], {})
    every, drawn = (
        span_density.epoch_by_block(examples, spans, num_blocks=200)
        for spans in (Spans.ALL, Spans.ONE_PER_SENTENCE)
    )
    dense = counts[blocks < 20].sum() / counts.sum()
    assert every[:20].sum() / every.sum() == dense > 0.28
    assert span_density.share_of_densest(every) == dense
    assert drawn.tolist() == [4] * 200
    assert span_density.share_of_densest(drawn) == 0.1


def test_density_cannot_be_measured_without_blocks_or_sentences(tmp_path):
    ids = np.arange(3)
    for name, arrays in {
        "news": {"source_block": np.full(3, -1), "sentence_id": ids},
        "older": {"source_block": ids},
        "questions": {"question_index": ids, "sentence_id": ids},
    }.items():
        examples = write_examples(tmp_path / name, [arrays], {})
        with pytest.raises(BadInputError, match=f"{name}, got some without") as e:
            span_density.epoch_by_block(examples, Spans.ALL, num_blocks=3)
        assert "\n" not in str(e.value)


@settings(deadline=None, max_examples=50)
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


def test_starts_are_mapped_and_their_damage_is_named(tmp_path):
    examples = write(tmp_path / "set", [2, 1])
    examples.verify()
    starts = examples.sentence_starts
    while starts is not None and not isinstance(starts, np.memmap):
        starts = starts.base
    assert starts is not None
    path = tmp_path / "set/sentence_starts.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=r"/sentence_starts\.npy is damaged \("):
        examples.verify()
    # Without checksums, too.
    with pytest.raises(BadInputError, match=r"from 0 to 3 in .*/sentence_starts\.npy"):
        Examples.open(tmp_path / "set")
    path.unlink()
    with pytest.raises(BadInputError, match=r"/sentence_starts\.npy is missing; "):
        Examples.open(tmp_path / "set")


@pytest.mark.parametrize("ids", [np.zeros(3), np.zeros((3, 2), np.int64)])
def test_an_id_that_is_no_integer_is_one_line(tmp_path, ids):
    with pytest.raises(BadInputError, match="expected one integer as the feature") as e:
        write_examples(tmp_path / "set", [{"row": np.zeros(3), "sentence_id": ids}], {})
    assert "\n" not in str(e.value)
    assert not list(tmp_path.iterdir())


def test_together_asks_for_the_drawn_span_first(tmp_path):
    rows = 6
    examples = write_examples(
        tmp_path / "examples",
        [
            {
                "query_ids": np.where(np.eye(rows, dtype=bool), 1, np.arange(2, 8)),
                "mask_positions": np.arange(rows)[:, None] * [1, 0, 0],
                "mask_ids": np.arange(2, 8)[:, None] * [1, 0, 0],
                "mask_weights": np.tile([1.0, 0.0, 0.0], (rows, 1)),
                "sentence_id": np.array([0, 0, 0, 0, 5, 5]),
            }
        ],
        {},
    )
    found = examples.together(np.array([2, 5]))
    # Three masks at most: the drawn one, then those after it, around to the first.
    assert found["mask_positions"].tolist() == [[2, 3, 0], [5, 4, 0]]
    assert found["mask_weights"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert found["query_ids"].tolist() == [[1, 3, 1, 1, 6, 7], [2, 3, 4, 5, 1, 1]]
