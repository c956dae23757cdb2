"""A relay carries what it cannot read, for those who prove their keys, to those who have dialled it themselves."""

import asyncio
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import torch

from stageline.broker.errors import AddressUnusable, EndpointTaken
from stageline.broker.keys.admission import ServerKeys
from stageline.broker.keys.join_line import JoinLine, keyed
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.secrets import QueueSecrets
from stageline.broker.transports.base import backend_of, open_client, open_server
from stageline.broker.transports.sockets import relay_server
from stageline.broker.transports.sockets.relay_address import RelayAddress
from stageline.broker.transports.sockets.relay_handshake import (
    ANSWER_BYTES,
    HELLO_BYTES,
    NOT_ADMITTED,
    DiallersHandshake,
    NoteCode,
    RelayRequest,
    RelaySession,
    RelaysHandshake,
    Unproven,
    Wish,
    name_digest,
)
from stageline.broker.transports.sockets.relay_link import RelayLink
from stageline.pipeline.addresses import fault, is_showable, masked
from support.byte_tap import ByteTap, bytes_of, found, recorded
from support.control_channels import PATIENCE, dial, received, send, serve
from support.keyed import BROKER, OTHER, OTHER_KEYS, STRANGER, WORKER, Admitted, of_place
from support.proxy import Flip, Proxy
from support.queue_pair import KEY, KEYED, RUN, QueuePair, wait_for
from support.relays import ADMISSION, RELAY, RunningRelay, asked, read, told

NOWHERE = name_digest("")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def relay() -> Iterator[RunningRelay]:
    with closing(RunningRelay()) as relay:
        yield relay


def line_through(url: str, stack: ExitStack) -> QueuePair:
    """A queue of two workers, the first of which may be at another address of the relay."""
    backend = backend_of(url)
    producer = backend.open_queues(url, RUN, 1, QueueOptions(secrets=KEYED), folder=Path())
    consumer = backend.open_queues(url, RUN, 2, QueueOptions(secrets=QueueSecrets(curve=OTHER_KEYS)), folder=Path())
    line = QueuePair(producer, consumer)
    stack.callback(line.close)
    consumer.connect({KEY: producer.endpoint})
    return line


def troubled(url: str, key: KeyPair = BROKER) -> str:
    """Why a client of the broker with `key` cannot reach it."""
    with closing(open_client(keyed(url, key.public), WORKER)) as client:

        def look() -> str | None:
            client.receive(0.01)
            return client.trouble or None

        return wait_for(look)


def listening(relay: RunningRelay, pair: KeyPair, number: int = 0) -> tuple[socket.socket, RelaySession]:
    connection, session = asked(relay, pair, RelayRequest(Wish.LISTEN, name=NOWHERE, number=number))
    assert told(connection, session)[0] is NoteCode.READY
    return connection, session


def dialling(relay: RunningRelay, pair: KeyPair, target: KeyPair) -> tuple[socket.socket, RelaySession]:
    return asked(relay, pair, RelayRequest(Wish.DIAL, target.public.raw, NOWHERE))


def is_over(connection: socket.socket) -> bool:
    """Whether the connection ends, whatever comes before."""
    try:
        while connection.recv(100):
            pass
    except ConnectionError:
        pass
    return True


def sent_until_blocked(connection: socket.socket) -> int:
    """The bytes that the connection takes while the other end reads nothing, up to 256 MiB."""
    connection.settimeout(0.5)
    sent = 0
    with suppress(TimeoutError):
        while sent < 2**28:
            sent += connection.send(bytes(2**20))
    return sent


# Addresses


@pytest.mark.parametrize(
    ("url", "fact"),
    [
        ("relay://relay.example:7443", "the relay's key is missing"),
        ("relay://k1.short:AAECAwQFBgcICQoLDA0ODw@relay.example:7443", "it has 5 characters"),
        (f"relay://{RELAY.public.text}:AAEC@relay.example:7443", "secret of admission has 4 characters"),
        (f"relay://{RELAY.public.text}:AAECAwQFBgcICQoLDA0ODw@relay.example", "a host and a port"),
        (f"relay://{RELAY.public.text}:AAECAwQFBgcICQoLDA0ODw@relay.example:99999", "a host and a port"),
    ],
)
def test_a_damaged_address_of_a_relay_is_told_what_is_wrong_with_it(url: str, fact: str) -> None:
    told = fault(url, ["relay"])
    assert told is not None
    assert fact in told
    assert "AAEC" not in told


