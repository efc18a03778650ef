"""Recognises examples that are there, by what made them.

Examples record what made them (`made_by` in examples.json): the code of this package,
the settings, and for a task of the user's own the source of the user's modules. The
settings and modules must be those of the command, or it refuses: checkpoints may have
been trained on these examples, so they are never overwritten. Other code of this
package is reported, and so is what examples of an earlier release do not record.
"""

import logging
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples
from realm_jax.data.questions import (
    pattern_length,
    question_examples,
    questions_fingerprint,
    read_questions,
)
from realm_jax.errors import BadInputError
from realm_jax.prepare.examples import TaskSettings, examples_folder, register
from realm_jax.prepare.fingerprints import (
    listing_sha256,
    module_code,
    package_code,
)

MADE_BY = "made_by"
"""Entry of the metadata of examples, and of corpus.json."""

_MASKS = ("query_length", "max_masks", "validation_fraction", "seed")
_PAIRS = (
    *("inverse_cloze_query_length", "document_length"),
    *("validation_fraction", "seed"),
)
# Task of the corpus -> the settings that its examples depend on.
_SETTINGS = {
    "blocks": ("document_length", "validation_fraction"),
    "ict": _PAIRS,
    "salient": _MASKS,
    "terms": _MASKS,
    "random_tokens": _MASKS,
    "random_spans": _MASKS,
    "questions": ("query_length",),
}
_ALL_SETTINGS = (*dict.fromkeys((*_MASKS, *_PAIRS)),)
# Tasks whose examples have always recorded all that they are compared by.
_DERIVED = ("ict", "salient")
_OTHERS = {
    "corpus_fingerprint": "they were made for another corpus",
    "vocabulary_fingerprint": "they are in another vocabulary",
    "settings_fingerprint": "the corpus they are from has another text or tagger",
    "questions_fingerprint": "the questions have changed since",
}
_log = logging.getLogger(__name__)


def made_by(tasks: TaskSettings, task: str) -> dict[str, Any]:
    """Returns what makes the examples of a task, as JSON values.

    A task of the user's own, which may be a mixture of any others, depends on all the
    settings, and on all the user's modules.
    """
    suffix = _suffix(tasks, task)
    names = _SETTINGS.get(suffix, _ALL_SETTINGS)
    settings = {name: getattr(tasks, name) for name in names}
    if tasks.seqio_cache:
        settings["seqio_cache"] = listing_sha256(f"{tasks.seqio_cache}/{task}")
    return {
        "realm_jax": package_code(),
        "settings": settings,
        "modules": {} if suffix in _SETTINGS else module_code(tasks.modules),
    }


def find_examples(
    tasks: TaskSettings, store: BlockStore, task: str, split: str
) -> Examples | None:
    """Returns the examples of a split of a task, None if there are none."""
    folder = examples_folder(tasks.knowledge or tasks.corpus, task, split)
    if not folder.exists():
        return None
    examples = Examples.open(folder)
    differences = _differences(tasks, store, task, examples)
    if differences:
        raise BadInputError(
            f"expected {folder} to be absent or made by this code and these settings, "
            f"but {'; '.join(differences)}; to have them made again, remove the "
            f"folder and run the same command: rm -r {shlex.quote(str(folder.parent))}"
        )
    return examples


def require_no_other_splits(tasks: TaskSettings, task: str, splits: set[str]) -> None:
    """Requires that there are no examples of splits that a task no longer has."""
    folder = examples_folder(tasks.knowledge or tasks.corpus, task, "train").parent
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if others := sorted(there - splits):
        raise BadInputError(
            f"expected the splits {', '.join(sorted(splits))} of {tasks.questions} in "
            f"{folder}, got {', '.join(others)} too, of other questions; to have them "
            "made again, remove the folder and run the same command: rm -r "
            f"{shlex.quote(str(folder))}"
        )


def report_other_code(store: BlockStore, found: Iterable[Examples]) -> None:
    """Logs which of what is there other code made, or code that is not known."""
    made = {str(store.directory): store.info.get(MADE_BY)}
    for examples in found:
        by = examples.metadata.get(MADE_BY)
        made[str(examples.directory.parent)] = by and by["realm_jax"]
    unknown = [place for place, by in made.items() if not by]
    others = [place for place, by in made.items() if by and by != package_code()]
    if unknown:
        _log.warning(
            "kept %s: an earlier release, or a call from Python, did not record the "
            "code and settings that made them, so whether they are those of this "
            "command is unknown",
            ", ".join(unknown),
        )
    if others:
        _log.warning(
            "kept %s: other code of realm_jax made them than this; what is removed is "
            "made again",
            ", ".join(others),
        )


