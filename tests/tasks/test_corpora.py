import itertools
import json

import numpy as np
import pytest
import seqio
import tensorflow as tf

from realm_jax.data.inverse_cloze import inverse_cloze_examples
from realm_jax.data.masking import salient_examples
from realm_jax.data.splits import is_held_out
from realm_jax.errors import BadInputError
from tasks import corpora

pytestmark = pytest.mark.usefixtures("towns")

NAMES = ("towns_blocks", "towns_ict", "towns_salient")
BLOCK_FEATURE = {
    "towns_blocks": "block_id",
    "towns_ict": "block_ids",
    "towns_salient": "source_block",
}


def load(name, split="train", **options):
    dataset = seqio.get_mixture_or_task(name).get_dataset(
        split=split, **({"shuffle": False, "num_epochs": 1} | options)
    )
    return list(dataset.as_numpy_iterator())


def fingerprints(examples):
    """Each example as bytes, for comparing sets."""
    return [
        b"".join(np.asarray(example[name]).tobytes() for name in sorted(example))
        for example in examples
    ]


def blocks_of_split(store, held_out):
    return [
        block
        for block in range(store.num_blocks)
        if is_held_out(store.text(block).source_id, 0.2) == held_out
    ]


def test_registers_three_tasks(towns):
    assert tuple(towns) == NAMES
    for name in NAMES:
        assert set(seqio.get_mixture_or_task(name).splits) == {"train", "validation"}


@pytest.mark.parametrize("split", ["train", "validation"])
def test_tasks_hold_what_the_plain_functions_make(store, split):
    blocks = np.array(blocks_of_split(store, split == "validation"))
    ids, segments = store.document_ids(blocks, 40)
    expected = {
        "towns_blocks": {
            "block_id": blocks,
            "document_ids": ids,
            "document_segment_ids": segments,
        },
        "towns_ict": inverse_cloze_examples(
            store, blocks, query_length=32, document_length=40
        ),
        "towns_salient": salient_examples(store, blocks, query_length=32, max_masks=6),
    }
    for name, arrays in expected.items():
        examples = load(name, split)
        assert len(examples) == len(next(iter(arrays.values()))) > 0
        for feature, array in arrays.items():
            found = np.stack([example[feature] for example in examples])
            np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("name", NAMES)
def test_no_article_is_in_both_splits(store, name):
    sources = {
        split: {
            store.text(example[BLOCK_FEATURE[name]]).source_id
            for example in load(name, split)
        }
        for split in ("train", "validation")
    }
    assert sources["train"] | sources["validation"] == {f"town-{i}" for i in range(60)}
    assert not sources["train"] & sources["validation"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_shards", [2, 5, 8])
def test_shards_are_a_partition(name, num_shards):
    # Five shards of the source; beyond them SeqIO deals out single examples.
    whole = fingerprints(load(name))
    parts = [
        fingerprints(load(name, shard_info=seqio.ShardInfo(index, num_shards)))
        for index in range(num_shards)
    ]
    assert sorted(itertools.chain.from_iterable(parts)) == sorted(whole)
    assert all(parts)


def test_shuffling_follows_the_seed():
    plain = fingerprints(load("towns_salient"))
    one, same, other = (
        fingerprints(load("towns_salient", shuffle=True, seed=seed))
        for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other
    assert one != plain
    assert sorted(one) == sorted(other) == sorted(plain)


def test_the_number_of_shards_does_not_change_the_examples(store, towns):
    whole = fingerprints(load("towns_salient", "validation"))
    corpora.register(
        "again",
        store.directory,
        query_length=32,
        document_length=40,
        max_masks=6,
        num_shards=17,
        validation_fraction=0.2,
    )
    assert fingerprints(load("again_salient", "validation")) == whole


def write_cache(task, directory):
    """Does what SeqIO's caching tool does, without Beam."""
    for split in task.splits:
        shards = task.source.list_shards(split)
        count = 0
        for index in range(len(shards)):
            info = seqio.ShardInfo(index, len(shards))
            source = task.source.get_dataset(split, shuffle=False, shard_info=info)
            dataset = task.preprocess_precache(source, seed=42)
            prefix = seqio.get_cached_tfrecord_prefix(directory, split)
            path = f"{prefix}-{index:05d}-of-{len(shards):05d}"
            with tf.io.TFRecordWriter(path) as writer:
                for example in dataset.as_numpy_iterator():
                    writer.write(seqio.dict_to_tfexample(example).SerializeToString())
                    count += 1
        features = {
            # The tool expects lengths to differ, and notes none.
            name: {
                "shape": [None, *spec.shape.as_list()[1:]] if spec.shape.rank else [],
                "dtype": spec.dtype.name,
            }
            for name, spec in dataset.element_spec.items()
        }
        info = {
            "num_shards": len(shards),
            "features": features,
            "seqio_version": seqio.__version__,
        }
        info_path = seqio.get_cached_info_path(directory, split)
        tf.io.gfile.GFile(info_path, "w").write(json.dumps(info))
        stats_path = seqio.get_cached_stats_path(directory, split)
        tf.io.gfile.GFile(stats_path, "w").write(json.dumps({"examples": count}))
    tf.io.gfile.GFile(f"{directory}/COMPLETED", "w").write("")


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_holds_the_same_examples(tmp_path, monkeypatch, name):
    directory = tmp_path / name
    directory.mkdir()
    write_cache(seqio.TaskRegistry.get(name), str(directory))
    monkeypatch.setattr(seqio.utils, "_GLOBAL_CACHE_DIRECTORIES", [str(tmp_path)])
    for split in ("train", "validation"):
        cached = load(name, split, use_cached=True)
        made = load(name, split)
        assert sorted(fingerprints(cached)) == sorted(fingerprints(made))
        assert {k: v.dtype for k, v in cached[0].items()} == {
            k: v.dtype for k, v in made[0].items()
        }


def test_seqio_does_not_cut_the_end_of_a_sequence_off():
    lengths = {"query_ids": 32, "document_ids": 40, "document_segment_ids": 40}
    assert load("towns_ict", sequence_length=lengths)
    with pytest.raises(BadInputError, match=r"at least 40 for document_ids.* got 30"):
        load("towns_ict", sequence_length=lengths | {"document_ids": 30})


def test_a_name_is_registered_once(store):
    with pytest.raises(BadInputError, match="got 'towns_blocks'"):
        corpora.register("towns", store.directory)
    with pytest.raises(BadInputError, match="got 'to wns_blocks'"):
        corpora.register("to wns", store.directory)


def test_a_missing_corpus_is_refused(tmp_path):
    with pytest.raises(BadInputError, match="expected a prepared corpus at"):
        corpora.register("nowhere", tmp_path)
    assert "nowhere_blocks" not in seqio.TaskRegistry.names()


def test_an_empty_split_is_refused(store):
    corpora.register("all_train", store.directory, validation_fraction=0.0)
    with pytest.raises(BadInputError, match=r"split 'validation', got none .* of 0.0"):
        load("all_train_blocks", "validation")
