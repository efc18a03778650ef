"""What every test runs under, and in which order files are handed to processes."""

import gc
import os
import pathlib
import resource
import signal
import sys

from tests import compiled, memory, tiers

# One thread pool a process is enough for tiny models, and keeps timings steady.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# What the environment says already stays, and XLA takes its flags and ours.
os.environ.update(compiled.environment() | os.environ | compiled.xla_flags())

import hypothesis
import pytest
from jaxtyping import install_import_hook

from tests.gcs_emulator import emulated_bucket

# What a shell starts in the background ignores Ctrl-C, and so would its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Shapes in signatures are checked at run time in tests, and only there.
install_import_hook("realm_jax.objectives", "beartype.beartype")

# The same examples every day; `make test-full` looks for new ones. How long one may
# take is nobody's business: the machine may be busy.
hypothesis.settings.register_profile(
    "gate", deadline=None, derandomize=True, database=None
)
hypothesis.settings.register_profile("full", deadline=None, print_blob=True)
hypothesis.settings.load_profile("gate")

# Minutes each: one left for the end would have a process to itself and others idle.
_LONGEST = (
    "test_learning",
    "test_several_hosts",
    "test_bad_input",
    "test_examples",
    "test_run",
    "test_batches_in_parts",
    "test_kills",
    "test_local",
    "test_pretrain",
    "test_dev_exact_match",
    "test_plan",
    "test_prepare",
    "test_ask",
)


# GiB of a process, above which it forgets after the next test; the gate's limit is 2.5.
_MUCH = 2.0


@pytest.fixture(scope="session")
def bucket(tmp_path_factory):
    """The gs:// address of a bucket; each test takes a folder of its own."""
    with emulated_bucket(tmp_path_factory.mktemp("gcs"), "realm-tests") as url:
        yield url


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """The tiny world; read only."""
    from tests import tiny_world

    return tiny_world.make(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def traced_once():
    """A module's stages trace the same program once."""
    from tests import tiny_world

    with tiny_world.traced_once():
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a finished chain; read only."""
    from tests import tiny_run

    return tiny_run.finished(tmp_path_factory)


def pytest_configure(config: pytest.Config) -> None:
    """Clears the compiled programs up, before any worker starts."""
    if not hasattr(config, "workerinput"):
        compiled.forget_unused()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Names bytes that nobody can read by their number.

    Their content may differ from worker to worker, as the time in a gzip header does,
    and pytest-xdist runs nothing when two workers name a test differently.
    """
    if isinstance(val, bytes) and not (val.isascii() and val.decode().isprintable()):
        return f"{len(val)}_bytes"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Holds the rules of the gate, and puts the longest files first."""
    excepted = (*tiers.BEYOND_THE_GATE, tiers.ALLOWED)
    broken = {
        f"{item.nodeid.partition('[')[0]}: {', '.join(found)}"
        for item in items
        if not any(map(item.get_closest_marker, excepted))
        and (found := tiers.faults(item.path, item.nodeid.partition("[")[0]))
    }
    if broken:
        raise pytest.UsageError(
            "expected tests of the gate to start no process and not to sleep; mark "
            'these `full`, or `process("reason")`:\n' + "\n".join(sorted(broken))
        )
    places = {file: place for place, file in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """Collects garbage rarely: tracing makes so many objects that it takes a while."""
    gc.collect()
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None, item: pytest.Item):
    """Forgets what was compiled when a file ends or holds much: else it all adds up."""
    yield
    ends = nextitem is None or nextitem.path != item.path
    if "jax" in sys.modules and (ends or _resident_gib() > _MUCH):
        sys.modules["jax"].clear_caches()
        memory.give_back()


def _resident_gib() -> float:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize() / 2**30


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tells the first process how much memory this one took."""
    if hasattr(session.config, "workeroutput"):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        session.config.workeroutput["peak_gib"] = peak / 2**20


@pytest.hookimpl(optionalhook=True)  # Of pytest-xdist.
def pytest_testnodedown(node) -> None:
    """Keeps what a worker told for the summary."""
    _PEAKS[node.gateway.id] = getattr(node, "workeroutput", {}).get("peak_gib", 0.0)


def pytest_terminal_summary(terminalreporter) -> None:
    """Prints the peak memory of each worker."""
    for worker, peak in sorted(_PEAKS.items()):
        terminalreporter.write_line(f"{worker}: {peak:.2f} GiB at most")


_PEAKS: dict[str, float] = {}
