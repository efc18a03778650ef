"""`up` and `down` as they are typed, against services of this machine."""

import dataclasses
import json
import os
import pty
import re
import shlex
import threading
import time

import pytest

from realm_jax.cli import configuration
from realm_jax.cli.main import STOPPED
from realm_jax.errors import StoppedError
from realm_jax.storage import open_store
from tpu_launch import bundle, plan, records, up
from tpu_launch.bundle import CODE, make_bundle
from tpu_launch.planner.figures import Line, Plan, Unit
from tpu_launch.run import TRAINER, run_id

MODEL_DIR = "gs://bucket/my/pretrain"
MACROS = {
    "CORPUS": "/data/my/corpus",
    "TASK": "my_salient",
    "WARM_START": "gs://bucket/my/warm_start",
    "PROJECT": "p",
    "ZONE": "us-central2-b",
}
FETCHED = ("gs://bucket/my/corpus", "/data/my/corpus")
FETCH = '--gin.hardware.LaunchConfig.fetch={"gs://bucket/my/corpus": "/data/my/corpus"}'


def line(*more, model_dir=MODEL_DIR, run_file="pretrain", **macros):
    files = ("models/tiny", f"runs/{run_file}", "hardware/v5litepod_64")
    macros = {"MODEL_DIR": model_dir, **MACROS, **macros}
    return [
        *("up", "--backend=tpu_vm"),
        *(f"--gin_file=gin/{file}.gin" for file in files),
        *(f'--gin.{name}="{value}"' for name, value in macros.items()),
        FETCH,
        *more,
    ]


@pytest.fixture(autouse=True)
def planned(monkeypatch):
    """A plan of two hours; a real one takes seconds."""
    lines = [Line("takes", 7200.0, Unit.SECONDS)]
    made = Plan("pretrain", {"the run": lines}, problems=[])
    monkeypatch.setattr(plan, "plan_command", lambda *arguments: made)
    return made


@pytest.fixture(scope="module")
def code_of_this():
    return make_bundle(CODE)


@pytest.fixture(autouse=True)
def shipped(code_of_this, monkeypatch):
    """The gin files that are shipped; the bundle is made once, without them."""
    files = {}

    def make(code, given):
        for path in given.values():
            bundle._require_code(path.name, path.read_bytes())
        files.update(given)
        return code_of_this

    monkeypatch.setattr(up, "make_bundle", make)
    return files


@pytest.fixture
def said(launcher):
    """Runs a command that ends with a code; returns what it printed."""

    def run(arguments, code=0):
        out, err = launcher(*arguments, code=code)
        return out, " ".join(err.split())

    return run


@pytest.fixture
def model_dir(bucket, request):
    return f"{bucket}/{request.node.name}"


def commands(out):
    """The commands that the startup scripts of a dry run end in."""
    return re.findall(r"-m realm_jax.cli.main (.*) \\$", out, re.MULTILINE)


def copied(out):
    """What hosts leave out of the corpus that they copy."""
    what = re.escape(" ".join(FETCHED))
    return re.findall(rf"^gcloud storage rsync --recursive (.*) {what}$", out, re.M)


def test_a_dry_run_says_everything_and_does_nothing(said):
    """Without a service, credentials or a bucket."""
    out, err = said(line("--dry_run"))
    # 64 and 16 chips at 1.20 USD.
    assert "1 x v5litepod-64 (trainer)" in err
    for price in ("77 USD", "19 USD", "2,304 USD after 24 hours"):
        assert price in err.replace("│ ", "")
    bodies = [text for text in out.splitlines() if text.startswith("POST ")]
    run = run_id("realm", MODEL_DIR)
    names = [body.partition("=")[2] for body in bodies]
    assert names == [f"{run}-trainer-1", f"{run}-builder-1"]
    trainer, builder = commands(out)
    assert trainer.startswith("pretrain --gin_file=gin/models/")
    assert builder.startswith("build-index ")
    assert builder.index("v5litepod_64.gin") < builder.index("gin/runs/build_index.gin")
    assert f"""'--gin.MODEL_DIR="{MODEL_DIR}"'""" in builder
    # Hosts copy the examples that their role reads; only pre-training has a builder.
    all_but = "'--exclude=examples/(?!(my_salient{})/)'"
    assert copied(out) == [all_but.format(""), "--exclude=examples/"]
    out, _ = said(line("--dry_run", run_file="warm_start", PAIRS_TASK="my_ict"))
    assert copied(out) == [all_but.format("|my_ict")]


