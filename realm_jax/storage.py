"""Stores named bytes in a local folder or a gs:// bucket, with the same semantics.

Jobs on different machines communicate only through a store, so a store guarantees what
they need: objects are written atomically, are durable once the call returns, and
`create` lets exactly one of several writers succeed.
"""

import base64
import contextlib
import dataclasses
import errno
import itertools
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import google_crc32c

from realm_jax.errors import BadInputError, is_out_of_space, out_of_space_error
from realm_jax.extras import require_extra

_READ_BYTES = 1 << 22
# TensorStore writes a local file under this suffix and renames it; what a killed
# process leaves behind is not an object.
_TENSORSTORE_LOCK = ".__lock"
# Raised by a network file system whose server is away, and by one that failed over.
_UNAVAILABLE = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN)
# Fewer than the connections that the client keeps open.
_DELETED_AT_ONCE = 8


class AlreadyExistsError(BadInputError):
    """Raised by `create` if an object with other contents exists."""


class MissingObjectError(BadInputError):
    """Raised when there is no object of a name."""


class UnavailableStoreError(OSError):
    """Raised when the store does not answer, after retries; calls can be repeated."""


@dataclasses.dataclass(frozen=True)
class ObjectStat:
    """Size of an object in bytes, its crc32c, and its last write in Unix seconds."""

    size: int
    crc32c: int
    modified: float


class Store(Protocol):
    """Objects by name: `/`-separated, relative, without parts that start with a dot.

    Every method raises `BadInputError` for a malformed name and for a location that
    cannot be read or written, `UnavailableStoreError` when the store is unreachable.
    """

    def write(self, name: str, data: bytes) -> None:
        """Writes an object durably, atomically replacing an existing one."""
        ...

    def create(self, name: str, data: bytes) -> None:
        """Writes an object only if there is none.

        Also succeeds if an object with the same bytes exists, because this call may
        have written it before a lost response and a retry. Writers that compete must
        therefore write different bytes.

        Raises:
          AlreadyExistsError: an object with other contents exists.
        """
        ...

    def read(self, name: str) -> bytes:
        """Returns the contents of an object.

        Raises:
          MissingObjectError: there is none.
        """
        ...

    def exists(self, name: str) -> bool:
        """Returns whether an object of this name exists."""
        ...

    def list(self, folder: str = "") -> list[str]:
        """Returns the sorted full names of all objects below `folder/`."""
        ...

    def stats(self, folder: str = "") -> dict[str, ObjectStat]:
        """Returns size, checksum and time of all objects below `folder/`."""
        ...

    def sync(self, folder: str) -> None:
        """Makes what other libraries have written below `folder/` durable.

        To be called before an object is written that refers to it.
        """
        ...

    def delete(self, name: str) -> None:
        """Deletes an object durably; does nothing if there is none."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Deletes all objects below `folder/`."""
        ...

    def url(self, name: str = "") -> str:
        """Returns the location of an object, for messages."""
        ...

    def kvstore_spec(self, folder: str) -> dict[str, Any]:
        """Returns the TensorStore key-value store spec of `folder/`."""
        ...


def open_store(url: str | os.PathLike[str]) -> Store:
    """Opens a folder (created by the first write) or `gs://bucket/prefix`."""
    location = os.fspath(url)
    scheme, separator, rest = location.partition("://")
    if not separator:
        return _LocalStore(location)
    if scheme == "file":
        return _LocalStore(rest)
    bucket, _, prefix = rest.partition("/")
    if scheme == "gs" and bucket:
        return _GcsStore(bucket, prefix.strip("/"))
    raise BadInputError(
        f"expected a folder or gs://bucket/prefix, got {location!r}; give one of these."
    )


def absolute_url(url: str) -> str:
    """Returns a location independent of the working directory."""
    return url if "://" in url else str(Path(url).expanduser().absolute())


def file_stat(path: Path) -> ObjectStat:
    """Returns size, checksum and time of a local file, of which it reads every byte."""
    checksum = google_crc32c.Checksum()
    with _bad_input_on_os_error(path), path.open("rb") as file:
        status = os.fstat(file.fileno())
        while part := file.read(_READ_BYTES):
            checksum.update(part)
    value = int.from_bytes(checksum.digest(), "big")
    return ObjectStat(status.st_size, value, status.st_mtime)


