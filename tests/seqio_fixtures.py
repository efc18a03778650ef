"""Fixtures: a small corpus, registered with SeqIO, and a cache as SeqIO writes it."""

import json
import pathlib

import pytest

from realm_jax.data.documents import Document
from realm_jax.data.wordpiece import WordPiece
from tests.corpus_builder import build_corpus


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """Sixty articles of about three blocks each."""
    directory = tmp_path_factory.mktemp("tasks")
    documents = [
        Document(
            title=f"Town {i}",
            text=(
                f"Town {i} was founded in {1200 + i} by Karel Dorm. It has {i} mills. "
                f"Maria Brel drew it on 16 February {1500 + i}. The river Fosk is near."
                f" In {1700 + i} the town burnt down. It was not built again."
            ),
            source_id=f"town-{i}",
        )
        for i in range(60)
    ]
    vocabulary = WordPiece.train(
        [document.text for document in documents], 300, directory / "vocab.txt"
    )
    return build_corpus(documents, directory / "corpus", vocabulary, chunk_length=40)


@pytest.fixture
def registry():
    """Forgets after the test what it registers with SeqIO."""
    import seqio

    registries = (seqio.TaskRegistry, seqio.MixtureRegistry)
    before = [set(one.names()) for one in registries]
    yield
    for one, names in zip(registries, before, strict=True):
        for name in set(one.names()) - names:
            one.remove(name)


@pytest.fixture
def towns(registry, store):
    """Registers the corpus as `towns` with short lengths and some held out."""
    from tasks import corpora

    return corpora.register(
        "towns",
        store.directory,
        query_length=32,
        inverse_cloze_query_length=32,
        document_length=40,
        max_masks=6,
        num_shards=5,
        validation_fraction=0.2,
    )


def write_cache(task, directory: pathlib.Path) -> None:
    """Writes the cache of a SeqIO task as SeqIO's caching tool does, without Beam."""
    import seqio
    import tensorflow as tf

    directory.mkdir()
    for split in task.splits:
        shards = task.source.list_shards(split)
        count = 0
        for index in range(len(shards)):
            info = seqio.ShardInfo(index, len(shards))
            source = task.source.get_dataset(split, shuffle=False, shard_info=info)
            dataset = task.preprocess_precache(source, seed=42)
            prefix = seqio.get_cached_tfrecord_prefix(str(directory), split)
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
        info = {"num_shards": len(shards), "features": features}
        info["seqio_version"] = seqio.__version__
        for path, content in (
            (seqio.get_cached_info_path(str(directory), split), info),
            (seqio.get_cached_stats_path(str(directory), split), {"examples": count}),
        ):
            pathlib.Path(path).write_text(json.dumps(content))
    (directory / "COMPLETED").touch()
