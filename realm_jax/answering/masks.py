"""Fills a mask of a sentence from a corpus, as pre-training does (REALM, table 3).

A sentence has one mask: `[MASK]` once for each wordpiece that is to be guessed, side by
side, or `[MASK=words]` for words whose probability is wanted. The answer is given as
that to a question: p(y|x) is the sum over documents of p(z|x) p(y|z,x), and the null
document shows what the reader knows without any.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PyTree

from realm_jax.answering.answers import Answer, ReadDocument, mentions
from realm_jax.answering.search import CorpusSearch
from realm_jax.data.masking import MAX_MASKS, masked_example
from realm_jax.errors import BadInputError
from realm_jax.index.candidates import num_neighbours, pretrain_candidates
from realm_jax.models.bert import BertConfig
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.objectives.masked_lm import (
    Marginalization,
    MaskedLikelihood,
    marginal_likelihood,
)
from realm_jax.objectives.retrieval import retrieval_log_probs
from realm_jax.types import NULL_BLOCK, Array, Candidates, PretrainBatch

NULL_TITLE = "No document"
_MASK = re.compile(r"\[MASK(?:=([^\]]*))?\]")


def has_mask(text: str) -> bool:
    """Returns whether a text is a sentence to be filled in, not a question."""
    return _MASK.search(text) is not None


class _Sentence(NamedTuple):
    """A sentence with a mask.

    Attributes:
      words: what is masked, or None if it is to be guessed.
      count: wordpieces to be guessed.
    """

    before: str
    words: str | None
    count: int
    after: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskFiller(CorpusSearch):
    """A pre-trained model with a corpus and its index, which fill in a mask.

    Attributes:
      reader: the knowledge-augmented encoder; its parameters are `params["reader"]`.
      num_candidates: documents that are read, the null document included.
    """

    reader: KnowledgeEncoder
    num_candidates: int

    def answer(self, sentences: Sequence[str]) -> list[Answer]:
        """Fills in sentences, in the given order."""
        return [self._fill(sentence) for sentence in sentences]

    def _fill(self, sentence: str) -> Answer:
        parsed = _parse(sentence)
        batch = self._batch(sentence, parsed)
        neighbours = self.search(
            np.asarray(batch.query_ids), num_neighbours(self.num_candidates)
        )
        candidates = pretrain_candidates(
            self.corpus,
            neighbours,
            batch,
            num_candidates=self.num_candidates,
            document_length=self.lengths.document,
            joined_length=self.lengths.joined,
        )
        fill = _filler(self.retriever, self.reader.config)
        guess = parsed.words is None
        ids, scores, log_retrieval, log_candidates, log_marginal = jax.device_get(
            fill(self.params, batch, candidates, guess)
        )
        vocabulary = self.corpus.vocabulary
        text = parsed.words or vocabulary.decode(ids[0, : parsed.count])
        documents = self._documents(
            text,
            np.asarray(candidates.block_ids)[0],
            scores[0],
            log_retrieval[0],
            log_candidates[0],
        )
        return Answer(
            question=sentence,
            text=text,
            probability=math.exp(log_marginal[0]),
            log_probability=float(log_marginal[0]),
            block_id=NULL_BLOCK,
            start=0,
            end=0,
            documents=documents,
        )

    def _batch(self, sentence: str, parsed: _Sentence) -> PretrainBatch:
        """Returns the sentence as pre-training reads it, with its mask."""
        vocabulary, length = self.corpus.vocabulary, self.lengths.query
        before, words, after = (
            encoding.ids
            for encoding in vocabulary.encode_batch(
                [parsed.before, parsed.words or "", parsed.after]
            )
        )
        if parsed.words is None:
            words = np.full(parsed.count, vocabulary.mask, before.dtype)
        pieces = np.concatenate([before, words, after])
        if not 0 < len(words) <= MAX_MASKS or len(pieces) > length - 2:
            raise BadInputError(
                f"expected a sentence of at most {length - 2} wordpieces with 1 to "
                f"{MAX_MASKS} of them masked, got {len(pieces)} with {len(words)} in "
                f"{sentence!r:.80}; shorten it"
            )
        example = masked_example(
            pieces,
            len(before) + np.arange(len(words)),
            vocabulary=vocabulary,
            source_block=NULL_BLOCK,
            query_length=length,
            max_masks=MAX_MASKS,
        )
        return PretrainBatch(**{name: row[None] for name, row in example.items()})

    def _documents(
        self,
        text: str,
        block_ids: Int[np.ndarray, " candidate"],
        scores: Float[np.ndarray, " candidate"],
        log_retrieval: Float[np.ndarray, " candidate"],
        log_candidates: Float[np.ndarray, " candidate"],
    ) -> list[ReadDocument]:
        """Returns the documents by falling p(z|x), the null document among them."""
        found = []
        for i in np.argsort(-log_retrieval, kind="stable"):
            if not np.isfinite(log_retrieval[i]):
                continue
            block = int(block_ids[i])
            title, source_id, body = NULL_TITLE, "", ""
            if block != NULL_BLOCK:
                title, body, source_id, *_ = self.corpus.text(block)
            found.append(
                ReadDocument(
                    block_id=block,
                    title=title,
                    source_id=source_id,
                    text=body,
                    score=float(scores[i]),
                    probability=math.exp(log_retrieval[i]),
                    answer_probability=math.exp(log_candidates[i]),
                    places=mentions(text, body),
                )
            )
        return found


def _parse(sentence: str) -> _Sentence:
    """Returns the parts of a sentence."""
    found = list(_MASK.finditer(sentence))
    between = [
        sentence[one.end() : other.start()] for one, other in itertools.pairwise(found)
    ]
    given = [match[1] for match in found if match[1] is not None]
    is_one = not any(gap.strip() for gap in between)
    if not found or not is_one or (given and (len(found) > 1 or not given[0].strip())):
        raise BadInputError(
            "expected one mask: [MASK] for each wordpiece, side by side, or "
            f"[MASK=words], got {sentence!r:.80}"
        )
    return _Sentence(
        sentence[: found[0].start()],
        given[0].strip() if given else None,
        len(found),
        sentence[found[-1].end() :],
    )


@functools.cache
def _filler(
    config: RetrieverConfig, bert: BertConfig
) -> Callable[[PyTree, PretrainBatch, Candidates, bool], tuple[Array, ...]]:
    """Returns one jitted function per model, so that a process compiles it once."""
    retriever, reader = Retriever(config.rolled()), KnowledgeEncoder(bert.rolled())

    @jax.jit
    def fill(
        params: PyTree, batch: PretrainBatch, candidates: Candidates, guess: bool
    ) -> tuple[Array, ...]:
        read = read_masks(retriever, reader, params, batch, candidates)
        ids = jnp.where(guess, read.log_mixture.argmax(axis=-1), batch.mask_ids)
        likelihood = read.likelihood(ids, batch.mask_weights)
        return (
            ids,
            read.scores,
            read.log_retrieval,
            likelihood.log_candidates,
            likelihood.log_marginal,
        )

    return fill


class ReadMasks(NamedTuple):
    """What each document says of the masks of a sentence.

    Attributes:
      scores: f(x, z).
      log_retrieval: log p(z|x).
      log_probs: log p(v|z,x) of every wordpiece v.
    """

    scores: Float[Array, "batch candidate"]
    log_retrieval: Float[Array, "batch candidate"]
    log_probs: Float[Array, "batch candidate mask vocab"]

    @property
    def log_mixture(self) -> Float[Array, "batch mask vocab"]:
        """Log sum_z p(z|x) p(v|z,x), by which a mask is filled in."""
        joint = self.log_probs + self.log_retrieval[:, :, None, None]
        return jax.nn.logsumexp(joint, axis=1)

    def likelihood(
        self, ids: Int[Array, "batch mask"], weights: Float[Array, "batch mask"]
    ) -> MaskedLikelihood:
        """Returns the likelihood of these wordpieces, those of weight 0 left out."""
        # Compared, not gathered: the vocabulary may be split over devices.
        is_target = ids[:, None, :, None] == jnp.arange(self.log_probs.shape[-1])
        log_tokens = jnp.where(is_target, self.log_probs, 0.0).sum(axis=-1)
        return marginal_likelihood(
            self.log_retrieval, log_tokens, weights, Marginalization.PER_SPAN
        )


def read_masks(
    retriever: Retriever,
    reader: KnowledgeEncoder,
    params: PyTree,
    batch: PretrainBatch,
    candidates: Candidates,
) -> ReadMasks:
    """Embeds sentences and their candidates, and reads each document once."""
    queries, documents = cast(
        tuple[jax.Array, jax.Array],
        retriever.apply(
            {"params": params["retriever"]},
            batch.query_ids,
            candidates.document_ids,
            candidates.document_segment_ids,
        ),
    )
    logits = reader.apply(
        {"params": params["reader"]},
        candidates.joined_ids,
        candidates.joined_segment_ids,
        batch.mask_positions[:, None, :],
    )
    return ReadMasks(
        jnp.einsum("bp,bkp->bk", queries, documents),
        retrieval_log_probs(queries, documents, candidates.valid),
        jax.nn.log_softmax(cast(jax.Array, logits), axis=-1),
    )
