"""What every test runs under, and in which order files are handed to processes."""

import gc
import os

from tests import compiled

# One thread pool a process is enough for tiny models, and keeps timings steady.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# What the environment says already stays.
os.environ.update(compiled.environment() | os.environ)

import pytest
from jaxtyping import install_import_hook

from tests.gcs_emulator import emulated_bucket

# Shapes in signatures are checked at run time in tests, and only there.
install_import_hook("realm_jax.objectives", "beartype.beartype")

# Minutes each: one left for the end would have a process to itself and others idle. The
# first that needs a finished chain is test_bad_input; the next four do not wait for it.
_LONGEST = (
    "test_learning",
    "test_several_hosts",
    "test_bad_input",
    "test_examples",
    "test_run",
    "test_losses",
    "test_kills",
    "test_local",
    "test_prepare",
    "test_ask",
    "test_users_tasks",
)


@pytest.fixture(scope="session")
def bucket(tmp_path_factory):
    """The gs:// address of a bucket; each test takes a folder of its own."""
    with emulated_bucket(tmp_path_factory.mktemp("gcs"), "realm-tests") as url:
        yield url


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


def pytest_collection_modifyitems(items: list) -> None:
    """Puts the longest files first; the order in a file stays."""
    items.sort(key=lambda item: _place(item.path.stem))


def pytest_collection_finish() -> None:
    """Keeps the collector away from what imports have made, which stays.

    Tracing makes so many objects that it would look through all of them at every step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _place(file: str) -> int:
    return _LONGEST.index(file) if file in _LONGEST else len(_LONGEST)
