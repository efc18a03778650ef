"""Every command line of docs/pods.md, as it is typed.

What the page shows is run, with `--dry_run` or `--fast` where it would take hours or
money. Whatever is added to the page in a form that nothing here knows fails.
"""

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
from tests.tpu_launch.fake_tpu import World
from tpu_launch import __main__ as tpu_launch
from tpu_launch import records
from tpu_launch.records import TPU_VM, LaunchRecord
from tpu_launch.run import BUILDER, TRAINER, run_id

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pods.md").read_text()
_MODEL_DIR = "gs://my-bucket/my/pretrain"
# Which flags make a command quick, and cost nothing (they may stand on the page too),
# and what shows that it has done its work, and not merely ended.
_LAUNCHER = {
    "plan": (["--fast"], ["memory of a device", "the run"]),
    "local": (["--dry_run"], ["# stage 1: prepare", "realm_jax.cli.main pretrain"]),
    "up": (
        ["--dry_run"],
        [
            "--exclude=examples/ gs://my-bucket/",
            "'--exclude=examples/(?!(my_salient)/)' gs://my-bucket/",
            "USD an hour",
        ],
    ),
    "down": ([], ["nothing is left"]),
    "status": (["--once"], ["trainer", "builder", "70"]),
    "logs": ([], ["a word of the trainer"]),
}
# These show what comes, for ever.
_ENDLESS = ("-f", "--follow")


def commands(text: str) -> list[str]:
    """The command lines of the indented blocks of a page."""
    text = re.sub(r"^```yaml\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    joined = re.sub(r" *\\\n *", " ", text)
    lines = joined.splitlines()
    return [line.strip() for line in lines if line.startswith("    ")]


COMMANDS = commands(PAGE)
GCLOUD = [one for one in COMMANDS if one.startswith("gcloud ")]
OTHERS = [one for one in COMMANDS if one not in GCLOUD]


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    """A project in which the page's run is known: bucket, slices, and its notes."""
    folder = tmp_path_factory.mktemp("page")
    world = World()
    with (
        emulated_bucket(folder, "my-bucket"),
        pytest.MonkeyPatch.context() as patch,
        world.served(patch),
    ):
        patch.chdir(ROOT)
        store, run = open_store(_MODEL_DIR), run_id("realm", _MODEL_DIR)
        roles = {TRAINER: "1 x v4-64", BUILDER: "1 x v4-16"}
        where = {"project": "my-project", "zones": ["us-central2-b"]}
        record = LaunchRecord(run, TPU_VM, roles, 1.0, None, 200_000, where)
        records.write_record(store, record)
        for role, beats in records.HEARTBEATS.items():
            Heartbeat(store, beats).beat(70)
            name = f"{records.LOGS}/{run}-{role}-1/0.log"
            store.write(name, f"a word of the {role}\n".encode())
        yield world


def _require_tpu_launch(words, capsys):
    name, given = words[0], [word for word in words[1:] if word not in _ENDLESS]
    flags, shown = _LAUNCHER[name]
    code = tpu_launch.main([name, *given, *(f for f in flags if f not in given)])
    out, err = capsys.readouterr()
    assert code == 0, err
    for part in shown:
        assert part in out + err


def _require_files(words):
    """What kubectl is to read is there."""
    for flag, file in itertools.pairwise(words):
        if flag == "-f" and not file.startswith("https://"):
            assert list(yaml.safe_load_all((ROOT / file).read_text()))


@pytest.mark.full
@pytest.mark.usefixtures("cloud")
@pytest.mark.parametrize("command", OTHERS, ids=lambda one: one[:40])
def test_what_the_page_shows_works(command, capsys):
    match shlex.split(command, comments=True):
        case ["make", target]:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text()
        case [".venv/bin/python", "-m", "tpu_launch", *words]:
            _require_tpu_launch(words, capsys)
        case ["python" | ".venv/bin/python", "-m", module, *words] if (
            "bench." in module
        ):
            # It starts, and has these flags; its figures take many minutes.
            shown = [sys.executable, "-m", module, "--help"]
            said = subprocess.check_output(shown, cwd=ROOT, text=True)
            flags = {word for word in words if word.startswith("--")}
            assert flags <= set(re.findall(r"--[a-z_-]+", said))
        case ["kubectl", *words]:
            _require_files(words)
        case ["bash", script, model_dir, *words]:
            subprocess.run(["bash", "-n", ROOT / script], check=True)
            _require_tpu_launch(["up", f"--gin.MODEL_DIR={model_dir}", *words], capsys)
        case _:
            pytest.fail(f"nothing here knows how to run {command!r}")


def test_every_command_of_the_launcher_is_on_the_page():
    """All stand in indented blocks, which the test above reads; YAML is no command."""
    fences = re.findall(r"^ *```(.*)$", PAGE, re.MULTILINE)
    assert set(fences[::2]) <= {"yaml"}
    shown = {shlex.split(one)[3] for one in COMMANDS if " -m tpu_launch " in one}
    assert shown == set(tpu_launch._COMMANDS)


@pytest.mark.full
def test_gcloud_itself_knows_every_line(tmp_path):
    lines = [shlex.split(one) for one in GCLOUD]
    bad = ["gcloud", "auth", "login", "--quickly"]
    *said, of_bad = gcloud_parser.complaints([*lines, bad], tmp_path)
    assert "unrecognized arguments: --quickly" in of_bad
    assert said == [""] * len(lines) != []
