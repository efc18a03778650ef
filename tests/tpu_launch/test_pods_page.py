"""Every command line of docs/pods.md, as it is typed.

What the page shows is run, with `--dry_run` or `--fast` where it would take hours or
money. Whatever is added to the page in a form that nothing here knows fails.
"""

import functools
import itertools
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from realm_jax.index.heartbeat import Heartbeat
from realm_jax.storage import open_store
from tests.gcs_emulator import emulated_bucket
from tests.tpu_launch import gcloud_parser
from tests.tpu_launch.fake_tpu import World, served
from tpu_launch import __main__ as tpu_launch
from tpu_launch import records
from tpu_launch.records import TPU_VM, LaunchRecord
from tpu_launch.run import BUILDER, TRAINER, run_id

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pods.md").read_text()
_MODEL_DIR = "gs://my-bucket/my/pretrain"
# Which flags make a command quick, and cost nothing. They may stand on the page too.
_HARMLESS = {
    "plan": ("--fast",),
    "local": ("--dry_run",),
    "up": ("--dry_run",),
    "down": (),
    "status": ("--once",),
    "logs": (),
}
# These show what comes, for ever.
_ENDLESS = ("-f", "--follow")
# Commands of gcloud that a setup needs -> their flags, by the parser of gcloud 528;
# where gcloud is installed, it is asked itself.
_GCLOUD = {
    "auth login": set(),
    "container clusters create": {
        *("--location", "--machine-type", "--num-nodes", "--workload-pool"),
    },
    "container clusters get-credentials": {"--location"},
    "container node-pools create": {
        *("--cluster", "--location", "--machine-type", "--tpu-topology"),
        *("--num-nodes", "--enable-autoscaling", "--min-nodes", "--max-nodes"),
        *("--disk-size", "--scopes", "--workload-metadata"),
    },
    "auth application-default login": {"--project"},
    "services enable": {"--project"},
    "beta services identity create": {"--project", "--service"},
    "iam service-accounts create": {"--project", "--display-name"},
    "iam service-accounts add-iam-policy-binding": {"--project", "--member", "--role"},
    "projects add-iam-policy-binding": {"--member", "--role", "--condition"},
    "storage buckets create": {
        *("--project", "--location"),
        *("--uniform-bucket-level-access", "--soft-delete-duration"),
    },
    "storage buckets add-iam-policy-binding": {"--member", "--role"},
    "storage rsync": {"--recursive"},
    "compute tpus tpu-vm ssh": {"--project", "--zone", "--worker", "--command"},
}


