"""The page of a run, live: a server by which many may read, and no one can change anything.

    GET /         the page, with all that is known
    GET /events   server-sent events: the sections that have changed, as one line of JSON

The run is asked while there are readers, by one task for all readers. A slow reader gets the newest sections, not all.
"""

import asyncio
import importlib.util
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from time import time
from typing import TYPE_CHECKING, Any

import msgspec

from stageline.pipeline.errors import ExitCode, StagelineError

from .access import LOOPBACK, Application, Guarded, ReaderRules
from .facts import Section
from .following import FollowedRun
from .page import page_of, policy

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response

MOST_READERS = 16  # of events
MOST_CONNECTIONS = 64
FIRST_REQUEST = 10.0  # seconds for a connection to send its first request
KEEP_ALIVE = 15.0  # seconds without news, after which an empty comment is sent
_log = logging.getLogger("stageline.dashboard")


class DashboardMissing(StagelineError):
    """Error that the packages of the dashboard are not installed.

    Mend: Install them with `pip install "stageline[dashboard]"`.

    Example: the dashboard needs the package starlette, which is not installed; install it with: pip install
    "stageline[dashboard]"
    """

    error_code = "SL520"
    exit_code = ExitCode.USAGE


def demand_packages() -> None:
    """Raise `DashboardMissing` if a package is not installed."""
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise DashboardMissing(
                f"the dashboard needs the package {name}, which is not installed; install it with: "
                'pip install "stageline[dashboard]"'
            )


class _Reader:
    """Someone who reads the events: the newest sections that it has not got."""

    def __init__(self) -> None:
        self.pending: dict[str, Section] = {}
        self.lost = ""
        self.news = asyncio.Event()

    def add(self, sections: dict[str, Section]) -> None:
        self.pending |= sections
        self.news.set()

    def lose(self, reason: str) -> None:
        self.lost = reason
        self.news.set()

    async def events(self) -> AsyncIterator[bytes]:
        yield b"retry: 3000\n\n"
        while True:
            try:
                await asyncio.wait_for(self.news.wait(), KEEP_ALIVE)
            except TimeoutError:
                yield b": still here\n\n"
                continue
            self.news.clear()
            sections, self.pending, lost, self.lost = self.pending, {}, self.lost, ""
            if sections:
                yield b"data: " + msgspec.json.encode(sections) + b"\n\n"
            if lost:
                yield b"event: lost\ndata: " + msgspec.json.encode(lost) + b"\n\n"


class Dashboard:
    """The application of one run."""

    def __init__(self, run: FollowedRun, admission: ReaderRules) -> None:
        """Take the run and the rules for readers."""
        self._run = run
        self._admission = admission
        self._readers: set[_Reader] = set()
        self._awake = asyncio.Event()
        self._looking = asyncio.Lock()
        self._logged = ""

    def application(self) -> Application:
        """Return the guarded application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [Route("/", self._page, methods=["GET"]), Route("/events", self._events, methods=["GET"])]
        return Guarded(Starlette(routes=routes, lifespan=self._following), self._admission, policy(live=True))

    @asynccontextmanager
    async def _following(self, application: object) -> AsyncIterator[None]:
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _follow(self) -> None:
        while True:
            await self._awake.wait()
            found = await self._look()
            for reader in self._readers:
                if isinstance(found, str):
                    reader.lose(f"{found}; trying again.")
                else:
                    reader.add(found)
            if not self._readers:
                self._awake.clear()
            await asyncio.sleep(self._run.pause)

    async def _look(self) -> dict[str, Section] | str:
        """Look at the run; return the sections that have changed, or why the look has failed."""
        try:
            async with self._looking:
                return await asyncio.to_thread(self._run.look)
        except (StagelineError, ValueError, OSError) as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, pages must tell, and not stand still
            reason = f"a look at the run has failed: {type(error).__name__}: {error}"
            if reason != self._logged:  # once, however often it comes again
                _log.exception("a look at the run has failed")
            self._logged = reason
            return reason

    async def _page(self, request: "Request") -> "Response":
        from starlette.responses import HTMLResponse, PlainTextResponse

        if not (self._readers and self._run.sections):  # there has been no reader for a while
            await self._look()  # if that fails, what is known is shown, and the events tell the rest
        if not self._run.sections:
            return PlainTextResponse("stageline: nothing is known of the run yet; load the page again\n", 503)
        return HTMLResponse(await asyncio.to_thread(page_of, dict(self._run.sections), time(), live=True))

    async def _events(self, request: "Request") -> "Response":
        from starlette.responses import PlainTextResponse, StreamingResponse

        if len(self._readers) >= MOST_READERS:
            said = f"stageline: {MOST_READERS} pages follow this run already\n"
            return PlainTextResponse(said, status_code=503, headers={"retry-after": "10"})
        reader = _Reader()
        reader.add(dict(self._run.sections))

        async def events() -> AsyncIterator[bytes]:
            try:
                async for event in reader.events():
                    yield event
            finally:
                self._readers.discard(reader)

        self._readers.add(reader)
        self._awake.set()
        return StreamingResponse(events(), media_type="text/event-stream")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=MOST_CONNECTIONS)


def names_of(host: str, further: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names by which a server that is bound to `host` may be called, without ports."""
    bound = f"[{host}]" if ":" in host else host
    return tuple(each.lower() for each in dict.fromkeys((*further, bound, *LOOPBACK)))


def link_of(name: str, port: int, token: str) -> str:
    """Return the link that opens a dashboard."""
    return f"http://{name}:{port}/?token={token}"


def server_of(run: FollowedRun, port: int, hosts: tuple[str, ...], token: str) -> "uvicorn.Server":
    """Return a server of a run; its `run` takes the sockets that listen, and returns once it is interrupted.

    Args:
        run: The run.
        port: Port of its socket, by which cookies of several dashboards are told apart.
        hosts: Names in `Host` that are answered.
        token: Token of the link.
    """
    import uvicorn

    admission = ReaderRules(token, hosts, f"stageline-{port}")
    config = uvicorn.Config(
        Dashboard(run, admission).application(),
        http=_bounded_protocol(),
        ws="none",
        loop="asyncio",
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=16_384,
    )
    return uvicorn.Server(config)


def _bounded_protocol() -> "type[asyncio.Protocol]":
    """Return uvicorn's protocol with a bound on connections, and on the time that one may take to ask something."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class BoundedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > MOST_CONNECTIONS:
                transport.abort()
            else:
                self.loop.call_later(FIRST_REQUEST, self._end_if_silent)

        def _end_if_silent(self) -> None:
            asked: object = self.cycle  # None before the first request
            if asked is None:
                self.transport.abort()

    return BoundedProtocol
