"""JSON lines, CC-News, WikiExtractor: what a line means, which files are read."""

import json
import re

from realm_jax.data.documents import NO_ARTICLE, Document, LeftOut
from realm_jax.data.records import BadRecord
from realm_jax.prepare.documents.cc_news import cc_news
from realm_jax.prepare.documents.lines import json_lines
from realm_jax.prepare.documents.source import read_all
from realm_jax.prepare.documents.wikiextractor import page_from_json, wikiextractor
from tests.refused import refused

ARTICLES = [
    {"title": "Łódź", "text": "Łódź is a city.", "id": "lodz"},
    {"title": "한강", "text": "한강은 서울을 지난다."},
    {"title": "", "text": ""},
    {"title": "한강", "text": "한강은 서울을 지난다."},
]


def test_json_lines_are_read_as_they_are(write_lines):
    # Empty titles, empty texts and duplicates are the pipeline's to judge.
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.bz2"):
        source = json_lines(write_lines(name, ARTICLES))
        assert list(read_all(source)) == [
            Document(a["title"], a["text"], a.get("id", a["title"])) for a in ARTICLES
        ]


def test_the_line_of_a_bad_record_is_the_line_of_the_file(write_lines, read_shards):
    lines = [{"title": f"Page {i}", "text": "Text."} for i in range(900)]
    lines[812] = {"title": "no text"}
    source = json_lines(write_lines("articles.jsonl", lines), shard_bytes=409)
    shards = read_shards(source)
    [bad] = [r for shard in shards for r in shard if not isinstance(r, Document)]
    assert len(shards) > 50
    assert isinstance(bad, BadRecord)
    assert bad.where.endswith("articles.jsonl, line 813")
    assert "a string 'text'" in bad.reason


def test_a_pattern_reads_its_files_in_the_order_of_their_names(write_lines):
    for folder, name in [("b", "1"), ("a-b", "1"), ("a", "2"), ("a", "10")]:
        text = {"title": f"{folder}/{name}", "text": ""}
        path = write_lines(f"{folder}/part{name}.jsonl", [text])
    root = path.removesuffix("a/part10.jsonl")
    found = [d.title for d in read_all(json_lines(f"{root}*/part*.jsonl"))]
    assert found == ["a/10", "a/2", "a-b/1", "b/1"]
    found = [d.title for d in read_all(json_lines(f"{root}[ab]/part1*.jsonl"))]
    assert found == ["a/10", "b/1"]


def test_cc_news_in_both_spellings(write_lines):
    common = {"title": "A title", "url": "http://news.example/1"}
    common |= {"date_publish": "2018-02-13 19:01:01", "description": "A lead."}
    crawled = common | {"maintext": "The whole text.", "text": None, "language": "en"}
    published = common | {"text": "The whole text.", "image_url": None}
    without = crawled | {"title": None, "maintext": " ", "title_page": "On the page"}
    nothing = {"title": "A title", "text": None}
    path = write_lines("news.jsonl.gz", [crawled, published, without, nothing])
    assert list(read_all(cc_news(path))) == [
        *[Document("A title", "The whole text.", "http://news.example/1")] * 2,
        Document("On the page", "A lead.", "http://news.example/1"),
        Document("A title", "", "A title"),
    ]


def test_lines_that_are_no_news_or_no_page_are_bad_records(write_lines):
    news = write_lines("news.jsonl", [{"title": "a"}, {"title": "a", "text": 3}, 4])
    page = write_lines("wiki_00", [{"id": "1", "title": "T"}])
    read = [*read_all(cc_news(news)), *read_all(wikiextractor(page))]
    assert all(isinstance(record, BadRecord) for record in read)
    places = [record.where.rpartition(", ")[2] for record in read]
    assert places == ["line 1", "line 2", "line 3", "line 1"]
    missing = "maintext, text, description, got title"
    reasons = [missing, "'text' to be .* got 3", "JSON", "a string 'text'"]
    for record, reason in zip(read, reasons, strict=True):
        assert re.search(reason, record.reason)


def page(title, text="Text.", number="12"):
    url = f"https://en.wikipedia.org/wiki?curid={number}"
    fields = {"id": number, "revid": "1", "url": url, "title": title, "text": text}
    return json.dumps(fields).encode()


def test_html_is_unescaped_and_the_title_taken_off_the_text():
    read = page_from_json(
        page("AT&amp;T", "AT&amp;T\n\nAT&amp;T is &lt;large&gt;.\nIt pays &pound;1.\n"),
        "here",
    )
    assert read == Document("AT&T", "AT&T is <large>.\nIt pays £1.\n", "12")
    kept = page("Rome", "Rome is a city.\nRome\n")
    assert page_from_json(kept, "here").text == "Rome is a city.\nRome\n"
    assert page_from_json(page("Rome", "Rome"), "here").text == ""
    assert page_from_json(page("", "\nRome"), "here").text == "\nRome"


def test_pages_that_are_no_articles_are_left_out_and_said_to_be(write_lines):
    titles = ["Mercury", "Mercury (disambiguation)", "List of rivers", "Rhine"]
    pages = [{"id": str(i), "title": t, "text": "T."} for i, t in enumerate(titles)]
    path = write_lines("wiki_00", pages)
    assert list(read_all(wikiextractor(path))) == [
        Document("Mercury", "T.", "0"),
        LeftOut(f"{path}, line 2", NO_ARTICLE),
        LeftOut(f"{path}, line 3", NO_ARTICLE),
        Document("Rhine", "T.", "3"),
    ]


def test_a_folder_of_wikiextractor_is_read_in_the_order_it_was_written(
    write_lines, tmp_path, read_shards
):
    names = ["AA/wiki_00", "AA/wiki_01.bz2", "AB/wiki_00.gz", "AB/wiki_01"]
    for name in reversed(names):
        pages = [{"id": f"{name}-{i}", "title": "T", "text": ""} for i in range(3)]
        write_lines(f"wiki/{name}", pages)
    write_lines("wiki/AA/README", ["not a page"])
    write_lines("wiki/AA/wiki_02", [])
    expected = [f"{name}-{i}" for name in names for i in range(3)]
    for shard_bytes in (1, 200, 1 << 20):
        source = wikiextractor(str(tmp_path / "wiki"), shard_bytes=shard_bytes)
        read = [r.source_id for shard in read_shards(source) for r in shard]
        assert read == expected


def test_a_source_without_content_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    for source in (json_lines, cc_news, wikiextractor):
        for name, said in [
            ("absent.jsonl", "found no such file; check the path"),
            ("absent*", "found no such file; check the path"),
            ("empty.jsonl", "empty"),
        ]:
            with refused(said):
                source(str(tmp_path / name))
    with refused(r"wiki_00 and so on below .* no such"):
        wikiextractor(str(tmp_path))
