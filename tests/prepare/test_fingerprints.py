"""The code that counts: the user's modules with what they import, and the package."""

import importlib
import os
import sys

import pytest

from realm_jax.prepare import fingerprints
from realm_jax.prepare.fingerprints import (
    differing_modules,
    listing_sha256,
    module_code,
    source_sha256,
)

CODE = "def years(x):\n    return x + 1\n"
MODULES = {
    "mine": "import json, numpy, tokenizers\nfrom realm_jax.data import documents\n"
    "import mine_lib.deep\nfrom mine_lib import shallow, value\n"
    "def later():\n    import mine_lazy\n",
    "mine_lazy": "Y = 1\n",
    "mine_unused": "Y = 1\n",
    "mine_lib/__init__": "value = 3\n",
    "mine_lib/deep": "from . import sibling\n",
    "mine_lib/shallow": "from mine_lib.deep import sibling\n",
    "mine_lib/sibling": "Y = 1\n",
    "mine_lib/unused": "Y = 1\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of the user's on the path; its modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("mine")]:
        del sys.modules[name]


def write(folder, sources):
    for name, source in sources.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    importlib.invalidate_caches()


def test_all_but_comments_and_layout_counts(tmp_path):
    def sha(source):
        (tmp_path / "a.py").write_text(source)
        return source_sha256(tmp_path / "a.py")

    same = "def years(x):\n\n    return (x +\n            1)  # More.\n"
    assert sha(same) == sha("# The years.\n" + CODE) == sha(CODE)
    others = (CODE.replace("1", "2"), CODE.replace("+", "-"), CODE + "Y = 1\n", "def")
    assert sha(CODE) not in set(map(sha, others))


def test_modules_count_with_those_of_the_user_that_they_import(folder):
    write(folder, MODULES)
    found = module_code(["mine"])
    assert list(found) == [
        *("mine", "mine_lazy", "mine_lib", "mine_lib.deep"),
        *("mine_lib.shallow", "mine_lib.sibling"),
    ]
    write(folder, {"mine_lib/sibling": "Y = 2\n", "mine_lib/unused": "Y = 2\n"})
    after = module_code(["mine"])
    assert differing_modules(found, after) == ["mine_lib.sibling"]
    write(folder, {"mine_lazy": "Y = 2\n"})
    assert differing_modules(after, module_code(["mine"])) == ["mine_lazy"]
    (folder / "mine.py").unlink()
    assert differing_modules(found, module_code(["mine"])) == list(found)


def test_packages_and_installed_modules_count_if_they_are_named(folder):
    write(folder, {"mine_lib/__init__": "value = 3\n", "mine_lib/deep": "Y = 1\n"})
    assert list(module_code(["mine_lib.deep"])) == ["mine_lib", "mine_lib.deep"]
    named = ["tokenizers.models", "json"]
    assert list(module_code(named)) == ["json", "tokenizers.models"]
    assert module_code([]) == {}
    with pytest.raises(ImportError):
        module_code(["mine_nowhere"])


def test_the_package_has_one_fingerprint_of_what_makes_blocks_and_examples(
    tmp_path, monkeypatch
):
    now, package = fingerprints.package_code(), tmp_path / "realm_jax"
    names = ("data/a", "prepare/documents/b", "training/c")
    write(package, dict.fromkeys(names, "X = 1\n"))
    monkeypatch.setattr(fingerprints, "_PACKAGE", package)

    def source():
        return fingerprints.package_code.__wrapped__()["source"]

    before = source()
    assert before != now["source"]
    write(package, {"training/c": "X = 2\n"})
    assert source() == before
    write(package, {"prepare/documents/b": "X = 2\n"})
    changed = source()
    assert changed != before
    (package / "data/a.py").rename(package / "data/b.py")
    assert source() not in (before, changed)


def test_files_of_a_cache_count_by_size_and_time(tmp_path):
    path = tmp_path / "train.tfrecord-00000-of-00001"
    assert listing_sha256(str(tmp_path / "none")) == ""
    path.write_text("a")
    os.utime(path, (1, 1))
    first = listing_sha256(str(tmp_path))
    assert listing_sha256(str(tmp_path)) == first
    os.utime(path, (2, 2))
    assert listing_sha256(str(tmp_path)) != first
