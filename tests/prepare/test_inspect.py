"""What is said of registered tasks, against the corpus they are made of."""

import json
import re
import shutil

import numpy as np
import pytest
import seqio
import tensorflow as tf

from realm_jax.data.documents import is_held_out
from realm_jax.data.wordpiece import WordPiece
from realm_jax.manifests import seal, unseal
from realm_jax.prepare import inspect
from realm_jax.prepare.materialise import materialise
from tasks import corpora
from tasks.questions import register_questions
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("towns")


def plain(text):
    return text.lower().replace(" ", "").replace("##", "")


def without_brackets(text):
    return plain(text).replace("[", "").replace("]", "")


def field(lines, name):
    [found] = [line.removeprefix(name) for line in lines if line.split()[0] == name]
    return found.lstrip(" ")


def examples_of(name, split):
    dataset = seqio.TaskRegistry.get(name).get_dataset(split=split, shuffle=False)
    return list(dataset.as_numpy_iterator())


def rows_of(name):
    return {row.split: row.content for row in inspect.summaries([name])}


def test_summaries_list_every_task_with_its_splits_and_counts(store, towns):
    seqio.MixtureRegistry.add("mixed", ["towns_salient", "towns_random_spans"], 1.0)
    rows = inspect.summaries()
    assert {row.task for row in rows} >= {*towns, "mixed"}
    assert [row.task for row in rows] == sorted(row.task for row in rows)
    held = [is_held_out(store.text(i).source_id, 0.2) for i in range(store.num_blocks)]
    for name in towns:
        assert rows_of(name) == {
            "train": f"{held.count(False):,} blocks",
            "validation": f"{held.count(True):,} blocks",
        }
    assert set(rows_of("mixed").values()) == {
        "mixture of towns_random_spans, towns_salient"
    }
    corpora.register("whole", store.directory, validation_fraction=0.0)
    assert rows_of("whole_ict")["validation"] == "0 blocks"
    with refused("got 'nothing'"):
        inspect.summaries(["nothing"])


def test_large_corpora_are_not_read_to_be_counted(monkeypatch):
    store = seqio.TaskRegistry.get("towns_salient").source.store
    read, texts = set(), store.texts

    def reading(block_ids):
        read.update(int(block) for block in block_ids)
        return texts(block_ids)

    # The first examples need one shard of the corpus.
    monkeypatch.setattr(store, "texts", reading)
    assert len(list(inspect.show("towns_salient", "train", 2))) == 2
    assert 0 < len(read) <= store.num_blocks / 5 + 1
    monkeypatch.setattr(inspect, "_MAX_COUNTED_BLOCKS", 3)
    monkeypatch.setattr(store, "texts", None)
    assert rows_of("towns_blocks")["train"] == f"a share of {store.num_blocks:,} blocks"


def test_a_prepared_corpus_is_registered_as_it_was_prepared(store, tmp_path):
    copied = shutil.copytree(store.directory, tmp_path / "corpus")
    masks, pairs = {"max_masks": 3}, {"inverse_cloze_query_length": 20}
    lengths = {"query_length": 24, "document_length": 36, **masks, **pairs}
    settings = {"validation_fraction": 0.3, "seed": 4}
    corpora.register("made", copied, **lengths, **settings)
    written = {
        task: materialise(
            f"made_{task}", "train", copied / f"examples/town_{task}/train"
        )
        for task in ("salient", "ict")
    }
    # `prepare` keeps its seed with the examples.
    path = copied / "examples/town_salient/train/examples.json"
    info = unseal(path.read_bytes())
    info["metadata"] |= settings
    path.write_bytes(seal(info))
    assert "town_random_tokens" in inspect.register_prepared("town", copied)
    names = ("made", "town")
    for task in ("blocks", "ict", "salient", "random_tokens", "random_spans"):
        for split in ("train", "validation"):
            made, again = (examples_of(f"{name}_{task}", split) for name in names)
            assert made
            np.testing.assert_equal(again, made)
    starts = written["salient"].sentence_starts
    assert starts is not None
    sentences = {"salient": f" of {len(starts) - 1:,} sentences", "ict": ""}
    for task, prepared in written.items():
        found = rows_of(f"town_{task}")
        count = f"{len(prepared):,} examples{sentences[task]}"
        assert found["train"].endswith(f" blocks, {count} prepared")
        assert found["validation"].endswith(" blocks")
    # Without examples documents have the length of blocks.
    inspect.register_prepared("bare", store.directory)
    features = next(inspect._examples(seqio.TaskRegistry.get("bare_ict"), "train", 1))
    assert features["document_ids"].shape == (store.chunk_length,)
    assert features["query_ids"].shape == (64,)


