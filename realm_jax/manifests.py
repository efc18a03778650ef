"""Manifests: JSON that says which files belong together and carries its own crc32c.

    {..., "files": {name: {"size": bytes, "crc32c": checksum}}, "crc32c": checksum}

Snapshots, checkpoints, corpora and sets of examples each have one, written last:
without it they do not exist. The last checksum is that of all else in the object, so no
bit of it can change unnoticed.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import google_crc32c

from realm_jax.storage import ObjectStat, Store

_SEAL = "crc32c"


class DamagedManifestError(Exception):
    """A manifest is not what was written; the message names it."""


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """A file: its size in bytes and the crc32c of its contents."""

    size: int
    crc32c: int

    @classmethod
    def of(cls, data: bytes) -> "FileRecord":
        """Returns the record of a file with these contents."""
        return cls(len(data), google_crc32c.value(data))


def file_records(stats: Mapping[str, ObjectStat]) -> dict[str, FileRecord]:
    """Returns the records of the objects in a listing, such as `Store.stats` gives."""
    return {name: FileRecord(stat.size, stat.crc32c) for name, stat in stats.items()}


def parse_files(table: Mapping[str, Mapping[str, Any]]) -> dict[str, FileRecord]:
    """Returns the records in the file table of a manifest; other fields are ignored.

    Raises:
      ValueError, KeyError, TypeError: it is not such a table.
    """
    records = {}
    for name, entry in table.items():
        crc32c = entry["crc32c"]
        # Corpora and examples of earlier versions have hexadecimal digits.
        value = int(crc32c, 16) if isinstance(crc32c, str) else crc32c
        records[name] = FileRecord(entry["size"], value)
    return records


def find_damage(
    files: Mapping[str, FileRecord],
    look_up: Callable[[str], FileRecord | ObjectStat | None],
) -> str | None:
    """Says which file is not the one of the manifest, and how; None if all are.

    Args:
      files: those of the manifest, by name.
      look_up: takes a name and returns what is there now, None if nothing is.

    Returns:
      The name of the first such file and what is wrong with it, for "..., but {}".
    """
    for name, expected in files.items():
        found = look_up(name)
        if found is None:
            return f"{name} is missing"
        if found.size != expected.size:
            return f"{name} has {found.size} bytes, not {expected.size}"
        if found.crc32c != expected.crc32c:
            checksums = f"{found.crc32c:08x}, not {expected.crc32c:08x}"
            return f"{name} is damaged (crc32c {checksums})"
    return None


def seal(body: Mapping[str, Any]) -> bytes:
    """Returns an object as JSON, with the checksum of all else in it at its end.

    Args:
      body: JSON values in any order, and file records.
    """
    text = json.dumps(body, sort_keys=True, default=dataclasses.asdict)
    return _with_checksum(json.loads(text))


def unseal(data: bytes, *, required: bool = True) -> dict[str, Any]:
    """Returns the object that was sealed.

    Args:
      data: the JSON.
      required: False lets an object pass that carries no checksum at all, as corpora
        and examples of earlier versions do.

    Raises:
      ValueError: these are not the very bytes that `seal` gave; white space counts.
    """
    body = json.loads(data)
    if not isinstance(body, dict) or (required and _SEAL not in body):
        raise ValueError("it carries no checksum")
    if _SEAL in body:
        del body[_SEAL]
        if _with_checksum(body) != data:
            raise ValueError("its checksum does not fit")
    return body


def read(store: Store, name: str) -> dict[str, Any]:
    """Returns a sealed object of a store.

    Raises:
      MissingObjectError: there is none.
      DamagedManifestError: it is not what was written.
    """
    data = store.read(name)
    try:
        return unseal(data)
    except ValueError as error:
        raise DamagedManifestError(f"{name} is damaged ({error})") from error


def _with_checksum(body: Mapping[str, Any]) -> bytes:
    # Earlier releases wrote other orders, which this keeps.
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    sealed = {**body, _SEAL: google_crc32c.value(canonical.encode())}
    return (json.dumps(sealed, indent=1) + "\n").encode()
