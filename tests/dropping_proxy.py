"""A proxy in front of a Cloud Storage server that loses answers, or says no.

Where an answer is lost, the server has done what it was asked for; the client sees its
connection closed and cannot know. So it is with a router that restarts, or a server
that dies as it answers. A server that is busy says 429, 500 or 503, before or after it
has done it.
"""

import dataclasses
import http.client
import http.server
import random
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length")


@dataclasses.dataclass(frozen=True)
class Request:
    """What a client asked for; `text` is path, query, and the beginning of the body."""

    method: str
    text: str

    @property
    def kind(self) -> str:
        """`create`, `write`, `chunk` (TensorStore's), `delete`, or `read`."""
        if self.method == "DELETE":
            return "delete"
        if self.method == "GET":
            return "read"
        if "uploadType=media" in self.text:
            return "chunk"
        return "create" if "ifGenerationMatch=0" in self.text else "write"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """What a busy server answers; `is_done` if it has done what it was asked for."""

    status: int
    is_done: bool


REFUSALS = [
    Refusal(status, is_done) for status in (429, 500, 503) for is_done in (False, True)
]


@dataclasses.dataclass
class Proxy:
    """Where it listens, which answers it loses or refuses, and those that it has."""

    url: str
    loses: Callable[[Request], bool] = lambda request: False
    lost: list[Request] = dataclasses.field(default_factory=list)
    refuses: Callable[[Request], Refusal | None] = lambda request: None
    refused: list[tuple[Request, Refusal]] = dataclasses.field(default_factory=list)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def lose_next(self, kind: str) -> None:
        """Loses the answer to the next request of a kind."""
        left = [kind]

        def loses(request: Request) -> bool:
            return request.kind in left and left.pop() == kind

        self.loses = loses

    def refuse_at_random(self, seed: int, share: float) -> None:
        """Refuses a share of all requests, in any of the ways of `REFUSALS`."""
        rng = random.Random(seed)

        def refuses(request: Request) -> Refusal | None:
            return rng.choice(REFUSALS) if rng.random() < share else None

        self.refuses = refuses


@contextmanager
def dropping_proxy(server: str) -> Iterator[Proxy]:
    """Yields a proxy in front of the server at `http://host:port`."""
    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    listener.daemon_threads = True
    listener.target = urllib.parse.urlsplit(server).netloc
    listener.proxy = Proxy(f"http://127.0.0.1:{listener.server_address[1]}")
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    try:
        yield listener.proxy
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _forward(self) -> None:
        body = self._body()
        text = self.path + body[:2000].decode(errors="replace")
        request = Request(self.command, urllib.parse.unquote(text))
        proxy = self.server.proxy
        with proxy.lock:
            refusal = proxy.refuses(request)
        if refusal is not None:
            proxy.refused.append((request, refusal))
            if refusal.is_done:
                self._ask(body)
            self._answer(refusal.status, [], b"busy")
            return
        status, headers, contents = self._ask(body)
        with proxy.lock:
            loses = proxy.loses(request)
        if loses:
            proxy.lost.append(request)
            self.close_connection = True
            return
        self._answer(status, headers, contents)

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in ("host", *_HOP_BY_HOP)
        }
        upstream = http.client.HTTPConnection(self.server.target, timeout=60)
        upstream.request(self.command, self.path, body, headers)
        answer = upstream.getresponse()
        contents = answer.read()
        upstream.close()
        return answer.status, answer.getheaders(), contents

    def _answer(
        self, status: int, headers: list[tuple[str, str]], contents: bytes
    ) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("date", "server", *_HOP_BY_HOP):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(contents)))
        self.end_headers()
        self.wfile.write(contents)

    def __getattr__(self, name: str) -> Callable[[], None]:
        # Whatever the method, `do_GET` and its like.
        if name.startswith("do_"):
            return self._forward
        raise AttributeError(name)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, *_: object) -> None:
        pass
