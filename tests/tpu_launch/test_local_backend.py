"""Slices of this machine: real scripts, supervisors and kills, and a quick command."""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import pathlib
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time

import pytest

from realm_jax.errors import BadInputError
from realm_jax.hardware import LaunchConfig
from realm_jax.storage import open_store
from tpu_launch import operations, slices, worker_state
from tpu_launch.attempts import Attempts, read_attempts
from tpu_launch.backends.backend import SliceState
from tpu_launch.backends.local import LocalBackend, compiled_programs, environment
from tpu_launch.clock import SystemClock
from tpu_launch.deleting import GaveUpError
from tpu_launch.job import BUILDER, TRAINER, Job, Role
from tpu_launch.operations import DeleteSlice, ShipBundle
from tpu_launch.reconcile import Reconciler
from tpu_launch.startup import Site

ROOT = pathlib.Path(__file__).parents[2]
RUN = "run-000000"
STEPS = 200
CONFIG = LaunchConfig(
    zone="here",
    deadline_hours=1.0,
    backoff_seconds=0.1,
    max_backoff_seconds=0.5,
    startup_minutes=1.0,
    settling_seconds=0.0,
    poll_seconds=0.1,
)

# Trains, or follows the trainer, from where its folder says it stood. As in a job of
# JAX, none gets further than its brothers, and a brother who comes back as another is
# the end of all.
_COMMAND = """
import fcntl, os, pathlib, signal, sys, time
role, model = sys.argv[1], pathlib.Path(sys.argv[2])
number = os.environ.get("JAX_PROCESS_ID", "0")
count = int(os.environ.get("JAX_NUM_PROCESSES", "1"))
attempt = os.environ.get("JAX_COORDINATOR_ADDRESS", "alone")
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
lock = open(model / f"{role}-{number}.lock", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    (model / "clash").touch()
    raise
print("started", role, number, flush=True)
if role == "builder":
    while not (model / "finished").exists():
        if asked:
            sys.exit(143)
        time.sleep(0.02)
    sys.exit(0)
me = model / f"{number}.alive"
me.write_text(f"{attempt} {os.getpid()}")
def brothers():
    paths = [model / f"{i}.alive" for i in range(count)]
    found = [path.read_text() for path in paths if path.exists()]
    return found if len(found) == count else None
def together():
    found = brothers()
    return found and all(one.split()[0] == attempt for one in found) and found
while not (met := together()):
    if asked:
        sys.exit(143)
    time.sleep(0.02)
checkpoints = model / "checkpoints"
checkpoints.mkdir(exist_ok=True)
step = max((int(path.stem) for path in checkpoints.glob("*.json")), default=0)
while step < STEPS:
    if asked:
        sys.exit(143)
    if brothers() != met:
        sys.exit(134)
    step += 1
    time.sleep(0.02)
    if number == "0" and step % 5 == 0:
        (checkpoints / f"{step}.json").touch()
(model / "finished").touch()
"""

# In place of a Python: the supervisor is the real one, the command is not.
_PYTHON = """\
#!/bin/bash
if [ "$2" = tpu_launch.worker.supervisor ]; then exec {python} "$@"; fi
exec {python} -S {command} "${{@:3}}"
"""


