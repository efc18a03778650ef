import contextlib
import errno
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import google_crc32c
import pytest
from google.api_core.exceptions import ServiceUnavailable
from google.auth.exceptions import RefreshError, TransportError
from google.cloud.storage import Blob

from realm_jax import storage
from realm_jax.errors import BadInputError
from realm_jax.storage import (
    AlreadyExistsError,
    MissingObjectError,
    UnavailableStoreError,
    open_store,
)
from tests.dropping_proxy import dropping_proxy
from tests.refused import refused


@pytest.fixture(params=["local", "gs"])
def root(request, tmp_path):
    if request.param == "local":
        return str(tmp_path / "model")
    # Each test has a folder of its own in the bucket.
    return f"{request.getfixturevalue('bucket')}/{tmp_path.name}/model"


@pytest.fixture
def store(root):
    return open_store(root)


def test_reads_back_what_was_written_last(store, root):
    store.write("a/b.bin", b"first")
    store.write("a/b.bin", bytes(range(256)))
    assert open_store(root).read("a/b.bin") == bytes(range(256))
    assert store.exists("a/b.bin")
    assert not store.exists("a")
    assert not store.exists("a/b")
    store.write("empty", b"")
    assert store.read("empty") == b""
    with pytest.raises(MissingObjectError, match="nothing/here"):
        store.read("nothing/here")
    assert store.url() in (root, f"{root}/")
    assert store.url("a/b") == f"{root}/a/b"


def test_lists_full_names_in_order_below_a_folder(store, root):
    assert store.list("b") == []
    for name in ["b/2", "b/10", "a", "b/c/1", "bc/1"]:
        open_store(root).write(name, b"")
    assert store.list() == ["a", "b/10", "b/2", "b/c/1", "bc/1"]
    assert store.list("b") == ["b/10", "b/2", "b/c/1"]
    assert store.list("nowhere") == []


def test_stats_hold_size_checksum_and_time(store):
    began = time.time()
    contents = {"s/a": b"", "s/b": b"123456789", "s/c": os.urandom(70_000)}
    for name, data in contents.items():
        store.write(name, data)
    stats = store.stats("s")
    assert list(stats) == list(contents)
    for name, data in contents.items():
        assert stats[name].size == len(data)
        assert stats[name].crc32c == google_crc32c.value(data)
        assert began - 2 < stats[name].modified < time.time() + 2
    # The check value of CRC-32C in every catalogue of checksums.
    assert stats["s/b"].crc32c == 0xE3069283


def test_deletes_only_what_it_is_told(store):
    for name in ["a/1", "a/2", "ab/1"]:
        store.write(name, b"")
    store.delete("a/1")
    store.delete("a/1")
    assert store.list() == ["a/2", "ab/1"]
    store.delete_folder("a")
    store.delete_folder("a")
    assert store.list() == ["ab/1"]


def test_deletes_a_folder_that_is_being_written_to(tmp_path):
    store, errors = open_store(tmp_path), []

    def write(number):
        try:
            store.write(f"a/b/{number % 50}", b"x")
        except MissingObjectError:
            pass  # Its folder went away under its hands.
        except BaseException as error:
            errors.append(error)

    with beside(write):
        for _ in range(50):
            store.delete_folder("a")
    assert errors == []
    store.delete_folder("a")
    assert store.list() == []


@contextlib.contextmanager
def beside(write):
    """Calls it with one number after the other, in a thread."""
    stop = threading.Event()

    def repeat():
        for number in itertools.count():
            if stop.is_set():
                return
            write(number)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_create_does_not_overwrite(store):
    store.create("commits/1", b"mine")
    # On a bucket a retry after a lost response meets its own object.
    store.create("commits/1", b"mine")
    with pytest.raises(AlreadyExistsError, match="commits/1"):
        store.create("commits/1", b"theirs")
    assert store.read("commits/1") == b"mine"


def test_one_of_many_creators_wins(tmp_path):
    store, start = open_store(tmp_path), threading.Barrier(8)

    def create(writer):
        start.wait()
        try:
            store.create("commit", b"%d" % writer)
        except AlreadyExistsError:
            return None
        return writer

    with ThreadPoolExecutor(8) as pool:
        won = [writer for writer in pool.map(create, range(8)) if writer is not None]
    assert len(won) == 1
    assert store.read("commit") == b"%d" % won[0]


def test_refuses_names_that_are_not_below_the_root(store):
    for name in ("", "/a", "a//b", "a/", "../a", "a/./b", ".hidden"):
        with refused("object name"):
            store.write(name, b"")
        with refused("object name"):
            store.delete_folder(name)


def test_folders_and_buckets_alone_are_opened(tmp_path):
    for url in ("s3://bucket/x", "gs://", "gs:///x", "http://host/x"):
        with refused("gs://bucket/prefix"):
            open_store(url)
    assert open_store(tmp_path / "new").list() == []
    assert not (tmp_path / "new").exists()
    open_store(f"file://{tmp_path}").write("a", b"1")
    assert (tmp_path / "a").read_bytes() == b"1"


def test_readers_never_see_half_an_object(tmp_path):
    store = open_store(tmp_path)
    store.write("x", b"0" * 200_000)
    with beside(lambda number: store.write("x", b"%d" % (number % 10) * 200_000)):
        for _ in range(100):
            data = store.read("x")
            assert len(data) == 200_000
            assert len(set(data)) == 1
            assert store.list() == ["x"]


