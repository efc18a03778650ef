"""The supervisor of a worker, with real commands, on a clock that runs fast."""

import dataclasses
import http.server
import itertools
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest

from realm_jax.storage import UnavailableStoreError, open_store
from tpu_launch import worker_state
from tpu_launch.startup import startup_script
from tpu_launch.worker import supervisor
from tpu_launch.worker.command import Work
from tpu_launch.worker.reporter import bounded_tail
from tpu_launch.worker.supervisor import Supervisor
from tpu_launch.worker.timeouts import Timeouts
from tpu_launch.worker.worker_identity import WorkerIdentity
from tpu_launch.worker_state import Done, State

pytestmark = pytest.mark.full

ROOT = pathlib.Path(__file__).parents[2]
BEGAN = 1_000_000.0
# Notes each start, and that nothing of libtpu is in its way.
_BEGIN = """
import os, pathlib, signal, subprocess, sys, time
lock = pathlib.Path("lockfile")
assert not lock.exists(), "locked"
lock.touch()
with open("starts", "a") as file:
    file.write(f"{time.monotonic()}\\n")
start = len(pathlib.Path("starts").read_text().splitlines())
def reach(step):
    folder = pathlib.Path("checkpoints")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{step}.json").touch()
def hang():
    pathlib.Path("hangs").touch()
    while True:
        time.sleep(60)
"""


class FastClock:
    """A hundred seconds in one."""

    RATE = 100.0

    def __init__(self, stop):
        self._stop = stop
        self._began = time.monotonic()

    def now(self):
        return BEGAN + (time.monotonic() - self._began) * self.RATE

    def wait(self, seconds):
        return self._stop.wait(seconds / self.RATE)

    def wait_anyway(self, seconds):
        time.sleep(seconds / self.RATE)


class AwayStore:
    """A store that answers only while `event` is not set."""

    def __init__(self, store):
        self._store = store
        self.away = threading.Event()

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def call(*arguments):
            if self.away.is_set():
                raise UnavailableStoreError("away")
            return method(*arguments)

        return call


class World:
    """A folder that is model directory and working directory of a command."""

    def __init__(self, folder):
        self.folder = folder
        self.store = open_store(folder)
        self.stop = threading.Event()
        self.clock = FastClock(self.stop)
        self.said = []
        self.timeouts = Timeouts()

    def run(self, program, role="trainer", number=0, hosts=1, seconds=1e6, store=None):
        work = Work(
            "run",
            role,
            3,
            BEGAN + seconds,
            [sys.executable, "-S", "-c", _BEGIN + program],
            dict(os.environ),
            self.folder / f"{number}.log",
            self.folder / "lockfile",
        )
        place = WorkerIdentity(number, 0, hosts, 1, "host0")
        return Supervisor(
            work,
            place,
            store or self.store,
            self.clock,
            self.stop,
            self.said.append,
            self.timeouts,
        ).run()

    def starts(self):
        notes = self.folder / "starts"
        return list(map(float, notes.read_text().split())) if notes.exists() else []

    def state(self, role="trainer", number=0):
        found = worker_state.read_workers(self.store, "run", role, 3)
        return found.get(number)

    def done(self, role="trainer"):
        return worker_state.read_done(self.store, "run", role)

    def mark(self, role):
        assert worker_state.mark_done(self.store, "run", role, Done(BEGAN, 3, 1))


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return World(tmp_path)


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def in_background(action):
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def test_a_crash_is_followed_by_another_start_as_long_as_it_gets_on(world):
    # More crashes than would be forgiven at one place.
    crashes = world.timeouts.restarts + 2
    code = world.run(f"reach(10 * start); print(start); sys.exit(start <= {crashes})")
    assert code == 0
    assert len(world.starts()) == crashes + 1
    assert world.done().step == 10 * (crashes + 1)
    assert world.done().attempt == 3
    state = world.state()
    assert (state.state, state.exit_code) == (State.DONE, 0)
    log = world.store.read("launch/run/trainer/003/0.log").decode()
    assert log.split() == [str(n + 1) for n in range(crashes + 1)]


