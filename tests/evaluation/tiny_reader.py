"""What the tests of answering share; the models are in conftest.py."""

import re

import numpy as np

from realm_jax.answering.reader import Answerer
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.types import Lengths, Neighbours

LENGTHS = Lengths(query=16, document=56, joined=64)
NUM_READ = 3
TOWNS = ("Ansk", "Brel", "Čudo", "Dorm", "Élan", "Fosk", "Gant", "Hult")


class FixedSearcher:
    """Finds given blocks: a row of ids for each question, or one row for all."""

    step = 0

    def __init__(self, ids, num_blocks):
        self.ids, self.num_blocks = np.atleast_2d(ids).astype(int), num_blocks

    def search(self, query_embeddings, k):
        rows = np.arange(len(query_embeddings)) % len(self.ids)
        ids = np.pad(self.ids, ((0, 0), (0, k)), constant_values=-1)[rows, :k]
        return Neighbours(ids, np.where(ids >= 0, 1.0, -np.inf).astype(np.float32))


def is_whole_words(text, start, end):
    """Whether a part of a text is; the towns' articles have no words but plain ones."""
    words = [match.span() for match in re.finditer(r"\w+", text)]
    return start in {begin for begin, _ in words} and end in {stop for _, stop in words}


def make_answerer(models, corpus, searcher, **changes):
    values = {
        "reader": models.reader,
        "num_read": NUM_READ,
        "marginalization": AnswerMarginalization.JOINT_SOFTMAX,
    }
    return Answerer(
        retriever=models.retriever.config,
        params=models.params,
        corpus=corpus,
        searcher=searcher,
        lengths=LENGTHS,
        **(values | changes),
    )
