"""What a person may write to name a source."""

from realm_jax.data.documents import Document
from realm_jax.prepare.documents.open import open_source
from realm_jax.prepare.documents.source import read_all
from tests.refused import refused

ARTICLE = {"title": "Rhine", "text": "A river.", "id": "1"}


def test_json_lines_are_known_by_their_suffix(write_lines):
    for name in ("a.jsonl", "a.jsonl.gz", "a.json", "a.ndjson.bz2"):
        path = write_lines(name, [ARTICLE])
        for spec in (path, f"json:{path}"):
            [document] = read_all(open_source(spec))
            assert document == Document("Rhine", "A river.", "1")
    path = write_lines("a.jsonl", [ARTICLE] * 4)
    assert len(open_source(path, shard_bytes=1).shards()) == 4


def test_what_cannot_be_opened_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("none", "blank"):
        (tmp_path / folder).mkdir()
    for name in ("blank/a.txt", "blank.jsonl"):
        (tmp_path / name).touch()
    for spec, message in [
        ("parquet:a", "a kind of source out of json, text, .*, got 'parquet'"),
        ("articles.csv", "kind:path with a kind out of json, text, .*'articles.csv'"),
        ("", "a kind out of json, text, .*, got ''"),
        ("text:", "a path or a dataset behind 'text', got 'text:'"),
        ("absent.jsonl", "JSON lines with title and text at absent.jsonl, found no"),
        ("json:absent*", "JSON lines with title and text at absent., found no such"),
        ("text:absent", "a folder of text files"),
        ("text:none", "text files .* below none, found no such file"),
        ("text:blank", "text files .* below blank, but it is empty"),
        ("wikiextractor:absent", "wiki_00 and so on at absent, found no such file"),
        ("wikiextractor:none", "wiki_00 and so on below none, found no such file"),
        ("cc_news:absent.jsonl", "CC-News as JSON lines at absent.jsonl"),
        ("cc_news:blank.jsonl", "CC-News .* at blank.jsonl, but it is empty"),
        ("realm_wikipedia:absent*", "TFRecords of annotated Wikipedia at absent"),
        ("tfds:wikipedia/20190301.en@absent", "prepared in absent, found none"),
        ("https://a.org/a.jsonl", "a local path or gs://, got 'https://a.org/a.jsonl'"),
        ("text:s3://bucket/folder", "a local path or gs://, got 'text:s3://bucket"),
        ("file:///a.jsonl", "a local path or gs://, got 'file:///a.jsonl'"),
    ]:
        with refused(f"^expected .*{message}"):
            open_source(spec)


def test_a_bucket_is_no_kind(monkeypatch):
    named = []
    monkeypatch.setattr(
        "realm_jax.prepare.documents.open.find_files",
        lambda pattern, what: named.append(pattern) or [],
    )
    open_source("gs://bucket/a.jsonl.gz")
    open_source("json:gs://bucket/*.jsonl")
    assert named == ["gs://bucket/a.jsonl.gz", "gs://bucket/*.jsonl"]
