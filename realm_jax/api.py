"""The library interface: opens a trained model from its directory, and its corpus.

    import realm_jax

    model = realm_jax.load("runs/quickstart/finetune")
    answer = model.answer("Who commissioned the Taj Mahal?")
    print(answer.text, answer.probability)
    for document in answer.documents:
        print(document.title, document.probability, document.answer_probability)

A model that is not fine-tuned yet has no reader: it searches and embeds, and does not
answer.

`realm_jax` exports these names and imports this module when one is first used. It is a
thin wrapper of `evaluation/`: the answers are those of `realm ask`, from the version of
the corpus that was opened. No gin file is read.
"""

import dataclasses
import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, overload

import numpy as np
from jaxtyping import Float

from realm_jax.answering.answers import Answer, Document
from realm_jax.answering.hybrid import DEPTH, BM25Index, fuse
from realm_jax.answering.reader import Answerer
from realm_jax.answering.search import CorpusSearch
from realm_jax.data.blocks import BlockStore
from realm_jax.errors import BadInputError
from realm_jax.evaluation.ask import require_question
from realm_jax.evaluation.recorded import Overrides
from realm_jax.evaluation.searching import open_retriever
from realm_jax.index.searchers import Searcher

Path = str | os.PathLike[str]
SearchT = TypeVar("SearchT", bound=CorpusSearch)


class Model:
    """A trained model over its corpus and index; `load` opens one.

    The first call of a method compiles. Calls run one at a time.

    Attributes:
      corpus: the blocks that are searched.
      num_read: number of blocks read per question; 0 without a reader.
    """

    def __init__(self, search: CorpusSearch):
        self._search = search
        self.corpus = search.corpus
        is_read = isinstance(search, Answerer)
        self.num_read = search.num_read if is_read else 0

    @overload
    def answer(
        self, questions: str, k: int | None = None, *, hybrid: bool = False
    ) -> Answer: ...

    @overload
    def answer(
        self, questions: Iterable[str], k: int | None = None, *, hybrid: bool = False
    ) -> list[Answer]: ...

    def answer(
        self,
        questions: str | Iterable[str],
        k: int | None = None,
        *,
        hybrid: bool = False,
    ) -> Answer | list[Answer]:
        """Answers a question, or several in batches: a list in their order.

            model.answer("Who commissioned the Taj Mahal?").text  # "Shah Jahan"
            [a.text for a in model.answer(["Who ...?", "When ...?"], k=1)]

        Only a fine-tuned model answers. Text beyond its length is cut. `k` documents
        are listed with each answer, 1 to `num_read`; None for all. It does not change
        the answer, which is from all blocks that were read.

        A `hybrid` answer is read from the blocks with the highest sum of f(x, z) and
        BM25's score (`answering/hybrid.py`), and `score` is that sum.
        """
        if not isinstance(self._search, Answerer):
            raise BadInputError(
                "expected a fine-tuned model to answer with, got one without a reader, "
                "which can search and embed; fine-tune it with `realm finetune`"
            )
        texts, single = _texts(questions)
        k = require_within(self.num_read if k is None else k, self.num_read, "read")
        # An empty list would make a batch of a shape the models cannot take.
        answerer = _sized(self._search, texts)
        if hybrid:
            answerer = dataclasses.replace(answerer, words=self._bm25)
        found = answerer.answer(texts) if texts else []
        answers = [
            dataclasses.replace(answer, documents=answer.documents[:k])
            for answer in found
        ]
        return answers[0] if single else answers

    def embed(self, texts: str | Iterable[str]) -> Float[np.ndarray, "... projection"]:
        """Embeds queries with the query tower: float32 [text, projection].

            model.embed(["Who ...?", "When ...?"]).shape  # (2, 128)

        A single text gives [projection]; text beyond the model's length is cut. The
        inner product with a block's embedding in the index is the block's score.
        """
        checked, single = _texts(texts)
        if not checked:
            return np.zeros((0, self._search.retriever.projection_size), np.float32)
        search = _sized(self._search, checked)
        embeddings = search.embed(search.question_ids(checked))
        return embeddings[0] if single else embeddings

    @overload
    def search(
        self, texts: str, k: int = 5, *, hybrid: bool = False
    ) -> list[Document]: ...

    @overload
    def search(
        self, texts: Iterable[str], k: int = 5, *, hybrid: bool = False
    ) -> list[list[Document]]: ...

    def search(
        self, texts: str | Iterable[str], k: int = 5, *, hybrid: bool = False
    ) -> list[Document] | list[list[Document]]:
        """Finds the blocks with the largest inner product, without reading them.

            for document in model.search("the Taj Mahal", k=3):
                print(document.score, document.title)

        Text beyond the model's length is cut. Returns the k best documents of one text,
        1 to `corpus.num_blocks`, best first; a list of such lists for several. An
        approximate searcher may find fewer.

        A `hybrid` search fuses what is found with what BM25 finds, and scores are sums
        of reciprocal ranks (`answering/hybrid.py`). The first one counts the words of
        the whole corpus, which stay in memory.
        """
        checked, single = _texts(texts)
        k = require_within(k, self.corpus.num_blocks, "in the corpus")
        if not checked:
            return []
        search = _sized(self._search, checked)
        depth = min(max(k, DEPTH), self.corpus.num_blocks) if hybrid else k
        found = search.search(search.question_ids(checked), depth)
        if hybrid:
            by_words = self._bm25.search(checked, depth)
            found = fuse(np.asarray(found.ids), np.asarray(by_words.ids), k)
        documents = [
            search.documents(ids, scores)
            for ids, scores in zip(found.ids, found.scores, strict=True)
        ]
        return documents[0] if single else documents

    @functools.cached_property
    def _bm25(self) -> BM25Index:
        return BM25Index(self.corpus)

    def with_searcher(self, searcher: Searcher) -> "Model":
        """Returns the same model with another index of its corpus.

            model.with_searcher(MySearcher(embeddings)).answer("Who ...?")

        The searcher has the same embeddings, block i in row i; see
        `examples/own_searcher.py`.
        """
        if searcher.num_blocks != self.corpus.num_blocks:
            raise BadInputError(
                f"expected a searcher of the corpus's {self.corpus.num_blocks} blocks, "
                f"got one of {searcher.num_blocks}; make it of this corpus's index"
            )
        other = Model(dataclasses.replace(self._search, searcher=searcher))
        # Words that were counted are those of the same corpus.
        vars(other).update({k: v for k, v in vars(self).items() if k == "_bm25"})
        return other


