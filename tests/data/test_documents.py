"""One record of a file to one document or to the reason why not; what is held out."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data.documents import (
    GIVEN,
    ByteRanges,
    Document,
    document_from_bytes,
    document_from_json,
    held_out,
    is_article,
    is_held_out,
    share_of_at_least_one,
    stable_uniform,
)
from realm_jax.data.records import BadRecord, RecordError
from realm_jax.data.salient_spans import Span
from tests.refused import refused

TEXT = st.text(alphabet=st.characters(codec="utf-8"))


def from_json(**fields):
    return document_from_json(json.dumps(fields).encode(), "a.jsonl, line 7")


@given(TEXT, TEXT, st.booleans())
def test_json_gives_back_any_text(title, text, escape):
    line = json.dumps({"title": title, "text": text, "id": 4}, ensure_ascii=escape)
    document = document_from_json(line.encode(), "here")
    assert document == Document(title, text, "4")


def test_an_article_without_id_is_identified_by_its_title_or_its_text():
    beir = {"title": "a", "_id": "p7"}
    for fields, name in (
        ({"title": "Ávila"}, "Ávila"),
        ({"title": "Ávila", "id": None}, "Ávila"),
        (beir, "p7"),
        (beir | {"id": None}, "p7"),
        (beir | {"id": 0}, "0"),
    ):
        assert from_json(text="b", **fields).source_id == name
    one = from_json(title=" ", text="One.")
    assert one.source_id
    assert one == document_from_json(b'{"title": " ", "text": "One."}', "elsewhere")
    assert one.source_id == from_json(text="One.").source_id
    assert one.source_id == from_json(title=None, text="One.").source_id
    assert one.source_id != from_json(text="Two.").source_id
    assert from_json(title=None, text="One.").title == ""


def test_a_byte_order_mark_is_left_out_and_half_a_surrogate_pair_replaced():
    line = b'\xef\xbb\xbf{"title": "a", "text": "b"}\r'
    assert document_from_json(line, "here") == Document("a", "b", "a")
    line = rb'{"title": "a\ud800", "text": "\udc00b", "id": "\ud83d"}'
    document = document_from_json(line, "here")
    assert document == Document("a\ufffd", "\ufffdb", "\ufffd")


def test_given_spans_keep_their_labels():
    document = from_json(title="", text="Ávila, 1607", spans=[[0, 5], [7, 11, "DATE"]])
    assert document.spans == (Span(0, 5, GIVEN), Span(7, 11, "DATE"))
    assert from_json(title="", text="", spans=[]).spans == ()
    assert from_json(title="", text="").spans is None
    # Sentences of no length are nothing.
    sentences = ByteRanges([0, 3, 3], [3, 3, 6])
    document = document_from_bytes(b"", b"Ab.Cd.", "here", sentences=sentences)
    assert document.sentences == ((0, 3), (3, 6))
    assert document.spans is None


def test_what_is_no_document_is_one_line_with_place_and_reason():
    for line, reason in [
        (b'{"title": "a", "text": "b"', "a JSON object.*delimiter"),
        (b'{"title": "\xff", "text": "b"}', "line in UTF-8.*0xff as byte 12;"),
        (b"[" * 100_000, "a JSON object.*recursion"),
        (b'["a", "b"]', r"a JSON object, got \[\"a\", \"b\"\]"),
        (b'{"title": "a"}', "a string 'text'"),
        (b'{"title": "a", "text": "b", "id": []}', "'id'"),
        (b'{"title": "a", "text": "b", "spans": [[0, 2]]}', "within the 1 char"),
        (b'{"title": "a", "text": "b", "spans": [[1, 1]]}', "within the 1 char"),
        (b'{"title": "a", "text": "b", "spans": [[false, true]]}', "within the 1"),
        (b'{"title": "a", "text": "b", "spans": [[0, 1, 2]]}', "within the 1 char"),
        (b'{"title": "a", "text": "b", "spans": null}', "within the 1 char"),
    ]:
        with refused(f"^a.jsonl, line 7: expected .*{reason}"):
            document_from_json(line, "a.jsonl, line 7")
    with pytest.raises(RecordError) as caught:
        document_from_json(b'["' + b"a" * 1000 + b'"]', "a.jsonl, line 7")
    message = str(caught.value)
    assert len(message) < 300
    assert caught.value.record == BadRecord(*message.split(": ", 1))


@given(TEXT, st.data())
def test_offsets_in_bytes_become_offsets_in_characters(text, data):
    content = text.encode()
    places = st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))
    spans = [tuple(sorted(p)) for p in data.draw(st.lists(places)) if p[0] != p[1]]
    starts = [len(text[:start].encode()) for start, _ in spans]
    limits = [len(text[:end].encode()) for _, end in spans]
    labels = [f"label {i}".encode() for i in range(len(spans))]
    ranges = ByteRanges(starts, limits, labels)
    document = document_from_bytes(b"title", content, "here", spans=ranges)
    expected = tuple(Span(*span, f"label {i}") for i, span in enumerate(spans))
    assert document == Document("title", text, "title", expected)


@given(TEXT, st.integers(-3, 20), st.integers(-3, 20))
def test_offsets_are_refused_just_where_the_bytes_between_are_no_text(
    text, start, limit
):
    content = text.encode()

    def borders(offset):
        try:
            return 0 <= offset <= len(content) and content[:offset].decode() is not None
        except UnicodeDecodeError:
            return False

    whole = start < limit and borders(start) and borders(limit)
    spans = ByteRanges([start], [limit])
    if whole:
        [span] = document_from_bytes(b"", content, "here", spans=spans).spans or ()
        assert text[span.start : span.end].encode() == content[start:limit]
    else:
        with pytest.raises(RecordError, match=r"expected (every|no empty) span"):
            document_from_bytes(b"", content, "here", spans=spans)


def test_offsets_and_bytes_that_do_not_fit_are_refused():
    for annotations, reason in [
        ({"sentences": ByteRanges([0, 2], [3, 6])}, "in order and disjoint"),
        ({"sentences": ByteRanges([3, 0], [6, 3])}, "in order and disjoint"),
        ({"sentences": ByteRanges([0], [7])}, "every sentence .*within the 6 bytes"),
        ({"spans": ByteRanges([0, 3], [3])}, "a limit of every span, got 2 and 1"),
        ({"spans": ByteRanges([0], [3], [b"A", b"B"])}, "types as spans, got 2 for 1"),
        ({"spans": ByteRanges([0], [3], [b"\xff"])}, "type of a span in UTF-8"),
    ]:
        with refused(f"^here: expected .*{reason}"):
            document_from_bytes(b"", b"Ab.Cd.", "here", **annotations)
    with refused(r"title in UTF-8.*0xff"):
        document_from_bytes(b"\xff", b"", "here")
    with refused(r"text in UTF-8.*0xc3"):
        document_from_bytes(b"", b"ab\xc3", "here")


def test_pages_are_articles_by_the_authors_rule():
    lists = ["List of sovereign states", "Index of law articles", "Outline of geometry"]
    pages = ["Mercury (disambiguation)", "Mercury (disambiguation) and more"]
    assert not any(map(is_article, lists + pages))
    articles = ["Mercury (planet)", "A List of Things", "Listeria", "List of ", ""]
    assert all(map(is_article, [*articles, "list of sovereign states"]))


def test_numbers_stay_what_they_were():
    # Spelled out: a changed hash would silently move articles between the splits.
    digest = hashlib.blake2b(b"validation\x00town-1", digest_size=8).digest()
    expected = (int.from_bytes(digest, "little") // 2**11) / 2**53
    assert stable_uniform("validation", "town-1") == expected
    assert stable_uniform(0, 12, 3) == 0.4571624582551126


def test_a_larger_share_holds_out_more_of_the_same():
    sources = [f"article {i}" for i in range(5_000)]
    few, many = held_out(sources, 0.01), held_out(sources, 0.05)
    assert few.sum() == pytest.approx(50, abs=28)
    assert many.sum() == pytest.approx(250, abs=62)
    assert (few <= many).all()
    assert [is_held_out(source) for source in sources] == few.tolist()
    assert not held_out(sources, 0.0).any()
    assert held_out(sources, 1.0).all()


def test_of_a_few_articles_the_first_that_any_share_holds_out_is_held_out():
    sources = [f"article {i}" for i in range(20)]
    assert not held_out(sources, 0.01).any()
    kept = held_out(sources, share_of_at_least_one(sources, 0.01))
    assert kept.sum() == 1
    shares = [share / 1000 for share in range(1001)]
    smallest = next(share for share in shares if held_out(sources, share).any())
    assert held_out(sources, smallest)[kept].all()
    # A share that holds out enough stays, and so does none at all.
    assert share_of_at_least_one(sources, 0.5) == 0.5
    assert share_of_at_least_one(sources, 0.0) == 0.0