def test_a_run_from_its_first_up_to_down(world, said, model_dir):
    store = open_store(model_dir)
    # Workers would go by what an earlier launch has said, and give slices back.
    records.write_record(store, records.LaunchRecord("a-0a", records.LOCAL, {}, 1.0))
    records.write_outcome(store, TRAINER, 0)
    said(line("--yes", model_dir=model_dir))
    assert len(world.created) == 2
    assert records.outcomes(store) == {}
    record = records.read_record(store)
    roles = {"trainer": "1 x v5litepod-64", "builder": "1 x v5litepod-16"}
    assert record.roles == roles
    [bundle] = store.list("launch/bundles")
    assert bundle.endswith(".tar.gz")
    # Nobody is asked again; the deadline stays.
    said(line(model_dir=model_dir))
    assert len(world.created) == 2
    assert records.read_record(store) == record
    out, _ = said(["status", f'--gin.MODEL_DIR="{model_dir}"', "--json"])
    states = {one["role"]: one["state"] for one in json.loads(out)["engine"]}
    assert states == {"trainer": "ACCEPTED", "builder": "ACCEPTED"}
    named = "--gin.hardware.LaunchConfig.name='b'"
    _, err = said(line(named, model_dir=model_dir), code=2)
    assert "run `down` first" in err
    down = f'--gin.MODEL_DIR="{model_dir}"'
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError, match="`status` shows what is left"):
        up.down([down], stop)
    _, err = said(["down", down])
    assert "nothing is left" in err
    assert world.resources == {}


@pytest.mark.parametrize(
    ("outcome", "deadline", "code", "message"),
    [
        ((2, "expected a"), 3600, 1, "trainer has failed: expected"),
        ((0, ""), 3600, 0, "this run is done"),
        (None, -1, 1, "its deadline has passed"),
    ],
)
def test_what_is_over_is_not_created_again(
    world, said, model_dir, outcome, deadline, code, message
):
    """Whatever cron thinks of it; `down` and `up` is the way to go on."""
    said(line("--yes", model_dir=model_dir))
    store = open_store(model_dir)
    record = records.read_record(store)
    changed = dataclasses.replace(record, deadline=time.time() + deadline)
    records.write_record(store, changed)
    if outcome:
        records.write_outcome(store, TRAINER, *outcome)
    world.resources.clear()
    _, err = said(line("--yes", model_dir=model_dir), code=code)
    assert message in err
    assert world.resources == {}
    said(["down", f'--gin.MODEL_DIR="{model_dir}"'])
    said(line("--yes", model_dir=model_dir))
    assert len(world.resources) == 2


def test_no_access_is_not_now_and_what_was_said_is_found_again(world, said, model_dir):
    world.faults = {"GET": "403"}
    _, err = said(line("--yes", model_dir=model_dir), code=os.EX_TEMPFAIL)
    assert "expected access to Cloud TPU" in err
    out, _ = said(["status", f'--gin.MODEL_DIR="{model_dir}"', "--once"])
    assert "tpu_vm: expected access to Cloud TPU" in out
    world.faults = {}
    said(line("--yes", model_dir=model_dir))
    assert len(world.resources) == 2


def test_what_does_not_fit_is_launched_by_force_only(world, said, planned):
    planned.problems.append("memory: too much")
    for arguments in (["--yes"], ["--dry_run"]):
        out, err = said(line(*arguments), code=2)
        assert out == ""
        assert "got memory: too much; change that" in err
    assert world.num_requests == 0
    out, _ = said(line("--dry_run", "--force"))
    assert len(commands(out)) == 2


def test_who_does_not_agree_pays_nothing(world, said, monkeypatch, model_dir):
    _, err = said(line(model_dir=model_dir), code=2)
    assert "there is no terminal; add --yes" in err
    controller, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        for answer in (b"n\n", b"\n", b"maybe\n"):
            os.write(controller, answer)
            _, err = said(line(model_dir=model_dir), code=STOPPED)
            assert "[y/N] nothing was created" in err
        # And nothing is created where nobody answers before Ctrl-C.
        stop = threading.Event()
        stop.set()
        with pytest.raises(StoppedError, match="nothing was created"):
            up._ask(stop)
    os.close(controller)
    assert world.num_requests == 0
    assert not records.find_record(open_store(model_dir))