@pytest.mark.process("it is killed")
def test_a_killed_writer_leaves_no_object(tmp_path):
    # The writer dies with its bytes on disk but not yet under their name.
    program = (
        "import os, signal, sys\n"
        "from realm_jax import storage\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "storage.open_store(sys.argv[1]).write('a/x', b'1234')\n"
    )
    process = subprocess.run([sys.executable, "-c", program, tmp_path], check=False)
    assert process.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path / "a")
    assert open_store(tmp_path).list() == []
    assert not open_store(tmp_path).exists("a/x")


def test_no_room_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    store.write("kept", b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for method in ("write", "create"):
        # A file-size limit stops a write in its middle, as a full disk does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with refused(r"100,000 bytes.*a/big"):
                getattr(store, method)("a/big", bytes(100_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert os.listdir(tmp_path / "a") == []

    no_space = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space"))
    monkeypatch.setattr(storage.os, "fsync", no_space)
    with refused("room for 3 bytes"):
        store.write("a/x", b"abc")
    assert os.listdir(tmp_path / "a") == []
    assert store.read("kept") == b"old"


def test_a_file_where_a_folder_is_needed_is_bad_input(tmp_path):
    (tmp_path / "model").write_text("a file, not a folder")
    for place, name in ((tmp_path / "model", "a"), (tmp_path, "model/b/c.bin")):
        with refused(r"model/.* usable"):
            open_store(place).write(name, b"")


def test_a_bucket_that_does_not_exist_is_bad_input(bucket):
    with pytest.raises(MissingObjectError, match="gs://no-such-bucket/x"):
        open_store("gs://no-such-bucket").write("x", b"")


def test_a_persons_credentials_need_no_project(tmp_path, monkeypatch):
    """As `gcloud auth application-default login` leaves them."""
    secrets = ("client_id", "client_secret", "refresh_token")
    credentials = {"type": "authorized_user", **dict.fromkeys(secrets, "x")}
    file = tmp_path / "application_default_credentials.json"
    file.write_text(json.dumps(credentials))
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    # Of no gcloud that knows a project.
    monkeypatch.setenv("PATH", str(tmp_path))
    assert open_store("gs://bucket/a").url("b") == "gs://bucket/a/b"


def test_an_unreachable_bucket_is_not_bad_input(bucket, monkeypatch):
    unavailable = mock.Mock(side_effect=ServiceUnavailable("try later"))
    monkeypatch.setattr(Blob, "download_as_bytes", unavailable)
    with pytest.raises(UnavailableStoreError, match="try later"):
        open_store(bucket).read("x")


def test_a_token_that_cannot_be_renewed_now_is_not_bad_input(bucket, monkeypatch):
    """As the credentials of a VM raise it, once an hour at most."""
    no_account = SimpleNamespace(status=404, data=b"no service account")
    for expected, *said in (
        (UnavailableStoreError, "the metadata server does not answer"),
        (BadInputError, "Failed to retrieve a token. Status: 404", no_account),
    ):
        error = RefreshError(cause := TransportError(*said))
        error.__cause__ = cause
        refresh = mock.Mock(side_effect=error)
        monkeypatch.setattr(Blob, "upload_from_string", refresh)
        with pytest.raises(expected):
            open_store(bucket).write("jobs/trainer.json", b"{}")


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path, monkeypatch):
    """As a network file system says it whose server failed over."""
    store, scandir = open_store(tmp_path), os.scandir
    store.write("index/data/1/rows", b"1")
    for number, expected in (
        (errno.ESTALE, UnavailableStoreError),
        (errno.EACCES, BadInputError),
    ):

        def unread(path, number=number):
            if os.fspath(path).endswith("data"):
                raise OSError(number, os.strerror(number), path)
            return scandir(path)

        monkeypatch.setattr(os, "scandir", unread)
        for call in (store.list, store.stats, store.delete_folder, store.sync):
            with pytest.raises(expected):
                call("index")
    monkeypatch.setattr(os, "scandir", scandir)
    assert store.read("index/data/1/rows") == b"1"


def test_a_lost_answer_is_not_a_lost_race(bucket, monkeypatch):
    with dropping_proxy(os.environ["STORAGE_EMULATOR_HOST"]) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        store = open_store(f"{bucket}/retry")
        for method in ("create", "write"):
            proxy.lose_next(method)
            getattr(store, method)(method, b"attempt 1")
        assert [request.kind for request in proxy.lost] == ["create", "write"]
        # Its own object, met by the retry, is one thing; another's is another.
        proxy.lose_next("create")
        with pytest.raises(AlreadyExistsError):
            store.create("create", b"attempt 2")
        assert len(proxy.lost) == 3
        assert store.read("create") == b"attempt 1"


def test_a_folder_that_is_deleted_while_it_is_made_is_missing(tmp_path, monkeypatch):
    """As pathlib says it: the folder was there, and is gone when it looks again."""

    gone = mock.Mock(side_effect=FileExistsError(errno.EEXIST, "File exists", "a"))
    monkeypatch.setattr(Path, "mkdir", gone)
    with pytest.raises(MissingObjectError):
        open_store(tmp_path).write("a/b.bin", b"data")
