"""Makes inverse cloze examples: a sentence paired with its block (ORQA, §4)."""

import numpy as np
from jaxtyping import Int

from realm_jax.data.blocks import BlockStore
from realm_jax.data.features import (
    Example,
    FeatureSpecs,
    int32,
    pieces_of_sentence,
    query_row,
)
from realm_jax.data.layout import document_inputs, from_lists
from realm_jax.data.splits import stable_uniform
from realm_jax.data.wordpiece import Encoding
from realm_jax.errors import BadInputError

QUERY_LENGTH = 64
DOCUMENT_LENGTH = 288
REMOVAL_PROBABILITY = 0.9
"""Share of examples whose document is the block without the sentence. The others keep
the sentence, so that the retriever also learns lexical matching."""


def inverse_cloze_specs(
    query_length: int = QUERY_LENGTH, document_length: int = DOCUMENT_LENGTH
) -> FeatureSpecs:
    """Returns the features of one example of `types.InverseClozeBatch`.

    Raises:
      BadInputError: a length leaves no room for an example.
    """
    if query_length < 3 or document_length < 4:
        raise BadInputError(
            "expected a query length of at least 3 and a document length of at least "
            f"4, got {query_length} and {document_length}; raise them (the paper uses "
            "64 and 288)."
        )
    return {
        "query_ids": int32(query_length),
        "document_ids": int32(document_length),
        "document_segment_ids": int32(document_length),
        "block_ids": int32(),
    }


def take_sentence(
    body: Encoding, sentence: tuple[int, int], remove: bool
) -> tuple[Int[np.ndarray, " query"], Int[np.ndarray, " rest"]] | None:
    """Returns the wordpieces of a sentence, and of the body that it is paired with.

    Args:
      body: wordpieces of a block's body.
      sentence: characters [start, end) of the sentence in the body.
      remove: whether the sentence is removed from the body.

    Returns:
      None if the sentence has no wordpieces or the rest of the body would be empty.
    """
    query = pieces_of_sentence(body.offsets, sentence)
    if query.start == query.stop:
        return None
    rest = np.delete(body.ids, query) if remove else body.ids
    return (body.ids[query], rest) if len(rest) else None


def inverse_cloze_examples(
    store: BlockStore,
    block_ids: np.ndarray,
    *,
    query_length: int = QUERY_LENGTH,
    document_length: int = DOCUMENT_LENGTH,
    removal_probability: float = REMOVAL_PROBABILITY,
    seed: int = 0,
) -> Example:
    """Returns an example for every sentence of the blocks.

    The reference implementation draws one sentence of a block each time it visits the
    block; here an epoch visits every sentence. Whether a sentence is removed depends on
    `seed`, the block and the sentence alone.

    Args:
      store: the corpus.
      block_ids: shape [block].
      query_length: wordpieces of a query.
      document_length: wordpieces of a document.
      removal_probability: probability that the sentence is removed from the document.
      seed: determines which sentences are removed.

    Returns:
      The features of `inverse_cloze_specs` along a leading axis, in the order of
      blocks and of sentences within them.

    Raises:
      BadInputError: a block id is out of range or a text cannot be read.
    """
    inverse_cloze_specs(query_length, document_length)  # Checks the lengths.
    texts = store.texts(block_ids)
    titles = store.vocabulary.encode_batch([text.title for text in texts])
    bodies = store.vocabulary.encode_batch([text.body for text in texts])
    ids, paired_titles, queries, rests = [], [], [], []
    for block, text, title, body in zip(block_ids, texts, titles, bodies, strict=True):
        for index, sentence in enumerate(text.sentences):
            remove = stable_uniform(seed, int(block), index) < removal_probability
            pair = take_sentence(body, sentence, remove)
            if pair is not None:
                ids.append(block)
                paired_titles.append(title.ids)
                queries.append(query_row(pair[0], query_length, store.vocabulary))
                rests.append(pair[1])
    document_ids, segments = document_inputs(
        from_lists(paired_titles, rests),
        document_length,
        store.vocabulary.cls,
        store.vocabulary.sep,
        np,
    )
    return {
        "query_ids": np.array(queries, np.int32).reshape(-1, query_length),
        "document_ids": document_ids,
        "document_segment_ids": segments,
        "block_ids": np.array(ids, np.int32),
    }