def test_gin_files_go_along_wherever_they_lie(said, monkeypatch, tmp_path, shipped):
    """Those of the code by the paths that gin knows, others beside it."""
    (tmp_path / "mine.gin").write_text("include 'of/mine.gin'\nSEED = 1\n")
    (tmp_path / "of").mkdir()
    (tmp_path / "of" / "mine.gin").write_text("BATCH_SIZE = 64\n")
    monkeypatch.chdir(tmp_path)
    files = "--gin_file=models/mini.gin", "--gin_file=mine.gin"
    out, _ = said(line("--dry_run", *files))
    for command in commands(out):
        assert " --gin_file=gin/models/mini.gin " in command
        assert re.search(r" --gin_file=given/\d+/mine.gin ", command)
    [name] = [name for name in shipped if re.fullmatch(r"given/\d+/mine.gin", name)]
    assert shipped[name] == tmp_path / "mine.gin"
    assert shipped["of/mine.gin"] == tmp_path / "of" / "mine.gin"


def test_a_builder_is_not_ended_by_what_its_trainer_is_given(said):
    """A setting that no run file has, and that the builder has no use for."""
    out, _ = said(line("--dry_run", "--gin.STALL_SECONDS=1800"))
    _, builder = commands(out)
    assert "STALL_SECONDS" in builder
    parser = configuration.make_parser("realm build-index", "")
    configuration.parse(parser, shlex.split(builder)[1:], "build-index")


def test_what_it_costs_at_most_is_said_where_it_is_known(said):
    on_gke = line("--backend=gke", "--dry_run")
    prices = "--gin.hardware.HardwareConfig.chip_hour_prices="
    for arguments, expected in (
        (on_gke, "by the deadline of a start"),
        ([*on_gke, launch_config('queue="tpus"')], "after 24 hours everything is"),
        ([*on_gke, f'{prices}{{"v4": 3.22}}'], "workers; no price"),
    ):
        _, err = said(arguments)
        assert expected in err
    assert "by the deadline" not in err


def launch_config(setting):
    return f"--gin.hardware.LaunchConfig.{setting}"


BAD_LINES = [
    (line(PROJECT=""), "expected a project"),
    (line(model_dir="gs:///my"), "MODEL_DIR on gs://BUCKET"),
    (line(model_dir="runs/x"), "expected MODEL_DIR on gs://"),
    (line(ZONE="mars-1"), "zone of .* got 'mars-1'"),
    (line(launch_config('builder_zone="mars-1"')), "got 'mars-1'"),
    (line(launch_config("fetch={}")), "expected CORPUS in a bucket, .*'/data/my/corp"),
    (
        line(launch_config('fetch={"gs://bucket/my/corpus": "data"}'), CORPUS="data"),
        "whole path of the folder .* got 'data'",
    ),
    (line(launch_config("builder_bindings='DTYPE=1'")), "a tuple of texts, .* 'DTYPE"),
    (line(launch_config("builder_bindings=('NO_SUCH=1',)")), "macro 'NO_SUCH'"),
    (line(CORPUS="gs:///my/corpus"), "expected CORPUS in a .* got 'gs:///my/corpus'"),
    (
        line(launch_config('fetch={"gs://": "/data/my/corpus"}')),
        "gs://BUCKET to copy from, got 'gs://'",
    ),
    (line(READER_WARM_START="bert"), "READER_WARM_START in a bucket, .* got 'bert'"),
    (line(WARM_START="runs/warm"), "WARM_START in a bucket, .* got 'runs/warm'"),
    (
        line("--gin_file=gin/runs/finetune.gin", QUESTIONS="questions.jsonl"),
        "expected QUESTIONS in a bucket, .* got 'questions.jsonl'",
    ),
    (line('--gin.bert.BertConfig.remat="auto"'), 'a decision for remat="auto"'),
    (line("--gin.hardware.HardwareConfig.trainer_slices=0"), "trainer_slices"),
    (line("--backend=magic"), "invalid choice: 'magic'"),
    (line("--gin_file=mine.gin"), "mine.gin, which looks like a secret"),
    (line("--gin_file=including.gin"), "files that workers find included in"),
    (line(launch_config("builder_gin_files=['no.gin']")), "a gin file at no.gin"),
]


def test_bad_input_is_one_line(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    token = "# hf" + f"_{34 * 'a'}\nSEED = 1\n"  # It is none, in parts.
    (tmp_path / "mine.gin").write_text(token)
    (tmp_path / "of.gin").touch()
    (tmp_path / "including.gin").write_text(f'include "{tmp_path}/of.gin"\n')
    for arguments, expected in BAD_LINES:
        out, err = said([*arguments, "--dry_run"], code=2)
        assert out == ""
        assert re.search(expected, err), err
