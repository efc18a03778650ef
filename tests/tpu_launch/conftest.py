"""A finished chain to launch again, and a service that has slices."""

import http.server
import threading

import pytest

from tests import compiled, tiny_run
from tests.tpu_launch.fake_tpu import World, served


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a finished chain; read only."""
    return tiny_run.finished(tmp_path_factory)


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    """Programs for TPUs are measured as they are, and run nowhere."""
    with compiled.as_it_comes():
        yield


@pytest.fixture
def planner_cache(tmp_path, monkeypatch):
    """The folder where figures of compiled programs are kept, empty."""
    folder = tmp_path / "cache" / "planner"
    monkeypatch.setattr("tpu_launch.planner.memory._KEPT", folder)
    return folder


@pytest.fixture
def world(monkeypatch):
    """A service of Cloud TPU, which the real client library finds."""
    world = World()
    with served(world) as address:
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", address)
        monkeypatch.setenv("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "true")
        monkeypatch.setattr("tpu_launch.up._DELETING_SECONDS", 0.0)
        yield world


@pytest.fixture
def metadata():
    """Attributes of a machine; "host" is where they are served."""
    attributes = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            folder, _, name = self.path.rpartition("/")
            of_attributes = folder == "/computeMetadata/v1/instance/attributes"
            known = of_attributes and name in attributes
            ours = self.headers["Metadata-Flavor"] == "Google"
            self.send_response((200 if known else 404) if ours else 403)
            self.end_headers()
            self.wfile.write(attributes.get(name, "not found").encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    attributes["host"] = f"127.0.0.1:{server.server_port}"
    yield attributes
    server.shutdown()
    thread.join()
    server.server_close()