def commands(text: str) -> list[str]:
    """The command lines of the indented blocks of a page."""
    text = re.sub(r"^```yaml\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    joined = re.sub(r" *\\\n *", " ", text)
    lines = joined.splitlines()
    return [line.strip() for line in lines if line.startswith("    ")]


def first_words(command: str) -> str:
    """The first words of a command, for whoever reads which test failed."""
    return " ".join(shlex.split(command)[:4])


COMMANDS = commands(PAGE)


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    """A project in which the page's run is known: bucket, slices, and its notes."""
    folder = tmp_path_factory.mktemp("page")
    world = World()
    with (
        emulated_bucket(folder, "my-bucket"),
        served(world) as address,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", address)
        patch.setenv("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "true")
        patch.chdir(ROOT)
        _invent_a_run()
        yield world


def _invent_a_run() -> None:
    store, run = open_store(_MODEL_DIR), run_id("realm", _MODEL_DIR)
    roles = {TRAINER: "1 x v4-64", BUILDER: "1 x v4-16"}
    where = {"project": "my-project", "zones": ["us-central2-b"]}
    record = LaunchRecord(run, TPU_VM, roles, 1.0, None, 200_000, where)
    records.write_record(store, record)
    for role, beats in records.HEARTBEATS.items():
        Heartbeat(store, beats).beat(70)
        name = f"{records.LOGS}/{run}-{role}-1/0.log"
        store.write(name, f"a word of the {role}\n".encode())


def _require_tpu_launch(words, capsys):
    name, given = words[0], [word for word in words[1:] if word not in _ENDLESS]
    more = [flag for flag in _HARMLESS[name] if flag not in given]
    code = tpu_launch.main([name, *given, *more])
    out, err = capsys.readouterr()
    assert code == 0, err
    for part in _SHOWN.get(name, ()):
        assert part in out + err


# What shows that a command has done its work, and not merely ended.
_SHOWN = {
    "plan": ("memory of a device", "the run"),
    "local": ("# stage 1: prepare", "realm_jax.cli.main pretrain"),
    "up": (
        "--exclude=examples/ gs://my-bucket/",
        "'--exclude=examples/(?!(my_salient)/)' gs://my-bucket/",
        "USD an hour",
    ),
    "down": ("nothing is left",),
    "status": ("trainer", "builder", "70"),
    "logs": ("a word of the trainer",),
}


def _require_make(words):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert words
    assert set(words) <= set(targets)


def _require_bench(module, words):
    """It starts, and has these flags; its figures take many minutes."""
    flags = {word for word in words if word.startswith("--")}
    assert flags <= set(re.findall(r"--[a-z_-]+", _help(module)))


@functools.cache
def _help(module):
    shown = [sys.executable, "-m", module, "--help"]
    return subprocess.check_output(shown, cwd=ROOT, text=True)


def _require_gcloud(words):
    """It is of a known command, with known flags; see also what gcloud says."""
    path, flags = [], set()
    for word in words:
        if word.startswith("--"):
            flags.add(word.partition("=")[0])
        elif any(name.startswith(" ".join([*path, word])) for name in _GCLOUD):
            path.append(word)
    name = " ".join(path)
    assert name in _GCLOUD, f"unknown: gcloud {' '.join(words)}"
    assert flags <= _GCLOUD[name], f"unknown flags of gcloud {name}"


def _require_kubectl(words):
    """It is a verb of kubectl, with its flags; files are there."""
    flags = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    assert flags <= _KUBECTL[words[0]], f"unknown flags of kubectl {words[0]}"
    for flag, file in itertools.pairwise(words):
        if flag == "-f" and not file.startswith("https://"):
            assert list(yaml.safe_load_all((ROOT / file).read_text()))


_KUBECTL = {
    "apply": {"--server-side"},
    "create": set(),
    "delete": set(),
    "get": {"--selector"},
}


@pytest.mark.full
@pytest.mark.usefixtures("cloud")
@pytest.mark.parametrize("command", COMMANDS, ids=first_words)
def test_what_the_page_shows_works(command, capsys):
    match shlex.split(command, comments=True):
        case ["make", *words]:
            _require_make(words)
        case [".venv/bin/python", "-m", "tpu_launch", *words]:
            _require_tpu_launch(words, capsys)
        case ["python" | ".venv/bin/python", "-m", module, *words] if module.startswith(
            "bench."
        ):
            _require_bench(module, words)
        case ["gcloud", *words]:
            _require_gcloud(words)
        case ["kubectl", *words]:
            _require_kubectl(words)
        case _:
            pytest.fail(f"nothing here knows how to run {command!r}")


def test_no_command_is_shown_in_another_form():
    """All stand in indented blocks, which the test above reads; YAML is no command."""
    fences = re.findall(r"^ *```(.*)$", PAGE, re.MULTILINE)
    assert set(fences[::2]) <= {"yaml"}
    assert len(COMMANDS) > 10


def test_every_command_of_the_launcher_is_on_the_page():
    shown = {shlex.split(one)[3] for one in COMMANDS if " -m tpu_launch " in one}
    assert shown == set(tpu_launch._COMMANDS)


def test_commands_are_read_with_what_continues_them():
    page = "Text.\n\n    a --b \\\n      --c\n    d\n\nMore text.\n"
    assert commands(page) == ["a --b --c", "d"]


@pytest.mark.parametrize(
    "words", ["auth logout a", "storage", "compute ssh a", "auth login --fast"]
)
def test_an_unknown_line_of_gcloud_is_found(words):
    with pytest.raises(AssertionError, match="unknown"):
        _require_gcloud(words.split())


@pytest.mark.full
def test_gcloud_itself_knows_every_line(tmp_path):
    lines = [shlex.split(one) for one in COMMANDS if one.startswith("gcloud ")]
    assert lines
    bad = ["gcloud", "auth", "login", "--quickly"]
    *said, of_bad = gcloud_parser.complaints([*lines, bad], tmp_path)
    assert "unrecognized arguments: --quickly" in of_bad
    assert dict(zip(map(shlex.join, lines), said, strict=True)) == dict.fromkeys(
        map(shlex.join, lines), ""
    )