def test_a_command_that_crashes_at_one_place_is_given_up(world):
    program = "reach(40); print('error: a bug'); os.kill(os.getpid(), signal.SIGSEGV)"
    assert world.run(program) == 139
    starts = world.starts()
    assert len(starts) == 1 + world.timeouts.restarts
    waits = [after - before for before, after in itertools.pairwise(starts)]
    for number, seconds in enumerate(waits):
        assert seconds * world.clock.RATE >= world.timeouts.backoff * 2**number
    state = world.state()
    assert (state.state, state.exit_code, state.step) == (State.FAILED, 139, 40)
    assert state.reached == "checkpoint 40"
    assert state.message == "code 139: a bug"
    assert world.done() is None


def test_a_command_whose_builder_is_late_is_started_again(world):
    """However often: its slice may be queued for longer than four restarts take."""
    assert world.run("sys.exit(75 if start < 8 else 0)") == 0
    assert len(world.starts()) == 8


@pytest.mark.parametrize(
    ("code", "state"),
    [(2, State.FAILED), (143, State.STOPPED), (130, State.STOPPED)],
)
def test_what_is_not_started_again(world, code, state):
    assert world.run(f"print('error: no corpus'); sys.exit({code})") == code
    assert len(world.starts()) == 1
    found = world.state()
    assert (found.state, found.exit_code) == (state, code)
    assert (found.message == "no corpus") == (code == 2)
    assert world.done() is None


def test_a_command_that_cannot_be_run(world, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(world.folder / "missing"))
    with pytest.raises(supervisor.BadInputError, match="missing"):
        world.run("")
    assert (world.state().state, world.state().exit_code) == (State.FAILED, 2)


def test_the_deadline_ends_a_command_that_does_not_listen_and_its_children(world):
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    program = f"""
signal.signal(signal.SIGTERM, lambda *_: open("asked", "w").close())
child = subprocess.Popen([sys.executable, "-S", "-c", {child!r}])
pathlib.Path("child").write_text(str(child.pid))
hang()
"""
    world.timeouts = dataclasses.replace(world.timeouts, stopping=30.0)
    assert world.run(program, seconds=150.0) == 137
    assert world.clock.now() >= BEGAN + 180.0
    assert (world.folder / "asked").exists()
    state = world.state()
    assert (state.state, state.exit_code) == (State.STOPPED, 137)
    assert state.message == "the deadline has come"
    assert len(world.starts()) == 1
    child = int((world.folder / "child").read_text())
    until(lambda: _is_gone(child))
    assert world.run("", seconds=0.0) == 143
    assert len(world.starts()) == 1


def _is_gone(pid):
    status = pathlib.Path(f"/proc/{pid}/stat")
    # Where nobody is there to bury it, it stays as a zombie.
    return (
        not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
    )


def test_asked_to_stop_between_two_starts(world):
    world.timeouts = dataclasses.replace(
        world.timeouts, backoff=1e5, longest_backoff=1e5
    )
    codes = []
    thread = in_background(lambda: codes.append(world.run("sys.exit(1)")))
    until(lambda: (s := world.state()) and s.state == State.RESTARTING)
    world.stop.set()
    thread.join()
    assert codes == [143]
    assert world.state().state == State.STOPPED


def test_a_worker_that_boots_after_the_role_was_done(world):
    world.mark("trainer")
    assert world.run("hang()") == 0
    assert world.starts() == []


def test_a_builder_starts_again_until_its_trainer_is_done(world):
    program = """
if start == 3:
    pathlib.Path("launch/run/trainer").mkdir(parents=True, exist_ok=True)
    pathlib.Path("launch/run/trainer/done.json").write_text('{"time": 1, "attempt": 1}')
"""
    world.timeouts = dataclasses.replace(world.timeouts, ended=10.0)
    assert world.run(program, role="builder") == 0
    assert len(world.starts()) == 3
    assert world.done("builder") is not None
    assert world.state("builder").state == State.DONE


