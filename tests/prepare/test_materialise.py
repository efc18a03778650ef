import numpy as np
import pytest
import seqio
import tensorflow as tf

from realm_jax.data.examples import Examples
from realm_jax.data.features import SENTENCE_ID, int32
from realm_jax.data.masking import pretrain_specs, salient_examples, sentence_specs
from realm_jax.errors import BadInputError
from realm_jax.prepare import seqio_tasks
from realm_jax.prepare.corpus_tasks import corpus_tasks
from realm_jax.prepare.examples import write
from realm_jax.prepare.materialise import materialise
from realm_jax.prepare.seqio_tasks import RegisteredTask, expand, restore_shapes
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("towns")


def test_writes_an_epoch_in_order(tmp_path, store):
    examples = materialise("towns_salient", "validation", tmp_path / "out")
    blocks = np.unique(examples.features["source_block"])
    expected = salient_examples(store, blocks, query_length=32, max_masks=6)
    ids = expected.pop("sentence_id")
    firsts = [row for row in range(len(ids)) if row == 0 or ids[row - 1] != ids[row]]
    assert examples.sentence_starts is not None
    assert examples.sentence_starts.tolist() == [*firsts, len(ids)]
    assert examples.features.keys() == expected.keys()
    stored = {path.stem for path in examples.directory.glob("*.npy")}
    assert {"block", "first", "end"} <= stored
    assert not stored & expected.keys()
    for name, array in expected.items():
        assert examples.features[name].dtype == array.dtype
        np.testing.assert_array_equal(examples.features[name], array)
    assert examples.metadata == {
        "task": "towns_salient",
        "split": "validation",
        "seed": 0,
        "validation_fraction": 0.2,
        "corpus_fingerprint": store.fingerprint,
        "vocabulary_fingerprint": store.vocabulary.fingerprint,
        "settings_fingerprint": store.info["settings_fingerprint"],
    }


def test_a_mixture_is_written_like_a_task(tmp_path, store):
    seqio.MixtureRegistry.add("towns_twice", [("towns_blocks", 1.0)], default_rate=1.0)
    examples = materialise("towns_twice", "train", tmp_path / "out")
    alone = materialise("towns_blocks", "train", tmp_path / "alone")
    for path in alone.directory.glob("*.npy"):
        assert path.read_bytes() == (examples.directory / path.name).read_bytes()
    assert examples.metadata["corpus_fingerprint"] == store.fingerprint
    # One that deals sentences out anew has no sentences.
    names = ["towns_salient", "towns_random_spans"]
    seqio.MixtureRegistry.add("towns_mixed", names, default_rate=1.0)
    mixed = materialise("towns_mixed", "train", tmp_path / "mixed")
    assert mixed.sentence_starts is None
    assert len(mixed.step_rows(0, batch_size=9, seed=0)) == 9


def joined(task, shard):
    """The examples of one of five shards, an array for each feature."""
    batches = list(task.batches("train", shard, 5))
    names = batches[0] if batches else ()
    return {name: np.concatenate([batch[name] for batch in batches]) for name in names}


def test_numpy_alone_makes_what_is_registered(store):
    lengths = {"query_length": 32, "document_length": 40, "max_masks": 6}
    lengths |= {"inverse_cloze_query_length": 32}
    shards = {"num_shards": 5, "validation_fraction": 0.2}
    tasks = corpus_tasks("towns", store, **lengths, **shards)
    assert len(tasks) == 6
    for task in tasks:
        registered = RegisteredTask(task.name)
        assert registered.provenance == task.provenance
        assert (registered.dtypes, registered.splits) == (task.dtypes, [*task.splits])
        assert registered.num_shards("train") == task.num_shards("train") == 5
        for shard in (0, 3):
            made, expected = (joined(one, shard) for one in (task, registered))
            np.testing.assert_equal(made, expected)


def own_task(store, name, change):
    """Registers salient sentences that a function of the user's has changed."""

    def make(block_ids):
        return change(salient_examples(store, block_ids, query_length=32, max_masks=6))

    source = seqio.get_mixture_or_task("towns_blocks").source
    specs = pretrain_specs(32, 6)
    seqio_tasks.add_task(name, source, make, specs, store.vocabulary.size)


