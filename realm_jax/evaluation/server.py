"""Serves the page and the JSON interface for asking a trained model.

    GET  /?question=…        the page, with the answer and its sources
    POST /answer             {"question": …} -> the same as JSON
    GET  /status             the version that answers, as JSON

What is wrong with a request is told on the page, and as {"error": ...} to programs.
The model runs in a separate thread, one question at a time. Requests that wait for it
block neither other connections nor /status, and are dropped once their sender has gone.

Nobody is asked for a password, so the pages of others must not get answers by way of a
browser here: the Host of a request has to be one of this server (DNS rebinding), a
question that is posted has to be of a type that a browser sends to its own site only,
and one in an address must not be from a page of another site (`Sec-Fetch-Site`), unless
a person has followed a link there, which leaves that page for this one.
"""

import asyncio
import errno
import json
import logging
import reprlib
import socket
import threading
import urllib.parse
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from realm_jax.errors import BadInputError
from realm_jax.evaluation.ask import AnswerService, Reply
from realm_jax.evaluation.templates import page_template
from realm_jax.types import NULL_BLOCK

_LARGEST_REQUEST = 1 << 16
_GOODBYE_SECONDS = 2.0
# Longest wait for a request, for its body, and for the next one of a connection.
_READ_SECONDS = 10.0
# Questions that wait at a time, and when one beyond may come again, in seconds.
_MOST_WAITING = 64
_RETRY_SECONDS = 5
# More than may wait, so that there is always one that can give way to another; far
# fewer than the files that a process may have open.
_MOST_CONNECTIONS = 256
# Of this machine, whatever network it is in; forwarded ports have these names, too.
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_FOR_PROGRAMS = ("/answer", "/status")

_log = logging.getLogger(__name__)
# aiohttp answers a request that is no HTTP with 400, but logs it as a fault of its own.
_log.addFilter(
    lambda record: (
        not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
    )
)


def open_port(host: str, port: int) -> socket.socket:
    """Binds and listens to a port; requests are answered once `serve` is called."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _no_port(host, port, error) from error
    try:
        # The port of a server that has just ended may still be in the state TIME_WAIT.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        # Listen now, because two sockets can bind one port until one of them listens.
        taken.listen()
    except OSError as error:
        taken.close()
        raise _no_port(host, port, error) from error
    return taken


def serve(
    respondent: AnswerService,
    listener: socket.socket,
    stop: threading.Event,
    on_ready: Callable[[], None] = lambda: None,
    hosts: Collection[str] = (),
) -> None:
    """Answers requests until `stop` is set; closes the port that `open_port` opened.

    The question in progress is answered first. `on_ready` is called once requests are
    accepted; `hosts` are names of this server beside localhost and the address that was
    reached.
    """
    asyncio.run(_serve(respondent, listener, stop, on_ready, hosts))


async def _serve(
    respondent: AnswerService,
    listener: socket.socket,
    stop: threading.Event,
    on_ready: Callable[[], None],
    hosts: Collection[str],
) -> None:
    handlers = _Handlers(respondent)
    runner = web.AppRunner(
        _make_application(handlers, hosts),
        access_log=None,
        logger=_log,
        # A compressed body is refused as what it is, no JSON.
        auto_decompress=False,
        # A question whose sender has gone is not computed.
        handler_cancellation=True,
        keepalive_timeout=_READ_SECONDS,
        shutdown_timeout=_GOODBYE_SECONDS,
    )
    await runner.setup()
    server = runner.server
    assert server is not None

    loop = asyncio.get_running_loop()

    def admit() -> web.RequestHandler:
        # Not at once: of connections that come together, those before this one are
        # known to aiohttp by then.
        loop.call_soon(_make_room, server, handlers.waiting)
        return server()

    # Not by web.SockSite, which admits any number of connections.
    port = await loop.create_server(admit, sock=listener)
    try:
        on_ready()
        await asyncio.to_thread(stop.wait)
    finally:
        port.close()
        await runner.cleanup()


def _make_room(server: web.Server, waiting: Collection[web.RequestHandler]) -> None:
    """Closes the oldest connections that await no answer, for one more."""
    is_open = [one for one in server.connections if one.transport is not None]
    idle = [one for one in is_open if one not in waiting]
    for one in idle[: max(0, len(is_open) + 1 - _MOST_CONNECTIONS)]:
        one.force_close()


def _make_application(handlers: "_Handlers", hosts: Collection[str]) -> web.Application:
    application = web.Application(
        client_max_size=_LARGEST_REQUEST,
        middlewares=[_require_host(hosts), _refuse_in_json],
    )
    application.add_routes(
        [
            web.get("/", handlers.page),
            web.post("/answer", handlers.answer),
            web.get("/status", handlers.status),
        ]
    )
    application.on_cleanup.append(handlers.close)
    return application


def _require_host(hosts: Collection[str]) -> Middleware:
    """Returns a check that a request is for a name of this server."""
    own = _LOCAL_NAMES | {_host_name(host) for host in hosts}

    @web.middleware
    async def require_host(
        request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        said = request.headers.get("Host", "")
        reached = (request.get_extra_info("sockname") or ("",))[0]
        # A socket for IPv6 shows addresses of IPv4 as if they were its own.
        if _host_name(said) in {*own, reached.removeprefix("::ffff:")}:
            return await handler(request)
        return _refuse(
            f"expected a Host of this server, got {said!r}; ask at the address it "
            "serves on, or start it with --allow_host",
            403,
        )

    return require_host


def _host_name(host: str) -> str:
    """Returns the name in a Host header, without a port; "" if there is none."""
    try:
        return urllib.parse.urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


@web.middleware
async def _refuse_in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers programs in JSON where aiohttp would in plain text."""
    try:
        return await handler(request)
    except web.HTTPClientError as error:
        accepts_json = "json" in request.headers.get("Accept", "")
        if not (accepts_json or request.path in _FOR_PROGRAMS):
            raise
        said = f"got {request.method} {request.path} ({error.reason})"
        response = _refuse(
            f"expected POST /answer or GET /status, {said}; use one of these",
            error.status,
        )
        if allowed := error.headers.get("Allow"):
            response.headers["Allow"] = allowed
        return response


