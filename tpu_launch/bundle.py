"""Packs the code of a run into one archive, named by its contents.

For a checkout it contains the files that git tracks, in their current state, and new
ones that are not ignored; for an installation the packages, with the gin files in
them. Both run from the folder they are unpacked to.
"""

import dataclasses
import gzip
import hashlib
import io
import pathlib
import re
import subprocess
import tarfile
from collections.abc import Mapping, Sequence

from realm_jax import run_record
from realm_jax.cli import configuration
from realm_jax.errors import BadInputError
from realm_jax.storage import Store
from tpu_launch.run import bundle_name

CODE = pathlib.Path(__file__).resolve().parents[1]
"""Folder of the running packages: a checkout, or the folder of an installation."""

_PACKAGES = ("realm_jax", "tasks", "tpu_launch")
# Folder of gin files in an installation.
_INSTALLED_GIN = "realm_jax/gin"
_GIVEN = "given"
_INCLUDE = re.compile(r"""^include\s+["']([^"']+)["']""", re.MULTILINE)
# Code is small; a stray corpus or checkpoint is not.
_LARGEST_FILE = 10 << 20
_SECRET_NAMES = (
    ".pem",
    ".key",
    ".p12",
    ".env",
    ".netrc",
    ".pypirc",
    "credentials.json",
    "id_rsa",
    "id_ed25519",
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
    """A compressed tar file of code, identical for identical files."""

    data: bytes
    sha256: str

    def ship(self, store: Store) -> None:
        """Writes it to the model directory, unless it is there."""
        name = bundle_name(self.sha256)
        if not store.exists(name):
            store.write(name, self.data)


def make_bundle(
    code: pathlib.Path, gin_files: Mapping[str, pathlib.Path] | None = None
) -> Bundle:
    """Returns the bundle of a checkout or an installation, with files of `GinFiles`."""
    paths = {name: code / name for name in _files(code)} | dict(gin_files or {})
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in sorted(paths.items()):
            if path.is_symlink() or not path.is_file():
                continue
            data = path.read_bytes()
            _require_code(name, data)
            _add(archive, name, data, path.stat().st_mode)
        if code == CODE and (commit := run_record.commit()):
            # What runs on the workers is no checkout that could be asked.
            _add(archive, f"realm_jax/{run_record.COMMIT_NAME}", commit.encode())
    data = gzip.compress(raw.getvalue(), mtime=0)
    return Bundle(data, hashlib.sha256(data).hexdigest())


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int = 0) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o755 if mode & 0o100 else 0o644
    archive.addfile(info, io.BytesIO(data))


def _files(code: pathlib.Path) -> list[str]:
    if _is_installed(code):
        # The folder also holds the packages of others.
        return [
            path.relative_to(code).as_posix()
            for package in _PACKAGES
            for path in (code / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        ]
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(listing, cwd=code, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BadInputError(
            f"expected a git checkout at {code}, got none ({error}); launch from a "
            "clone of the repository, or from an installed package"
        ) from error
    return sorted(set(done.stdout.decode().split("\0")) - {""})


def _is_installed(code: pathlib.Path) -> bool:
    return (code / _INSTALLED_GIN).is_dir()


def _require_code(name: str, data: bytes) -> None:
    if len(data) > _LARGEST_FILE:
        raise BadInputError(
            f"expected files of at most {_LARGEST_FILE:,} bytes to ship, got {name} of "
            f"{len(data):,}; have git ignore it"
        )
    if name.lower().endswith(_SECRET_NAMES) or _SECRETS.search(data):
        raise BadInputError(
            f"expected code to ship, got {name}, which looks like a secret; have git "
            "ignore it"
        )


def require_shipped(code: pathlib.Path, modules: Sequence[str]) -> None:
    """Requires that workers have the modules they are to import."""
    for module in modules:
        if _is_installed(code) and module.partition(".")[0] not in _PACKAGES:
            raise BadInputError(
                "expected no --import_module beside the installed packages, which are "
                f"all that workers get, got {module}; launch from a clone of the "
                "repository, with the module in it"
            )


class GinFiles:
    """Maps the gin files of a command line to paths on a worker.

    Attributes:
      shipped: name in the bundle -> file. Files of the code too, as git may ignore one.
    """

    def __init__(self, code: pathlib.Path):
        """Begins with no files; `code` is the folder of the packages."""
        self._code = code
        self.shipped: dict[str, pathlib.Path] = {}

    def on_worker(self, file: str) -> str:
        """Returns the path of a file in the bundle."""
        path = _find_gin_file(file)
        if path is None:
            raise BadInputError(
                f"expected a gin file at {file}, found none; correct the path"
            )
        # Two files from elsewhere may have the same name.
        name = f"{_GIVEN}/{len(self.shipped)}/{path.name}"
        if path.is_relative_to(self._code):
            name = path.relative_to(self._code).as_posix()
        self._ship(name, path)
        return name

    def _ship(self, name: str, path: pathlib.Path) -> None:
        """Ships a file and, at the paths by which it names them, those it includes."""
        if self.shipped.get(name) == path:
            return
        self.shipped[name] = path
        for included in _INCLUDE.findall(path.read_text()):
            found = _find_gin_file(included)
            if found is None or included.startswith("/"):
                raise BadInputError(
                    f"expected files that workers find included in {path}, got "
                    f"{included!r}; name it by a path relative to the checkout"
                )
            self._ship(included, found)


def _find_gin_file(file: str) -> pathlib.Path | None:
    """Returns the file that gin reads for this path, or None."""
    for folder in (pathlib.Path.cwd(), *configuration.GIN_FILE_FOLDERS):
        if (folder / file).is_file():
            return (folder / file).resolve()
    return None