def test_an_address_is_what_is_parsed_of_it_and_shows_no_secret_where_it_is_masked() -> None:
    address = RelayAddress("[::1]", 7443, RELAY.public, "scans", ADMISSION)
    assert RelayAddress.parse(address.url) == address
    secret = address.url.rpartition("@")[0].rpartition(":")[2]
    assert len(secret) == 22
    assert secret not in masked(keyed(address.url, BROKER.public))
    assert secret not in repr(address)
    assert secret not in address.shared.url


def test_queues_without_keys_are_refused(relay: RunningRelay) -> None:
    with pytest.raises(AddressUnusable, match="need keys"):
        backend_of(relay.url).open_queues(relay.url, RUN, 1, QueueOptions(), folder=Path())


# The handshake


def shaken() -> tuple[DiallersHandshake, RelaysHandshake, bytes]:
    address = RelayAddress("127.0.0.1", 1, RELAY.public, secret=ADMISSION)
    asking = DiallersHandshake(address, WORKER)
    answering = RelaysHandshake(RELAY, ADMISSION, asking.hello)
    return asking, answering, asking.request(answering.answer, RelayRequest(Wish.DIAL, OTHER.public.raw))[0]


def test_who_dials_and_what_for_arrives_sealed() -> None:
    asking, answering, request = shaken()
    who, what, _ = answering.read(request)
    assert (who, what.kind, what.target) == (WORKER.public, Wish.DIAL, OTHER.public.raw)
    for key in (WORKER, OTHER, RELAY):
        assert key.public.raw not in asking.hello + answering.answer + request


def test_no_bit_of_the_handshake_can_be_changed() -> None:
    asking, answering, request = shaken()
    for place in range(HELLO_BYTES):
        with pytest.raises(Unproven):
            RelaysHandshake(RELAY, ADMISSION, _flipped(asking.hello, place))
    for place in range(1, ANSWER_BYTES):
        with pytest.raises(Unproven):
            asking.request(_flipped(answering.answer, place), RelayRequest(Wish.LISTEN))
    for place in range(len(request)):
        with pytest.raises(Unproven):
            answering.read(_flipped(request, place))


def test_a_recorded_handshake_does_not_work_again() -> None:
    asking, _, request = shaken()
    with pytest.raises(Unproven):
        RelaysHandshake(RELAY, ADMISSION, asking.hello).read(request)


def test_a_key_whose_secret_one_lacks_is_not_proven() -> None:
    address = RelayAddress("127.0.0.1", 1, RELAY.public, secret=ADMISSION)
    asking = DiallersHandshake(address, KeyPair(WORKER.public, STRANGER.secret))
    answering = RelaysHandshake(RELAY, ADMISSION, asking.hello)
    with pytest.raises(Unproven):
        answering.read(asking.request(answering.answer, RelayRequest(Wish.LISTEN))[0])


def test_notes_cannot_be_repeated_or_changed() -> None:
    asking, answering, _ = shaken()
    request, mine = asking.request(answering.answer, RelayRequest(Wish.LISTEN))
    *_, theirs = answering.read(request)
    first, second = theirs.seal(NoteCode.READY), theirs.seal(NoteCode.PING)
    assert mine.open(first)[0] is NoteCode.READY
    with pytest.raises(Unproven):
        mine.open(first)
    with pytest.raises(Unproven):
        mine.open(_flipped(second, 3))


def test_a_note_of_an_unknown_kind_ends_a_connection_and_raises_nothing_else() -> None:
    """A listener's link, and the relay's task, died of it: the one without a word, the other with a traceback."""
    asking, answering, _ = shaken()
    request, mine = asking.request(answering.answer, RelayRequest(Wish.LISTEN))
    *_, theirs = answering.read(request)
    with pytest.raises(Unproven, match="99"):
        theirs.open(mine.seal(99))  # type: ignore[arg-type]


def _flipped(text: bytes, place: int) -> bytes:
    return text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :]


# Who is let in, and to whom


