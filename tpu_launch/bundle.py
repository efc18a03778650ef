"""The code of a run as one archive, named by its contents.

It holds what git tracks in the checkout, as it is now, and what is new and not ignored.

    python -m tpu_launch.bundle URL FILE     copies a bundle from its model directory
"""

import dataclasses
import gzip
import hashlib
import io
import pathlib
import re
import subprocess
import sys
import tarfile

from realm_jax.errors import BadInputError
from realm_jax.storage import Store, open_store
from tpu_launch.operations import ShipBundle

_FOLDER = "launch/bundles"
# Code is small; a corpus or a checkpoint that lies about is not.
_LARGEST_FILE = 10 << 20
_SECRET_NAMES = (
    *(".pem", ".key", ".p12", ".env", ".netrc", ".pypirc"),
    *("credentials.json", "id_rsa", "id_ed25519"),
)
# Private keys, also within the JSON of a service account, and tokens of Google Cloud,
# GitHub, Hugging Face and AWS.
_SECRETS = re.compile(
    rb"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----"
    rb"|\bya29\.[\w-]{20,}"
    rb"|\bAIza[\w-]{35}\b"
    rb"|\bgh[pousr]_[A-Za-z0-9]{36}\b"
    rb"|\bhf_[A-Za-z0-9]{34}\b"
    rb"|\bAKIA[0-9A-Z]{16}\b"
)


@dataclasses.dataclass(frozen=True)
class Bundle:
    """An archive.

    Attributes:
      data: tar, compressed; the same for the same files.
      sha256: of the data.
    """

    data: bytes
    sha256: str

    def operation(self, model_dir: str) -> ShipBundle:
        """Returns what brings it to a model directory."""
        return ShipBundle(f"{model_dir.rstrip('/')}/{_name(self)}", self.sha256)

    def ship(self, store: Store) -> None:
        """Brings it to the model directory, unless it is there."""
        if not store.exists(_name(self)):
            store.write(_name(self), self.data)


def make_bundle(checkout: pathlib.Path) -> Bundle:
    """Returns the bundle of a checkout.

    Raises:
      BadInputError: it is no git checkout, or holds a large file or one that looks like
        a secret.
    """
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in _files(checkout):
            path = checkout / name
            if path.is_symlink() or not path.is_file():
                continue
            _require_code(path, name)
            info = tarfile.TarInfo(name)
            info.size = path.stat().st_size
            info.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            with path.open("rb") as file:
                archive.addfile(info, file)
    data = gzip.compress(raw.getvalue(), mtime=0)
    return Bundle(data, hashlib.sha256(data).hexdigest())


def path_in(checkout: pathlib.Path, file: str) -> str | None:
    """Returns where a file of a checkout is in its bundle; None for any other.

    Args:
      checkout: folder.
      file: path from the working directory, or from the checkout.
    """
    for path in (pathlib.Path(file).absolute(), checkout / file):
        if path.exists() and path.resolve().is_relative_to(checkout):
            return path.resolve().relative_to(checkout).as_posix()
    return None


def _files(checkout: pathlib.Path) -> list[str]:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(listing, cwd=checkout, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BadInputError(
            f"expected a git checkout at {checkout}, got none ({error}); launch from a "
            "clone of the repository"
        ) from error
    return sorted(set(done.stdout.decode().split("\0")) - {""})


def _require_code(path: pathlib.Path, name: str) -> None:
    size = path.stat().st_size
    if size > _LARGEST_FILE:
        raise BadInputError(
            f"expected files of at most {_LARGEST_FILE:,} bytes to ship, got {name} of "
            f"{size:,}; have git ignore it"
        )
    is_named_so = path.name.lower().endswith(_SECRET_NAMES)
    if is_named_so or _SECRETS.search(path.read_bytes()):
        raise BadInputError(
            f"expected code to ship, got {name}, which looks like a secret; have git "
            "ignore it"
        )


def _name(bundle: Bundle) -> str:
    return f"{_FOLDER}/{bundle.sha256}.tar.gz"


def _copy(url: str, file: str) -> None:
    folder, _, name = url.rpartition("/")
    pathlib.Path(file).write_bytes(open_store(folder).read(name))


if __name__ == "__main__":
    _copy(*sys.argv[1:])
