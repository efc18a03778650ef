"""The server withstands requests that are malformed, slow, abandoned or foreign."""

import contextlib
import dataclasses
import html
import http.client
import json
import logging
import re
import socket
import sys
import threading
import time
import types
import urllib.parse
from typing import cast

import pytest

from realm_jax.errors import BadInputError
from realm_jax.evaluation import server
from realm_jax.evaluation.ask import AnswerService, require_question
from tests.waiting import PATIENCE, wait_until

JSON = {"Content-Type": "application/json"}
POST = b"POST /answer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Version:
    def describe(self):
        return {
            "num_blocks": 3,
            "index_step": 0,
            "index_attempt": "f00",
            "index_age_seconds": 1.0,
            "fingerprint": "0" * 64,
        }


@dataclasses.dataclass
class Reply:
    question: str
    version = Version()
    note = ""
    answer = types.SimpleNamespace(text="", documents=())

    def describe(self):
        return {"question": self.question}


class Respondent:
    """Stands for the model: notes what it is asked, and may be held up."""

    problem = ""
    version = Version()

    def __init__(self):
        self.asked = []
        self.busy = threading.Semaphore(0)
        self.may_answer = threading.Event()
        self.may_answer.set()

    def answer(self, question):
        question = require_question(question)
        self.asked.append(question)
        self.busy.release()
        assert self.may_answer.wait(PATIENCE)
        return Reply(question)