class _BusyError(BadInputError):
    """Raised for a question that finds too many others before it."""


def _status_of(error: BadInputError) -> int:
    return 503 if isinstance(error, _BusyError) else 400


def _headers_of(status: int) -> dict[str, str]:
    return {"Retry-After": str(_RETRY_SECONDS)} if status == 503 else {}


class _Handlers:
    """The routes, and the thread in which the model runs.

    Attributes:
      waiting: connections whose question is in that thread, or waits for it.
    """

    def __init__(self, respondent: AnswerService):
        self.waiting: set[web.RequestHandler] = set()
        self._respondent = respondent
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answer")
        self._template = page_template("ask.html.jinja")

    async def close(self, application: web.Application) -> None:
        """Waits for the question in progress."""
        self._thread.shutdown(cancel_futures=True)

    async def page(self, request: web.Request) -> web.Response:
        question = request.query.get("question")
        reply, problem, status = None, "", 200
        if question is not None:
            # An image of any page would have the model work for it.
            is_foreign = request.headers.get("Sec-Fetch-Site") == "cross-site"
            if is_foreign and not _is_followed_link(request):
                return _refuse(
                    "expected a question from this page, got one from another site; "
                    f"open http://{request.host} and ask there",
                    403,
                )
            try:
                reply = await self._ask(request, question)
            except BadInputError as error:
                problem, status = str(error), _status_of(error)
        version = reply.version if reply else self._respondent.version
        page = self._template.render(
            question=question or "",
            reply=reply,
            problem=problem,
            version=version.describe(),
            null_block=NULL_BLOCK,
        )
        return web.Response(
            text=page,
            content_type="text/html",
            status=status,
            headers=_headers_of(status),
        )

    async def answer(self, request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            return _refuse(
                "expected a question as application/json, got "
                f"{request.headers.get('Content-Type', 'no Content-Type')!r}; set "
                "the Content-Type",
                415,
            )
        try:
            async with asyncio.timeout(_READ_SECONDS):
                data = await request.read()
            reply = await self._ask(request, _question_of(data))
        except TimeoutError:
            return _refuse(
                f"expected the question within {_READ_SECONDS:.0f} seconds, got a part "
                "of it; send it again",
                408,
            )
        except web.HTTPRequestEntityTooLarge:
            return _refuse(f"expected a request of at most {_LARGEST_REQUEST:,} bytes")
        except BadInputError as error:
            return _refuse(str(error), _status_of(error))
        return web.json_response(reply.describe())

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                **self._respondent.version.describe(),
                "problem": self._respondent.problem,
            }
        )

    async def _ask(self, request: web.Request, question: str) -> Reply:
        if len(self.waiting) >= _MOST_WAITING:
            raise _BusyError(
                f"expected fewer than {_MOST_WAITING} questions at a time, got more; "
                f"ask again in {_RETRY_SECONDS} seconds"
            )
        self.waiting.add(request.protocol)
        try:
            # Cancelled with the request: what has not begun by then does not begin.
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self._respondent.answer, question
            )
        finally:
            self.waiting.discard(request.protocol)


def _is_followed_link(request: web.Request) -> bool:
    """Returns whether a person has clicked, and sees this page in place of another."""
    wanted = {
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
        "Sec-Fetch-User": "?1",
    }
    return all(request.headers.get(name) == value for name, value in wanted.items())


def _question_of(data: bytes) -> str:
    try:
        request = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            f'expected JSON such as {{"question": "who ..."}}, got none ({error})'
        ) from error
    if not isinstance(request, dict) or list(request) != ["question"]:
        # repr() itself may exceed the recursion limit.
        raise BadInputError(
            'expected JSON such as {"question": "who ..."}, got '
            f"{reprlib.repr(request)}"
        )
    return request["question"]


def _refuse(message: str, status: int = 400) -> web.Response:
    return web.json_response(
        {"error": " ".join(message.split())},
        status=status,
        headers=_headers_of(status),
    )


def _no_port(host: str, port: int, error: OSError) -> BadInputError:
    if error.errno == errno.EADDRINUSE:
        return BadInputError(
            f"expected a free port, got {host}:{port}, which is in use; choose another "
            "PORT, or end what answers there"
        )
    return BadInputError(
        f"expected an address of this machine and a port that may be opened, got "
        f"{host}:{port} ({error.strerror}); correct HOST or PORT"
    )
