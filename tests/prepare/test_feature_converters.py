import numpy as np
import pytest
import seqio
import tensorflow as tf

from realm_jax.data.features import SENTENCE_ID, int32
from realm_jax.data.inverse_cloze import inverse_cloze_examples
from realm_jax.data.masking import pretrain_specs, salient_examples, sentence_specs
from realm_jax.data.questions import Question, question_examples
from realm_jax.errors import BadInputError
from realm_jax.prepare.feature_converters import (
    InverseClozeFeatureConverter,
    PretrainFeatureConverter,
    QuestionFeatureConverter,
    expand,
    restore_shapes,
)


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


def converted(converter, arrays, lengths):
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    return list(converter(dataset, lengths).as_numpy_iterator())


def examples_of(small_store):
    blocks = np.arange(3)
    question = Question("a", 0, "Where is Ansk?", ("Hult",), "dev")
    return {
        PretrainFeatureConverter: salient_examples(
            small_store, blocks, query_length=40, max_masks=4
        ),
        InverseClozeFeatureConverter: inverse_cloze_examples(
            small_store, blocks, query_length=32, document_length=40
        ),
        QuestionFeatureConverter: question_examples([question], small_store.vocabulary),
    }


def test_converters_pass_features_and_pad_sequences(small_store):
    for converter, made in examples_of(small_store).items():
        arrays = {name: made[name] for name in made if name != SENTENCE_ID}
        lengths = {
            name: array.shape[1] + 5 if array.ndim > 1 else None
            for name, array in arrays.items()
        }
        examples = converted(converter(), made, lengths)
        assert len(examples) == len(next(iter(arrays.values())))
        for row, example in enumerate(examples):
            assert example.keys() == arrays.keys()
            for name, array in arrays.items():
                value, expected = example[name], array[row]
                if expected.ndim:
                    assert not value[len(expected) :].any()
                    assert len(value) == lengths[name]
                    value = value[: len(expected)]
                np.testing.assert_array_equal(value, expected)


def test_converters_serve_seqio(small_store):
    # `seqio.get_dataset` is how T5X reads a task.
    arrays = salient_examples(small_store, np.arange(3), query_length=40, max_masks=4)
    features = {
        name: seqio.ContinuousFeature(
            seqio.PassThroughVocabulary(9),
            dtype=tf.as_dtype(array.dtype),
            rank=array.ndim - 1,
        )
        for name, array in arrays.items()
    }
    source = seqio.FunctionDataSource(
        lambda split, shuffle_files: tf.data.Dataset.from_tensor_slices(arrays),
        splits=["train"],
    )
    seqio.TaskRegistry.add("converted", source=source, output_features=features)
    try:
        dataset = seqio.get_dataset(
            "converted",
            dict.fromkeys(pretrain_specs())
            | {"query_ids": 48, "mask_positions": 4, "mask_ids": 4, "mask_weights": 4},
            dataset_split="train",
            shuffle=False,
            feature_converter=PretrainFeatureConverter(),
        )
        examples = list(dataset.as_numpy_iterator())
    finally:
        seqio.TaskRegistry.remove("converted")
    found = np.stack([example["query_ids"] for example in examples])
    np.testing.assert_array_equal(found[:, :40], arrays["query_ids"])
    assert found.shape[1] == 48
    assert not found[:, 40:].any()


def test_a_cache_from_before_there_was_a_feature_is_refused(small_store):
    arrays = salient_examples(small_store, np.arange(3), query_length=40, max_masks=4)
    del arrays[SENTENCE_ID]
    cached = tf.data.Dataset.from_tensor_slices(arrays)
    with pytest.raises(
        BadInputError, match="lacks sentence_id; remove it and"
    ) as caught:
        restore_shapes(cached, None, sentence_specs(40, 4))
    assert "\n" not in str(caught.value)


def test_packing_is_refused():
    with pytest.raises(BadInputError, match="expected pack=False"):
        PretrainFeatureConverter(pack=True)
