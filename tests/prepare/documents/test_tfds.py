"""Datasets of TFDS, generated on disk with the features of the real builders."""

import shutil

import pytest

from realm_jax.data.documents import NO_ARTICLE, Document, LeftOut
from realm_jax.data.records import BadRecord
from realm_jax.data.salient_spans import Span
from realm_jax.prepare.documents.source import read_all
from realm_jax.prepare.documents.tfds import TfdsSource
from tests.prepare.tfds_datasets import features_of, generate
from tests.refused import refused

NUM_FILES = 3


def titles_in_files(builder):
    """The titles as they lie in the files, read without TFDS."""
    import tensorflow as tf

    paths = sorted(str(path) for path in builder.data_path.glob("*.tfrecord*"))
    assert len(paths) == NUM_FILES
    for path in paths:
        for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
            features = tf.train.Example.FromString(record).features.feature
            yield features["title"].bytes_list.value[0].decode()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("tensorflow_datasets")


@pytest.fixture(scope="module")
def wikipedia(data_dir):
    titles = [f"한강 {i}" for i in range(100)]
    titles += ["Mercury (disambiguation)", "List of rivers"]
    features = features_of("wikipedia", config="20190301.en", data_dir=data_dir)
    examples = [{"title": title, "text": f"{title}은 강이다."} for title in titles]
    examples.append({"title": "broken", "text": b"\xff"})
    splits, config = {"train": examples}, "20190301.en"
    return generate(data_dir, "Wikipedia", features, splits, config, NUM_FILES)


def test_wikipedia_in_the_order_of_its_files_whatever_the_shards(
    wikipedia, data_dir, read_shards
):
    name = "wikipedia/20190301.en"
    expected = []
    for number, title in enumerate(titles_in_files(wikipedia), start=1):
        where = f"{name} train, example {number}"
        if "List" in title or "(" in title:
            expected.append(LeftOut(where, NO_ARTICLE))
        elif title == "broken":
            expected.append(where)
        else:
            expected.append(Document(title, f"{title}은 강이다.", title))
    for shard_bytes, least in [(1 << 20, 1), (300, 10)]:
        shards = read_shards(TfdsSource(name, str(data_dir), shard_bytes=shard_bytes))
        assert len(shards) >= least
        records = [record for shard in shards for record in shard]
        [bad] = [record for record in records if isinstance(record, BadRecord)]
        assert "text in UTF-8" in bad.reason
        assert [r.where if r is bad else r for r in records] == expected


def test_the_fingerprint_is_of_the_files(wikipedia, data_dir, tmp_path):
    fingerprint = TfdsSource("wikipedia/20190301.en", str(data_dir)).fingerprint()
    copy = tmp_path / "copy"
    shutil.copytree(data_dir / "wikipedia", copy / "wikipedia")
    source = TfdsSource("wikipedia/20190301.en:1.0.0", str(copy))
    assert source.fingerprint() == fingerprint
    path = sorted(copy.rglob("*.tfrecord*"))[1]
    path.write_bytes(path.read_bytes()[:-20])
    assert source.fingerprint() != fingerprint
    with refused("^expected whole files of wikipedia.* cannot be read "):
        list(read_all(source))
    path.unlink()
    with refused("^expected whole files of wikipedia.* cannot be read "):
        list(read_all(source))


ARTICLE = "Ávila grew in 1607. 한강은 서울을 지난다."
SENTENCES = ["Ávila grew in 1607.", "한강은 서울을 지난다."]
SPANS = {"Ávila": "PLACE", "1607": "DATE", "서울": "PLACE"}


def byte_ranges(text, parts):
    content = text.encode()
    starts = [content.index(part.encode()) for part in parts]
    limits = [start + len(p.encode()) for start, p in zip(starts, parts, strict=True)]
    return {"start": starts, "limit": limits}


def spans_in(text):
    return [part for part in SPANS if part in text]


def annotated(text):
    """An example's text and spans as the real builder makes them."""
    spans = byte_ranges(text, spans_in(text))
    return {"text": text, "spans": spans | {"type": [SPANS[s] for s in spans_in(text)]}}


def expected_spans(text):
    return tuple(
        Span(text.index(part), text.index(part) + len(part), SPANS[part])
        for part in spans_in(text)
    )


def test_annotated_sentences_are_documents_with_their_spans(data_dir):
    examples = [{"title": "Avila", **annotated(text)} for text in SENTENCES]
    records = read_annotated(data_dir, "sentences", examples)
    assert {record.text: record for record in records} == {
        text: Document("Avila", text, "Avila", expected_spans(text))
        for text in SENTENCES
    }


def read_annotated(data_dir, config, examples):
    features = features_of("salient_span_wikipedia", config=config, data_dir=data_dir)
    splits = {"train": examples}
    generate(data_dir, "SalientSpanWikipedia", features, splits, config)
    source = TfdsSource(f"salient_span_wikipedia/{config}", str(data_dir))
    return list(read_all(source))


def test_annotated_documents_have_their_sentences_too(data_dir):
    sentences = byte_ranges(ARTICLE, SENTENCES)
    none = {"start": [], "limit": []}
    nothing = {"text": "nothing", "sentences": none, "spans": none | {"type": []}}
    examples = [
        {"title": "Avila", "sentences": sentences, **annotated(ARTICLE)},
        {"title": "Nothing", **nothing},
    ]
    places = tuple((ARTICLE.index(s), ARTICLE.index(s) + len(s)) for s in SENTENCES)
    spans = expected_spans(ARTICLE)
    read = read_annotated(data_dir, "documents", examples)
    assert {record.title: record for record in read} == {
        "Avila": Document("Avila", ARTICLE, "Avila", spans, places),
        "Nothing": Document("Nothing", "nothing", "Nothing", (), ()),
    }


def test_cc_news_and_the_folder_from_the_environment(data_dir, monkeypatch):
    import tensorflow_datasets as tfds

    names = ("title", "text", "domain", "date", "description", "url", "image_url")
    features = {name: tfds.features.Text() for name in names}
    article = dict.fromkeys(names, "") | {
        "title": "A title",
        "text": "서울에 눈이 왔다.",
        "date": "2018-02-13 19:01:01",
        "description": "A lead.",
        "url": "http://news.example/1",
    }
    examples = [article, article | {"url": "", "text": ""}]
    generate(data_dir, "CcNews", features, {"train": examples})
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    read = {record.source_id: record for record in read_all(TfdsSource("cc_news"))}
    title, url = "A title", "http://news.example/1"
    documents = (title, article["text"], url), (title, "A lead.", title)
    assert read == {one[2]: Document(*one) for one in documents}


def test_what_is_not_prepared_or_has_no_text_is_refused(wikipedia, data_dir):
    import tensorflow_datasets as tfds

    absent = ("wikipedia/20200101.xx", "wikipedia/20190301.en:2.0.0", "no_such", "a b")
    for name in (*absent, "a:b/c"):
        with refused(rf"^expected the TFDS dataset '{name}' prepared in"):
            TfdsSource(name, str(data_dir))
    features = {"question": tfds.features.Text()}
    generate(data_dir, "Questions", features, {"train": [{"question": "Who?"}]})
    with refused("title and text, got questions with quest"):
        TfdsSource("questions", str(data_dir))
    generate(data_dir, "Untrained", features, {"test": [{"question": "Who?"}]})
    with refused(r"'train' of untrained, got the splits test;"):
        TfdsSource("untrained", str(data_dir))