def test_another_secret_of_admission_is_refused_by_name(relay: RunningRelay) -> None:
    stale = RelayAddress("127.0.0.1", relay.port, RELAY.public, secret=os.urandom(16)).url
    for url in (stale, RelayAddress("127.0.0.1", relay.port, BROKER.public, secret=ADMISSION).url):
        assert re.search(rf"127.0.0.1:{relay.port} does not take the secret", troubled(url))
    with pytest.raises(AddressUnusable, match="does not take the secret"):
        serve(stale)


def test_a_process_that_is_no_relay_is_found_out(stack: ExitStack) -> None:
    """It knows the secret of admission, as all who use the relay do, but not the relay's key."""
    impostor = stack.enter_context(closing(RunningRelay(pair=STRANGER)))
    url = RelayAddress("127.0.0.1", impostor.port, RELAY.public, secret=ADMISSION).url
    assert "does not take the secret" in troubled(url)
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    place = f"127.0.0.1:{listener.getsockname()[1]}"
    client = stack.enter_context(
        closing(open_client(keyed(f"{url.rpartition('@')[0]}@{place}", BROKER.public), WORKER))
    )
    with listener.accept()[0] as connection:
        read(connection, HELLO_BYTES)
        connection.sendall(bytes(ANSWER_BYTES))
        wait_for(lambda: f"{place} is no relay with the key" in client.trouble or None)
        assert is_over(connection)


def test_a_relay_that_is_away_is_named() -> None:
    with closing(RunningRelay()) as gone:
        pass
    assert f"127.0.0.1:{gone.port} cannot be reached" in troubled(gone.url)


def test_each_stranger_of_a_burst_makes_room_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that had come at once found the same one to be the oldest, which alone made room."""
    monkeypatch.setattr(relay_server, "HANDSHAKE", 3600.0)
    relay = relay_server.Relay("127.0.0.1", 0, RELAY, ADMISSION)
    monkeypatch.setattr(relay_server, "STRANGERS", 4)
    with ExitStack() as stack:
        burst = [stack.enter_context(socket.create_connection(("127.0.0.1", relay.port))) for _ in range(12)]

        async def look() -> None:
            serving = asyncio.create_task(relay.serve())
            async with asyncio.timeout(PATIENCE):
                for each in burst[:8]:
                    each.setblocking(False)
                    assert await asyncio.get_running_loop().sock_recv(each, 1) == b""
            serving.cancel()
            await asyncio.wait([serving])

        asyncio.run(look())


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(HELLO_BYTES)], ids=["http", "zeros"])
def test_a_stranger_is_told_nothing_and_closed(relay: RunningRelay, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", relay.port), timeout=PATIENCE) as connection:
        connection.sendall(sent)
        assert connection.recv(100) == NOT_ADMITTED
        assert is_over(connection)


def test_a_stranger_that_is_silent_is_closed(relay: RunningRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_server, "HANDSHAKE", 0.05)
    with socket.create_connection(("127.0.0.1", relay.port), timeout=PATIENCE) as connection:
        assert is_over(connection)


def test_strangers_of_one_host_leave_room_for_others(relay: RunningRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_server, "STRANGERS", 4)
    with ExitStack() as stack:
        slow = stack.enter_context(socket.create_connection(("127.0.0.1", relay.port), timeout=PATIENCE))
        flood = [
            stack.enter_context(
                socket.create_connection(("127.0.0.1", relay.port), PATIENCE, source_address=("127.0.0.2", 0))
            )
            for _ in range(12)
        ]
        assert is_over(flood[0])
        asking = DiallersHandshake(relay.address, WORKER)
        slow.sendall(asking.hello)
        assert read(slow, ANSWER_BYTES)


def test_only_a_key_that_has_dialled_is_reached(relay: RunningRelay) -> None:
    assert BROKER.public.short in troubled(relay.url)
    with closing(dial(keyed(relay.url, BROKER.public))) as client, closing(serve(relay.url)) as server:
        send(client, b"hello")  # it was there first
        assert received(server)[0][1] == b"hello"


def test_a_ticket_is_taken_by_the_key_that_was_dialled_alone(relay: RunningRelay) -> None:
    with ExitStack() as stack:
        listener, session = listening(relay, BROKER)
        dialler, dialled = dialling(relay, WORKER, BROKER)
        code, ticket = told(listener, session)
        assert code is NoteCode.OFFER
        thief, stolen = asked(relay, STRANGER, RelayRequest(Wish.TAKE, name=ticket))
        taker, taken = asked(relay, BROKER, RelayRequest(Wish.TAKE, name=ticket))
        late, again = asked(relay, BROKER, RelayRequest(Wish.TAKE, name=ticket))
        for each in (listener, dialler, thief, taker, late):
            stack.enter_context(each)
        assert told(thief, stolen)[0] is NoteCode.ABSENT
        assert told(taker, taken)[0] is told(dialler, dialled)[0] is NoteCode.READY
        assert told(late, again)[0] is NoteCode.ABSENT
        dialler.sendall(b"there")
        assert read(taker, 5) == b"there"
        taker.sendall(b"and back")
        assert read(dialler, 8) == b"and back"
        taker.close()
        assert is_over(dialler)


def test_a_newer_process_has_the_place_and_an_older_one_is_refused(relay: RunningRelay) -> None:
    with listening(relay, BROKER, number=1)[0] as old, closing(RelayLink(relay.address, BROKER)) as newer:
        newer.listen(1, 2).result(PATIENCE)
        assert is_over(old)
        again, session = asked(relay, BROKER, RelayRequest(Wish.LISTEN, name=NOWHERE, number=1))
        with again:
            assert told(again, session)[0] is NoteCode.TAKEN
        assert newer.absence is None


def test_a_listener_that_does_not_answer_loses_its_place(relay: RunningRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine is gone, and no system has told the relay."""
    monkeypatch.setattr(relay_server, "ANSWER", 0.05)
    dead, _ = listening(relay, BROKER)
    alive, _ = listening(relay, BROKER)
    dead.close()
    alive.close()