def test_another_worker_is_done_when_the_first_has_marked_the_role(world):
    codes = []
    program = "hang() if start > 1 else None"

    def work():
        codes.append(world.run(program, number=1, hosts=2))

    thread = in_background(work)
    # It has started again, for nobody said that the role was done, and would wait for
    # ever for the first.
    until((world.folder / "hangs").exists)
    assert world.state(number=1).state in (State.RUNNING, State.RESTARTING)
    world.mark("trainer")
    thread.join()
    assert codes == [0]
    assert world.state(number=1).state == State.DONE
    assert len(world.starts()) == 2


def test_a_store_that_is_away_for_a_while(world):
    store = AwayStore(world.store)
    crashes = world.timeouts.restarts + 2
    codes = []
    # The command cannot write either, so it crashes, more often than is forgiven.
    program = f"""
if start <= {crashes}:
    pathlib.Path(f"crash{{start}}").touch()
    sys.exit(1)
reach(7)
pathlib.Path("end").touch()
"""
    world.timeouts = dataclasses.replace(world.timeouts, longest_backoff=20.0)
    thread = in_background(lambda: codes.append(world.run(program, store=store)))
    for number in range(1, crashes + 1):
        until((world.folder / f"crash{number}").exists)
        store.away.set()
        # Long enough for it to be asked how far the command got.
        until(lambda n=number: sum("starting again" in s for s in world.said) >= n)
        store.away.clear()
    until((world.folder / "end").exists)
    thread.join()
    assert codes == [0]
    assert world.done().step == 7
    assert world.state().state == State.DONE


def test_the_end_is_told_once_the_store_is_back(world):
    store = AwayStore(world.store)
    codes = []
    program = """
pathlib.Path("began").touch()
while not os.path.exists("go"):
    time.sleep(0.01)
"""
    thread = in_background(lambda: codes.append(world.run(program, store=store)))
    until((world.folder / "began").exists)
    store.away.set()
    (world.folder / "go").touch()
    until(lambda: any("waiting for the model directory" in s for s in world.said))
    assert world.done() is None
    assert not codes
    store.away.clear()
    thread.join()
    assert codes == [0]
    assert world.done() is not None
    assert world.state().state == State.DONE


def test_a_directory_that_refuses_is_bad_input(world):
    world.mark("trainer")
    world.store.write("launch/run/trainer/done.json", b"{")
    with pytest.raises(supervisor.BadInputError, match=r"done.json"):
        world.run("")
    assert world.starts() == []
    assert (world.state().state, world.state().exit_code) == (State.FAILED, 2)


def test_it_speaks_every_minute(world):
    codes = []
    thread = in_background(lambda: codes.append(world.run("hang()")))
    until(lambda: (s := world.state()) and s.state == State.RUNNING)
    first = world.state().time
    (world.folder / "checkpoints").mkdir(parents=True)
    (world.folder / "checkpoints/12.json").touch()
    until(lambda: world.state().step == 12)
    assert world.state().time - first >= world.timeouts.report
    world.stop.set()
    thread.join()
    # It has no handler of its own.
    assert codes == [143]
    assert world.state().message == "asked to stop"


