"""Random tokens and random spans: what is masked, how much of it, and how often."""

import hypothesis
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from realm_jax.data.masking import masked_example, sentence_specs
from realm_jax.data.random_masking import (
    choose_spans,
    draw_spans,
    draw_tokens,
    span_length,
)
from tests.data.random_masks import random_examples
from tests.data.test_masking import TEXTS

DRAWS = (draw_tokens, draw_spans)
SENTENCES = st.lists(
    st.sampled_from(["Ansk", "burnt", "unbelievably", "bells", "1507", ",", "각", "é"]),
    max_size=60,
).map(" ".join)


def words_of(vocabulary, pieces):
    """Wordpieces grouped to words, one piece at a time: lists of places."""
    words = []
    for place, piece in enumerate(pieces):
        if words and vocabulary.pieces[piece].startswith("##"):
            words[-1].append(place)
        else:
            words.append([place])
    return words


def masked_places(vocabulary, example, pieces, query_length):
    """Where the query has [MASK]; all else must be the sentence, framed and padded."""
    kept = pieces[: query_length - 2]
    query = example["query_ids"].tolist()
    assert query[0] == vocabulary.cls
    assert query[1 + len(kept)] == vocabulary.sep
    assert not any(query[2 + len(kept) :])
    hidden = query[1 : 1 + len(kept)]
    masked = [place for place, piece in enumerate(hidden) if piece == vocabulary.mask]
    assert [p for i, p in enumerate(hidden) if i not in masked] == [
        p for i, p in enumerate(kept) if i not in masked
    ]
    return masked


@settings(max_examples=200)
@given(
    draw=st.sampled_from(DRAWS),
    before=TEXTS,
    text=TEXTS | SENTENCES,
    query_length=st.integers(3, 60),
    max_masks=st.integers(1, 12),
    seed=st.integers(0, 3),
)
def test_hides_some_pieces_and_scores_them(
    small_store, draw, before, text, query_length, max_masks, seed
):
    vocabulary = small_store.vocabulary
    body = f"{before} {text}"
    encoding = vocabulary.encode(body)
    inside = encoding.offsets[:, 0] > len(before)
    pieces = encoding.ids[inside].tolist()
    kept = pieces[: query_length - 2]
    words = words_of(vocabulary, kept)
    drawn = draw(vocabulary, np.array(kept, np.int32), (seed, 8, 1))
    if not len(drawn):
        assert len(words if draw is draw_spans else kept) < 2
        return
    settings = {"vocabulary": vocabulary, "source_block": 8, "max_masks": max_masks}
    settings["query_length"] = query_length
    example = masked_example(np.array(kept, np.int32), drawn, **settings)
    masked = masked_places(vocabulary, example, pieces, query_length)
    assert 0 < len(masked) < len(kept)
    scored = int(example["mask_weights"].sum())
    assert scored == min(len(masked), max_masks)
    positions = example["mask_positions"].tolist()
    assert positions[:scored] == sorted(set(positions[:scored]))
    assert {position - 1 for position in positions[:scored]} <= set(masked)
    assert example["mask_ids"].tolist() == [
        *(kept[position - 1] for position in positions[:scored]),
        *[0] * (max_masks - scored),
    ]
    assert example["mask_weights"].tolist() == [1] * scored + [0] * (max_masks - scored)
    assert not any(positions[scored:])
    assert example["source_block"] == 8
    if draw is draw_tokens:
        assert abs(len(masked) - 0.15 * len(kept)) <= 0.5 or len(masked) == 1
    else:
        hit = [word for word in words if word[0] in masked]
        assert [place for word in hit for place in word] == masked
        # Without the word that reached the 15 % they are not reached, save where one
        # more word would have left none to read.
        assert len(masked) - max(map(len, hit)) < 0.15 * len(kept)
        assert len(masked) >= 0.15 * len(kept) or len(hit) == len(words) - 1


@given(
    word_lengths=st.lists(st.integers(1, 9), max_size=80),
    uniforms=st.integers(0, 2**32).map(
        lambda seed: np.random.default_rng(seed).random(160).tolist()
    ),
)
# One word must be left.
@hypothesis.example(word_lengths=[1, 9], uniforms=[0.9, 0.0] * 80)
def test_spans_are_disjoint_and_stop_at_fifteen_per_cent(word_lengths, uniforms):
    spans = choose_spans(word_lengths, iter(uniforms))
    covered = [word for span in spans for word in span]
    assert len(set(covered)) == len(covered)
    assert set(covered) <= set(range(len(word_lengths)))
    assert all(1 <= len(span) <= 10 for span in spans)
    total = sum(word_lengths)
    masked = [word_lengths[word] for word in covered]
    if len(word_lengths) < 2:
        assert not spans
        return
    assert sum(masked[:-1]) < 0.15 * total
    assert sum(masked) >= 0.15 * total or len(covered) == len(word_lengths) - 1