def test_two_brokers_of_one_key_have_names(relay: RunningRelay) -> None:
    keys = ServerKeys(BROKER, Admitted())
    with closing(open_server(relay.url, keys)), closing(open_server(f"{relay.url}/scans", keys)) as named:
        with pytest.raises(EndpointTaken, match=rf"127.0.0.1:{relay.port}/NAME"):
            open_server(relay.url, keys)
        with closing(dial(named.endpoint)) as client:
            send(client, b"hello")
            assert received(named)[0][1] == b"hello"


def test_a_key_has_so_many_connections(relay: RunningRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_server, "PAIRS", 1)
    with closing(serve(relay.url)) as server, closing(dial(server.endpoint)) as first:
        send(first, b"hello")
        received(server)
        assert "too many connections" in troubled(relay.url)


def test_who_is_not_admitted_by_the_peer_learns_so_through_the_relay(relay: RunningRelay) -> None:
    with closing(serve(relay.url)) as server, closing(open_client(server.endpoint, STRANGER)) as client:
        wait_for(lambda: client.refusal or None)
        assert client.refusal == "not admitted"


# What passes


def test_a_relay_that_is_killed_and_started_again_is_found_by_all(stack: ExitStack) -> None:
    relay = RunningRelay()
    stack.callback(lambda: relay.close())
    server = stack.enter_context(closing(serve(relay.url)))
    client = stack.enter_context(closing(dial(server.endpoint)))
    line = line_through(relay.url, stack)
    send(client, b"before")
    assert received(server)[0][1] == b"before"
    line.put(0, 1)
    assert line.take_numbers(2) == [0, 1]
    relay.close()
    wait_for(lambda: True if server.receive(0.01) is None else None)  # so no silence counts against a worker
    line.put(2, 3)
    line.producer.pump(0.05)
    assert line.producer.trouble is not None
    relay = RunningRelay(relay.port)
    wait_for(lambda: client.send(b"after") or None)
    assert received(server)[0][1] == b"after"
    assert line.take_numbers(2) == [2, 3]
    assert line.producer.trouble is None


def test_a_replacement_is_reached_at_the_place_of_the_lost_worker(relay: RunningRelay, stack: ExitStack) -> None:
    line = line_through(relay.url, stack)
    line.put(0)
    assert line.take().number == 0
    line.producer.close()
    options = QueueOptions(secrets=KEYED)
    producer = backend_of(relay.url).open_queues(relay.url, RUN, 3, options, folder=Path())
    stack.callback(producer.close)
    line.consumer.connect({KEY: producer.endpoint})
    line.consumer.admit(3)
    again = QueuePair(producer, line.consumer)
    again.outbound.put(again.message(0, incarnation=3))
    again.outbound.put(again.message(1, incarnation=3))
    assert again.take().number == 1


