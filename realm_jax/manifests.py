"""Manifests: JSON records of the files that belong together, with their own crc32c.

    {..., "files": {name: {"size": bytes, "crc32c": checksum}}, "crc32c": checksum}

Snapshots, checkpoints, corpora and sets of examples each have one, written last:
without it they do not exist. The last checksum covers the rest of the object, so that
a change to any bit of it is detected.
"""

import dataclasses
import json
import reprlib
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any

import google_crc32c

from realm_jax.storage import ObjectStat, Store

_SEAL = "crc32c"


class DamagedManifestError(Exception):
    """Raised when a manifest differs from what was written; the message names it."""


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """Size of a file in bytes, and the crc32c of its contents."""

    size: int
    crc32c: int

    @classmethod
    def of(cls, data: bytes) -> "FileRecord":
        """Returns the record of a file with these contents."""
        return cls(len(data), google_crc32c.value(data))


def file_records(stats: Mapping[str, ObjectStat]) -> dict[str, FileRecord]:
    """Returns the records of the objects in a listing from `Store.stats`."""
    return {name: FileRecord(stat.size, stat.crc32c) for name, stat in stats.items()}


def parse_json(data: str | bytes) -> Any:
    """Returns a JSON value; what is nested too deeply is a ValueError, too."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def require_fields(record: Any, fields: Mapping[str, type | UnionType]) -> None:
    """Raises ValueError unless a JSON value is an object with fields of these types.

    It may have others. A boolean is no int here, as in JSON.
    """
    if not isinstance(record, dict):
        raise ValueError(f"it is {reprlib.repr(record)} and no object")
    for name, kind in fields.items():
        if name not in record:
            raise ValueError(f"it has no {name!r}")
        value = record[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"its {name!r} is {reprlib.repr(value)}")


def parse_files(table: Any) -> dict[str, FileRecord]:
    """Returns the records in the file table of a manifest; ValueError if it is none."""
    require_fields(table, {})
    records = {}
    for name, entry in table.items():
        require_fields(entry, {"size": int, "crc32c": int | str})
        crc32c = entry["crc32c"]
        # In corpora and examples of earlier versions it is a hexadecimal string.
        value = int(crc32c, 16) if isinstance(crc32c, str) else crc32c
        records[name] = FileRecord(entry["size"], value)
    return records


def find_damage(
    files: Mapping[str, FileRecord],
    look_up: Callable[[str], FileRecord | ObjectStat | None],
) -> str | None:
    """Returns the first damaged file and its damage, for "..., but {}", or None.

    `look_up` takes a name and returns the file found now, None if there is none.
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


def seal(body: Mapping[str, Any], *, is_sorted: bool = True) -> bytes:
    """Returns an object as JSON, with a checksum of the rest of it at its end.

    Unsorted keys keep an order that is shown to people.
    """
    text = json.dumps(body, sort_keys=is_sorted, default=dataclasses.asdict)
    return _with_checksum(json.loads(text))


def unseal(data: bytes, *, required: bool = True) -> dict[str, Any]:
    """Returns the object that was sealed; ValueError if a byte, even a space, differs.

    `required=False` accepts an object without a checksum, as in corpora and examples of
    earlier versions.
    """
    body = parse_json(data)
    if not isinstance(body, dict) or (required and _SEAL not in body):
        raise ValueError("it carries no checksum")
    if _SEAL in body:
        del body[_SEAL]
        if _with_checksum(body) != data:
            raise ValueError("its checksum does not fit")
    return body


def read(
    store: Store, name: str, fields: Mapping[str, type | UnionType]
) -> dict[str, Any]:
    """Returns a sealed object of a store, with these fields.

    Raises:
      MissingObjectError: there is no such object.
      DamagedManifestError: the object differs from what was written.
    """
    data = store.read(name)
    try:
        body = unseal(data)
        require_fields(body, fields)
        return body
    except ValueError as error:
        raise DamagedManifestError(f"{name} is damaged ({error})") from error


def _with_checksum(body: Mapping[str, Any]) -> bytes:
    # Keys keep their order here, because earlier releases wrote other orders.
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    sealed = {**body, _SEAL: google_crc32c.value(canonical.encode())}
    return (json.dumps(sealed, indent=1) + "\n").encode()