def test_the_end_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert bounded_tail(log) == b""
    lines = [b"%07d\n" % n for n in range(100_000)]
    log.write_bytes(b"".join(lines))
    tail = bounded_tail(log)
    assert tail == b"".join(lines[-len(tail) // 8 :])
    assert 200_000 < len(tail) <= 256 << 10
    with log.open("ab") as written:
        assert bounded_tail(log, longest=500_000) == tail
        assert log.read_bytes() == tail
        written.write(b"more\n")
    assert log.read_bytes() == tail + b"more\n"


# From here the program itself, as the startup script starts it.


def _environment(tmp_path, **changes):
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "host0",
        **changes,
    }


def _arguments(model_dir, command):
    script = startup_script(
        name="run-trainer-003",
        run="run",
        role="trainer",
        attempt=3,
        slices=1,
        hosts=1,
        model_dir=str(model_dir),
        bundle_url="gs://bucket/bundle.tar.gz",
        bundle_digest="0" * 64,
        deadline=int(time.time()) + 600,
        fetch={},
        command=command,
    )
    words = shlex.split(script.rpartition("\nexec ")[2])
    words[0] = sys.executable
    words[words.index("--log_dir=$home")] = f"--log_dir={model_dir.parent}"
    program = words.index("--") + 1
    # In place of `python -m realm_jax.cli.main`.
    return [*words[:program], sys.executable, "-S", "-c", *words[program + 3 :]]


def test_the_program_passes_sigterm_on_and_the_command_saves(tmp_path):
    program = """
import os, pathlib, signal, sys, time
def save(*_):
    pathlib.Path("saved").write_text(os.environ["JAX_COORDINATOR_PORT"])
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
assert not any(name.startswith("MEGASCALE_") for name in os.environ)
assert sys.argv[1:] == ["pretrain", "--gin_file=/x", "--"]
pathlib.Path("ready").touch()
while True:
    time.sleep(60)
"""
    model_dir = tmp_path / "model"
    process = subprocess.Popen(
        _arguments(model_dir, [program, "pretrain", "--gin_file=/x", "--"]),
        cwd=tmp_path,
        env=_environment(
            tmp_path, MEGASCALE_COORDINATOR_ADDRESS="gone:8080", MEGASCALE_SLICE_ID="1"
        ),
    )
    try:
        until((tmp_path / "ready").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
    finally:
        process.kill()
    assert (tmp_path / "saved").read_text() == "8476"
    workers = worker_state.read_workers(open_store(model_dir), "run", "trainer", 3)
    assert workers[0].state == State.STOPPED


def test_a_preemption_that_only_the_metadata_tell_has_the_command_save(tmp_path):
    program = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path("saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path("ready").touch()
while True:
    time.sleep(60)
"""
    preempted, model_dir = threading.Event(), tmp_path / "model"
    told = {
        "attributes/agent-worker-number": "0",
        "attributes/worker-network-endpoints": "127.0.0.1",
    }

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.headers["Metadata-Flavor"] == "Google"
            path, _, query = self.path.partition("?")
            name = path.removeprefix("/computeMetadata/v1/instance/")
            if name == "preempted" and "wait_for_change=true" in query:
                preempted.wait(10)
            is_so = "TRUE" if preempted.is_set() else "FALSE"
            self.send_response(200)
            self.end_headers()
            self.wfile.write({"preempted": is_so, **told}[name].encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    environment = _environment(
        tmp_path, GCE_METADATA_HOST=f"127.0.0.1:{server.server_port}"
    )
    del environment["TPU_WORKER_ID"], environment["TPU_WORKER_HOSTNAMES"]
    arguments = _arguments(model_dir, [program])
    process = subprocess.Popen(arguments, cwd=tmp_path, env=environment)
    try:
        until((tmp_path / "ready").exists)
        preempted.set()
        assert process.wait(20) == 143
    finally:
        process.kill()
        server.shutdown()
        server.server_close()
    assert (tmp_path / "saved").exists()


def test_the_program_takes_no_memory_of_jax():
    """It stays beside the command for as long as that runs."""
    loaded = "import sys, tpu_launch.worker.supervisor; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, check=True)


def test_the_program_on_a_machine_that_does_not_say_which_it_is(tmp_path):
    done = subprocess.run(
        _arguments(tmp_path / "model", ["pass"]),
        cwd=tmp_path,
        env=_environment(tmp_path, TPU_WORKER_HOSTNAMES=""),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "TPU_WORKER_HOSTNAMES" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "model").exists()
