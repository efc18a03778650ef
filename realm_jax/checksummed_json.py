"""JSON objects that carry their own crc32c: no bit of one can change unnoticed."""

import json
from collections.abc import Mapping
from typing import Any

import google_crc32c

_SEAL = "crc32c"


def seal(body: Mapping[str, Any]) -> bytes:
    """Returns an object as JSON, with the checksum of all else in it at its end."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    sealed = {**body, _SEAL: google_crc32c.value(canonical.encode())}
    return (json.dumps(sealed, indent=1) + "\n").encode()


def unseal(data: bytes) -> dict[str, Any]:
    """Returns the object that was sealed.

    Raises:
      ValueError: these are not the very bytes that `seal` gave; white space counts.
    """
    body = json.loads(data)
    if not isinstance(body, dict) or _SEAL not in body:
        raise ValueError("it carries no checksum")
    del body[_SEAL]
    if seal(body) != data:
        raise ValueError("its checksum does not fit")
    return body
