"""Provides questions as text to text, for a T5 that answers them from its parameters.

This is REALM's comparison with T5 (section 4.2; Roberts et al. 2020): the same
questions and splits, no documents. Importing this module imports TensorFlow.
"""

import importlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import seqio
import tensorflow as tf

from realm_jax.data.questions import Question
from realm_jax.metrics.answers import is_right
from realm_jax.prepare.seqio_tasks import add_to_registry

TRAIN = "train"

_SIGNATURE = {
    "id": tf.TensorSpec((), tf.string),
    "inputs": tf.TensorSpec((), tf.string),
    "targets": tf.TensorSpec((), tf.string),
    "answers": tf.TensorSpec((None,), tf.string),
    "answers_are_patterns": tf.TensorSpec((), tf.int32),
}
# Private to the standard library, but no public function returns the parts of a regular
# expression.
_parse = importlib.import_module("re._parser").parse
_log = logging.getLogger(__name__)


class _UnspokenError(Exception):
    """Raised for a part of a regular expression that has no text."""


class References(NamedTuple):
    """The reference that a prediction is compared with.

    Attributes:
      id: id of the question.
      answers: all right answers.
      are_patterns: whether they are regular expressions.
    """

    id: str
    answers: tuple[str, ...]
    are_patterns: bool


def register_closed_book(
    name: str,
    questions: Sequence[Question],
    vocabulary: seqio.Vocabulary | None = None,
    *,
    prompt: str = "",
) -> str:
    """Registers the task `name`, with the splits of the questions; returns the name.

    Its examples have `inputs` (the question) and `targets` (the first answer, or a
    text that the first pattern matches), tokenized, and for evaluation `id`, `answers`
    (all of them) and `answers_are_patterns`. A question of the train split whose
    patterns give no text is left out of it; the number of these is logged.

    Args:
      name: letters, digits and underscores.
      vocabulary: vocabulary of the model; bytes by default.
      prompt: prefix of every question, such as "nq question: ".
    """
    vocabulary = vocabulary or seqio.ByteVocabulary()
    feature = seqio.Feature(vocabulary, add_eos=True)
    add_to_registry(
        name,
        source=_source(name, questions, prompt),
        preprocessors=[
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos,
        ],
        output_features={"inputs": feature, "targets": feature},
        postprocess_fn=references_or_prediction,
        metric_fns=[exact_match_percent],
    )
    return name


def references_or_prediction(
    decoded_model_output: str,
    example: Mapping[str, Any] | None = None,
    is_target: bool = False,
) -> str | References:
    """Returns what the metric compares; SeqIO calls it for targets and predictions."""
    if not is_target or example is None:
        return decoded_model_output
    return References(
        example["id"].decode(),
        tuple(answer.decode() for answer in example["answers"]),
        bool(example["answers_are_patterns"]),
    )


def exact_match_percent(
    targets: Sequence[References], predictions: Sequence[str]
) -> dict[str, float]:
    """Returns the percentage of right predictions, as T5's metrics do.

    The rules are those of the retrieving reader: `metrics.answers.is_right`.
    """
    right = [
        is_right(prediction, target.answers, target.are_patterns)
        for target, prediction in zip(targets, predictions, strict=True)
    ]
    return {"exact_match": 100.0 * float(np.mean(right))}


def text_of_pattern(pattern: str) -> str | None:
    """Returns a text that a regular expression matches; None if none is found.

    The longest text of the first alternative: "Sept?(ember)?|Feb(ruary)?" gives
    "September". A repeated wildcard becomes a space.
    """
    try:
        text = " ".join("".join(_spell(_parse(pattern))).split())
    except (re.error, _UnspokenError, OverflowError, RecursionError):
        return None
    return text if text and is_right(text, [pattern], are_patterns=True) else None


def _spell(parts: Any) -> Iterator[str]:
    """Yields the text of a parsed regular expression, part by part."""
    for kind, value in parts:
        match str(kind):
            case "LITERAL":
                yield chr(value)
            case "ANY":
                # Usually a full stop that was not escaped.
                yield "."
            case "IN":
                yield _member(value)
            case "BRANCH":
                yield from _spell(value[1][0])
            case "SUBPATTERN":
                yield from _spell(value[-1])
            case "ATOMIC_GROUP":
                yield from _spell(value)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                least, most, repeated = value
                if most > 1 and _is_anything(repeated):
                    yield " "
                else:
                    yield from "".join(_spell(repeated)) * max(least, min(most, 1))
            case "AT" | "ASSERT" | "ASSERT_NOT":
                pass
            case other:
                raise _UnspokenError(other)


def _member(items: Any) -> str:
    """Returns a character of a class like [a-z]."""
    kind, value = items[0]
    match str(kind), str(value):
        case "LITERAL", _:
            return chr(value)
        case "RANGE", _:
            return chr(value[0])
        case "CATEGORY", "CATEGORY_SPACE":
            return " "
        case "CATEGORY", "CATEGORY_DIGIT":
            return "0"
        case other:
            raise _UnspokenError(other)


def _is_anything(parts: Any) -> bool:
    """Returns whether it is `.` or an inverted class such as [^0-9]."""
    if len(parts) != 1:
        return False
    kind, value = parts[0]
    in_class = str(kind) == "IN" and str(value[0][0]) == "NEGATE"
    return in_class or str(kind) in ("ANY", "NOT_LITERAL")


def _source(
    name: str, questions: Sequence[Question], prompt: str
) -> seqio.FunctionDataSource:
    examples: dict[str, list[dict[str, Any]]] = {}
    left_out = 0
    for question in questions:
        target = _target(question)
        if target is None and question.split == TRAIN:
            left_out += 1
            continue
        example = {
            "id": question.id,
            "inputs": prompt + question.question,
            # Used only in the train split, but required in all.
            "targets": target or question.answers[0],
            "answers": list(question.answers),
            "answers_are_patterns": int(question.answers_are_patterns),
        }
        examples.setdefault(question.split, []).append(example)
    if left_out:
        _log.warning(
            "%s: left out %d questions to train on, whose patterns cannot be put into "
            "words",
            name,
            left_out,
        )

    def dataset_fn(split: str, shuffle_files: bool, seed: int | None = None):
        del shuffle_files, seed  # One shard: the task's own shuffling is enough.
        return tf.data.Dataset.from_generator(
            lambda: iter(examples[split]), output_signature=_SIGNATURE
        )

    counts = {split: len(in_split) for split, in_split in examples.items()}
    return seqio.FunctionDataSource(
        dataset_fn, splits=tuple(examples), num_input_examples=counts
    )


def _target(question: Question) -> str | None:
    if not question.answers_are_patterns:
        return question.answers[0]
    texts = (text_of_pattern(pattern) for pattern in question.answers)
    return next((text for text in texts if text), None)
