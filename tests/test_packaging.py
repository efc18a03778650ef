"""What a wheel holds, and what an installation does where there is no checkout."""

import email
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Mapping, Sequence

import pytest

import realm_jax
from realm_jax import extras
from realm_jax.cli.main import main
from tests import tiny_run

pytestmark = pytest.mark.full

ROOT = tiny_run.ROOT
# What a trainer does without.
HEAVY = ("tensorflow", "seqio", "apache_beam", "aiohttp", "spacy")
_PIN = re.compile(r"^([\w.-]+)(?:\[[\w,-]+\])?==(\S+)", re.MULTILINE)

# Says where `gin` and the packages are, and what gin reads of a file that includes one.
_FOUND = """
import gin, json, realm_jax
from realm_jax.cli import configuration

found = {"gin": gin.__file__, "realm_jax": realm_jax.__file__}
for file in ("gin/hardware/v4_64.gin", "hardware/v4_64.gin"):
    configuration.parse(configuration.make_parser("", ""), [f"--gin_file={file}"])
    found[file] = gin.query_parameter("hardware.HardwareConfig.trainer")
print(json.dumps(found))
"""

# Says what `up` would ship from an installation.
_SHIPPED = """
import io, json, tarfile
from tpu_launch.bundle import CODE, GinFiles, make_bundle

files = GinFiles(CODE)
places = [files.on_worker(f"{folder}runs/pretrain.gin") for folder in ("", "gin/")]
places.append(files.on_worker("mine.gin"))
with tarfile.open(fileobj=io.BytesIO(make_bundle(CODE, files.shipped).data)) as archive:
    print(json.dumps([places, archive.getnames()]))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of this checkout, for builds leave files where they are made."""
    folder = tmp_path_factory.mktemp("source")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listing, cwd=ROOT, text=True)
    for name in filter(None, names.split("\0")):
        if (path := ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", source)
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the wheel in it, and none of what it needs."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--no-index", f"--target={folder}", wheel)
    return folder


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        return email.message_from_bytes(archive.read(name))


def pip(*arguments: object, python: pathlib.Path | None = None) -> None:
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    words += [f"--python={python}"] if python else []
    subprocess.run([*words, *map(str, arguments)], check=True)


def elsewhere(**changes: str) -> Mapping[str, str]:
    """The environment of a process that is to find no checkout."""
    kept = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, **tiny_run.ENVIRONMENT, **changes}


def said(words: Sequence[object], cwd: pathlib.Path, env: Mapping[str, str]) -> str:
    command = [str(word) for word in words]
    return subprocess.check_output(command, cwd=cwd, env=env, text=True)


def pins(*names: str) -> dict[str, str]:
    return dict(_PIN.findall("\n".join((ROOT / name).read_text() for name in names)))


def test_a_wheel_holds_all_that_is_read_at_run_time(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    gin_files = {path.relative_to(ROOT) for path in (ROOT / "gin").rglob("*.gin")}
    assert len(gin_files) > 20
    assert {f"realm_jax/{path}" for path in gin_files} <= names
    for package in ("realm_jax", "tasks", "tpu_launch"):
        modules = {str(p.relative_to(ROOT)) for p in (ROOT / package).rglob("*.py")}
        assert modules <= names
    assert {
        "realm_jax/evaluation/report.html.jinja",
        "realm_jax/evaluation/ask.html.jinja",
        "realm_jax/evaluation/style.css.jinja",
        "realm_jax/py.typed",
        "tasks/data/vital_questions.jsonl",
        "tasks/data/vital_training_questions.jsonl",
        "tpu_launch/requirements.lock",
    } <= names
    tops = {name.partition("/")[0] for name in names}
    packages = {top for top in tops if not top.endswith(".dist-info")}
    assert packages == {"realm_jax", "tasks", "tpu_launch"}


def test_where_a_wheel_is_gin_is_the_library_and_finds_the_files(installed, tmp_path):
    env = elsewhere(PYTHONPATH=str(installed))
    found = json.loads(said([sys.executable, "-c", _FOUND], tmp_path, env))
    require_found(found, installed)


def test_where_the_checkout_is_editable_gin_is_the_library_too(source, tmp_path):
    folder = tmp_path / "venv"
    venv.create(folder)
    python = folder / "bin" / "python"
    [packages] = (folder / "lib").glob("python*/site-packages")
    # What is installed here serves there, but nothing that is editable does.
    (packages / "libraries.pth").write_text(place_of("jax") + "\n")
    words = ("install", "--no-deps", "--no-index", "--no-build-isolation")
    pip(*words, "--editable", source, python=python)
    found = json.loads(said([python, "-c", _FOUND], tmp_path, elsewhere()))
    require_found(found, source)


def place_of(distribution: str) -> str:
    """The folder that a distribution is installed in."""
    return str(importlib.metadata.distribution(distribution).locate_file(""))


def require_found(found, folder):
    assert found["realm_jax"] == str(folder / "realm_jax" / "__init__.py")
    assert found["gin"] == os.path.join(place_of("gin-config"), "gin", "__init__.py")
    assert found["gin/hardware/v4_64.gin"] == "v4-64"
    assert found["hardware/v4_64.gin"] == "v4-64"


def test_workers_of_an_installation_get_what_is_installed(installed, tmp_path):
    """The packages with their gin files, and those that were given beside them."""
    (tmp_path / "mine.gin").write_text("SEED = 1\n")
    cache = installed / "realm_jax" / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "x.pyc").touch()
    (installed / "of_others.py").touch()
    env = elsewhere(PYTHONPATH=str(installed))
    places, names = json.loads(said([sys.executable, "-c", _SHIPPED], tmp_path, env))
    assert places == [*["realm_jax/gin/runs/pretrain.gin"] * 2, "given/1/mine.gin"]
    assert set(names) >= {
        *(*places, "realm_jax/gin/runs/build_index.gin", "realm_jax/cli/main.py"),
        *("tpu_launch/worker.py", "tpu_launch/requirements.lock"),
    }
    assert not [name for name in names if "__pycache__" in name or "others" in name]


