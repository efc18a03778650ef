"""TFRecords in the format of the annotated Wikipedia that REALM's authors published."""

import re

import pytest

from realm_jax.data.documents import GIVEN, Document
from realm_jax.data.records import BadRecord
from realm_jax.data.salient_spans import Span
from realm_jax.errors import BadInputError
from realm_jax.prepare.documents.realm_wikipedia import RealmWikipedia
from realm_jax.prepare.documents.source import read_all

TEXT = "Ávila grew in 1607. 한강은 서울을 지난다. It is 𝒳-long."
SENTENCES = ["Ávila grew in 1607.", "한강은 서울을 지난다.", "It is 𝒳-long."]
SPANS = {"Ávila": "PLACE", "1607": "DATE", "한강": "PLACE", "𝒳": "LETTER"}


def feature(values):
    import tensorflow as tf

    if values and isinstance(values[0], int):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def example(**features):
    import tensorflow as tf

    features = {name: feature(values) for name, values in features.items()}
    wrapped = tf.train.Features(feature=features)
    return tf.train.Example(features=wrapped).SerializeToString()


def annotated(title="Avila", **changes):
    """A record as the authors' pipeline wrote it."""
    content = TEXT.encode()
    features = {"uid": [b"1"], "title": [title.encode()], "text": [content]}
    for kind, parts in (("sentence", SENTENCES), ("span", SPANS)):
        starts = [content.index(part.encode()) for part in parts]
        limits = [at + len(p.encode()) for at, p in zip(starts, parts, strict=True)]
        features |= {f"{kind}_byte_start": starts, f"{kind}_byte_limit": limits}
    features |= {"span_type": [s.encode() for s in SPANS.values()], **changes}
    return example(**{name: v for name, v in features.items() if v is not None})


def write_records(path, records):
    import tensorflow as tf

    options = "GZIP" if ".gz" in path.name else ""
    with tf.io.TFRecordWriter(str(path), options) as writer:
        for record in records:
            writer.write(record)
    return str(path)


def document(title="Avila", labels=None):
    spans = [
        Span(TEXT.index(part), TEXT.index(part) + len(part), label)
        for part, label in zip(SPANS, labels or SPANS.values(), strict=True)
    ]
    sentences = [(TEXT.index(part), TEXT.index(part) + len(part)) for part in SENTENCES]
    return Document(title, TEXT, title, tuple(spans), tuple(sentences))


def test_offsets_in_bytes_become_characters(tmp_path):
    records = [annotated(), annotated("Łódź")]
    for name in ("a.tfrecord.gz", "a.tfrecord"):
        source = RealmWikipedia(write_records(tmp_path / name, records))
        assert list(read_all(source)) == [document(), document("Łódź")]


def test_the_concatenation_of_shards_is_the_whole(tmp_path, read_shards):
    for index in range(5):
        records = [annotated(f"{index}-{i}") for i in range(index)]
        name = f"wikipedia_annotated_with_dates_public-{index:05d}-of-00005.tfrecord.gz"
        write_records(tmp_path / name, records)
    expected = [document(f"{index}-{i}") for index in range(5) for i in range(index)]
    pattern = f"{tmp_path}/wikipedia_annotated_with_dates_public*.tfrecord.gz"
    for shard_bytes, count in [(1, 5), (1 << 20, 1)]:
        shards = read_shards(RealmWikipedia(pattern, shard_bytes=shard_bytes))
        assert len(shards) == count
        assert [r for shard in shards for r in shard] == expected


def test_spans_without_types_and_records_without_spans(tmp_path):
    names = ("span_byte_start", "span_byte_limit", "span_type")
    nothing, empty = dict.fromkeys(names), {name: [] for name in names}
    records = [annotated(span_type=None), annotated(**nothing), annotated(**empty)]
    path = write_records(tmp_path / "a.tfrecord.gz", records)
    untyped, absent, none = read_all(RealmWikipedia(path))
    assert untyped == document(labels=[GIVEN] * 4)
    # The record is annotated: that nothing was found is known too.
    assert absent.spans == none.spans == ()
    assert absent.sentences == none.sentences == untyped.sentences


def test_the_published_knowledge_corpus_is_read_too(tmp_path):
    tokens = {"title_token_ids": [5, 6], "body_token_ids": [7, 8, 9]}
    record = example(title=[b"Avila"], body=[TEXT.encode()], **tokens)
    path = write_records(tmp_path / "docs.tfr.gz-00000-of-00050", [record])
    assert list(read_all(RealmWikipedia(path))) == [Document("Avila", TEXT, "Avila")]


def test_bad_records_are_named_and_the_rest_is_read(tmp_path):
    for record, reason in [
        (b"\xff\xff\xff", "expected a tf.train.Example"),
        (example(text=[b"a"]), "title and text .or body., got text;"),
        (example(), "title and text .or body., got none;"),
        (annotated(span_type=[b"A"]), "as many types as spans, got 1 for 4"),
    ]:
        records = [annotated(), record, annotated()]
        path = write_records(tmp_path / "a.tfrecord.gz", records)
        first, bad, last = read_all(RealmWikipedia(path))
        assert first == last == document()
        assert isinstance(bad, BadRecord)
        assert bad.where == f"{path}, record 2"
        assert re.search(reason, bad.reason)


def test_a_damaged_file_is_refused(tmp_path):
    for path in (tmp_path / "a.tfrecord.gz", tmp_path / "a.tfrecord"):
        write_records(path, [annotated(str(i)) for i in range(50)])
        path.write_bytes(path.read_bytes()[:-20])
        read = []
        with pytest.raises(BadInputError, match=r"expected whole TFRecords in") as e:
            read.extend(read_all(RealmWikipedia(str(path))))
        assert f"damaged after record {len(read)} (" in str(e.value)