def sync_entry(path: Path) -> None:
    """Makes a local file, or the entries of a folder, durable."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _walk(path: Path, topdown: bool = True) -> Iterator[tuple[str, list[str]]]:
    """Yields folders with the names of their files; one that is gone has none.

    Raises:
      OSError: a folder cannot be read, which `os.walk` would take for an empty one.
    """

    def onerror(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    for parent, _, files in os.walk(path, topdown=topdown, onerror=onerror):
        yield parent, files


def sync_tree(path: Path) -> None:
    """Makes all files below a local folder durable, with the names of all folders.

    What is deleted meanwhile is passed over.
    """
    for parent, files in _walk(path, topdown=False):
        for entry in (*(Path(parent, file) for file in files), Path(parent)):
            with contextlib.suppress(FileNotFoundError):
                sync_entry(entry)
    for above in path.parents:
        # Those that are not ours, such as the root, existed before.
        with contextlib.suppress(OSError):
            sync_entry(above)


class _LocalStore:
    """A store in a folder of a local or network file system with hard links."""

    def __init__(self, root: str | os.PathLike[str]):
        self._root = Path(root).expanduser().absolute()

    def write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with _bad_input_on_os_error(path, len(data)), _durable(path, data) as temporary:
            os.replace(temporary, path)

    def create(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with _bad_input_on_os_error(path, len(data)), _durable(path, data) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                _require_same(self.url(name), self.read(name), data)

    def read(self, name: str) -> bytes:
        path = self._path(name)
        with _bad_input_on_os_error(path):
            return path.read_bytes()

    def exists(self, name: str) -> bool:
        path = self._path(name)
        with _bad_input_on_os_error(path):
            return path.is_file()

    def list(self, folder: str = "") -> list[str]:
        top = self._path(folder) if folder else self._root
        with _bad_input_on_os_error(top):
            return sorted(
                Path(parent, file).relative_to(self._root).as_posix()
                for parent, files in _walk(top)
                for file in files
                if not (file.startswith(".") or file.endswith(_TENSORSTORE_LOCK))
            )

    def stats(self, folder: str = "") -> dict[str, ObjectStat]:
        found = {}
        for name in self.list(folder):
            # An object may be deleted after it was listed.
            with contextlib.suppress(MissingObjectError):
                found[name] = file_stat(self._path(name))
        return found

    def sync(self, folder: str) -> None:
        path = self._path(folder)
        with _bad_input_on_os_error(path):
            sync_tree(path)

    def delete(self, name: str) -> None:
        path = self._path(name)
        # Where there is no folder, there is no object.
        with _bad_input_on_os_error(path), contextlib.suppress(FileNotFoundError):
            path.unlink()
            # A commit that came back after a power cut could have lost its data.
            sync_entry(path.parent)

    def delete_folder(self, folder: str) -> None:
        path = self._path(folder)
        with _bad_input_on_os_error(path):
            for parent, files in _walk(path, topdown=False):
                for file in files:
                    Path(parent, file).unlink(missing_ok=True)
                # As in a bucket, a concurrent write to the folder is not an error.
                with contextlib.suppress(OSError):
                    os.rmdir(parent)

    def url(self, name: str = "") -> str:
        return str(self._path(name) if name else self._root)

    def kvstore_spec(self, folder: str) -> dict[str, Any]:
        return {"driver": "file", "path": f"{self._path(folder)}/"}

    def _path(self, name: str) -> Path:
        return self._root / _checked(name)


class _GcsStore:
    """A store below a prefix of a Google Cloud Storage bucket.

    Uses the application default credentials; with STORAGE_EMULATOR_HOST set, uses that
    server without credentials.
    """

    def __init__(self, bucket: str, prefix: str = ""):
        require_extra("gcs", f"gs://{bucket}")
        # Imported here, because local runs do not need it and it is slow to import.
        from google.cloud import storage

        self._prefix = f"{_checked(prefix)}/" if prefix else ""
        with _bad_input_on_cloud_error(f"gs://{bucket}/{self._prefix}"):
            # Objects belong to no project, and user credentials have none.
            self._bucket = storage.Client(project=None).bucket(bucket)

    def write(self, name: str, data: bytes) -> None:
        with _bad_input_on_cloud_error(self.url(name)):
            self._blob(name).upload_from_string(data, checksum="crc32c")

    def create(self, name: str, data: bytes) -> None:
        from google.api_core.exceptions import PreconditionFailed

        with _bad_input_on_cloud_error(self.url(name)):
            try:
                self._blob(name).upload_from_string(
                    data, checksum="crc32c", if_generation_match=0
                )
            except PreconditionFailed:
                _require_same(self.url(name), self.read(name), data)

    def read(self, name: str) -> bytes:
        with _bad_input_on_cloud_error(self.url(name)):
            return self._blob(name).download_as_bytes(checksum="crc32c")

    def exists(self, name: str) -> bool:
        with _bad_input_on_cloud_error(self.url(name)):
            return self._blob(name).exists()

    def list(self, folder: str = "") -> list[str]:
        return sorted(self._names(folder))

    def stats(self, folder: str = "") -> dict[str, ObjectStat]:
        # Google computes the checksum when it stores an object and includes it in the
        # listing, so nothing is downloaded here, however large the snapshot.
        return {
            name: ObjectStat(
                int(blob.size),
                int.from_bytes(base64.b64decode(blob.crc32c), "big"),
                blob.updated.timestamp(),
            )
            for name, blob in self._names(folder).items()
        }

    def sync(self, folder: str) -> None:
        # An upload that has ended is durable.
        _checked(folder)

    def delete(self, name: str) -> None:
        with (
            contextlib.suppress(MissingObjectError),
            _bad_input_on_cloud_error(self.url(name)),
        ):
            self._blob(name).delete()

    def delete_folder(self, folder: str) -> None:
        _checked(folder)
        names = self.list(folder)
        # One after the other, an index of 13 million blocks takes ten minutes.
        with ThreadPoolExecutor(_DELETED_AT_ONCE) as pool:
            for _ in pool.map(self.delete, names):
                pass

    def url(self, name: str = "") -> str:
        return (
            f"gs://{self._bucket.name}/{self._prefix}{_checked(name) if name else ''}"
        )

    def kvstore_spec(self, folder: str) -> dict[str, Any]:
        path = f"{self._prefix}{_checked(folder)}/"
        return {"driver": "gcs", "bucket": self._bucket.name, "path": path}

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._prefix + _checked(name))

    def _names(self, folder: str) -> dict[str, Any]:
        prefix = self._prefix + (f"{_checked(folder)}/" if folder else "")
        with _bad_input_on_cloud_error(f"gs://{self._bucket.name}/{prefix}"):
            blobs = list(self._bucket.list_blobs(prefix=prefix))
        return {blob.name.removeprefix(self._prefix): blob for blob in blobs}


def _checked(name: str) -> str:
    parts = name.split("/")
    if not all(part and not part.startswith(".") for part in parts):
        raise BadInputError(
            f"expected an object name like folder/file, got {name!r}; leave out "
            "empty parts and parts that start with a dot."
        )
    return name


def _require_same(url: str, found: bytes, expected: bytes) -> None:
    if found != expected:
        raise AlreadyExistsError(
            f"expected nothing at {url}, but another writer was first; use what is "
            "there, or delete it and run again."
        )


@contextlib.contextmanager
def _durable(path: Path, data: bytes) -> Iterator[Path]:
    """Yields a temporary file with `data`, on disk, to be moved to `path`."""
    _make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
    # The directory entry must survive a power cut, too.
    sync_entry(path.parent)


def _make_folder(path: Path) -> None:
    """Makes a folder and those above it, durably, unless it is deleted meanwhile."""
    places = (path, *path.parents)
    new = list(itertools.takewhile(lambda place: not place.exists(), places))
    try:
        path.mkdir(parents=True, exist_ok=True)
        for place in new:
            sync_entry(place.parent)
    except FileExistsError as error:
        # Also raised for a folder that was there and is gone when pathlib looks again.
        if any(one.exists() and not one.is_dir() for one in (path, *path.parents)):
            raise
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error


@contextlib.contextmanager
def _bad_input_on_os_error(path: Path, needed: int = 0) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise MissingObjectError(
            f"expected a file at {path}, found none; check the folder, or run the "
            "stage that writes it."
        ) from error
    except OSError as error:
        if is_out_of_space(error):
            raise out_of_space_error(f"{needed:,} bytes at {path}") from error
        if error.errno in _UNAVAILABLE:
            raise UnavailableStoreError(f"{path}: {error.strerror}") from error
        raise BadInputError(
            f"expected {path} to be usable, got {error.strerror!r}; check the path and "
            "its permissions."
        ) from error


@contextlib.contextmanager
def _bad_input_on_cloud_error(url: str) -> Iterator[None]:
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError

    try:
        yield
    except exceptions.NotFound as error:
        raise MissingObjectError(
            f"expected an object at {url}, found none; check bucket and prefix, or run "
            "the stage that writes it."
        ) from error
    except (exceptions.Forbidden, exceptions.Unauthorized, GoogleAuthError) as error:
        if isinstance(error, GoogleAuthError) and _is_without_answer(error):
            raise UnavailableStoreError(f"{url}: {_first_line(error)}") from error
        raise BadInputError(
            f"expected access to {url}, got {_first_line(error)!r}; run `gcloud auth "
            "application-default login` or grant the service account access."
        ) from error
    except (exceptions.GoogleAPIError, OSError) as error:
        raise UnavailableStoreError(f"{url}: {_first_line(error)}") from error


def _is_without_answer(error: Any) -> bool:
    """Returns whether a token was not renewed because its server did not answer.

    That is the metadata server of a VM, asked every hour. An error about an answer,
    such as that there is no service account, has the answer as its second argument.
    """
    from google.auth.exceptions import TransportError

    cause = error.__cause__ or error
    is_unanswered = isinstance(cause, TransportError) and len(cause.args) == 1
    return error.retryable or is_unanswered


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