def test_a_peer_that_reads_nothing_holds_back_the_other(relay: RunningRelay) -> None:
    """The relay has a buffer of its own for each direction, and the system its own."""
    with ExitStack() as stack:
        listener, session = listening(relay, BROKER)
        dialler, dialled = dialling(relay, WORKER, BROKER)
        taker, taken = asked(relay, BROKER, RelayRequest(Wish.TAKE, name=told(listener, session)[1]))
        for each in (listener, dialler, taker):
            stack.enter_context(each)
        assert told(dialler, dialled)[0] is told(taker, taken)[0] is NoteCode.READY
        sent = sent_until_blocked(dialler)
        assert sent < 2**26
        assert len(read(taker, sent)) == sent


def test_nothing_is_readable_on_the_way_to_the_relay_or_back(
    relay: RunningRelay, stack: ExitStack, tmp_path: Path
) -> None:
    tap = stack.enter_context(ByteTap(f"tcp://127.0.0.1:{relay.port}", tmp_path))
    port = int(tap.endpoint.rpartition(":")[2])
    url = RelayAddress("127.0.0.1", port, RELAY.public, "scans", ADMISSION).url
    line = line_through(url, stack)
    payload = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    line.outbound.put(line.message(0, payload))
    assert torch.equal(line.take().payload, payload)
    server = stack.enter_context(closing(serve(url)))
    client = stack.enter_context(closing(dial(server.endpoint)))
    send(client, b"the plan of the run")
    received(server)
    keys = [pair.public for pair in (BROKER, WORKER, OTHER)]
    words = [b"the plan", KEY.name.encode(), RUN.encode(), b"scans", ADMISSION, url.encode()]
    needles = [*map(bytes_of, payload), *words, *[key.raw for key in keys], *[key.text.encode() for key in keys]]
    assert sum(map(len, recorded(tmp_path))) > payload.nbytes
    assert found(tmp_path, iter(needles)) == []


@pytest.mark.parametrize("place", [60, 140, 400, 3000])
def test_a_bit_that_changes_on_the_way_costs_a_connection_and_no_message(
    relay: RunningRelay, stack: ExitStack, place: int
) -> None:
    proxy = stack.enter_context(Proxy(f"tcp://127.0.0.1:{relay.port}"))
    address = RelayAddress("127.0.0.1", int(proxy.endpoint.rpartition(":")[2]), RELAY.public, secret=ADMISSION)
    flip = Flip(place, 3)
    proxy.change_there = flip
    line = line_through(address.url, stack)
    for number in range(20):
        line.put(number)
    assert line.take_numbers(20) == [*range(20)]
    assert flip.fired


def test_queues_go_on_with_other_keys_of_their_places(relay: RunningRelay, stack: ExitStack) -> None:
    backend = backend_of(relay.url)
    ends = producer, consumer = [
        backend.open_queues(relay.url, RUN, 1 + place, QueueOptions(secrets=of_place(place, 1, KEY)), folder=Path())
        for place in (0, 1)
    ]
    line = QueuePair(producer, consumer)
    stack.callback(line.close)
    consumer.connect({KEY: producer.endpoint})
    line.put(*range(10))
    assert line.take_numbers(5) == list(range(5))
    before = producer.endpoint
    for place, end in enumerate(ends):
        end.rekey(of_place(place, 2, KEY))
    assert producer.endpoint != before
    consumer.connect({KEY: producer.endpoint})
    line.put(*range(10, 20))
    assert line.take_numbers(15) == list(range(5, 20))


def test_a_line_with_the_secret_of_a_relay_may_be_shown_and_one_with_a_password_may_not() -> None:
    relay = RelayAddress("desk", 7443, RELAY.public, secret=ADMISSION).url
    addresses = relay, "tcp://desk:7000", "redis://anna:secret@desk:6379/0"
    assert [is_showable(JoinLine(each, BROKER.public, bytes(16)).text) for each in addresses] == [True, True, False]
