"""A relay: it connects processes that can only dial out.

    listener ──LISTEN──> relay <──DIAL(key of the listener)── dialler
             <──OFFER───       a ticket, 16 random bytes
    listener ──TAKE────>       the same ticket
             <══════════ bytes of both, not looked at ══════>

A process names a key, never a host: only processes that have dialled the relay, and proven their keys, are reached.
Nothing is kept, on disk or of what passes; a relay that is started again is found by all by themselves.
"""

import asyncio
import os
import socket as sockets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic

import structlog

from stageline.broker.keys.pairs import PUBLIC_BYTES, KeyPair, PublicKey
from stageline.broker.rate_limit import RateLimit

from .bind import taken
from .descriptors import descriptor_limit
from .relay_handshake import (
    HELLO_BYTES,
    NOT_ADMITTED,
    NOTE_BYTES,
    REQUEST_BYTES,
    TICKET,
    NoteCode,
    RelayRequest,
    RelaySession,
    RelaysHandshake,
    Unproven,
    Wish,
)
from .relay_splice import exactly, splice, tune

HANDSHAKE = 5.0  # seconds in which a stranger must prove a key
STRANGERS = 128  # connections at a time that have not proven one; the oldest of the host with the most makes room
PAIRS = 256  # connections at a time of one key that dials, and of one that listens four times as many
OFFERED = 5.0  # seconds in which a listener must take a dialler
ANSWER = 3.0  # seconds in which a listener answers when another one wants its place
PING, SILENCE = 1.0, 30.0  # seconds between two signs of life; after which a listener without any is gone
LOGGED = 5  # refusals logged in a second; the others are counted
_SPARE = 64  # descriptors that are left for other things


log = structlog.get_logger()


@dataclass(slots=True)
class _Listener:
    """Process that is told of those who dial it."""

    connection: sockets.socket
    session: RelaySession
    number: int
    heard: asyncio.Event = field(default_factory=asyncio.Event)  # set with each note of the listener

    def tell(self, code: NoteCode, ticket: bytes = bytes(TICKET)) -> None:
        """Send a note. A listener that does not take one is gone."""
        note = self.session.seal(code, ticket)
        try:
            sent = self.connection.send(note)
        except OSError:
            sent = 0
        if sent < len(note):
            with suppress(OSError):
                self.connection.shutdown(sockets.SHUT_RDWR)


@dataclass(slots=True)
class _Offer:
    """Dialler that waits for a listener. `taken` brings the listener's connection, which it closes then."""

    target: bytes  # the listener's key
    taken: "asyncio.Future[tuple[sockets.socket, RelaySession]]" = field(repr=False)


