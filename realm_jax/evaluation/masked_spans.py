"""Selects masked sentences of a finished run as examples for its report."""

import textwrap

import numpy as np

from realm_jax.data.blocks import BlockStore
from realm_jax.evaluation.report_data import ExampleDocument, MaskedExample
from realm_jax.training.masked_spans import MaskedSpans
from realm_jax.types import NULL_BLOCK

_SNIPPET = 240


def masked_examples(
    spans: MaskedSpans, corpus: BlockStore, count: int
) -> list[MaskedExample]:
    """Returns example sentences in the style of REALM's table 3.

    Two thirds of `count` are those that retrieval helped most, the rest those it helped
    least, so that the selection is not only flattering.
    """
    order = np.argsort(-spans.utility, kind="stable")
    count = min(count, len(order))
    least = count // 3
    rows = np.concatenate([order[: count - least], order[len(order) - least :]])
    return [_masked_example(spans, corpus, row) for row in rows]


def _masked_example(spans: MaskedSpans, corpus: BlockStore, row: int) -> MaskedExample:
    documents = []
    for column in np.argsort(-spans.log_retrieval[row]):
        block = int(spans.block_ids[row, column])
        if not np.isfinite(spans.log_retrieval[row, column]):
            continue
        text = corpus.text(block) if block != NULL_BLOCK else None
        documents.append(
            ExampleDocument(
                block_id=block,
                title=text.title if text else "",
                snippet=textwrap.shorten(text.body, _SNIPPET) if text else "",
                retrieval_probability=float(np.exp(spans.log_retrieval[row, column])),
                answer_probability=float(np.exp(spans.log_candidates[row, column])),
            )
        )
    before, answer, after = _around_the_mask(spans, corpus, row)
    return MaskedExample(
        before=before,
        answer=answer,
        after=after,
        documents=documents,
        marginal=float(np.exp(spans.log_marginal[row])),
    )


def _around_the_mask(
    spans: MaskedSpans, corpus: BlockStore, row: int
) -> tuple[str, str, str]:
    """Returns a sentence in three parts, which joined give the sentence unmasked.

    Whether a space stands between two wordpieces depends on both of them, so a part
    decoded by itself would lack the space beside the mask.
    """
    decode = corpus.vocabulary.decode
    query = spans.batch.query_ids[row]
    # [CLS] x [SEP] without its special pieces; the masks are contiguous.
    pieces = query[query != 0][1:-1]
    masked = np.flatnonzero(pieces == corpus.vocabulary.mask)
    scored = spans.batch.mask_weights[row] > 0
    answer = spans.batch.mask_ids[row][scored]
    filled = [*pieces[: masked[0]], *answer, *pieces[masked[-1] + 1 :]]
    before, through, whole = (
        decode(filled[:end]) for end in (masked[0], masked[0] + len(answer), None)
    )
    shown = through.removeprefix(before).lstrip()
    return through.removesuffix(shown), shown, whole.removeprefix(through)
