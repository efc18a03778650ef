"""Services of other machines, on this one."""

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

# Status and body of an answer: text, or what is JSON; None leaves without one.
Answer = tuple[int, Any] | None


@contextlib.contextmanager
def served(answer: Callable[[BaseHTTPRequestHandler, Any], Answer]) -> Iterator[str]:
    """Yields the address of a service, such as 127.0.0.1:1234.

    A request without a body in JSON is answered as if it had {}.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Else an answer of two packets waits for the client's acknowledgement.
        disable_nagle_algorithm = True

        def _serve(self):
            size = int(self.headers.get("Content-Length") or 0)
            found = answer(self, json.loads(self.rfile.read(size) or "{}"))
            if found is None:
                self.close_connection = True
                return
            status, body = found
            kind = "text/plain" if isinstance(body, str) else "application/json"
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815

        def log_message(self, format, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
