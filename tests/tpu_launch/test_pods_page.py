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
# Which flag makes a command quick, and cost nothing (it may stand on the page too).
_QUICK = {"plan": "--fast", "local": "--dry_run", "up": "--dry_run", "status": "--once"}
# These show what comes, for ever.
_ENDLESS = ("-f", "--follow")


def commands(text: str) -> list[str]:
    """The command lines of the indented blocks of a page."""
    text = re.sub(r"^```yaml\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    joined = re.sub(r" *\\\n *", " ", text)
    return [line.strip() for line in joined.splitlines() if line.startswith("    ")]


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
        store.write(f"{records.LOGS}/{run}-trainer-1/0.log", b"a word\n")
        yield


def _require_tpu_launch(words, launcher):
    given = [word for word in words if word not in _ENDLESS]
    quick = [flag for name, flag in _QUICK.items() if name == words[0]]
    out, _ = launcher(*given, *quick)
    assert words[0] != "logs" or out == "trainer/0 | a word\n"


@pytest.mark.full
@pytest.mark.usefixtures("cloud")
@pytest.mark.parametrize("command", OTHERS, ids=lambda one: one[:40])
def test_what_the_page_shows_works(command, launcher):
    match shlex.split(command, comments=True):
        case ["make", target]:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text()
        case [".venv/bin/python", "-m", "tpu_launch", *words]:
            _require_tpu_launch(words, launcher)
        case ["python" | ".venv/bin/python", "-m", module, *words] if (
            "bench." in module
        ):
            # It starts, and has these flags; its figures take many minutes.
            shown = [sys.executable, "-m", module, "--help"]
            said = subprocess.check_output(shown, cwd=ROOT, text=True)
            flags = {word for word in words if word.startswith("--")}
            assert flags <= set(re.findall(r"--[a-z_-]+", said))
        case ["kubectl", *words]:
            # What it is to read is there.
            for flag, file in itertools.pairwise(words):
                if flag == "-f" and not file.startswith("https://"):
                    assert list(yaml.safe_load_all((ROOT / file).read_text()))
        case ["bash", script, model_dir, *words]:
            subprocess.run(["bash", "-n", ROOT / script], check=True)
            given = ["up", f"--gin.MODEL_DIR={model_dir}", *words]
            _require_tpu_launch(given, launcher)
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