def _suffix(tasks: TaskSettings, task: str) -> str:
    """Returns which of the corpus's own tasks it is; "" for one of the user's own."""
    name, _, suffix = task.rpartition(f"{tasks.name}_")
    is_own = suffix in _SETTINGS and (suffix != "questions" or tasks.questions)
    return suffix if is_own and not name else ""


def _differences(
    tasks: TaskSettings, store: BlockStore, task: str, examples: Examples
) -> list[str]:
    """Returns how the examples differ from those that this command would make."""
    metadata = examples.metadata
    wanted = _wanted_metadata(tasks, store, task, str(metadata.get("split")))
    made, now = metadata.get(MADE_BY), made_by(tasks, task)
    recorded = wanted if made or _suffix(tasks, task) in _DERIVED else metadata
    found = [
        _OTHERS.get(name, f"their {name} is {metadata.get(name)!r}, not {value!r}")
        for name, value in wanted.items()
        if name in recorded and metadata.get(name) != value
    ]
    if made:
        found += _different_settings(made["settings"], now["settings"], wanted)
        found += _different_modules(made["modules"], now["modules"])
    if not found and not made and not _fit(tasks, store, task, examples):
        found = ["they are of other lengths or other questions"]
    return found


def _wanted_metadata(
    tasks: TaskSettings, store: BlockStore, task: str, split: str
) -> dict[str, Any]:
    """Returns the fingerprints that the examples must have been made with."""
    suffix = _suffix(tasks, task)
    if suffix not in _SETTINGS:
        # The task itself knows; to register it takes TensorFlow, and seconds.
        register(tasks)
        from realm_jax.prepare import materialise

        return materialise.metadata(task, split, tasks.seed)
    wanted: dict[str, Any] = {"vocabulary_fingerprint": store.vocabulary.fingerprint}
    if suffix == "questions":
        fingerprint = questions_fingerprint(read_questions(tasks.questions))
        return wanted | {"questions_fingerprint": fingerprint}
    searched = BlockStore.open(tasks.knowledge) if tasks.knowledge else store
    return wanted | {
        "corpus_fingerprint": searched.fingerprint,
        # Covers the spans, which the corpus fingerprint leaves out.
        "settings_fingerprint": store.info.get("settings_fingerprint", ""),
        "validation_fraction": tasks.validation_fraction,
        "seed": tasks.seed,
    }


def _different_settings(
    made: Mapping[str, Any], now: Mapping[str, Any], compared: Mapping[str, Any]
) -> list[str]:
    return [
        f"their {name} is {made.get(name)!r}, not {value!r}"
        for name, value in now.items()
        if made.get(name) != value and name not in compared
    ]


def _different_modules(made: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"the module {name} {_what_happened(made.get(name), now.get(name))}"
        for name in sorted({*made, *now})
        if made.get(name) != now.get(name)
    ]


def _what_happened(before: str | None, after: str | None) -> str:
    if before is None:
        return "was not imported then"
    return "is not imported now" if after is None else "has changed since"


def _fit(tasks: TaskSettings, store: BlockStore, task: str, examples: Examples) -> bool:
    """Returns whether examples have the configured lengths, and the same questions.

    Those that record what made them are compared by that.
    """
    features, suffix = examples.features, _suffix(tasks, task)
    if suffix == "ict":
        return (features["query_ids"].shape[1], features["document_ids"].shape[1]) == (
            tasks.inverse_cloze_query_length,
            tasks.document_length,
        )
    if suffix == "salient":
        return (features["query_ids"].shape[1], features["mask_ids"].shape[1]) == (
            tasks.query_length,
            tasks.max_masks,
        )
    if suffix != "questions":
        return True
    questions = read_questions(tasks.questions)
    split = examples.metadata["split"]
    made = question_examples(
        [question for question in questions if question.split == split],
        store.vocabulary,
        query_length=tasks.query_length,
        max_pattern_length=pattern_length(questions),
    )
    return features.keys() == made.keys() and all(
        np.array_equal(features[name], made[name]) for name in made
    )
