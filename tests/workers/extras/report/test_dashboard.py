"""The dashboard over real sockets: what it answers, what it refuses, what readers get, and its bounds."""

import json
import re
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from time import monotonic, sleep
from typing import Any

import pytest

from stageline.pipeline.errors import StagelineError
from stageline.workers.cli.asking.looking import RunView
from stageline.workers.extras.report import dashboard
from stageline.workers.extras.report.dashboard import MOST_CONNECTIONS, MOST_READERS, listen, names_of, server_of
from stageline.workers.extras.report.following import FollowedRun
from support.conversation import name, report
from support.pictured_runs import PicturedRun

TOKEN = "a-token-of-a-test"  # noqa: S105 - of this test alone
BOUND = 30.0  # seconds for what is waited for


class Served:
    """A dashboard of a simulated run, in a thread."""

    def __init__(self) -> None:
        self.run = PicturedRun(2, 3, 6)
        self.fault: str | Exception = ""
        self.asked: dict[HTTPResponse, HTTPConnection] = {}
        self.listening = listen("127.0.0.1", 0)
        self.port = self.listening.getsockname()[1]
        self.server = server_of(FollowedRun(self.view), self.port, names_of("127.0.0.1", ()), TOKEN)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listening]})
        self.thread.start()

    @contextmanager
    def view(self) -> Iterator[RunView]:
        if self.fault:
            raise self.fault if isinstance(self.fault, Exception) else StagelineError(self.fault)
        yield RunView(self.run.ask, None, "broker", 1.0)

    def close(self) -> None:
        for answer in list(self.asked):
            self.leave(answer)
        self.server.should_exit = True
        self.thread.join(BOUND)
        self.listening.close()
        assert not self.thread.is_alive()

    def ask(self, path: str, *, cookie: bool = True, method: str = "GET", **headers: str) -> HTTPResponse:
        """The answer to a request."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=BOUND)
        own = {"Cookie": f"stageline-{self.port}={TOKEN}"} if cookie else {}
        try:
            connection.request(method, path, headers=own | headers)
            answer = connection.getresponse()
        except ConnectionError:
            connection.close()
            raise
        self.asked[answer] = connection
        return answer

    def leave(self, answer: HTTPResponse) -> None:
        """Close the connection of an answer."""
        answer.close()
        self.asked.pop(answer).close()


@pytest.fixture
def served() -> Iterator[Served]:
    with closing(Served()) as made:
        yield made


def until(done: Callable[[], object]) -> None:
    deadline = monotonic() + BOUND
    while not done():
        assert monotonic() < deadline
        sleep(0.02)


def next_event(answer: HTTPResponse) -> tuple[str, Any]:
    """The next event with data: its name and its data."""
    event = "message"
    while line := answer.readline().decode().rstrip("\n"):
        key, _, value = line.partition(": ")
        if key == "event":
            event = value
        if key == "data":
            answer.readline()
            return event, json.loads(value)
    return next_event(answer)


def test_a_link_opens_the_page_and_leaves_the_token_out_of_its_address(served: Served) -> None:
    first = served.ask(f"/?token={TOKEN}", cookie=False)
    assert (first.status, first.headers["location"], first.read()) == (303, "/", b"")
    cookie = first.headers["set-cookie"].partition(";")[0]
    page = served.ask("/", cookie=False, Cookie=cookie, Origin="https://evil.example")
    text = page.read().decode()
    assert page.status == 200
    assert '"live":true' in text
    assert TOKEN not in text
    (meta,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert page.headers["content-security-policy"] == f"{meta}; frame-ancestors 'none'"
    assert "connect-src 'self'" in meta
    assert page.headers["cache-control"] == "no-store"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    assert not [each for each in page.headers if each.lower().startswith("access-control")]


def test_requests_that_are_refused_learn_nothing_of_the_run(served: Served) -> None:
    refused = [
        (served.ask("/", cookie=False), 403),
        (served.ask("/events", cookie=False), 403),
        (served.ask(f"/?token={TOKEN}x", cookie=False), 403),
        (served.ask("/", Host="evil.example"), 421),
        (served.ask("/events", Host=f"evil.example:{served.port}"), 421),
        (served.ask(f"/?token={TOKEN}", cookie=False, Host="evil.example"), 421),
        *((served.ask("/", method=method), 405) for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS")),
        (served.ask("/data.json"), 404),
        (served.ask("/../etc/passwd"), 404),
    ]
    for answer, status in refused:
        assert answer.status == status
        assert b"run-1" not in answer.read()
        assert answer.headers["content-security-policy"]
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "request_head",
    [  # without a name, with two, with too long a header, and something else
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\nCookie: %s\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 2_000_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 not HTTP\r\n\r\n",
    ],
    ids=["no host", "two hosts", "long header", "TLS"],
)
def test_what_is_no_proper_request_is_refused(served: Served, request_head: bytes) -> None:
    cookie = f"stageline-{served.port}={TOKEN}".encode()
    with socket.create_connection(("127.0.0.1", served.port), BOUND) as connection:
        answer = b""
        try:
            connection.sendall(request_head.replace(b"%s", cookie))
            while part := connection.recv(65_536):
                answer += part
        except ConnectionError:  # closed with bytes that it has not read
            pass
    assert not answer or answer.split()[1] in (b"400", b"421", b"431")
    assert served.ask("/").status == 200


def test_readers_get_all_sections_and_then_those_that_change(served: Served) -> None:
    events = served.ask("/events")
    assert events.headers["content-type"].startswith("text/event-stream")
    found: dict[str, Any] = {}
    while set(found) != {"run", "why", "curves", "timetable", "stores", "faults", "plan"}:
        found |= next_event(events)[1]
    assert found["run"]["steps"] == 6
    served.run.talk.send(name(0), report(0, actions=99, now="2F0 of step 7"))
    while not any(each["now"] == "2F0 of step 7" for each in found["stores"]["workers"]):
        changed = next_event(events)[1]
        assert "plan" not in changed
        found |= changed


def test_a_fault_of_the_run_is_told_and_the_page_shows_what_is_known(served: Served) -> None:
    assert served.ask("/").status == 200
    events = served.ask("/events")
    next_event(events)
    served.fault = "no broker answers"
    while (event := next_event(events))[0] != "lost":
        pass
    assert "no broker answers" in event[1]
    assert b"run-1" in served.ask("/").read()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [KeyError("lacking"), TypeError("of another type"), sqlite3.OperationalError("locked")]
)
def test_whatever_a_look_fails_by_is_told_and_logged_and_the_looks_go_on(
    served: Served, fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    events = served.ask("/events")
    next_event(events)
    served.fault = fault
    while (event := next_event(events))[0] != "lost":
        pass
    assert f"{type(fault).__name__}: {fault}" in event[1]
    assert b"run-1" in served.ask("/").read()
    served.fault = ""
    served.run.talk.send(name(0), report(0, actions=99, now="2F0 of step 7"))
    while next_event(events)[0] == "lost":
        pass
    assert "a look at the run has failed" in caplog.text


def test_before_anything_is_known_the_page_says_so(served: Served) -> None:
    served.fault = "no broker answers"
    answer = served.ask("/")
    assert (answer.status, b"nothing is known" in answer.read()) == (503, True)
    served.fault = ""
    assert served.ask("/").status == 200


def test_readers_are_bounded_and_one_that_leaves_makes_room(served: Served) -> None:
    readers = [served.ask("/events") for _ in range(MOST_READERS)]
    assert {each.status for each in readers} == {200}
    assert served.ask("/events").status == 503
    assert served.ask("/").status == 200
    served.leave(readers.pop())
    until(lambda: answers(served, "/events"))


def test_connections_are_bounded_and_work_again_once_others_leave(served: Served) -> None:
    many = [socket.create_connection(("127.0.0.1", served.port), BOUND) for _ in range(MOST_CONNECTIONS + 8)]
    until(lambda: sum(map(ended, many)) >= 8)
    for each in many:
        each.close()
    until(lambda: answers(served))


def test_a_connection_that_asks_nothing_is_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "FIRST_REQUEST", 0.05)
    with socket.create_connection(("127.0.0.1", served.port), BOUND) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        until(lambda: ended(connection))


def ended(connection: socket.socket) -> bool:
    """True once the other side has closed it."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def answers(served: Served, path: str = "/") -> bool:
    """True if a request is let in; its connection is closed."""
    try:
        answer = served.ask(path)
    except ConnectionError:
        return False
    status = answer.status
    served.leave(answer)
    return status == 200
