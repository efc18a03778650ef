"""Examples that are there already: where they lie, and whether they are the right ones.

A corpus's own tasks are `<name>_ict`, `<name>_salient` and `<name>_questions`.
"""

import pathlib

import numpy as np

from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples
from realm_jax.data.questions import pattern_length, question_examples, read_questions
from realm_jax.errors import BadInputError
from tasks.make_examples import TaskSettings


def examples_folder(corpus: str, task: str, split: str) -> pathlib.Path:
    """Where the examples of a task and split lie."""
    return pathlib.Path(corpus) / "examples" / task / split


def are_there(tasks: TaskSettings, store: BlockStore, task: str, split: str) -> bool:
    """Whether the examples of these very settings exist already.

    Args:
      tasks: how they are made.
      store: the corpus whose sentences they are of.
      task: its name.
      split: of the task.

    Raises:
      BadInputError: others do, and nothing is overwritten silently.
    """
    folder = examples_folder(tasks.knowledge or tasks.corpus, task, split)
    if not folder.exists():
        return False
    expect: dict[str, object] = {"vocabulary_fingerprint": store.vocabulary.fingerprint}
    if task in (f"{tasks.name}_ict", f"{tasks.name}_salient"):
        expect["corpus_fingerprint"] = (
            BlockStore.open(tasks.knowledge) if tasks.knowledge else store
        ).fingerprint
        # The spans too: the corpus fingerprint does not know them.
        expect["settings_fingerprint"] = store.info.get("settings_fingerprint", "")
        expect["validation_fraction"] = tasks.validation_fraction
        expect["seed"] = tasks.seed
    examples = Examples.open(folder, expect=expect)
    if not _fit(tasks, store, task, split, examples):
        raise BadInputError(
            f"expected {folder} to be absent or made with these settings, but its "
            "examples are of other lengths or other questions; remove it to have it "
            "made again"
        )
    return True


def _fit(
    tasks: TaskSettings, store: BlockStore, task: str, split: str, examples: Examples
) -> bool:
    """Whether examples have the lengths, and questions the contents, wanted."""
    features = examples.features
    if task == f"{tasks.name}_ict":
        return (features["query_ids"].shape[1], features["document_ids"].shape[1]) == (
            tasks.inverse_cloze_query_length,
            tasks.document_length,
        )
    if task == f"{tasks.name}_salient":
        return (features["query_ids"].shape[1], features["mask_ids"].shape[1]) == (
            tasks.query_length,
            tasks.max_masks,
        )
    if task != f"{tasks.name}_questions":
        return True
    made = question_examples(
        read_questions(tasks.questions, split),
        store.vocabulary,
        query_length=tasks.query_length,
        max_pattern_length=pattern_length(read_questions(tasks.questions)),
    )
    return features.keys() == made.keys() and all(
        np.array_equal(features[name], made[name]) for name in made
    )