class Relay:
    """Relay that listens at `endpoint`, from the constructor on; `serve` does the work."""

    def __init__(self, host: str, port: int, pair: KeyPair, admission: bytes) -> None:
        """Listen. Raises `EndpointTaken`.

        Args:
            host: Address of this machine, "" for all of them.
            port: Port, 0 for any that is free.
            pair: Pair of the relay.
            admission: Secret of admission, 16 bytes.
        """
        self._pair, self._admission = pair, admission
        family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
        try:
            self._socket = sockets.create_server((host, port), family=family, backlog=STRANGERS)
        except OSError as error:
            raise taken(error, f"tcp://{host or '*'}:{port}") from error
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._strangers: dict[asyncio.Task[None], str] = {}  # with their hosts, the oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: dict[bytes, _Listener] = {}  # by raw key and name
        self._offers: dict[bytes, _Offer] = {}  # by ticket
        self._refusals = RateLimit(LOGGED)
        self._pairs: Counter[tuple[Wish, bytes]] = Counter()

    async def serve(self) -> None:
        """Serve until the task is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, peer = await loop.sock_accept(self._socket)
                except OSError:  # no descriptor is left, or the peer has gone
                    await asyncio.sleep(0.1)
                    continue
                self._begin(connection, peer[0])
                await asyncio.sleep(0)  # others have their turn: accepting returns at once while connections wait
        finally:
            self._socket.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, connection: sockets.socket, host: str) -> None:
        if 2 * len(self._tasks) > descriptor_limit() - _SPARE:
            connection.close()
            return
        if len(self._strangers) >= STRANGERS:
            crowd, _ = Counter(self._strangers.values()).most_common(1)[0]
            oldest = next(task for task, other in self._strangers.items() if other == crowd)
            del self._strangers[oldest]  # at once: its task ends later, and would be found again
            oldest.cancel()
        task = asyncio.create_task(self._receive(connection, host))
        self._tasks.add(task)
        self._strangers[task] = host

        def end(ended: "asyncio.Task[None]") -> None:
            self._tasks.discard(ended)
            self._strangers.pop(ended, None)
            if ended.cancelled():  # perhaps before it began
                connection.close()

        task.add_done_callback(end)

    async def _receive(self, connection: sockets.socket, peer: str) -> None:
        """Serve one connection, and close it unless it has become a dialler's."""
        handed_on = False
        try:
            tune(connection)
            async with asyncio.timeout(HANDSHAKE):
                who, request, session = await self._proven(connection)
            self._strangers.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
            match request.kind:
                case Wish.LISTEN:
                    await self._listen(_Listener(connection, session, request.number), who.raw + request.name)
                case Wish.DIAL:
                    await self._dial(connection, session, who.raw, request.target + request.name)
                case Wish.TAKE:
                    handed_on = self._take(connection, session, who.raw, request.name)
        except (OSError, TimeoutError):
            pass
        except Unproven as error:
            self._log(str(error), peer)
        finally:
            if not handed_on:
                connection.close()

    async def _proven(self, connection: sockets.socket) -> tuple[PublicKey, RelayRequest, RelaySession]:
        """Return who has dialled, and what for. Raises `Unproven`, `OSError`."""
        loop = asyncio.get_running_loop()
        try:
            handshake = RelaysHandshake(self._pair, self._admission, await exactly(connection, HELLO_BYTES))
        except Unproven:
            await loop.sock_sendall(connection, NOT_ADMITTED)
            raise
        await loop.sock_sendall(connection, handshake.answer)
        return handshake.read(await exactly(connection, REQUEST_BYTES))

    async def _listen(self, mine: _Listener, place: bytes) -> None:
        """Tell a listener of its diallers for as long as it answers."""
        if not await self._makes_room(place, mine.number):
            mine.tell(NoteCode.TAKEN)
            return
        self._listeners[place] = mine
        pinging = asyncio.create_task(_ping(mine))
        try:
            mine.tell(NoteCode.READY)
            while True:
                async with asyncio.timeout(SILENCE):
                    mine.session.open(await exactly(mine.connection, NOTE_BYTES))
                mine.heard.set()
        finally:
            pinging.cancel()
            if self._listeners.get(place) is mine:
                del self._listeners[place]

    async def _makes_room(self, place: bytes, number: int) -> bool:
        """Return False if a listener keeps its place against one with `number`: it has as high a one, and answers."""
        other = self._listeners.get(place)
        if other is None:
            return True
        if other.number >= number:
            other.heard.clear()
            other.tell(NoteCode.PING)
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER):
                    await other.heard.wait()
                return False
        other.tell(NoteCode.TAKEN)
        with suppress(OSError):
            other.connection.shutdown(sockets.SHUT_RD)  # which ends its task
        return True

    async def _dial(self, connection: sockets.socket, session: RelaySession, who: bytes, target: bytes) -> None:
        """Connect a dialler with the listener that has the key and name `target`."""
        loop, listener = asyncio.get_running_loop(), self._listeners.get(target)
        if listener is None:
            await loop.sock_sendall(connection, session.seal(NoteCode.ABSENT))
            return
        if self._pairs[Wish.DIAL, who] >= PAIRS or self._pairs[Wish.LISTEN, target] >= 4 * PAIRS:
            await loop.sock_sendall(connection, session.seal(NoteCode.CROWDED))
            return
        with self._counted((Wish.DIAL, who)), self._counted((Wish.LISTEN, target)):
            peer = await self._offered(listener, target[:PUBLIC_BYTES])
            if peer is None:
                await loop.sock_sendall(connection, session.seal(NoteCode.ABSENT))
                return
            with peer[0] as taken:
                await loop.sock_sendall(connection, session.seal(NoteCode.READY))
                await loop.sock_sendall(taken, peer[1].seal(NoteCode.READY))
                await splice(connection, taken)

    async def _offered(self, listener: _Listener, target: bytes) -> tuple[sockets.socket, RelaySession] | None:
        """Return the listener's connection for a new dialler, None if none comes."""
        ticket = os.urandom(TICKET)
        offer = self._offers[ticket] = _Offer(target, asyncio.get_running_loop().create_future())
        try:
            listener.tell(NoteCode.OFFER, ticket)
            async with asyncio.timeout(OFFERED):
                return await offer.taken
        except BaseException as error:
            if offer.taken.done() and not offer.taken.cancelled():  # in this very moment
                offer.taken.result()[0].close()
            if isinstance(error, TimeoutError):
                return None
            raise
        finally:
            del self._offers[ticket]

    def _take(self, connection: sockets.socket, session: RelaySession, who: bytes, ticket: bytes) -> bool:
        """Hand a listener's connection to the dialler who waits under the ticket. Returns False if none does."""
        offer = self._offers.get(ticket)
        if offer is None or offer.target != who or offer.taken.done():
            with suppress(OSError):
                connection.send(session.seal(NoteCode.ABSENT))
            return False
        offer.taken.set_result((connection, session))
        return True

    def _log(self, reason: str, peer: str) -> None:
        if self._refusals.allows(monotonic()):
            more = self._refusals.take_withheld()
            log.warning("a connection was refused", reason=reason, peer=peer, **({"others": more} if more else {}))

    @contextmanager
    def _counted(self, key: tuple[Wish, bytes]) -> Iterator[None]:
        self._pairs[key] += 1
        try:
            yield
        finally:
            self._pairs[key] -= 1
            if not self._pairs[key]:
                del self._pairs[key]


async def _ping(listener: _Listener) -> None:
    while True:
        await asyncio.sleep(PING)
        listener.tell(NoteCode.PING)