def test_masked_sentences_read_as_the_model_sees_them(store):
    for name in ("towns_salient", "towns_random_tokens", "towns_random_spans"):
        examples = examples_of(name, "train")
        shown = list(inspect.show(name, "train", 10**6))
        assert len(shown) == len(examples) > 50
        for lines, example in zip(shown, examples, strict=True):
            query, answers = field(lines, "query"), field(lines, "answers")
            masks = (example["query_ids"] == store.vocabulary.mask).sum()
            assert query.count("[MASK]") == masks
            block = int(example["source_block"])
            text = store.text(block)
            assert field(lines, "from") == f"block {block}, {text.title!r}"
            # The sentence, or as much of it as the query has room for.
            assert without_brackets(answers) in plain(text.body)
            # What is in brackets is what the masks stand for, run by run.
            hidden = [plain(part) for part in re.findall(r"\[(.*?)\]", answers)]
            pattern = re.sub(r"(\\\[mask\\\])+", "(.+)", re.escape(plain(query)))
            found = re.fullmatch(pattern, without_brackets(answers))
            assert found
            assert "".join(found.groups()) == "".join(hidden)
    [lines] = inspect.show("towns_salient", "train", 1, mark=lambda text: f"<{text}>")
    assert "<[MASK]>" in field(lines, "query")
    assert re.search(r"<\[.+?\]>", field(lines, "answers"))


def test_masks_that_are_not_scored_are_counted(store):
    lengths = {"query_length": 32, "document_length": 40, "max_masks": 1}
    corpora.register("few", store.directory, **lengths)
    shown = inspect.show("few_random_spans", "", 40)
    said = [lines for lines in shown if len(lines) > 3]
    assert said
    for query, answers, more, _ in said:
        count = int(re.fullmatch(r" +\((\d+) more masked, and not scored\)", more)[1])
        assert answers.count("[MASK]") == count == query.count("[MASK]") - 1


def test_blocks_have_their_title_and_the_spans_of_the_corpus(store):
    shown = list(inspect.show("towns_blocks", "validation", 10**6))
    assert len(shown) > 10
    for lines in shown:
        text = store.text(int(field(lines, "from").removeprefix("block ")))
        assert plain(field(lines, "title")) == plain(text.title)
        body = field(lines, "body")
        assert without_brackets(body) == plain(text.body)
        marked = [plain(part) for part in re.findall(r"\[(.*?)\]", body)]
        assert marked == [plain(text.body[s.start : s.end]) for s in text.spans]


def test_pairs_have_query_title_and_body(store):
    shown = list(inspect.show("towns_ict", "train", 10**6))
    removed = 0
    for lines in shown:
        block = int(re.match(r"block (\d+),", field(lines, "from"))[1])
        text = store.text(block)
        assert plain(field(lines, "query")) in plain(text.body)
        assert plain(field(lines, "title")) == plain(text.title)
        body = plain(field(lines, "body"))
        is_whole = body == plain(text.body)
        assert is_whole or body == plain(text.body).replace(
            plain(field(lines, "query")), "", 1
        )
        removed += not is_whole
    assert 0 < removed < len(shown)


def test_questions_have_their_answers(store, tmp_path):
    path = tmp_path / "questions.jsonl"
    question = {"id": "a", "question": "Who drew Town 3.", "split": "dev"}
    path.write_text(json.dumps({**question, "answers": ["Maria Brel", "Brel"]}))
    register_questions("asked", path, store.vocabulary)
    [lines] = inspect.show("asked", "", 5)
    assert plain(field(lines, "question")) == "whodrewtown3."
    assert plain(field(lines, "answers")) == "[mariabrel][brel]"
    assert rows_of("asked") == {"dev": "1 examples"}
    # A source of somebody else's, which says nothing of its wordpieces.
    register_questions("other", path, WordPiece([*store.vocabulary.pieces, "x"]))
    del seqio.TaskRegistry.get("other").source.vocabulary
    [lines] = inspect.show("other", "dev", 1)
    assert re.fullmatch(r"\[ *2 +\d+ .* 0\]", field(lines, "question_ids"))


def test_tasks_of_any_other_kind_show_every_feature():
    rows = {
        "inputs": tf.ragged.constant([list(b"abc"), list(b"de")]) + 3,
        "names": tf.constant([["x", "y"], ["왕", ""]]),
        "id": tf.constant(["1", "2"]),
        "weights": tf.constant([[0.5, 1.5], [2.0, 3.0]]),
    }

    def make(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensor_slices(rows)

    vocabulary = seqio.ByteVocabulary()
    seqio.TaskRegistry.add(
        "text",
        source=seqio.FunctionDataSource(make, splits=["test"]),
        preprocessors=[],
        output_features={"inputs": seqio.Feature(vocabulary, add_eos=False)},
    )
    first, second = inspect.show("text", "", 9)
    assert field(first, "inputs") == "abc"
    assert field(second, "names") == "왕 | "
    assert field(first, "id") == "1"
    assert field(second, "weights") == "[2. 3.]"
    assert rows_of("text") == {"test": "examples, not counted"}


def test_unknown_splits_and_empty_tasks_are_refused(store):
    corpora.register("whole", store.directory, validation_fraction=0.0, num_shards=3)
    for name, split, said in [
        ("towns_ict", "test", r"train, validation\), got 'test'"),
        ("town", "", "got 'town'"),
        ("whole_ict", "validation", r"'validation' of whole_ict, got none"),
    ]:
        with refused(said):
            next(inspect.show(name, split, 1))