def test_workers_install_versions_of_the_lock_files():
    worker = pins("tpu_launch/requirements.lock")
    assert worker.items() <= pins("requirements.lock", "requirements-tpu.lock").items()
    assert {"jax", "orbax-checkpoint", "libtpu", "google-cloud-storage"} <= set(worker)
    assert not {"tensorflow", "seqio", "apache-beam", "spacy"} & set(worker)


def test_the_compiler_for_gpus_is_of_the_version_of_jax():
    compiler = pins("requirements-gpu.lock")
    jax = pins("requirements.lock")["jax"]
    assert compiler["jax-cuda13-plugin"] == compiler["jax-cuda13-pjrt"] == jax


def requirements(metadata, extra: str | None) -> set[str]:
    """Names of what the wheel requires, for an extra or in any case."""
    found = set()
    for line in metadata.get_all("Requires-Dist"):
        requirement, _, marker = line.partition(";")
        asked = re.search(r'extra == "([\w-]+)"', marker)
        if (asked and asked[1]) == extra:
            found.add(re.match(r"[\w.-]+", requirement)[0].lower())
    return found


def test_a_trainer_requires_no_library_of_an_extra(metadata):
    trainer = requirements(metadata, None)
    assert {"jax", "flax", "gin-config", "orbax-checkpoint"} <= trainer
    for extra in extras.MODULES:
        added = requirements(metadata, extra) - {"etils"}
        assert added
        assert not added & trainer
        assert added <= requirements(metadata, "all")


def test_extras_bring_the_modules_they_are_known_by(metadata):
    brought_by = importlib.metadata.packages_distributions()
    for extra, modules in extras.MODULES.items():
        for module in modules:
            names = {name.lower() for name in brought_by[module.partition(".")[0]]}
            assert names & requirements(metadata, extra), module


def test_there_is_one_version(metadata, capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"realm_jax {realm_jax.__version__}\n"
    assert metadata["Version"] == realm_jax.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {realm_jax.__version__}\n" in citation
    [newest, *_] = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert realm_jax.__version__.removesuffix(".dev0") == newest


@pytest.mark.timeout(3600)
def test_a_trainer_needs_its_own_set_alone(wheel, tmp_path):
    """Prints what the installation takes: see CONTRIBUTING.md."""
    folder, python = install_trainer(wheel, tmp_path)
    code = "import importlib.util as u, sys; print(*map(u.find_spec, sys.argv[1:]))"
    found = said([python, "-c", code, *HEAVY], tmp_path, elsewhere())
    assert found.split() == ["None"] * len(HEAVY)
    tiny_run.make_inputs(tmp_path)
    tiny_run.write_sizes(tmp_path, pretrain_steps=10)
    prepare = [sys.executable, "-m", "realm_jax.cli.main"]
    said([*prepare, *tiny_run.arguments("prepare", tmp_path)], ROOT, os.environ)
    for stage in ("warm-start", "pretrain"):
        run = f"gin/runs/{stage.replace('-', '_')}.gin"
        files = ("gin/models/tiny.gin", "hardware/cpu.gin", run, "sizes.gin")
        words = [folder / "bin" / "realm", stage, *(f"--gin_file={f}" for f in files)]
        words += [f"--gin.{text}" for text in tiny_run.bindings(stage, tmp_path)]
        words += ['--gin.REFRESH_MODE="blocking"'] if stage == "pretrain" else []
        said(words, tmp_path, elsewhere())
    lines = (tmp_path / "pretrain" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 10


def install_trainer(wheel, tmp_path) -> tuple[pathlib.Path, pathlib.Path]:
    """Installs a wheel as a person would; returns folder and Python of it."""
    folder, constraints = tmp_path / "venv", tmp_path / "constraints.txt"
    lines = [f"{n}=={v}\n" for n, v in pins("requirements.lock").items()]
    constraints.write_text("".join(lines))
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    began = time.monotonic()
    words = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    said([*words, f"--constraint={constraints}", wheel], tmp_path, elsewhere())
    seconds = time.monotonic() - began
    packages = len(list(folder.glob("lib/python*/site-packages/*.dist-info")))
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    print(f"\n{packages} packages, {size >> 20:,} MiB, {seconds:.0f} s")
    return folder, python