class Server:
    """The server on a port of its own, in a thread."""

    def __init__(self, hosts=(), address="127.0.0.1"):
        self.respondent = Respondent()
        listener = server.open_port(address, 0)
        self.port = listener.getsockname()[1]
        self._stop, ready = threading.Event(), threading.Event()
        respondent = cast(AnswerService, self.respondent)
        self._thread = threading.Thread(
            target=server.serve,
            args=(respondent, listener, self._stop, ready.set, hosts),
        )
        self._thread.start()
        assert ready.wait(PATIENCE)

    def close(self):
        self.respondent.may_answer.set()
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def request(self, method="GET", path="/status", body=None, headers=None):
        """Returns code, headers and text of the response."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=PATIENCE
        )
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read().decode()

    def post(self, body, headers=JSON):
        return self.request("POST", "/answer", body, headers)

    def ask(self, question):
        return self.post(json.dumps({"question": question}))

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE)

    def leave_a_question(self, question):
        """Posts a question and returns the connection, without reading a reply."""
        body = json.dumps({"question": question}).encode()
        connection = self.connect()
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        return connection


@pytest.fixture
def make_server():
    with contextlib.ExitStack() as stack:

        def make(**arguments):
            return stack.enter_context(contextlib.closing(Server(**arguments)))

        yield make


@pytest.fixture
def served(make_server):
    return make_server()


def require_refused(response, code):
    """Requires this code, and returns the one line that says why."""
    found, _, text = response
    error = json.loads(text)["error"]
    assert (found, error[:9], "\n" in error) == (code, "expected ", False)
    return error


def logged(caplog):
    """What was logged as a fault, or with a traceback."""
    return [r for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR]


# The parser and what shows its result give up at depths near this limit.
DEPTHS = [*range(sys.getrecursionlimit() - 100, sys.getrecursionlimit(), 9), 30_000]

BAD_BODIES = (
    *(b"", b"who", b"[]", b"{}", b"\xff\xfe", b"x" * (1 << 17)),
    *(b'{"question": 3}', b'{"question": "  "}', b'{"question": "who", "k": 3}'),
    json.dumps({"question": "who " * 1000}).encode(),
    # Surrogates that are not a pair.
    *(rb'{"question": "who \ud800?"}', rb'{"question": "\udfff\ud800"}'),
    *(rb'{"\ud800": "who?"}', b'{"question": "who \xed\xa0\x80?"}'),
    *(b"[" * depth + b"]" * depth for depth in DEPTHS),
    *(b'{"question": %b}' % (b"[" * depth + b"]" * depth) for depth in DEPTHS),
)


def test_bad_requests_are_told_in_one_line(served, caplog):
    for body in BAD_BODIES:
        require_refused(served.post(body), 400)
    for encoding in ("gzip", "deflate"):
        headers = {**JSON, "Content-Encoding": encoding}
        require_refused(served.post(b"\xff" * 100, headers), 400)
    # On the page, too.
    code, _, page = served.request(path="/?question=+")
    assert (code, "expected a question" in page) == (400, True)
    assert served.respondent.asked == []
    assert logged(caplog) == []


def test_programs_are_told_in_json_what_there_is(served):
    for path, accept, code in (
        ("/answer", "*/*", 405),
        ("/answers", "application/json", 404),
        ("/nowhere/answer", "text/html, application/json;q=0.9", 404),
    ):
        response = served.request(path=path, headers={"Accept": accept})
        said = require_refused(response, code)
        assert f"GET {path}" in said
        assert "POST /answer" in said
        assert response[1]["Allow"] == ("POST" if code == 405 else None)


def test_a_question_is_text_and_never_markup(served):
    hostile = "<script>alert('x')</script> \"who\" & why 😀"
    code, _, page = served.request(path=f"/?question={urllib.parse.quote(hostile)}")
    assert code == 200
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    # A pair of surrogates is a character.
    code, _, text = served.post(rb'{"question": "who \ud83d\ude00?"}')
    assert (code, json.loads(text)) == (200, {"question": "who 😀?"})
    assert served.respondent.asked == [hostile, "who 😀?"]


def test_a_question_from_the_command_line_may_be_no_unicode():
    with pytest.raises(BadInputError, match=r"expected a question .*character 4"):
        require_question("who \udcff?")


def test_what_is_no_http_or_unicode_leaves_no_traceback(served, caplog):
    assert served.request(path="/?question=%ED%A0%80")[0] in (200, 400)
    with served.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.0 400 ")
    # A body that is given up.
    with served.connect() as connection:
        connection.sendall(POST + b"Content-Length: 30\r\n\r\n{")
        assert served.request()[0] == 200
    assert served.request()[0] == 200
    assert logged(caplog) == []


def is_closed(connection):
    """Returns whether the server closes a connection."""
    connection.settimeout(PATIENCE)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_connections_that_ask_nothing_are_closed(make_server, monkeypatch):
    monkeypatch.setattr(server, "_READ_SECONDS", 0.2)
    served = make_server()
    request = b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(served.connect()) for _ in range(3)]
        for connection, sent in zip(connections, (0, 36, None), strict=True):
            connection.sendall(request[:sent])
        assert all(map(is_closed, connections))


@pytest.mark.full
@pytest.mark.parametrize(
    ("header", "body"),
    [
        (b"Content-Length: 30", b'{"question": "w'),
        (b"Transfer-Encoding: chunked", b"zz\r\nno chunk\r\n0\r\n\r\n"),
    ],
)
def test_a_body_that_does_not_come_is_not_awaited(
    make_server, monkeypatch, header, body
):
    monkeypatch.setattr(server, "_READ_SECONDS", 0.2)
    with make_server().connect() as connection:
        connection.sendall(POST + header + b"\r\n\r\n")
        time.sleep(0.1)
        connection.sendall(body)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


def test_slow_connections_leave_room_for_an_honest_one(make_server, monkeypatch):
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 20)
    # Those that are slow never exceed their time.
    monkeypatch.setattr(server, "_READ_SECONDS", 1e5)
    served = make_server()
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(served.connect()) for _ in range(100)]
        for connection in slow:
            connection.sendall(b"POST /answer HTTP/1.1\r\nHost: localh")
        assert served.ask("who?")[0] == 200
        # The first came first, and had to give way to the last.
        assert all(map(is_closed, slow[:81]))


def test_a_connection_that_awaits_its_answer_does_not_give_way(
    make_server, monkeypatch
):
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 20)
    served = make_server()
    served.respondent.may_answer.clear()
    with contextlib.ExitStack() as stack:
        honest = stack.enter_context(served.leave_a_question("who?"))
        assert served.respondent.busy.acquire(timeout=PATIENCE)
        for _ in range(100):
            stack.enter_context(served.connect())
        assert served.request()[0] == 200
        served.respondent.may_answer.set()
        assert b"who?" in honest.recv(1 << 16)


def test_questions_beyond_the_queue_are_asked_to_come_again(make_server, monkeypatch):
    monkeypatch.setattr(server, "_MOST_WAITING", 3)
    served = make_server()
    served.respondent.may_answer.clear()
    with contextlib.ExitStack() as stack:
        early = [
            stack.enter_context(served.leave_a_question(f"who {number}?"))
            for number in range(3)
        ]
        assert served.respondent.busy.acquire(timeout=PATIENCE)
        responses = []

        def is_refused():
            responses.append(served.ask("why?"))
            return responses[-1][0] == 503

        wait_until(is_refused)
        require_refused(responses[-1], 503)
        code, headers, page = served.request(path="/?question=why")
        assert (code, "expected" in page) == (503, True)
        assert min(int(h["Retry-After"]) for h in (headers, responses[-1][1])) > 0
        assert served.request()[0] == 200
        served.respondent.may_answer.set()
        for connection in early:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    assert served.ask("why?")[0] == 200


def test_abandoned_questions_are_not_computed(served):
    served.respondent.may_answer.clear()
    with served.leave_a_question("first?"):
        assert served.respondent.busy.acquire(timeout=PATIENCE)
        for number in range(30):
            served.leave_a_question(f"abandoned {number}?").close()
        # The server has seen the end of those when it answers what came after them.
        assert served.request()[0] == 200
        with served.leave_a_question("last?") as last:
            assert served.request()[0] == 200
            served.respondent.may_answer.set()
            assert b"last?" in last.recv(1 << 16)
    assert served.respondent.asked == ["first?", "last?"]


def test_a_question_in_progress_is_finished_before_the_next(served):
    """The model is not thread-safe, whether or not anyone still waits."""
    served.respondent.may_answer.clear()
    with served.leave_a_question("first?"):
        assert served.respondent.busy.acquire(timeout=PATIENCE)
    with served.leave_a_question("second?") as second:
        assert not served.respondent.busy.acquire(timeout=0.3)
        served.respondent.may_answer.set()
        assert b"second?" in second.recv(1 << 16)


def test_a_foreign_host_gets_no_answer(served):
    for host in (
        *("attacker.example", "attacker.example:80", "localhost.attacker.example"),
        *("127.0.0.1.attacker.example", "192.0.2.7", "[::2]", "[", ""),
    ):
        for path in ("/?question=who", "/status", "/no"):
            response = served.request(path=path, headers={"Host": host})
            assert "--allow_host" in require_refused(response, 403)
    assert served.respondent.asked == []


def test_its_own_names_and_those_allowed_get_answers(make_server):
    served = make_server(hosts=("Box.local",))
    local = ("localhost", "LocalHost:1234", "127.0.0.1", "127.0.0.1:99", "[::1]")
    for host in (*local, "box.local"):
        assert served.request(headers={"Host": host})[0] == 200
        assert served.post('{"question": "who?"}', {**JSON, "Host": host})[0] == 200


def test_the_address_that_was_reached_is_a_host_of_its_own(monkeypatch):
    """Of a server for all addresses, which any one of them may be named."""
    monkeypatch.setattr(server, "_LOCAL_NAMES", frozenset())
    with contextlib.closing(Server(address="0.0.0.0")) as served:
        assert served.request(headers={"Host": "127.0.0.1:80"})[0] == 200
        assert served.request(headers={"Host": "192.0.2.7:80"})[0] == 403


def test_a_page_of_others_cannot_post_a_question(served):
    """A browser sends these across origins without asking first."""
    forms = ("application/x-www-form-urlencoded", "multipart/form-data")
    for kind in ("text/plain", *forms, ""):
        response = served.post('{"question": "who?"}', {"Content-Type": kind})
        assert "application/json" in require_refused(response, 415)
    assert served.respondent.asked == []
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert served.post('{"question": "who?"}', headers)[0] == 200


def test_a_page_of_others_cannot_have_a_question_answered_by_its_address(served):
    headers = {"Sec-Fetch-Site": "cross-site"}

    def ask(**others):
        return served.request(path="/?question=who", headers={**headers, **others})

    assert "another site" in require_refused(ask(), 403)
    # Its port may be none.
    for host in ("localhost:who", "localhost:99999999"):
        assert f"open http://{host} and" in require_refused(ask(Host=host), 403)
    # Nor by a frame, or by a script that opens it.
    for dest, user in (("iframe", {"Sec-Fetch-User": "?1"}), ("document", {})):
        others = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": dest}
        assert ask(**others, **user)[0] == 403
    assert served.respondent.asked == []
    # A link to the page itself costs nothing.
    assert served.request(path="/", headers=headers)[0] == 200
    for site in ("same-origin", "same-site", "none", None):
        headers = {} if site is None else {"Sec-Fetch-Site": site}
        assert ask()[0] == 200
    assert served.respondent.asked == ["who"] * 4


def test_a_link_that_a_person_follows_is_answered(served):
    said = {"Site": "cross-site", "Mode": "navigate", "Dest": "document", "User": "?1"}
    headers = {f"Sec-Fetch-{name}": value for name, value in said.items()}
    question = 'who, <a> & "b" or 50% + 1?'
    path = f"/?{urllib.parse.urlencode({'question': question})}"
    code, _, page = served.request(path=path, headers=headers)
    assert code == 200
    assert "Index <code>0-f00</code>" in page
    assert "1.0 s</span> old" in page
    # The page's own link asks the same.
    (again,) = re.findall(r'<a class="link" href="([^"]*)"', page)
    assert served.request(path=html.unescape(again))[0] == 200
    assert served.respondent.asked == [question] * 2
