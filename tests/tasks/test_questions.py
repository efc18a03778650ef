import numpy as np
import pytest
import seqio

from realm_jax.data.questions import decode_patterns, question_examples, read_questions
from realm_jax.prepare.materialise import materialise
from tasks.questions import register_questions
from tests.json_lines import write_lines
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture
def path(tmp_path):
    lines = [
        {
            "id": f"q{i}",
            "question": f"Who founded Town {i}?",
            "answers": ["Karel Dorm"],
            "split": "dev" if i % 3 == 0 else "train",
        }
        for i in range(10)
    ]
    return write_lines(tmp_path / "questions.jsonl", lines)


@pytest.fixture
def trec(tmp_path):
    """A published file of two questions whose answers are patterns."""
    path = tmp_path / "large2180-train.tsv"
    path.write_text(
        "1\tfactoid\tWho founded Town 9?\t(karel )?dorm\n2\tfactoid\tWhen?\t17\\d3\n"
    )
    return path


def test_the_task_holds_what_the_plain_function_makes(tmp_path, path, store):
    register_questions("who", path, store.vocabulary, query_length=24)
    task = seqio.get_mixture_or_task("who")
    assert set(task.splits) == {"train", "dev"}
    assert task.num_input_examples("dev") == 4
    for split in task.splits:
        examples = materialise("who", split, tmp_path / split)
        expected = question_examples(
            read_questions(path, split), store.vocabulary, query_length=24
        )
        assert examples.features.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(examples.features[name], array)
        fingerprint = examples.metadata["vocabulary_fingerprint"]
        assert fingerprint == store.vocabulary.fingerprint


def test_the_same_questions_are_a_closed_book_task(path, store):
    register_questions("who", path, store.vocabulary, prompt="who: ")
    task = seqio.get_mixture_or_task("who_closed_book")
    counts = {split: task.num_input_examples(split) for split in task.splits}
    assert counts == {"dev": 4, "train": 6}
    (example, *_) = task.get_dataset(split="dev", shuffle=False).as_numpy_iterator()
    assert example["inputs_pretokenized"] == b"who: Who founded Town 0?"
    assert example["targets_pretokenized"] == b"Karel Dorm"


def test_a_published_set_is_registered_by_its_kind(tmp_path, store):
    lines = [{"question": f"who drew town {i}", "answer": ["Brel"]} for i in range(100)]
    for split in ("train", "dev"):
        write_lines(tmp_path / f"NQ-open.{split}.jsonl", lines)
    register_questions("nq", tmp_path, store.vocabulary, "nq_open")
    for name in ("nq", "nq_closed_book"):
        task = seqio.get_mixture_or_task(name)
        counts = {split: task.num_input_examples(split) for split in task.splits}
        assert counts.keys() == {"train", "dev", "test"}
        assert counts["train"] + counts["dev"] == counts["test"] == 100
        assert 0 < counts["dev"] < 30
    examples = materialise("nq", "dev", tmp_path / "dev")
    assert "answer_patterns" not in examples.features


def test_patterns_have_room(tmp_path, trec, store):
    # With a dev split named, none is taken from the other questions.
    register_questions("trec", {"dev": trec}, store.vocabulary, "curated_trec")
    batch = materialise("trec", "dev", tmp_path / "dev").batch(np.arange(2))
    found = list(map(decode_patterns, batch["answer_patterns"]))
    assert found == [("(karel )?dorm",), ("17\\d3",)]


def test_sets_with_and_without_patterns_can_be_mixed(path, trec, store):
    room = {"max_pattern_length": 16}
    register_questions("who", path, store.vocabulary, **room)
    register_questions("trec", trec.parent, store.vocabulary, "curated_trec", **room)
    seqio.MixtureRegistry.add("both", ["who", "trec"], default_rate=1.0)
    dataset = seqio.get_mixture_or_task("both").get_dataset(
        split="train", shuffle=False, num_epochs=1
    )
    kinds = {
        (bool(e["answer_ids"].any()), bool(e["answer_patterns"].any()))
        for e in dataset.as_numpy_iterator()
    }
    assert kinds == {(True, False), (False, True)}


def test_a_pattern_that_is_too_long_is_refused(trec, store):
    source = ("trec", trec.parent, store.vocabulary, "curated_trec")
    with refused("at most 4 characters"):
        register_questions(*source, max_pattern_length=4)
    assert "trec" not in seqio.TaskRegistry.names()
