"""Link of a process with a relay: what its sockets send to 127.0.0.1 goes to the relay, and on from there.

    ZeroMQ's DEALER ──> 127.0.0.1:p ══ DIAL ══> relay ══ TAKE ══> link ──> 127.0.0.1:q  ZeroMQ's ROUTER

The two sockets prove their keys to each other and encrypt (CURVE): links and relay carry bytes. A connection that
breaks is closed at both ends, whose sockets dial again.
"""

import asyncio
import select
import socket as sockets
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic
from typing import Any

from stageline.broker.errors import AddressUnusable, EndpointTaken
from stageline.broker.keys.pairs import KeyPair, PublicKey
from stageline.broker.queues.base import Trouble

from .relay_address import RelayAddress
from .relay_handshake import (
    ANSWER_BYTES,
    NOT_ADMITTED,
    NOTE_BYTES,
    DiallersHandshake,
    NoteCode,
    RelayRequest,
    RelaySession,
    Unproven,
    Wish,
    name_digest,
)
from .relay_splice import exactly, splice, tune

PATIENCE = 10.0  # seconds in which the relay answers
SILENCE = 5.0  # seconds after which a relay that sends nothing is gone
RETRY = 0.25  # seconds between two attempts
TAKEN = 5.0  # seconds before a listener tries again whose place a newer process has
WAITING = 30.0  # seconds that a socket of this process waits for a peer before it has to dial again
DRAIN = 1.0  # seconds for what is on its way out

_ENDED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
_LOOPBACK = "127.0.0.1"
_NOT_ADMITTED = (
    "the relay at {place} does not take the secret in the address, or is another one than the address says: copy the "
    "line that `stageline relay` prints there now"
)
_NO_RELAY = "the process at {place} is no relay with the key that the address has: copy the relay's line again"
_ABSENT = "no process with the key {key} is at the relay {place}: it is not started, or lost its connection"
_TAKEN = (
    "another process with the key {key} is at the relay {place}: end that one, or give this one another name at the "
    "end of its address, as in relay://...@{place}/NAME"
)
_CROWDED = "the relay at {place} has too many connections of one key"


