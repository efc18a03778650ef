import json

import numpy as np
import pytest
import seqio

from realm_jax.data.questions import question_examples, read_questions
from realm_jax.errors import BadInputError
from tasks.materialise import materialise
from tasks.questions import register_questions

pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "questions.jsonl"
    lines = [
        {
            "id": f"q{i}",
            "question": f"Who founded Town {i}?",
            "answers": ["Karel Dorm"],
            "split": "dev" if i % 3 == 0 else "train",
        }
        for i in range(10)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize("split", ["train", "dev"])
def test_the_task_holds_what_the_plain_function_makes(tmp_path, path, store, split):
    register_questions("who", path, store.vocabulary, query_length=24)
    examples = materialise("who", split, tmp_path / split)
    expected = question_examples(
        read_questions(path, split), store.vocabulary, query_length=24
    )
    assert examples.features.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(examples.features[name], array)
    fingerprint = examples.metadata["vocabulary_fingerprint"]
    assert fingerprint == store.vocabulary.fingerprint


def test_splits_are_those_of_the_file(path, store):
    register_questions("who", path, store.vocabulary)
    task = seqio.get_mixture_or_task("who")
    assert set(task.splits) == {"train", "dev"}
    assert task.num_input_examples("dev") == 4


def test_a_missing_file_is_refused(tmp_path, store):
    with pytest.raises(BadInputError, match="cannot be read"):
        register_questions("who", tmp_path / "nowhere.jsonl", store.vocabulary)