class World:
    """A run of this machine whose command is quick."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder / "launched"
        self.model_dir = folder / "model"
        self.model_dir.mkdir()
        self.store = open_store(self.model_dir)
        command, python = folder / "command.py", folder / "python"
        command.write_text(_COMMAND.replace("STEPS", str(STEPS)))
        python.write_text(_PYTHON.format(python=sys.executable, command=command))
        python.chmod(0o755)
        self.site = Site('"$PWD"', str(python), '"$PWD"', "cp", flags=("--local",))
        bundle = folder / "bundle.tar.gz"
        with tarfile.open(bundle, "w:gz"):
            pass
        digest = hashlib.sha256(bundle.read_bytes()).hexdigest()
        self.bundle = ShipBundle(str(bundle), digest)
        self.said = []
        self._sweeping = f"REALM_LOCAL_TEST={folder.name}{os.getpid()}"
        name, _, value = self._sweeping.partition("=")
        os.environ[name] = value

    def job(self, trainers=2, builders=1):
        def role(name, count):
            machines = slices.parse(f"local-{count}x1")
            command = (name, str(self.model_dir))
            return Role(name, machines, 1, "here", "here", command)

        roles = [role(TRAINER, trainers)]
        if builders:
            roles.append(role(BUILDER, builders))
        return Job(RUN, str(self.model_dir), tuple(roles), CONFIG, self.site)

    def launch(self, stop=None, **counts):
        """Runs the job to its end, as the launcher does."""
        clock = SystemClock(stop or threading.Event())
        backend = LocalBackend(self.folder)
        said, job = self.said.append, self.job(**counts)
        Reconciler(job, self.bundle, backend, self.store, clock, said, {}).run()

    def create(self, backend, role=TRAINER, attempt=1, **counts):
        job = self.job(**counts)
        now = time.time()
        operation = operations.create_slice(
            job, job.role(role), attempt, self.bundle, now, int(now) + 3600
        )
        backend.create(operation)
        return operation

    def processes(self, *words):
        """Process ids of what runs of this world, by what is in their command line."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                told = (path / "environ").read_bytes().split(b"\0")
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if self._sweeping.encode() in told and all(w in line for w in words):
                    found.append(int(path.name))
        return [pid for pid in found if pid != os.getpid()]

    def supervisors(self, role):
        return self.processes("tpu_launch.worker.supervisor", f"--role={role}")

    def commands(self, role):
        return self.processes("command.py", f" {role} ")

    def step(self):
        names = (self.model_dir / "checkpoints").glob("*.json")
        return max((int(path.stem) for path in names), default=0)

    def require_sound(self):
        assert not (self.model_dir / "clash").exists(), "two at once of one command"
        assert not list(self.folder.glob("*/slice.json"))
        left = [path for path in self.folder.glob("*/*/*") if path.suffix != ".log"]
        assert not left, "checkouts or bundles are left"
        until(lambda: not self.processes())


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    for pid in world.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def in_background(action):
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


@pytest.mark.full
def test_a_run_comes_to_its_end_whatever_is_killed(world):
    """Each kind of process twice, in an order that chance gives, and all at once."""
    chance = random.Random(11)
    thread = in_background(world.launch)
    victims = {
        "a trainer": lambda: [chance.choice(until(lambda: world.commands(TRAINER)))],
        "the builder": lambda: until(lambda: world.commands(BUILDER)),
        "a trainer's supervisor": lambda: [
            chance.choice(until(lambda: world.supervisors(TRAINER)))
        ],
        "all": lambda: until(world.processes),
    }
    for name in chance.sample(2 * sorted(victims), 2 * len(victims)):
        step = world.step()
        until(lambda step=step: step < world.step() < STEPS)
        kill(victims[name]())
    thread.join(90)
    assert not thread.is_alive(), world.said
    assert world.step() == STEPS
    for role in (TRAINER, BUILDER):
        assert worker_state.read_done(world.store, RUN, role) is not None
    said = "\n".join(world.said)
    assert "is gone (code -9)" in said
    world.require_sound()


@pytest.mark.full
def test_a_launcher_that_is_killed_takes_its_hosts_with_it_and_another_goes_on(world):
    program = (
        "import pathlib\n"
        "from tests.tpu_launch import test_local_backend as t\n"
        f"world = object.__new__(t.World)\nworld.__dict__.update({vars(world)!r})\n"
    )
    program = program.replace("PosixPath(", "pathlib.Path(")
    program = program.replace(repr(world.store), "None")
    program = program.replace("ShipBundle(", "t.ShipBundle(").replace(
        "Site(", "t.Site("
    )
    program += "world.store = t.open_store(world.model_dir)\nworld.launch()\n"
    launcher = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    until(lambda: world.step() >= 5 and world.commands(BUILDER))
    launcher.kill()
    launcher.wait()
    until(lambda: not world.processes())
    killed_at = world.step()
    assert killed_at < STEPS
    workers = worker_state.read_workers(world.store, RUN, TRAINER, 1)
    assert {worker.state for worker in workers.values()} == {worker_state.State.STOPPED}
    assert (world.folder / f"{RUN}-trainer-001" / "slice.json").exists()
    world.launch()
    assert world.step() == STEPS
    assert any("the launcher that had it is gone" in text for text in world.said)
    world.require_sound()


@pytest.mark.full
def test_a_slice_that_was_noted_and_never_made_is_not_waited_for(world):
    Attempts(world.store, RUN, time.time()).begin(TRAINER, time.time(), None)
    world.launch(trainers=1, builders=0)
    attempts = read_attempts(world.store, RUN, TRAINER)
    assert [attempt.number for attempt in attempts] == [1, 2]
    assert attempts[0].ended - attempts[0].begun < 30
    world.require_sound()