class RelayLink:
    """Connections of one process through a relay, in a thread of their own."""

    def __init__(self, address: RelayAddress, pair: KeyPair) -> None:
        """Begin without connections. `listen` and `dial` make some.

        Args:
            address: Address of the relay.
            pair: Pair by whose key this process is known at the relay.
        """
        self._address, self._pair = address, pair
        self._name = name_digest(address.name)
        self._tasks: set[asyncio.Task[None]] = set()
        self._carrying: set[asyncio.Task[None]] = set()
        self._doors: dict[tuple[PublicKey, bytes], tuple[sockets.socket, str]] = {}
        self._absent_since: float | None = monotonic()
        self._trouble = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """The reason why the relay or a peer cannot be reached, "" if none is known."""
        return self._trouble

    @property
    def absence(self) -> Trouble | None:
        """The reason why the relay does not tell this process of its diallers; None while it does."""
        since = self._absent_since
        return None if since is None else Trouble(self._trouble or "the relay has not answered yet", since)

    def listen(self, port: int, number: int) -> "Future[None]":
        """Connect all who dial this process's key with `port` of 127.0.0.1, from now on.

        Args:
            port: Port of a socket of this process.
            number: Count of the processes that had the key, by which a newer one takes an older one's place at once.

        Returns:
            Future that is done once the relay connects such diallers, or with why it does not at the first attempt:
            `EndpointTaken` or `AddressUnusable`. Further attempts are made in either case.
        """
        first: Future[None] = Future()
        self._start(self._listen(port, number, first))
        return first

    def dial(self, target: PublicKey, name: str | None = None) -> str:
        """Return an address of this machine that leads to the process with the key `target`.

        Its `name` tells it from others of that key; None: it has that of this process.
        """
        there = target, self._name if name is None else name_digest(name)
        if there not in self._doors:
            door = sockets.create_server((_LOOPBACK, 0))
            door.setblocking(False)
            self._doors[there] = door, f"tcp://{_LOOPBACK}:{door.getsockname()[1]}"
            self._start(self._accept(door, *there))
        return self._doors[there][1]

    def close(self) -> None:
        """End all connections, after a second at most for what is on its way out. Close the sockets before."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            for door, _ in self._doors.values():
                door.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.call_soon_threadsafe(self._track, work, self._tasks)

    def _track(self, work: Coroutine[Any, Any, None], tasks: "set[asyncio.Task[None]]") -> None:
        task = self._loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _end(self) -> None:
        if self._carrying:
            await asyncio.wait(self._carrying, timeout=DRAIN)
        ending = [*self._tasks, *self._carrying]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    async def _listen(self, port: int, number: int, first: "Future[None]") -> None:
        while True:
            pause = RETRY
            try:
                with await self._connected() as relay:
                    session = await self._asked(relay, RelayRequest(Wish.LISTEN, name=self._name, number=number))
                    await self._take_offers(relay, session, port, first)
            except EndpointTaken as error:
                pause = TAKEN
                self._trouble = str(error)
                _fail(first, error)
            except (OSError, Unproven, TimeoutError) as error:
                self._note(error)
                _fail(first, AddressUnusable(self._trouble))
            finally:
                self._absent_since = self._absent_since or monotonic()
            await asyncio.sleep(pause)

    async def _take_offers(
        self, relay: sockets.socket, session: RelaySession, port: int, first: "Future[None]"
    ) -> None:
        """Take the diallers of whom the relay tells, until it is gone."""
        while True:
            async with asyncio.timeout(SILENCE):
                code, ticket = session.open(await exactly(relay, NOTE_BYTES))
            match code:
                case NoteCode.READY:
                    self._absent_since, self._trouble = None, ""
                    if not first.done():
                        first.set_result(None)
                case NoteCode.OFFER:
                    self._track(self._take(ticket, port), self._carrying)
                case NoteCode.PING:
                    await self._loop.sock_sendall(relay, session.seal(NoteCode.PONG))
                case NoteCode.TAKEN:
                    raise EndpointTaken(_TAKEN.format(place=self._address.place, key=self._pair.public.short))

    async def _take(self, ticket: bytes, port: int) -> None:
        with suppress(OSError, Unproven, TimeoutError), await self._connected() as relay:
            session = await self._asked(relay, RelayRequest(Wish.TAKE, name=ticket))
            if (await self._told(relay, session)) is not NoteCode.READY:
                return
            with sockets.socket() as own:
                tune(own)
                await self._loop.sock_connect(own, (_LOOPBACK, port))
                await splice(own, relay)

    async def _accept(self, door: sockets.socket, target: PublicKey, name: bytes) -> None:
        while True:
            try:
                own, _ = await self._loop.sock_accept(door)
            except OSError:  # no descriptor is left, or the peer has gone
                await asyncio.sleep(RETRY)
                continue
            self._track(self._carry(own, target, name), self._carrying)

    async def _carry(self, own: sockets.socket, target: PublicKey, name: bytes) -> None:
        """Connect a socket of this process with the peer, for which it waits as long as its owner does."""
        with own:
            tune(own)
            until = monotonic() + WAITING
            while monotonic() < until and not _is_over(own):
                try:
                    with await self._connected() as relay:
                        session = await self._asked(relay, RelayRequest(Wish.DIAL, target.raw, name))
                        code = await self._told(relay, session)
                        if code is NoteCode.READY:
                            self._trouble = ""
                            await splice(own, relay)
                            return
                        text = _CROWDED if code is NoteCode.CROWDED else _ABSENT
                        self._trouble = text.format(place=self._address.place, key=target.short)
                except (OSError, Unproven, TimeoutError) as error:
                    self._note(error)
                await asyncio.sleep(RETRY)

    async def _connected(self) -> sockets.socket:
        """Return a connection to the relay. Raises `OSError`, `TimeoutError`."""
        host, problem = self._address.host.strip("[]"), OSError("the name has no address")
        async with asyncio.timeout(PATIENCE):
            for family, kind, protocol, _, place in await self._loop.getaddrinfo(
                host, self._address.port, type=sockets.SOCK_STREAM
            ):
                relay = sockets.socket(family, kind, protocol)
                try:
                    tune(relay)
                    await self._loop.sock_connect(relay, place)
                    return relay
                except OSError as error:
                    relay.close()
                    problem = error
                except BaseException:
                    relay.close()
                    raise
        raise problem

    async def _asked(self, relay: sockets.socket, request: RelayRequest) -> RelaySession:
        """Do the handshake, and return the session. Raises `Unproven`, `OSError`, `TimeoutError`."""
        asking = DiallersHandshake(self._address, self._pair)
        async with asyncio.timeout(PATIENCE):
            await self._loop.sock_sendall(relay, asking.hello)
            if (code := await exactly(relay, 1)) == NOT_ADMITTED:
                raise Unproven(_NOT_ADMITTED.format(place=self._address.place))
            answer = code + await exactly(relay, ANSWER_BYTES - 1)
            try:
                sealed, session = asking.request(answer, request)
            except Unproven as error:
                raise Unproven(_NO_RELAY.format(place=self._address.place)) from error
            await self._loop.sock_sendall(relay, sealed)
            return session

    async def _told(self, relay: sockets.socket, session: RelaySession) -> NoteCode:
        """Return the relay's answer to a request. Raises `Unproven`, `OSError`, `TimeoutError`."""
        async with asyncio.timeout(PATIENCE):
            return session.open(await exactly(relay, NOTE_BYTES))[0]

    def _note(self, error: Exception) -> None:
        reason = str(error) or "no answer in time"
        told = (
            reason if isinstance(error, Unproven) else f"the relay at {self._address.place} cannot be reached: {reason}"
        )
        self._trouble = told


def _fail(first: "Future[None]", error: Exception) -> None:
    if not first.done():
        first.set_exception(error)


def _is_over(connection: sockets.socket) -> bool:
    """Return True if the peer has closed the connection, as far as the system tells; what it sent is still unread."""
    poller = select.poll()
    poller.register(connection, _ENDED)
    return bool(poller.poll(0))
