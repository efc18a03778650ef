import subprocess
import sys

import numpy as np
import pytest
import seqio
import tensorflow as tf

from realm_jax.data.examples import Examples
from realm_jax.data.masking import salient_examples
from realm_jax.errors import BadInputError
from realm_jax.prepare.materialise import materialise

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


def test_the_same_call_writes_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        materialise("towns_ict", "train", tmp_path / name)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


@pytest.mark.full
def test_reading_them_needs_no_tensorflow(tmp_path):
    materialise("towns_ict", "train", tmp_path / "out")
    program = (
        "import sys; from realm_jax.data.examples import Examples;"
        f"next(Examples.open({str(tmp_path / 'out')!r}).batches(batch_size=4, seed=0));"
        "sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_mixture_is_written_like_a_task(tmp_path, store):
    seqio.MixtureRegistry.add("towns_twice", [("towns_blocks", 1.0)], default_rate=1.0)
    examples = materialise("towns_twice", "train", tmp_path / "out")
    alone = materialise("towns_blocks", "train", tmp_path / "alone")
    np.testing.assert_array_equal(
        examples.features["document_ids"], alone.features["document_ids"]
    )
    assert examples.metadata["corpus_fingerprint"] == store.fingerprint


def test_a_mixture_that_deals_sentences_out_anew_has_no_sentences(tmp_path):
    names = ["towns_salient", "towns_random_spans"]
    seqio.MixtureRegistry.add("towns_mixed", names, default_rate=1.0)
    examples = materialise("towns_mixed", "train", tmp_path / "out")
    assert examples.sentence_starts is None
    assert len(examples.step_rows(0, batch_size=9, seed=0)) == 9


def test_an_unknown_task_is_named_with_those_there_are(tmp_path):
    with pytest.raises(BadInputError, match=r"towns_salient.*got 'towns_salty'"):
        materialise("towns_salty", "train", tmp_path / "out")
    with pytest.raises(BadInputError, match=r"\(train, validation\), got 'test'"):
        materialise("towns_salient", "test", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_absent_cache_is_one_line(tmp_path):
    with pytest.raises(BadInputError, match="expected a cache of towns_ict"):
        materialise("towns_ict", "train", tmp_path / "out", use_cached=True)
    assert list(tmp_path.iterdir()) == []


def add_task(name, map_fn, shape):
    seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(
            lambda split, shuffle_files, seed=None: tf.data.Dataset.range(6).map(
                map_fn
            ),
            splits=["train"],
        ),
        output_features={
            "x": seqio.ContinuousFeature(
                seqio.PassThroughVocabulary(9), dtype=tf.int64, rank=len(shape)
            )
        },
    )


def test_any_task_of_fixed_shapes_is_written(tmp_path):
    add_task("squares", lambda i: {"x": tf.stack([i, i * i]), "text": "a"}, (2,))
    examples = materialise("squares", "train", tmp_path / "out")
    assert examples.features["x"].tolist() == [[i, i * i] for i in range(6)]
    assert examples.features.keys() == {"x"}
    assert "corpus_fingerprint" not in Examples.open(tmp_path / "out").metadata


def test_examples_of_many_lengths_are_refused(tmp_path):
    add_task("ragged", lambda i: {"x": tf.range(i)}, (1,))
    with pytest.raises(BadInputError, match=r"got x of shape \(None,\)"):
        materialise("ragged", "train", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_bad_input_inside_tensorflow_stays_bad_input(tmp_path):
    def fail(values):
        raise BadInputError("expected sense, got nonsense; think.")

    add_task(
        "failing",
        lambda i: {"x": tf.ensure_shape(tf.numpy_function(fail, [i], tf.int64), ())},
        (),
    )
    with pytest.raises(BadInputError, match=r"^expected sense, got nonsense; think\.$"):
        materialise("failing", "train", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
