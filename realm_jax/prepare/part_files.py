"""Keeps the parts of unfinished work in a store, each with a checksum of its own.

Parts lie there until the last one is made, which may be days and several runs later. A
damaged one counts as absent, so that it is made anew and never becomes a corpus.
"""

import logging

import google_crc32c

from realm_jax.storage import MissingObjectError, Store

_CHECKSUM_BYTES = 4

_log = logging.getLogger(__name__)


def write_part(store: Store, name: str, part: bytes) -> None:
    """Writes a part, followed by its crc32c."""
    store.write(name, part + _checksum(part))


def read_part(store: Store, name: str) -> bytes | None:
    """Returns a part; None if there is none, or a damaged one, which is logged."""
    try:
        data = store.read(name)
    except MissingObjectError:
        return None
    part, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if checksum == _checksum(part):
        return part
    _log.warning("%s is damaged and is made anew", store.url(name))
    return None


def _checksum(part: bytes) -> bytes:
    return google_crc32c.value(part).to_bytes(_CHECKSUM_BYTES, "big")
