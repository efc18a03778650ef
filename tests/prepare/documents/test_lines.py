"""Files of lines, in shards of any size, and what a line means in each format."""

import gzip
import json
import re
import resource
import tempfile
from pathlib import Path

import pytest
from etils import epath
from hypothesis import example, given, settings
from hypothesis import strategies as st

from realm_jax.data.documents import NO_ARTICLE, Document, LeftOut
from realm_jax.data.records import BadRecord, RecordError
from realm_jax.prepare.documents import files
from realm_jax.prepare.documents.lines import LineSource, page_from_json
from realm_jax.prepare.documents.open import open_source
from realm_jax.prepare.documents.source import read_all
from tests.refused import refused

MAX_BYTES = 12
# Few letters, so that newlines, blank lines and bad lines are frequent.
CONTENT = st.lists(st.sampled_from([b"a", b"b", b"!", b" ", b"\n", b"\r\n", b"\xff"]))


def parse(line, where):
    if line.startswith(b"!"):
        raise RecordError(where, "expected no exclamation mark.")
    return Document(where, line.decode("latin-1"), "")


def line_source(*paths, **settings):
    settings = {"max_line_bytes": MAX_BYTES} | settings
    return LineSource("letters", list(map(epath.Path, paths)), parse, **settings)


def read_plainly(path, content):
    """What is in a file of lines, without shards."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        where = f"{path}, line {number}"
        if len(line) > MAX_BYTES:
            yield BadRecord(
                where,
                f"expected at most 12 bytes, got {len(line)}; split the text into "
                "documents.",
            )
        elif line.startswith(b"!"):
            yield BadRecord(where, "expected no exclamation mark.")
        elif line.strip():
            yield Document(where, line.decode("latin-1"), "")


@settings(max_examples=50)
@given(
    contents=st.lists(CONTENT, max_size=3),
    shard_bytes=st.integers(1, 9),
    chunk_bytes=st.integers(1, 12),
)
@example(contents=[[b"a" * 12, b"\n", b"a" * 13, b"\nb"]], shard_bytes=9, chunk_bytes=5)
def test_every_line_is_in_one_shard_with_its_number(
    read_shards, contents, shard_bytes, chunk_bytes
):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHUNK_BYTES", chunk_bytes)
        expected, paths = [], []
        for index, parts in enumerate(contents):
            content = b"".join(parts)
            plain, packed = Path(folder, f"{index}"), Path(folder, f"{index}.gz")
            plain.write_bytes(content)
            packed.write_bytes(gzip.compress(content))
            paths += [plain, packed]
            expected += [*read_plainly(plain, content), *read_plainly(packed, content)]
        source = line_source(*paths, shard_bytes=shard_bytes)
        assert [r for shard in read_shards(source) for r in shard] == expected
        source.prepare_shards(Path(folder, "scratch"))
        assert [r for shard in read_shards(source) for r in shard] == expected
        assert list(read_all(source)) == expected
        assert all(piece.size for shard in source.shards() for piece in shard.pieces)


def test_shards_have_about_the_size_asked_for(tmp_path, read_shards):
    line = b"a line of twenty...\n"
    (tmp_path / "large").write_bytes(line * 1000)
    (tmp_path / "small").write_bytes(line)
    paths = [tmp_path / "large", *[tmp_path / "small"] * 7]
    source = line_source(*paths, shard_bytes=70, max_line_bytes=100)
    # Four lines are the first to reach 70 bytes.
    assert [len(records) for records in read_shards(source)] == [*[4] * 251, 3]


def test_a_packed_file_is_unpacked_once_and_then_cut(tmp_path, read_shards):
    packed = tmp_path / "a.gz"
    packed.write_bytes(gzip.compress(bytes(range(97, 123)) * 40 + b"\nb" * 1000))
    source = line_source(packed, shard_bytes=50)
    assert len(source.shards()) == 1
    scratch = tmp_path / "scratch"
    source.prepare_shards(scratch)
    assert len(source.shards()) > 10
    [unpacked] = scratch.iterdir()
    before = unpacked.stat()
    again = line_source(packed, shard_bytes=50)
    again.prepare_shards(scratch)
    assert unpacked.stat() == before
    assert again.shards() == source.shards()
    assert source.fingerprint() == line_source(packed, shard_bytes=7).fingerprint()


def test_the_fingerprint_is_of_the_content_and_its_order(tmp_path):
    (tmp_path / "a").write_bytes(b"aaa\n")
    (tmp_path / "b").write_bytes(b"bbb\n")
    (tmp_path / "elsewhere").write_bytes(b"aaa\n")
    a, b, same = (tmp_path / name for name in ("a", "b", "elsewhere"))
    fingerprint = line_source(a, b).fingerprint()
    assert line_source(same, b).fingerprint() == fingerprint
    assert line_source(b, a).fingerprint() != fingerprint
    assert line_source(a).fingerprint() != fingerprint
    other_kind = LineSource("other", [epath.Path(a), epath.Path(b)], parse)
    assert other_kind.fingerprint() != fingerprint


def test_a_damaged_packed_file_ends_in_one_line(tmp_path, read_shards):
    sound = gzip.compress(b"some line\n" * 5000)
    changed = sound[:-6] + bytes([sound[-6] ^ 1]) + sound[-5:]  # The checksum.
    packed, scratch = tmp_path / "a.gz", tmp_path / "scratch"
    message = r"^expected a whole compressed file at .*a\.gz, but it is damaged "
    for content in (sound[: len(sound) // 2], changed):
        packed.write_bytes(content)
        source = line_source(packed, shard_bytes=10)
        with refused(message):
            source.prepare_shards(scratch)
        assert not list(scratch.iterdir())
        with refused(message):
            read_shards(source)


def test_a_full_disk_ends_in_one_line_and_leaves_nothing(tmp_path):
    packed = tmp_path / "a.gz"
    packed.write_bytes(gzip.compress(b"some line\n" * 5000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The limit on a file's size stops a write half-way, as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with refused("the disk is full"):
            line_source(packed, shard_bytes=10).prepare_shards(tmp_path / "scratch")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "scratch").iterdir())


def test_a_file_that_became_shorter_ends_in_one_line(tmp_path, read_shards):
    path = tmp_path / "a"
    path.write_bytes(b"some line\n" * 3)
    source = line_source(path)
    shards = source.shards()
    path.write_bytes(b"some line\n")
    with refused(r"at least 30 bytes in .*, got 10"):
        list(source.read(shards[0]))
    path.unlink()
    with refused("expected a readable file at"):
        list(source.read(shards[0]))


def test_a_pattern_reads_its_files_in_the_order_of_their_names(write_lines):
    for folder, name in [("b", "1"), ("a-b", "1"), ("a", "2"), ("a", "10")]:
        text = {"title": f"{folder}/{name}", "text": ""}
        path = write_lines(f"{folder}/part{name}.jsonl", [text])
    root = path.removesuffix("a/part10.jsonl")
    found = [d.title for d in read_all(open_source(f"json:{root}*/part*.jsonl"))]
    assert found == ["a/10", "a/2", "a-b/1", "b/1"]
    found = [d.title for d in read_all(open_source(f"json:{root}[ab]/part1*.jsonl"))]
    assert found == ["a/10", "b/1"]


def test_cc_news_in_both_spellings(write_lines):
    common = {"title": "A title", "url": "http://news.example/1"}
    common |= {"date_publish": "2018-02-13 19:01:01", "description": "A lead."}
    crawled = common | {"maintext": "The whole text.", "text": None, "language": "en"}
    published = common | {"text": "The whole text.", "image_url": None}
    without = crawled | {"title": None, "maintext": " ", "title_page": "On the page"}
    nothing = {"title": "A title", "text": None}
    path = write_lines("news.jsonl.gz", [crawled, published, without, nothing])
    assert list(read_all(open_source(f"cc_news:{path}"))) == [
        *[Document("A title", "The whole text.", "http://news.example/1")] * 2,
        Document("On the page", "A lead.", "http://news.example/1"),
        Document("A title", "", "A title"),
    ]


def test_lines_that_are_no_news_or_no_page_are_bad_records(write_lines):
    news = write_lines("news.jsonl", [{"title": "a"}, {"title": "a", "text": 3}, 4])
    page = write_lines("wiki_00", [{"id": "1", "title": "T"}])
    read = [
        *read_all(open_source(f"cc_news:{news}")),
        *read_all(open_source(f"wikiextractor:{page}")),
    ]
    assert all(isinstance(record, BadRecord) for record in read)
    places = [record.where.rpartition(", ")[2] for record in read]
    assert places == ["line 1", "line 2", "line 3", "line 1"]
    missing = "maintext, text, description, got title"
    reasons = [missing, "'text' to be .* got 3", "JSON", "a string 'text'"]
    for record, reason in zip(read, reasons, strict=True):
        assert re.search(reason, record.reason)


def page(title, text):
    url = "https://en.wikipedia.org/wiki?curid=12"
    fields = {"id": "12", "revid": "1", "url": url, "title": title, "text": text}
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
    assert list(read_all(open_source(f"wikiextractor:{path}"))) == [
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
        source = open_source(f"wikiextractor:{tmp_path}/wiki", shard_bytes=shard_bytes)
        read = [r.source_id for shard in read_shards(source) for r in shard]
        assert read == expected