def load(
    model_dir: Path,
    corpus: Path | BlockStore | None = None,
    *,
    searcher: str | None = None,
    num_read: int | None = None,
    retrieval_weight: float | None = None,
    pretrained: Path | None = None,
    checkpoint: str = "last",
    allow_corpus_mismatch: bool = False,
    batch_size: int = 8,
) -> Model:
    """Opens a trained model, with its index.

        model = realm_jax.load("runs/quickstart")

    A fine-tuned model answers, searches and embeds. What `realm pretrain` or `realm
    warm-start` has trained searches and embeds; if it has no index of the corpus, that
    is built in its directory, which embeds the whole corpus once.

    Sizes, lengths, temperature, corpus and searcher are those that the run
    recorded. An older run, which did not record the last two, needs `num_read`,
    and `corpus` if that is not beside the model.

    Args:
      model_dir: folder or gs:// of a finished run, or of a chain, whose last stage is
        opened, or what `realm adapt` has chosen.
      corpus: the prepared corpus or a later version of it, or its directory; None for
        the one beside the model, or the recorded one.
      searcher: "device" (exact) or "scann"; None for the recorded one.
      num_read: number of blocks that a fine-tuned model reads per question; None for
        the recorded number.
      retrieval_weight: factor of f(x, z) where an answer combines it with the reader's
        logits; None for the recorded one.
      pretrained: the model directory that fine-tuning started from, which embeds
        another corpus for a model with one tower (`PRETRAINED` of `realm ask`).
      checkpoint: "last" or "best", of a run that is not fine-tuned.
      allow_corpus_mismatch: whether `corpus` may differ from the one the model was
        trained on, in the same vocabulary. Its index is then built in `model_dir`, if
        it does not exist: that embeds the whole corpus.
      batch_size: number of questions searched and read at once, if there are several.
    """
    if batch_size < 1:
        raise BadInputError(
            f"expected a batch_size of at least 1 question, got {batch_size}; raise it"
        )
    is_open = isinstance(corpus, BlockStore)
    place = corpus.directory if is_open else corpus
    given = Overrides(
        corpus="" if place is None else os.fspath(place),
        pretrained="" if pretrained is None else os.fspath(pretrained),
        num_read=num_read,
        retrieval_weight=retrieval_weight,
        searcher=searcher or "",
        allow_corpus_mismatch=allow_corpus_mismatch,
    )
    model, store = open_retriever(
        os.fspath(model_dir),
        given,
        corpus=corpus if is_open else None,
        checkpoint=checkpoint,
        option="corpus=",
    )
    return Model(model.corpus_search(store, model.index(store), batch_size))


def open_corpus(path: Path) -> BlockStore:
    """Opens a corpus that `realm prepare` has made; reads no text yet.

        corpus = realm_jax.open_corpus("runs/quickstart/corpus")
        corpus.num_blocks, corpus.text(0).title, corpus.text(0).body

    A missing or truncated file is a `BadInputError`.
    """
    return BlockStore.open(path)


def _texts(texts: Any) -> tuple[list[str], bool]:
    """Returns checked texts, and whether a single one was given."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        return [require_question(texts)], True
    return [require_question(text) for text in texts], False


def _sized(search: SearchT, texts: Sequence[str]) -> SearchT:
    """Returns what searches for these texts; one text is not padded to a batch."""
    return search if len(texts) > 1 else dataclasses.replace(search, batch_size=1)


def require_within(k: int, most: int, where: str) -> int:
    """Returns a number of blocks, of which there are so many in a place."""
    if not isinstance(k, int | np.integer) or not 1 <= k <= most:
        raise BadInputError(
            f"expected k from 1 to {most}, the blocks {where}, got {k!r}; change it"
        )
    return int(k)
