"""`up`, `down` and `reap` as they are typed, against services of this machine."""

import errno
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from realm_jax.storage import open_store
from tests.tpu_launch.fake_tpu import World, served
from tpu_launch import __main__ as tpu_launch
from tpu_launch import cleanup, plan, up, worker_state
from tpu_launch.attempts import Attempts, read_attempt, read_launcher
from tpu_launch.job import run_id
from tpu_launch.messages import say
from tpu_launch.planner.figures import Line, Plan, Unit
from tpu_launch.stage_configs import stage_config

MODEL_DIR = "gs://bucket/my/pretrain"


def line(command, *more, model_dir=MODEL_DIR, project="p", zone="us-central2-b"):
    macros = {
        "MODEL_DIR": model_dir,
        "CORPUS": "/data/my/corpus",
        "TASK": "my_salient",
        "WARM_START": "gs://bucket/my/warm_start",
        "PROJECT": project,
        "ZONE": zone,
    }
    return [
        command,
        *(f"--gin_file=gin/{file}.gin" for file in FILES),
        *(f'--gin.{name}="{value}"' for name, value in macros.items()),
        FETCH,
        *more,
    ]


FETCHED = ("gs://bucket/my/corpus", "/data/my/corpus")
FETCH = '--gin.hardware.LaunchConfig.fetch={"gs://bucket/my/corpus": "/data/my/corpus"}'
FILES = ("models/tiny", "runs/pretrain", "hardware/v5litepod_64")


@pytest.fixture
def world():
    return World()


@pytest.fixture
def planned(monkeypatch):
    """A plan of two hours; a real one takes seconds."""
    lines = [Line("takes", 7200.0, Unit.SECONDS)]
    made = Plan("pretrain", {"the run": lines}, problems=[])
    monkeypatch.setattr(plan, "plan_command", lambda *arguments: made)
    return made


