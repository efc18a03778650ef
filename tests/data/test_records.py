import gzip

import pytest

from realm_jax.data.records import answers_field, json_object, read_text, text_field
from realm_jax.errors import BadInputError
from realm_jax.storage import open_store
from tests.gcs_emulator import emulated_bucket

TEXT = "Čudo\n서울\r\n"


def test_text_is_read_plain_and_packed(tmp_path):
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_bytes(TEXT.encode())
    packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + TEXT.encode()))
    # A byte order mark is no part of the text.
    assert read_text(plain) == read_text(str(packed)) == TEXT


def test_text_is_read_from_a_bucket(tmp_path):
    with emulated_bucket(tmp_path, "texts") as bucket:
        open_store(bucket).write("a/b.txt.gz", gzip.compress(TEXT.encode()))
        assert read_text(f"{bucket}/a/b.txt.gz") == TEXT
        with pytest.raises(BadInputError, match=r"c\.txt, but it cannot be read"):
            read_text(f"{bucket}/a/c.txt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nowhere.txt", None, "cannot be read"),
        ("a.gz", b"no gzip", "cannot be read"),
        ("a.gz", gzip.compress(b"cut", mtime=0)[:-5], "cannot be read"),
        (
            "a.txt",
            b"one\ntwo\nthr\xff\xfe\n",
            "a.txt:3: expected the line in UTF-8, got the byte 0xff as byte 4 of",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInputError, match=message) as caught:
        read_text(path)
    assert "\n" not in str(caught.value)


def test_half_a_pair_of_surrogates_is_replaced():
    record = json_object(r'{"q": "a\ud800b", "a": ["\udc00", "😀"]}', "here")
    assert text_field(record, "q", "here") == "a\ufffdb"
    assert answers_field(record, "a", "here") == ("\ufffd", "😀")


def test_json_nested_too_deep_is_no_traceback():
    with pytest.raises(BadInputError, match="here: expected a JSON object"):
        json_object("[" * 200_000, "here")
