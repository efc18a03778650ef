"""Estimates the size of a corpus before it is prepared, by the first parts of its text.

The planner asks for it where a chain prepares the corpus that its later stages read.
"""

import threading

from realm_jax.data.corpus_size import CorpusSize
from realm_jax.data.features import FeatureSpecs
from realm_jax.data.inverse_cloze import inverse_cloze_specs
from realm_jax.data.masking import pretrain_specs
from realm_jax.data.questions import question_specs
from realm_jax.data.tokenizer_files import load_vocabulary
from realm_jax.errors import BadInputError
from realm_jax.prepare.first_chain import text_size
from realm_jax.prepare.prepare import PrepareConfig
from realm_jax.prepare.text_sample import MASKS, TextSample

# [CLS] and two [SEP].
_SPECIAL = 3


def expected_size(config: PrepareConfig) -> CorpusSize | None:
    """Returns the size of the corpus that a configuration makes.

    None if its text is not on this machine, or cannot be read.
    """
    if "://" in config.source or config.source.startswith("tfds:"):
        return None
    try:
        sample = TextSample.read(config.source, threading.Event())
        vocab_size = config.vocabulary_size
        if config.vocabulary:
            vocab_size = load_vocabulary(config.vocabulary).size
    except BadInputError:
        return None
    text = text_size(sample)
    if not text.documents:
        return None
    num_blocks = text.blocks_of(config.chunk_length)
    return CorpusSize(
        num_blocks,
        vocab_size,
        min(config.chunk_length, text.pieces / num_blocks + _SPECIAL),
        source="of SOURCE, an estimate",
        longest=config.chunk_length - _SPECIAL,
        specs=_specs(config),
    )


def _specs(config: PrepareConfig) -> dict[str, FeatureSpecs]:
    """Returns the features of the examples of each of the corpus's own tasks."""
    masked = pretrain_specs(config.query_length, config.max_masks)
    name = config.name
    return {
        **{f"{name}_{masks}": masked for masks in MASKS},
        f"{name}_ict": inverse_cloze_specs(
            config.inverse_cloze_query_length, config.chunk_length
        ),
        f"{name}_questions": question_specs(config.query_length),
    }
