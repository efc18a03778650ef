"""Packs the code of a run into one archive, named by its contents.

For a checkout it contains the files that git tracks, in their current state, and new
ones that are not ignored; for an installation the packages, with the gin files in
them. Both run from the folder they are unpacked to.

    python -m tpu_launch.bundle URL FILE     copies a bundle from its model directory
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

from realm_jax import settings
from realm_jax.cli import configuration
from realm_jax.errors import BadInputError
from realm_jax.storage import Store
from tpu_launch.run import Code

CODE = pathlib.Path(__file__).resolve().parents[1]
"""Folder of the running packages: a checkout, or the folder of an installation."""

_FOLDER = "launch/bundles"
_PACKAGES = ("realm_jax", "tasks", "tpu_launch")
# Folder of gin files in an installation.
_INSTALLED_GIN = "realm_jax/gin"
_GIVEN = "given"
_INCLUDE = re.compile(r"""^include\s+["']([^"']+)["']""", re.MULTILINE)
# Code is small; a stray corpus or checkpoint is not.
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
    """An archive of code.

    Attributes:
      data: compressed tar file; identical for identical files.
      sha256: checksum of the data.
    """

    data: bytes
    sha256: str

    def code(self, model_dir: str) -> Code:
        """Returns where it is in a model directory, once it is shipped."""
        return Code(f"{model_dir.rstrip('/')}/{_name(self)}", self.sha256)

    def ship(self, store: Store) -> None:
        """Writes it to the model directory, unless it is there."""
        if not store.exists(_name(self)):
            store.write(_name(self), self.data)


def make_bundle(
    code: pathlib.Path, gin_files: Mapping[str, pathlib.Path] | None = None
) -> Bundle:
    """Returns the bundle of a checkout or an installation.

    Args:
      code: folder of the packages.
      gin_files: further files, by name in the bundle; see `GinFiles`.

    Raises:
      BadInputError: the folder is neither, or contains a large file or one that looks
        like a secret.
    """
    paths = {name: code / name for name in _files(code)} | dict(gin_files or {})
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in sorted(paths.items()):
            if path.is_symlink() or not path.is_file():
                continue
            _require_code(path, name)
            info = tarfile.TarInfo(name)
            info.size = path.stat().st_size
            info.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            with path.open("rb") as file:
                archive.addfile(info, file)
        if code == CODE and (commit := settings.commit()):
            # What runs on the workers is no checkout that could be asked.
            info = tarfile.TarInfo(f"realm_jax/{settings.COMMIT_NAME}")
            info.size = len(commit)
            archive.addfile(info, io.BytesIO(commit.encode()))
    data = gzip.compress(raw.getvalue(), mtime=0)
    return Bundle(data, hashlib.sha256(data).hexdigest())


def _path_in(code: pathlib.Path, file: str) -> str | None:
    """Returns the path of a gin file of the code in its bundle; None for any other.

    Args:
      code: folder of the packages.
      file: the path as given: relative to the working directory, or one that gin finds
        in the code.
    """
    path = find_gin_file(file)
    if path is None or not path.resolve().is_relative_to(code):
        return None
    return path.resolve().relative_to(code).as_posix()


def require_shipped(code: pathlib.Path, modules: Sequence[str]) -> None:
    """Requires that workers have the modules they are to import.

    Raises:
      BadInputError: the code is an installation, and a module is not part of it.
    """
    for module in modules:
        if _is_installed(code) and module.partition(".")[0] not in _PACKAGES:
            raise BadInputError(
                "expected no --import_module beside the installed packages, which are "
                f"all that workers get, got {module}; launch from a clone of the "
                "repository, with the module in it"
            )


def find_gin_file(file: str) -> pathlib.Path | None:
    """Returns the file that gin reads for this path, or None."""
    for folder in (pathlib.Path.cwd(), *configuration.GIN_FILE_FOLDERS):
        if (folder / file).is_file():
            return folder / file
    return None


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
        """Returns the path of a file in the bundle.

        Raises:
          BadInputError: there is no such file.
        """
        path = find_gin_file(file)
        if path is None:
            raise BadInputError(
                f"expected a gin file at {file}, found none; correct the path"
            )
        # Two files from elsewhere may have the same name.
        elsewhere = f"{_GIVEN}/{len(self.shipped)}/{path.name}"
        name = _path_in(self._code, file) or elsewhere
        self._ship(name, path)
        return name

    def _ship(self, name: str, path: pathlib.Path) -> None:
        """Ships a file and, at the paths by which it names them, those it includes."""
        if self.shipped.get(name) == path.resolve():
            return
        self.shipped[name] = path.resolve()
        for included in _INCLUDE.findall(path.read_text()):
            found = find_gin_file(included)
            if found is None or included.startswith("/"):
                raise BadInputError(
                    f"expected files that workers find included in {path}, got "
                    f"{included!r}; name it by a path relative to the checkout"
                )
            self._ship(included, found)


def _files(code: pathlib.Path) -> list[str]:
    if _is_installed(code):
        return _installed_files(code)
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


def _installed_files(code: pathlib.Path) -> list[str]:
    """Returns the files of a wheel; its folder also holds the packages of others."""
    return [
        path.relative_to(code).as_posix()
        for package in _PACKAGES
        for path in (code / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]


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