def test_wordpieces_of_whole_rows_have_the_width_of_the_vocabulary(tmp_path, store):
    assert store.vocabulary.id_dtype == np.uint16
    own_task(store, "own", lambda examples: examples)
    names = ["towns_salient", "towns_random_spans"]
    seqio.MixtureRegistry.add("towns_mixed", names, default_rate=1.0)
    for name in ("own", "towns_mixed"):
        examples = materialise(name, "train", tmp_path / name)
        rows = examples.batch(np.arange(len(examples)))
        for path in examples.directory.glob("*.npy"):
            width = "uint16" if path.stem in ("query_ids", "mask_ids") else None
            array = np.load(path)
            assert array.dtype == (width or rows[path.stem].dtype)
            np.testing.assert_array_equal(array, rows[path.stem])
        assert {array.dtype.name for array in rows.values()} == {"int32", "float32"}
        np.testing.assert_array_equal(examples.features["mask_ids"], rows["mask_ids"])
    alone = materialise("towns_salient", "train", tmp_path / "alone")
    whole = Examples.open(tmp_path / "own")
    for name, array in alone.batch(np.arange(len(alone))).items():
        np.testing.assert_array_equal(whole.features[name], array)


def test_a_cache_of_an_earlier_release_is_written_whole(tmp_path, store):
    """Its examples do not say where in the corpus they are."""
    expected = materialise("towns_salient", "train", tmp_path / "new")
    rows = expected.batch(np.arange(len(expected)))
    task = RegisteredTask("towns_salient")
    examples = write(task, tmp_path / "old", [rows], expected.metadata)
    for name, array in rows.items():
        np.testing.assert_array_equal(np.load(tmp_path / f"old/{name}.npy"), array)
        np.testing.assert_array_equal(examples.features[name], array)


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path, store):
    def fail(values):
        raise BadInputError("expected sense, got nonsense; think.")

    for name, wrong in (("too_large", 1 << 16), ("negative", -1)):
        own_task(store, name, lambda e, w=wrong: e | {"mask_ids": e["mask_ids"] + w})
    add_task("ragged", lambda i: {"x": tf.range(i)}, (1,))

    def failing(i):
        return {"x": tf.ensure_shape(tf.numpy_function(fail, [i], tf.int64), ())}

    add_task("failing", failing, ())
    for name, split, said in [
        ("towns_salty", "train", r"towns_salient.*got 'towns_salty'"),
        ("towns_salient", "test", r"\(train, validation\), got 'test'"),
        ("too_large", "train", "expected mask_ids to be uint16"),
        ("negative", "train", "expected mask_ids to be uint16"),
        ("ragged", "train", r"got x of shape \(None,\)"),
        # Raised inside TensorFlow.
        ("failing", "train", r"^expected sense, got nonsense; think\.$"),
    ]:
        with refused(said):
            materialise(name, split, tmp_path / "out")
    with refused("expected a cache of towns_ict"):
        materialise("towns_ict", "train", tmp_path / "out", use_cached=True)
    assert list(tmp_path.iterdir()) == []


def add_task(name, map_fn, shape):
    def make(split, shuffle_files, seed=None):
        return tf.data.Dataset.range(6).map(map_fn)

    vocabulary = seqio.PassThroughVocabulary(9)
    feature = seqio.ContinuousFeature(vocabulary, dtype=tf.int64, rank=len(shape))
    source = seqio.FunctionDataSource(make, splits=["train"])
    seqio.TaskRegistry.add(name, source=source, output_features={"x": feature})


def test_any_task_of_fixed_shapes_is_written(tmp_path):
    add_task("squares", lambda i: {"x": tf.stack([i, i * i]), "text": "a"}, (2,))
    examples = materialise("squares", "train", tmp_path / "out")
    assert examples.features["x"].tolist() == [[i, i * i] for i in range(6)]
    assert examples.features.keys() == {"x"}
    assert "corpus_fingerprint" not in Examples.open(tmp_path / "out").metadata


def test_expands_in_order_and_may_make_nothing():
    calls = []

    def repeat(values):
        calls.append(len(values))
        rows = np.repeat(values, values % 3)
        return {"x": np.stack([rows, rows * 2], axis=1), "y": rows}

    dataset = tf.data.Dataset.from_tensor_slices(np.arange(10, dtype=np.int32))
    specs = {"x": int32(2), "y": int32()}
    examples = list(expand(dataset, repeat, specs, chunk_size=4).as_numpy_iterator())
    expected = [i for i in range(10) for _ in range(i % 3)]
    assert [int(example["y"]) for example in examples] == expected
    assert [example["x"].tolist() for example in examples] == [
        [i, 2 * i] for i in expected
    ]
    assert calls == [4, 4, 2]


def test_a_cache_from_before_there_was_a_feature_is_refused():
    specs = sentence_specs(40, 4)
    arrays = {name: np.zeros((3, *s.shape), s.dtype) for name, s in specs.items()}
    del arrays[SENTENCE_ID]
    with refused("lacks sentence_id; remove it and"):
        restore_shapes(tf.data.Dataset.from_tensor_slices(arrays), None, specs)
