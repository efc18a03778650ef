"""Serves the page and the JSON interface for asking a trained model.

    GET  /?question=…        the page, with the answer and its sources
    POST /answer             {"question": …} -> the same as JSON
    GET  /status             the version that answers, as JSON

What is wrong with a request is told on the page, and as {"error": ...} to programs.
The model runs in a separate thread, one question at a time. Requests that wait for it
block neither other connections nor /status.
"""

import asyncio
import errno
import json
import socket
import threading
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler
from markupsafe import Markup, escape

from realm_jax.errors import BadInputError
from realm_jax.evaluation.answering import ReadDocument
from realm_jax.evaluation.ask import AnswerService, Reply
from realm_jax.evaluation.findings import duration
from realm_jax.evaluation.templates import page_environment

_LARGEST_REQUEST = 1 << 16
_GOODBYE_SECONDS = 2.0
_FOR_PROGRAMS = ("/answer", "/status")


def open_port(host: str, port: int) -> socket.socket:
    """Binds and listens to a port; requests are answered once `serve` is called.

    Raises:
      BadInputError: the address is not of this machine, or the port is in use.
    """
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
) -> None:
    """Answers requests until `stop` is set; closes the port.

    Args:
      respondent: the service that answers.
      listener: socket from `open_port`.
      stop: ends the server, after the question in progress is answered.
      on_ready: called once the server accepts requests.
    """
    asyncio.run(_serve(respondent, listener, stop, on_ready))


async def _serve(
    respondent: AnswerService,
    listener: socket.socket,
    stop: threading.Event,
    on_ready: Callable[[], None],
) -> None:
    runner = web.AppRunner(
        make_application(respondent),
        access_log=None,
        shutdown_timeout=_GOODBYE_SECONDS,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        on_ready()
        await asyncio.to_thread(stop.wait)
    finally:
        await runner.cleanup()


def make_application(respondent: AnswerService) -> web.Application:
    """Returns the application with its routes."""
    handlers = _Handlers(respondent)
    application = web.Application(
        client_max_size=_LARGEST_REQUEST, middlewares=[_refuse_in_json]
    )
    application.add_routes(
        [
            web.get("/", handlers.page),
            web.post("/answer", handlers.answer),
            web.get("/status", handlers.status),
        ]
    )
    return application


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


class _Handlers:
    def __init__(self, respondent: AnswerService):
        self._respondent = respondent
        self._free = asyncio.Lock()
        environment = page_environment()
        environment.filters |= {"duration": duration, "marked": _marked}
        self._template = environment.get_template("ask.html.jinja")

    async def page(self, request: web.Request) -> web.Response:
        question = request.query.get("question")
        reply, problem = None, ""
        if question is not None:
            try:
                reply = await self._ask(question)
            except BadInputError as error:
                problem = str(error)
        version = reply.version if reply else self._respondent.version
        page = self._template.render(
            question=question or "",
            reply=reply,
            problem=problem,
            version=version.describe(),
        )
        return web.Response(
            text=page, content_type="text/html", status=400 if problem else 200
        )

    async def answer(self, request: web.Request) -> web.Response:
        try:
            reply = await self._ask(_question_of(await request.read()))
        except web.HTTPRequestEntityTooLarge:
            return _refuse(f"expected a request of at most {_LARGEST_REQUEST:,} bytes")
        except BadInputError as error:
            return _refuse(str(error))
        return web.json_response(reply.describe())

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                **self._respondent.version.describe(),
                "problem": self._respondent.problem,
            }
        )

    async def _ask(self, question: str) -> Reply:
        async with self._free:
            return await asyncio.to_thread(self._respondent.answer, question)


def _question_of(data: bytes) -> str:
    try:
        request = json.loads(data)
    except ValueError as error:
        raise BadInputError(
            f'expected JSON such as {{"question": "who ..."}}, got none ({error})'
        ) from error
    if not isinstance(request, dict) or list(request) != ["question"]:
        raise BadInputError(
            f'expected JSON such as {{"question": "who ..."}}, got {request!r:.60}'
        )
    return request["question"]


def _refuse(message: str, status: int = 400) -> web.Response:
    return web.json_response({"error": " ".join(message.split())}, status=status)


def _marked(document: ReadDocument) -> Markup:
    """Returns the escaped body with all occurrences of the answer highlighted."""
    pieces, end = [], 0
    for start, stop in document.places:
        if start < end:
            continue  # Occurrences of an answer can overlap.
        pieces.append(escape(document.body[end:start]))
        pieces.append(Markup("<mark>{}</mark>").format(document.body[start:stop]))
        end = stop
    return Markup("").join([*pieces, escape(document.body[end:])])


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
