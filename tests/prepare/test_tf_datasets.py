import numpy as np
import tensorflow as tf

from realm_jax.data.features import SENTENCE_ID, int32
from realm_jax.data.masking import sentence_specs
from realm_jax.prepare.tf_datasets import expand, restore_shapes
from tests.refused import refused


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
    cached = tf.data.Dataset.from_tensor_slices(arrays)
    with refused("lacks sentence_id; remove it and"):
        restore_shapes(cached, None, specs)