@pytest.fixture
def service(world, planned, monkeypatch):
    """Cloud TPU, in whose time the commands wait; nothing takes real time."""
    for module in (up, cleanup):
        monkeypatch.setattr(module, "SystemClock", lambda stop: world)
        monkeypatch.setattr(module.time, "time", world.now)
    with served(world) as address:
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", address)
        monkeypatch.setenv("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "true")
        yield world


@pytest.fixture
def said(capsys):
    """Runs a command; returns its exit code, and what it printed."""

    def run(arguments):
        code = tpu_launch.main(arguments)
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    return run


def creates(out):
    """The bodies of the requests that a dry run prints."""
    decoder = json.JSONDecoder()
    starts = [out.index("{", at) for at in find_all(out, "\nPOST ")]
    return [decoder.raw_decode(out, start)[0] for start in starts]


def find_all(text, part):
    at = text.find(part)
    while at >= 0:
        yield at
        at = text.find(part, at + 1)


@pytest.mark.usefixtures("planned")
def test_a_dry_run_says_everything_and_does_nothing(said):
    """Without a service, credentials or a bucket."""
    code, out, err = said(line("up", "--dry_run"))
    assert code == 0
    headings = [text for text in out.splitlines() if text.startswith("# ")]
    run = run_id("realm", MODEL_DIR)
    assert headings[0] == "# bundle"
    assert headings[1:3] == [
        f"# create slice {run}-trainer-001",
        f"# create slice {run}-builder-001",
    ]
    assert len(headings) == 9
    assert "takes longer than the deadline" not in err
    # 64 and 16 chips at 1.20 USD.
    assert "1 x v5litepod-64 (trainer)" in err
    assert "77 USD" in err
    assert "19 USD" in err
    assert "2,304 USD after 24 hours" in err.replace("│ ", "")
    trainer, builder = creates(out)
    node = trainer["tpu"]["nodeSpec"][0]["node"]
    assert node["acceleratorType"] == "v5litepod-64"
    last = node["metadata"]["startup-script"].splitlines()[-1]
    assert '-m realm_jax.cli.main pretrain --gin_file="$checkout"/gin/models/' in last
    node = builder["tpu"]["nodeSpec"][0]["node"]
    assert node["acceleratorType"] == "v5litepod-16"
    last = node["metadata"]["startup-script"].splitlines()[-1]
    assert "-m realm_jax.cli.main build-index" in last
    assert last.index("v5litepod_64.gin") < last.index("gin/runs/build_index.gin")
    assert f"""'--gin.MODEL_DIR="{MODEL_DIR}"'""" in last


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize(
    ("run_file", "more", "tasks"),
    [
        ("runs/pretrain", (), "(my_salient)"),
        ("runs/finetune", (), "(my_salient)"),
        ("runs/warm_start", ('--gin.PAIRS_TASK="my_ict"',), "(my_salient|my_ict)"),
    ],
)
def test_hosts_copy_the_examples_that_their_role_reads(said, run_file, more, tasks):
    arguments = line("up", "--dry_run", *more)
    file = arguments.index("--gin_file=gin/runs/pretrain.gin")
    arguments[file] = f"--gin_file=gin/{run_file}.gin"
    code, out, err = said(arguments)
    assert code == 0, err
    copies = [
        next(line for line in script.splitlines() if " rsync " in line)
        for made in creates(out)
        for node in made["tpu"]["nodeSpec"]
        for script in [node["node"]["metadata"]["startup-script"]]
    ]
    excluded = [f"'--exclude=examples/(?!{tasks}/)'", "--exclude=examples/"]
    for copy, one in zip(copies, excluded, strict=False):
        words = ["gcloud storage rsync --recursive", one, *FETCHED]
        assert copy == " ".join(words)
    # Only pre-training has a builder.
    assert len(copies) == 1 + (run_file == "runs/pretrain")


@pytest.mark.usefixtures("planned")
def test_without_an_own_builder_there_is_one_role(said):
    code, out, _ = said(line("up", "--dry_run", '--gin.REFRESH_MODE="rolling"'))
    assert code == 0
    assert len(creates(out)) == 1


def test_a_run_from_its_command_to_its_end(service, said, bucket):
    model_dir = f"{bucket}/launched/pretrain"
    service.store, service.steps = open_store(model_dir), 20
    euros = '--gin.hardware.HardwareConfig.currency="EUR"'
    code, _, err = said(line("up", "--yes", euros, model_dir=model_dir))
    assert code == 0
    assert service.resources == {}
    assert len(service.creations) == 2
    run = run_id("realm", model_dir)
    for role in ("trainer", "builder"):
        assert worker_state.read_done(service.store, run, role).step == service.steps
        assert f"{role}: done at step 20, 1 attempt, " in err
        assert read_attempt(service.store, run, role, 1).currency == "EUR"
    launcher = read_launcher(service.store, run)
    steps = stage_config("pretrain").train_steps
    assert (launcher.total_steps, launcher.reason) == (steps, "done")
    [bundle] = service.store.list("launch/bundles")
    assert bundle.endswith(".tar.gz")
    # Nothing is paid for what is done.
    code, _, err = said(line("up", "--yes", model_dir=model_dir))
    assert code == 0
    assert f"delete {model_dir}/launch/{run}/*/done.json" in err
    assert "trainer: done at step 20, 1 attempt, " in err
    assert len(service.creations) == 2


def test_a_run_that_is_given_up_says_why(service, said, monkeypatch):
    monkeypatch.setattr(up, "open_store", lambda url: service.store)
    service.steps = 10**6
    code, _, err = said(line("up", "--yes", "--gin.DEADLINE_HOURS=1.0"))
    assert code == 1
    assert "the run takes longer than the deadline of 1 hours" in err
    assert "the deadline of 1 hours has come" in err
    assert service.resources == {}


def test_no_access_is_an_error_before_the_run_is_taken(service, said, monkeypatch):
    monkeypatch.setattr(up, "open_store", lambda url: service.store)
    service.fault = lambda method, path: "403"
    code, _, err = said(line("up", "--yes"))
    assert code == 2
    assert "expected access to Cloud TPU" in err
    assert service.store.objects == {}


def test_down_of_a_busy_service_is_one_line(service, said, monkeypatch):
    monkeypatch.setattr(cleanup, "open_store", lambda url: service.store)
    service.fault = lambda method, path: "503"
    code, _, err = said(line("down"))
    assert code == 1
    assert "nothing was deleted: " in err
    assert "The service is currently unavailable" in err


def test_what_does_not_fit_is_launched_by_force_only(service, said, planned):
    planned.problems.append("memory: too much")
    for arguments in (["--yes"], ["--dry_run"]):
        code, out, err = said(line("up", *arguments))
        assert (code, out) == (2, "")
        assert "got memory: too much; change that" in err
    assert service.requests == []
    code, out, _ = said(line("up", "--dry_run", "--force"))
    assert code == 0
    assert len(creates(out)) == 2


def test_nobody_to_ask_is_said(service, said):
    code, _, err = said(line("up"))
    assert code == 2
    assert "there is no terminal; add --yes" in err
    assert service.requests == []


@pytest.mark.parametrize("answer", ["n\n", "\n", "maybe\n"])
def test_who_does_not_agree_pays_nothing(service, said, monkeypatch, answer):
    controller, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin:
        os.write(controller, answer.encode())
        monkeypatch.setattr("sys.stdin", stdin)
        _, _, err = said(line("up"))
    os.close(controller)
    assert "Create these slices? [y/N] nothing was created" in err
    assert service.requests == []


@pytest.mark.usefixtures("planned")
def test_gin_files_go_along_wherever_they_lie(said, monkeypatch, tmp_path):
    """Those of the code by the paths that gin knows, others beside it."""
    (tmp_path / "mine.gin").write_text("SEED = 1\n")
    monkeypatch.chdir(tmp_path)
    shipped = {}
    make = up.make_bundle
    monkeypatch.setattr(
        up, "make_bundle", lambda code, files: shipped.update(files) or make(code)
    )
    files = "--gin_file=models/mini.gin", "--gin_file=mine.gin"
    code, out, _ = said(line("up", "--dry_run", *files))
    assert code == 0
    for made in creates(out):
        node = made["tpu"]["nodeSpec"][0]["node"]
        last = node["metadata"]["startup-script"].splitlines()[-1]
        assert ' --gin_file="$checkout"/gin/models/mini.gin ' in last
        assert ' --gin_file="$checkout"/given/4/mine.gin ' in last
    assert shipped["given/4/mine.gin"] == tmp_path / "mine.gin"


BAD_LINES = {
    "no project": (line("up", project=""), "expected a project"),
    "an empty bucket": (line("up", model_dir="gs:///my"), "MODEL_DIR on gs://BUCKET"),
    "a zone of another planet": (line("up", zone="mars-1"), "zone of .* got 'mars-1'"),
    "a builder's of another": (
        line("up", '--gin.hardware.LaunchConfig.builder_zone="mars-1"'),
        "got 'mars-1'",
    ),
    "a corpus that workers lack": (
        line("up", "--gin.hardware.LaunchConfig.fetch={}"),
        "expected CORPUS in a bucket, .* got '/data/my/corpus'",
    ),
    "a warm start that workers lack": (
        line("up", '--gin.WARM_START="runs/warm"'),
        "expected WARM_START in a bucket, .* got 'runs/warm'",
    ),
    "an undecided planner": (
        line("up", '--gin.bert.BertConfig.remat="auto"'),
        'expected a decision for remat="auto"',
    ),
    "down in a zone of another planet": (line("down", zone="mars-1"), "got 'mars-1'"),
    "a local folder": (line("up", model_dir="runs/x"), "expected MODEL_DIR on gs://"),
    "a machine of the next generation": (
        line("up", '--gin.hardware.HardwareConfig.trainer="tpu7x-64"'),
        "does not serve TPU7x",
    ),
    "an unknown backend": (line("up", "--backend=magic"), "invalid choice: 'magic'"),
    "a file from elsewhere that looks like a secret": (
        line("up", "--gin_file={elsewhere}"),
        "mine.gin, which looks like a secret",
    ),
    "a file of the builder that is not there": (
        line("up", "--gin.hardware.LaunchConfig.builder_gin_files=['nowhere.gin']"),
        "expected a gin file at nowhere.gin",
    ),
    "down without a zone": (line("down", zone=""), "expected a zone"),
    "reap without a zone": (line("reap", zone=""), "expected a zone"),
}


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_input_is_one_line(said, tmp_path, case):
    arguments, expected = BAD_LINES[case]
    elsewhere = tmp_path / "mine.gin"
    elsewhere.write_text("# hf" + f"_{34 * 'a'}\nSEED = 1\n")  # No token, in parts.
    code, out, err = said([a.replace("{elsewhere}", str(elsewhere)) for a in arguments])
    assert code == 2
    assert re.search(expected, err)
    assert out == ""


def ask_for(world, run, role, attempt, expires):
    labels = {
        "realm-run": run,
        "realm-role": role,
        "realm-attempt": str(attempt),
        "realm-expires": str(expires),
    }
    node = {"labels": labels, "acceleratorType": "v4-8"}
    query = {"queuedResourceId": f"{run}-{role}-{attempt:03d}"}
    path = "/v2/projects/p/locations/us-central2-b/queuedResources"
    world.answer("POST", path, query, {"tpu": {"nodeSpec": [{"node": node}]}})


def test_down_deletes_the_run_and_ends_its_launcher(service, said, monkeypatch):
    monkeypatch.setattr(cleanup, "open_store", lambda url: service.store)
    service.working = False
    run = run_id("realm", MODEL_DIR)
    launcher = Attempts(service.store, run, service.now())
    launcher.begin("trainer", service.now(), 1.0)
    ask_for(service, run, "trainer", 3, 2_000_000)
    ask_for(service, run, "builder", 1, 2_000_000)
    ask_for(service, "realm-another", "trainer", 1, 0)
    code, out, _ = said(line("down", "--dry_run"))
    assert code == 0
    assert f"queuedResources/{run}-trainer-003?force=true" in out
    assert len(service.resources) == 3
    launcher.require_ours()
    code, out, _ = said(line("down"))
    assert code == 0
    assert list(service.resources) == ["realm-another-trainer-001"]
    with pytest.raises(Exception, match="launched anew elsewhere"):
        launcher.require_ours()
    # From then on it costs nothing.
    ended = read_attempt(service.store, run, "trainer", 1)
    assert (ended.ended, ended.reason) == (service.now(), "run ended")
    assert read_launcher(service.store, run).reason == "taken down"
    code, out, _ = said(line("down"))
    assert (code, out) == (0, "nothing to delete\n")


def test_reap_deletes_what_is_past_its_deadline(service, said):
    service.working = False
    now = int(service.now())
    ask_for(service, "old", "trainer", 1, now - 1)
    ask_for(service, "old", "builder", 2, now)
    ask_for(service, "young", "trainer", 1, now + 3600)
    path = "/v2/projects/p/locations/us-central2-b/queuedResources"
    node = {"labels": {"owner": "somebody"}, "acceleratorType": "v4-8"}
    body = {"tpu": {"nodeSpec": [{"node": node}]}}
    service.answer("POST", path, {"queuedResourceId": "precious"}, body)
    files = ["--gin_file=gin/hardware/v5litepod_64.gin"]
    arguments = ["reap", *files, '--gin.PROJECT="p"', '--gin.ZONE="us-central2-b"']
    code, out, _ = said([*arguments, "--dry_run"])
    assert (code, len(service.resources)) == (0, 4)
    assert "old-trainer-001 in us-central2-b: 1 x v4-8, CREATING" in out
    code, out, _ = said(arguments)
    assert code == 0
    assert set(service.resources) == {"young-trainer-001", "precious"}


def test_what_down_cannot_delete_is_named(service, said, monkeypatch):
    monkeypatch.setattr(cleanup, "open_store", lambda url: service.store)
    run = run_id("realm", MODEL_DIR)
    service.working = False
    ask_for(service, run, "trainer", 1, 2_000_000)
    service.fault = lambda method, path: "500" if method == "DELETE" else ""
    code, _, err = said(line("down"))
    assert code == 1
    assert f"could not delete {run}-trainer-001" in err


def test_asking_ends_with_ctrl_c(monkeypatch):
    controller, terminal = pty.openpty()
    stop = threading.Event()
    stop.set()
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(up.StoppedError, match="nothing was created"):
            up._ask(stop)
    os.close(controller)


def test_a_terminal_that_is_gone_is_no_error(monkeypatch):
    class Gone(io.StringIO):
        def flush(self):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("sys.stderr", Gone())
    say("deleting")


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_ends_the_program_once_everything_is_deleted(bucket, tmp_path, number):
    """The program itself, in real time; Cloud TPU's is faster."""
    world, over = World(working=False, time=time.time()), threading.Event()

    def pass_time():
        while not over.wait(0.02):
            world.wait_anyway(15)

    with served(world) as address, (tmp_path / "said").open("w+") as screen:
        thread = threading.Thread(target=pass_time)
        thread.start()
        poll = "--gin.hardware.LaunchConfig.poll_seconds=0.2"
        arguments = line("up", "--yes", poll, model_dir=f"{bucket}/stopped")
        process = subprocess.Popen(
            [sys.executable, "-m", "tpu_launch", *arguments],
            stdin=subprocess.DEVNULL,
            stderr=screen,
            env={
                **os.environ,
                "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": address,
                "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            },
        )
        try:
            while len(world.active()) < 2:
                assert process.poll() is None, screen.read()
                time.sleep(0.1)
            process.send_signal(number)
            assert process.wait(timeout=120) == 128 + number
        finally:
            process.kill()
            over.set()
            thread.join()
        screen.seek(0)
        assert "the same command resumes from the last checkpoint" in screen.read()
    assert world.resources == {}
    assert set(world.creations.values()) == {1}
    assert len(world.creations) == 2