def truncated_geometric():
    """SpanBERT's lengths: p (1 - p)^(n - 1) for n up to 10, made to sum to one."""
    weights = [0.2 * 0.8 ** (n - 1) for n in range(1, 11)]
    return [weight / sum(weights) for weight in weights]


def test_span_lengths_have_the_published_distribution():
    # Quantiles of a uniform draw are its distribution, up to one part in a million.
    draws = [span_length(i / 10**5) for i in range(10**5)]
    shares = np.bincount(draws, minlength=11)[1:] / len(draws)
    np.testing.assert_allclose(shares, truncated_geometric(), atol=2e-5)
    assert np.mean(draws) == pytest.approx(3.8, abs=0.01)


def test_chosen_spans_keep_that_distribution():
    rng = np.random.default_rng(0)
    lengths = []
    for _ in range(30):
        spans = choose_spans([1] * 4000, iter(rng.random(8000).tolist()))
        lengths += [len(span) for span in spans[:-1]]  # The last is cut at the 15 %.
    counts = np.bincount(lengths, minlength=11)[1:]
    expected = np.array(truncated_geometric()) * len(lengths)
    assert len(lengths) > 4000
    assert scipy.stats.chisquare(counts, expected).pvalue > 0.01


def test_span_starts_are_spread_evenly():
    # A length of one word (a draw of 0), so that every place is open to it.
    rng = np.random.default_rng(1)
    starts = [
        choose_spans([1] * 6, iter([0.0, rng.random()]))[0].start for _ in range(3000)
    ]
    assert scipy.stats.chisquare(np.bincount(starts, minlength=6)).pvalue > 0.01


def test_every_token_is_drawn_equally_often(small_store):
    pieces = np.full(20, 7)
    drawn = [
        draw_tokens(small_store.vocabulary, pieces, (0, i, 0)) for i in range(2000)
    ]
    assert {len(set(places.tolist())) for places in drawn} == {3}
    assert scipy.stats.chisquare(np.bincount(np.concatenate(drawn))).pvalue > 0.01


def test_the_draw_depends_on_nothing_but_its_key(small_store):
    """Pinned: another machine or version must mask the same."""
    # Pieces that each begin a word, in whatever vocabulary.
    word = int(np.flatnonzero(~small_store.vocabulary.is_inner)[-1])
    pinned = {draw_tokens: [13, 11, 19], draw_spans: [9, 10, 11]}
    for draw, places in pinned.items():
        found = draw(small_store.vocabulary, np.full(20, word), (3, 14, 1))
        assert found.tolist() == places


@pytest.mark.parametrize("draw", DRAWS)
def test_every_sentence_has_an_example(small_store, draw):
    blocks = np.arange(small_store.num_blocks)
    whole, other = (
        random_examples(
            small_store, blocks, draw, query_length=48, max_masks=4, seed=seed
        )
        for seed in (0, 6)
    )
    sentences = [len(small_store.text(block).sentences) for block in blocks]
    assert len(whole["query_ids"]) == sum(sentences)
    assert whole["source_block"].tolist() == np.repeat(blocks, sentences).tolist()
    assert (np.diff(whole["sentence_id"]) > 0).all()
    assert {n: (a.shape[1:], a.dtype) for n, a in whole.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in sentence_specs(48, 4).items()
    }
    # The seed changes the masks and nothing else.
    assert (whole["query_ids"] != other["query_ids"]).any(axis=-1).mean() > 0.5
    np.testing.assert_array_equal(whole["source_block"], other["source_block"])


@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_scored_is_not_always_the_first_of_the_sentence(small_store, draw):
    blocks = np.arange(small_store.num_blocks)
    examples = random_examples(small_store, blocks, draw, query_length=48, max_masks=2)
    rows = zip(examples["query_ids"], examples["mask_positions"], strict=True)
    mask = small_store.vocabulary.mask
    firsts = [set(at) == set(np.flatnonzero(ids == mask)[:2]) for ids, at in rows]
    assert not all(firsts)