@pytest.mark.full
def test_deleting_lets_commands_save_and_kills_what_lost_its_host(world):
    backend = LocalBackend(world.folder)
    operation = world.create(backend)
    until(lambda: len(world.commands(TRAINER)) == 2 and world.step() > 0)
    assert backend.state(operation.name, "here").state == SliceState.ACTIVE
    victim = world.supervisors(TRAINER)[0]
    kill([victim])
    until(lambda: backend.state(operation.name, "here").state == SliceState.SUSPENDED)
    # Its command runs on, though its machine is gone.
    backend.delete(DeleteSlice(operation.name, "here"))
    backend.delete(DeleteSlice(operation.name, "here"))
    until(lambda: backend.state(operation.name, "here") is None)
    assert world.processes() == []
    assert backend.find("here", {operations.RUN: RUN}) == []
    said = worker_state.read_workers(world.store, RUN, TRAINER, 1)
    assert worker_state.State.STOPPED in {worker.state for worker in said.values()}
    # Logs stay, checkouts go.
    assert len(list(world.folder.glob("*/*/serial.log"))) == 2
    world.require_sound()


@pytest.mark.full
def test_a_launcher_that_is_asked_to_stop_leaves_nothing(world):
    stop, caught = threading.Event(), []

    def launch():
        try:
            world.launch(stop)
        except Exception as error:
            caught.append(type(error).__name__)

    thread = in_background(launch)
    until(lambda: world.step() >= 5)
    began = time.monotonic()
    stop.set()
    thread.join(60)
    assert caught == ["StoppedError"]
    assert time.monotonic() - began < 10
    assert world.step() < STEPS
    world.require_sound()


@pytest.mark.full
def test_a_command_that_fails_at_one_place_is_given_up(world):
    """Four times on its host, and once more on another."""
    command = world.folder.parent / "command.py"
    command.write_text("import sys\nsys.exit('error: out of luck')\n")
    with pytest.raises(GaveUpError, match="out of luck"):
        world.launch(trainers=1, builders=0)
    logs = list(world.folder.glob("*/0/run-*.log"))
    assert len(logs) == 2
    assert [log.read_text().count("out of luck") for log in logs] == [4, 4]
    world.require_sound()


@pytest.mark.full
def test_a_script_that_cannot_be_run_is_given_up(world):
    """Nothing of the bundle is run if it is not what it is said to be."""
    world.bundle = ShipBundle(world.bundle.url, "0" * 64)
    config = dataclasses.replace(CONFIG, startup_minutes=0.02)
    job = dataclasses.replace(world.job(trainers=1, builders=0), config=config)
    backend, clock = LocalBackend(world.folder), SystemClock(threading.Event())
    with pytest.raises(GaveUpError, match="said nothing"):
        Reconciler(
            job, world.bundle, backend, world.store, clock, world.said.append, {}
        ).run()
    log = (world.folder / f"{RUN}-trainer-001" / "0" / "serial.log").read_text()
    assert "did NOT match" in log
    assert not world.commands(TRAINER)


@pytest.mark.full
def test_a_name_is_taken_once(world):
    backend = LocalBackend(world.folder)
    operation = world.create(backend, trainers=1)
    backend.create(operation)
    until(lambda: world.supervisors(TRAINER))
    assert len(world.supervisors(TRAINER)) == 1
    with pytest.raises(BadInputError, match="choose another"):
        backend.create(
            dataclasses.replace(operation, labels={operations.RUN: "another"})
        )


@pytest.mark.full
def test_a_slice_that_is_no_slice(world):
    path = world.folder / "a-slice" / "slice.json"
    path.parent.mkdir(parents=True)
    for text in ("{", "[]", '{"token": "a", "state": "ASLEEP"}'):
        path.write_text(text)
        with pytest.raises(BadInputError, match=r"slice\.json.*delete"):
            LocalBackend(world.folder)


@pytest.mark.parametrize(("processes", "devices"), itertools.product((1, 2, 3), (1, 2)))
def test_processes_are_told_who_they_are(processes, devices):
    told = [environment(n, processes, 7, devices) for n in range(processes)]
    if processes == devices == 1:
        # Whatever devices there are.
        assert told == [{}]
        return
    for number, one in enumerate(told):
        assert one["JAX_NUM_CPU_DEVICES"] == str(devices)
        alone = {"JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"}
        if processes == 1:
            assert set(one) == alone
        else:
            assert one["JAX_PROCESS_ID"] == str(number)
            assert one["JAX_NUM_PROCESSES"] == str(processes)
            assert one["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:7"


def test_compiled_programs_are_kept_with_what_is_launched_unless_told_where(
    tmp_path, monkeypatch
):
    name = "JAX_COMPILATION_CACHE_DIR"
    monkeypatch.delenv(name, raising=False)
    assert compiled_programs(tmp_path) == {name: f"{tmp_path}/compiled"}
    monkeypatch.setenv(name, "gs://bucket/compiled")
    assert compiled_programs(tmp_path) == {name: "gs://bucket/compiled"}
