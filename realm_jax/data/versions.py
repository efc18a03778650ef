"""Links the versions of a corpus: each version names its successor.

    <corpus>/successor.json   in an old version: path and fingerprint of the next one
    <corpus>/parent.json      in a new version: the same of the version it was made from

A corpus is never modified, because indexes and checkpoints are bound to its
fingerprint. It has at most one successor, so that the newest version is unique. Both
files are kept beside corpus.json and not in it: an updated corpus is identical to one
prepared from the changed text.
"""

import json
import os
from pathlib import Path

from realm_jax.data.blocks import read_info
from realm_jax.errors import BadInputError
from realm_jax.manifests import parse_json, require_fields
from realm_jax.storage import AlreadyExistsError, open_store

SUCCESSOR_FILE = "successor.json"
PARENT_FILE = "parent.json"


def newest_version(corpus: str | os.PathLike[str]) -> Path:
    """Returns the newest version of a corpus, itself if it has no successor."""
    path = Path(corpus)
    read_info(path)
    seen = {path.resolve()}
    while (following := successor(path)) is not None:
        if following in seen:
            raise BadInputError(
                f"expected a newer version of {corpus} than those before it, got "
                f"{following} again in {path / SUCCESSOR_FILE}; remove the file that "
                "is wrong."
            )
        seen.add(following)
        path = following
    return path


def successor(corpus: str | os.PathLike[str]) -> Path | None:
    """Returns the immediate successor of a corpus, None if there is none."""
    pointer = Path(corpus) / SUCCESSOR_FILE
    if not pointer.exists():
        return None
    try:
        place, fingerprint = _read_pointer(pointer)
        path = (Path(corpus).resolve() / place).resolve()
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"expected the path of the next version of {corpus} in {pointer}, but it "
            f"cannot be read ({error}); restore or remove it."
        ) from error
    try:
        found = read_info(path)["fingerprint"]
    except BadInputError as error:
        raise BadInputError(
            f"expected the next version of {corpus} at {path}, which {pointer} names, "
            f"but it cannot be read ({error}); move it there or correct the file."
        ) from error
    if found != fingerprint:
        raise BadInputError(
            f"expected the corpus {fingerprint[:12]} at {path}, which {pointer} names "
            f"as the next version of {corpus}, got {found[:12]}; move the right one "
            "there or correct the file."
        )
    return path


def is_version_of(corpus: str | os.PathLike[str], fingerprint: str) -> bool:
    """Returns whether a corpus was made from another one by `realm update-corpus`.

    Args:
      fingerprint: of the earlier one, which need not exist any more.
    """
    path, seen = Path(corpus).resolve(), set()
    while path not in seen:
        seen.add(path)
        try:
            place, found = _read_pointer(path / PARENT_FILE)
            path = (path / place).resolve()
        except (OSError, ValueError):
            return False
        if found == fingerprint:
            return True
    return False


def require_no_other_successor(
    corpus: str | os.PathLike[str], output: str | os.PathLike[str]
) -> None:
    """Checks that a corpus has no successor other than `output`."""
    pointer = Path(corpus) / SUCCESSOR_FILE
    if pointer.exists():
        following = successor(corpus)
        if following != Path(output).resolve():
            raise _second_successor(corpus, str(following))


def link_versions(
    corpus: str | os.PathLike[str], output: str | os.PathLike[str]
) -> None:
    """Records a complete corpus as the successor of another; idempotent."""
    old, new = Path(corpus).resolve(), Path(output).resolve()
    # Relative, so that both can be moved together.
    parent = _pointer(os.path.relpath(old, new), read_info(old)["fingerprint"])
    following = _pointer(os.path.relpath(new, old), read_info(new)["fingerprint"])
    # The successor is written last, so that it only ever names a complete version.
    try:
        open_store(new).create(PARENT_FILE, parent)
    except AlreadyExistsError as error:
        raise BadInputError(
            f"expected {output} to be made from {corpus}, but its {PARENT_FILE} names "
            "another corpus; choose another folder for the new version."
        ) from error
    try:
        open_store(old).create(SUCCESSOR_FILE, following)
    except AlreadyExistsError as error:
        raise _second_successor(corpus, "another one") from error


def _read_pointer(path: Path) -> tuple[str, str]:
    """Returns folder and fingerprint; raises OSError or ValueError if it cannot."""
    named = parse_json(path.read_text(encoding="utf-8"))
    require_fields(named, {"corpus": str, "fingerprint": str})
    return named["corpus"], named["fingerprint"]


def _pointer(place: str, fingerprint: str) -> bytes:
    text = json.dumps({"corpus": place, "fingerprint": fingerprint}, indent=2)
    return f"{text}\n".encode()


def _second_successor(corpus: str | os.PathLike[str], found: str) -> BadInputError:
    return BadInputError(
        f"expected {corpus} to have no successor yet, got {found}; change that "
        f"version, the newest one, or remove {Path(corpus) / SUCCESSOR_FILE}."
    )
