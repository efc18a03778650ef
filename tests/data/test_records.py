import gzip

from realm_jax.data.records import answers_field, json_object, read_text, text_field
from realm_jax.storage import open_store
from tests.refused import refused

TEXT = "Čudo\n서울\r\n"


def test_text_is_read_plain_and_packed(tmp_path):
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_bytes(TEXT.encode())
    packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + TEXT.encode()))
    # A byte order mark is no part of the text.
    assert read_text(plain) == read_text(str(packed)) == TEXT


def test_text_is_read_from_a_bucket(bucket):
    open_store(bucket).write("texts/b.txt.gz", gzip.compress(TEXT.encode()))
    assert read_text(f"{bucket}/texts/b.txt.gz") == TEXT
    with refused(r"c\.txt, but it cannot be read"):
        read_text(f"{bucket}/texts/c.txt")


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("nowhere.txt", "folder"):
        with refused(f"text file at .*{name}, but it cannot be read"):
            read_text(tmp_path / name)
    gzipped = r"c.txt:1: .*got gzipped data; .*\.gz"
    for name, content, message in [
        ("a.gz", b"no gzip", "cannot be read"),
        ("b.gz", gzip.compress(b"cut", mtime=0)[:-5], "cannot be read"),
        ("b.txt", "{}".encode("utf-16"), "b.txt:1: .*got UTF-16"),
        ("c.txt", gzip.compress(b"{}", mtime=0), gzipped),
        ("a.txt", b"1\n2\nthr\xff\n", r"a.txt:3: .*UTF-8, got the byte 0xff as byte 4"),
    ]:
        (tmp_path / name).write_bytes(content)
        with refused(message):
            read_text(tmp_path / name)


def test_a_record_of_odd_json():
    record = json_object(r'{"q": "a\ud800b", "a": ["\udc00", "😀"]}', "here")
    # Half a pair of surrogates is no text.
    assert text_field(record, "q", "here") == "a\ufffdb"
    assert answers_field(record, "a", "here") == ("\ufffd", "😀")
