"""Every command line of docs/pods.md, as it is typed.

What the page shows is run, with `--dry_run` or `--fast` where it would take hours or
money. Whatever is added to the page in a form that nothing here knows fails.
"""

import functools
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from realm_jax.storage import open_store
from tests.gcs_emulator import emulated_bucket
from tests.tpu_launch import gcloud_parser
from tests.tpu_launch.fake_tpu import World, served
from tpu_launch import __main__ as tpu_launch
from tpu_launch import worker_state
from tpu_launch.attempts import Attempts
from tpu_launch.job import run_id
from tpu_launch.worker_state import State, WorkerState

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pods.md").read_text()
_MODEL_DIR = "gs://my-bucket/my/pretrain"
# Which flags make a command quick, and cost nothing. They may stand on the page too.
_HARMLESS = {
    "plan": ("--fast",),
    "local": ("--dry_run",),
    "up": ("--dry_run",),
    "down": ("--dry_run",),
    "reap": ("--dry_run",),
    "status": ("--once",),
    "logs": (),
}
# These show what comes, for ever.
_ENDLESS = ("-f", "--follow")
# Commands of gcloud that a setup needs -> their flags, by the parser of gcloud 528;
# where gcloud is installed, it is asked itself.
_GCLOUD = {
    "auth login": set(),
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
    world = World(working=False)
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
    attempts = Attempts(store, run, 1.8e9)
    for role in ("trainer", "builder"):
        attempt = attempts.begin(role, 1.8e9, 103.04)
        attempts.activate(role, attempt, 1.8e9 + 300)
        state = WorkerState(State.RUNNING, 1.8e9 + 900, 70)
        worker_state.write_worker(store, run, role, 1, 0, state)
        folder = worker_state.attempt_folder(run, role, 1)
        store.write(f"{folder}/0.log", f"a word of the {role}\n".encode())


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
    "local": ("# stage 1: prepare", "# create slice pretrain-"),
    "up": (
        "--exclude=examples/ gs://my-bucket/my/corpus /data/my/corpus",
        "'--exclude=examples/(?!(my_salient)/)' gs://my-bucket/my/corpus /data",
        '"realm-worker@my-project.iam.gserviceaccount.com"',
        "128.80 USD an hour",
    ),
    "down": ("nothing to delete",),
    "reap": ("nothing to delete",),
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


@pytest.mark.full
@pytest.mark.usefixtures("cloud")
@pytest.mark.parametrize("command", COMMANDS, ids=first_words)
def test_what_the_page_shows_works(command, capsys):
    match shlex.split(command):
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
        case _:
            pytest.fail(f"nothing here knows how to run {command!r}")


def test_no_command_is_shown_in_another_form():
    """All stand in indented blocks, which the test above reads."""
    assert "```" not in PAGE
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
