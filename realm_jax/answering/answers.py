"""What is found and answered, for the library, the commands, the page, the report."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

Characters = tuple[int, int]
"""Range [start, end) of characters in a block's body."""


def mentions(answer: str, body: str) -> list[Characters]:
    """Returns where an answer stands in a body, in any case and not inside a word."""
    if not answer.strip():
        return []
    pattern = rf"(?<!\w){re.escape(answer)}(?!\w)"
    return [match.span() for match in re.finditer(pattern, body, re.IGNORECASE)]


@dataclasses.dataclass(frozen=True)
class Document:
    """A block of the corpus that was retrieved for a text.

    Attributes:
      score: f(x, z), the inner product of the two embeddings; in a hybrid search the
        sum of reciprocal ranks.
    """

    block_id: int
    title: str
    source_id: str
    text: str
    score: float

    def as_json(self) -> dict[str, Any]:
        """Returns the document as commands and page give it to programs."""
        return {
            "block": self.block_id,
            "title": self.title,
            "source_id": self.source_id,
            "passage": self.text,
            "score": self.score,
        }


@dataclasses.dataclass(frozen=True)
class ReadDocument(Document):
    """A block that was read for a question, perhaps only its beginning.

    Attributes:
      probability: p(z|x), among the blocks that were read; with `joint_softmax` the
        reader has a part in it.
      answer_probability: p(y|z,x), summed over all spans of whole words with the
        answer's wordpieces.
      places: the mentions of the answer in `text`, in order.
    """

    probability: float
    answer_probability: float
    places: Sequence[Characters]

    def as_json(self) -> dict[str, Any]:
        """Returns the document as `Document.as_json`, with what reading it gave."""
        return {
            **super().as_json(),
            "answer_at": [list(place) for place in self.places],
            "document_probability": self.probability,
            "answer_probability": self.answer_probability,
        }


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a question, with its sources.

    Attributes:
      text: the answer, in the characters of the document; "" if nothing was found.
      probability: p(y|x), the sum of `probability * answer_probability` over all blocks
        that were read, including those not in `documents`.
      log_probability: log p(z, span|x) of the best span alone; -inf if there was none.
      block_id: the block that contains this span; -1 if there was none.
      start: its first character in the block's body.
      end: one past its last character.
      documents: the best of the blocks that were read, by `score`, best first.
    """

    question: str
    text: str
    probability: float
    log_probability: float
    block_id: int
    start: int
    end: int
    documents: Sequence[ReadDocument]
