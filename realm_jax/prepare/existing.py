"""Recognises examples that are there, by what made them.

Examples record what made them (`made_by` in examples.json): the code of this package,
the settings, and for a task of the user's own the source of the user's modules. The
settings and modules must be those of the command, or it refuses: checkpoints may have
been trained on these examples, so they are never overwritten. Other code of this
package is reported, and so is what examples of an earlier release do not record.
"""

import logging
import shlex
from collections.abc import Iterable
from typing import Any

import numpy as np

from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples
from realm_jax.data.features import SENTENCE_ID
from realm_jax.errors import BadInputError
from realm_jax.prepare.corpus_tasks import CorpusTask
from realm_jax.prepare.examples import (
    TaskSettings,
    examples_folder,
    find_task,
    metadata,
    own_tasks,
)
from realm_jax.prepare.fingerprints import (
    differing_modules,
    listing_sha256,
    module_code,
    package_code,
)

MADE_BY = "made_by"
"""Entry of the metadata of examples, and of corpus.json."""

# Of a task of the user's own, which may be a mixture of any others.
_ALL_SETTINGS = (
    *("query_length", "max_masks", "validation_fraction", "seed"),
    *("inverse_cloze_query_length", "document_length"),
)
# Tasks whose examples have always recorded all that they are compared by.
_COMPLETE = ("_ict", "_salient")
_OTHERS = {
    "corpus_fingerprint": "they were made for another corpus",
    "vocabulary_fingerprint": "they are in another vocabulary",
    "settings_fingerprint": "the corpus they are from has another text or tagger",
    "questions_fingerprint": "the questions have changed since",
}
_log = logging.getLogger(__name__)


def made_by(tasks: TaskSettings, name: str) -> dict[str, Any]:
    """Returns what makes the examples of a task, as JSON values.

    A task of the user's own depends on all the settings, and on all the user's modules.
    """
    own = own_tasks(tasks).get(name)
    names = own.settings if own else _ALL_SETTINGS
    settings = {setting: getattr(tasks, setting) for setting in names}
    if tasks.seqio_cache:
        settings["seqio_cache"] = listing_sha256(f"{tasks.seqio_cache}/{name}")
    return {
        "realm_jax": package_code(),
        "settings": settings,
        "modules": {} if own else module_code(tasks.modules),
    }


def find_examples(tasks: TaskSettings, name: str, split: str) -> Examples | None:
    """Returns the examples of a split of a task, None if there are none."""
    folder = examples_folder(tasks.knowledge or tasks.corpus, name, split)
    if not folder.exists():
        return None
    examples = Examples.open(folder)
    if differences := _differences(tasks, name, split, examples):
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


def _differences(
    tasks: TaskSettings, name: str, split: str, examples: Examples
) -> list[str]:
    """Returns how the examples differ from those that this command would make."""
    own, found = own_tasks(tasks).get(name), examples.metadata
    made, now = found.get(MADE_BY), made_by(tasks, name)
    if own:
        wanted: dict[str, Any] = dict(own.provenance)
        if "seed" in own.settings:
            wanted["seed"] = tasks.seed
    else:
        # SeqIO knows what it is made from; that takes TensorFlow, and seconds.
        wanted = metadata(find_task(tasks, name), split, tasks.seed)
    if made:
        # What the provenance has is compared under its own name.
        wanted = {**now["settings"], **wanted}
        found = {**made["settings"], **found}
    elif not (own and name.endswith(_COMPLETE)):
        wanted = {key: value for key, value in wanted.items() if key in found}
    differences = [
        _OTHERS.get(key, f"their {key} is {found.get(key)!r}, not {value!r}")
        for key, value in wanted.items()
        if found.get(key) != value
    ]
    if made:
        before, after = made["modules"], now["modules"]
        differences += [
            f"the module {module} {_what_happened(module in before, module in after)}"
            for module in differing_modules(before, after)
        ]
    elif own and not differences and not _fit(own, split, examples):
        differences = ["they are of other lengths or other questions"]
    return differences


def _what_happened(was_imported: bool, is_imported: bool) -> str:
    if not was_imported:
        return "was not imported then"
    return "has changed since" if is_imported else "is not imported now"


def _fit(task: CorpusTask, split: str, examples: Examples) -> bool:
    """Returns whether examples have the configured lengths, and the same questions.

    Those that record what made them are compared by that.
    """
    specs = {name: s for name, s in task.specs.items() if name != SENTENCE_ID}
    if task.blocks is not None or examples.specs != specs:
        return examples.specs == specs
    made = task.make(task.ids(split, None))
    return all(np.array_equal(examples.features[name], made[name]) for name in made)
