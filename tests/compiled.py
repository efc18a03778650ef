"""Compiled programs that all tests share: workers, what they start, and the next run.

Models are tiny here, so compiling them is most of the work. JAX's persistent
compilation cache does it once; its keys hold program, options and XLA_FLAGS.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import time
from collections.abc import Iterator

_ROOT = pathlib.Path(__file__).parents[1]
_DAYS_KEPT = 7

NOT_CACHED = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
"""Environment of a process that has to compile, or must not write entries."""


def folder() -> pathlib.Path:
    """Of this kind of processor and this XLA: programs use all instructions it has."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    kind = sorted({line for line in lines if line.startswith(("model name", "flags"))})
    digest = hashlib.sha256("\n".join(kind).encode()).hexdigest()[:12]
    version = importlib.metadata.version("jaxlib")
    return _ROOT / ".cache" / "compiled_for_tests" / f"{version}-{digest}"


def xla_flags() -> dict[str, str]:
    """XLA_FLAGS as they are set, and without fusion emitters."""
    ours = "--xla_cpu_use_fusion_emitters=false"
    given = os.environ.get("XLA_FLAGS", "")
    return {"XLA_FLAGS": given if ours in given else f"{given} {ours}".strip()}


def environment() -> dict[str, str]:
    """What makes JAX use the folder, and XLA compile quickly.

    The gradient of an encoder of one layer took 5.9 s of a core to compile, 2.7 s
    without optimizations, and 0.9 s without fusion emitters, too.
    """
    return {
        **xla_flags(),
        "JAX_COMPILATION_CACHE_DIR": str(folder()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        # JAX writes entries in place. Whoever reads one at that moment, or after its
        # writer was killed, compiles for itself. On a full disk none can be written.
        "PYTHONWARNINGS": ",".join(
            f"ignore:Error {doing} persistent compilation cache entry:UserWarning"
            for doing in ("reading", "writing")
        ),
    }


@contextlib.contextmanager
def as_it_comes() -> Iterator[None]:
    """In this process: all optimizations, and no folder."""
    # What this module sets is set before JAX is imported.
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_disable_most_optimizations", "jax_enable_compilation_cache")
    before = {name: jax.config.values[name] for name in names}
    try:
        for name in names:
            jax.config.update(name, False)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def forget_unused() -> None:
    """Deletes the programs that no run of the last days has read."""
    oldest = time.time() - _DAYS_KEPT * 24 * 3600
    for path in folder().rglob("*-cache"):
        # Another session may do the same.
        with contextlib.suppress(FileNotFoundError):
            # Reading renews it, once a day if the file system is mounted with relatime.
            if path.stat().st_atime < oldest:
                path.unlink()
