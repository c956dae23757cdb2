"""Keys on real ZeroMQ sockets: who is admitted, why a client is not, and what passes on the way."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import zmq
from structlog.testing import capture_logs

from stageline.broker.control.channel import ClientChannel, ServerChannel
from stageline.broker.errors import AddressUnusable, EndpointTaken
from stageline.broker.keys.admission import Admission, NotReady, QueueKeys, ServerKeys
from stageline.broker.keys.join_line import keyed
from stageline.broker.keys.pairs import KeyPair, PublicKey
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.secrets import QueueSecrets
from stageline.broker.transports.base import backend_of, open_client, open_server
from stageline.broker.transports.sockets import connection_guard, curve, zeromq_channel, zeromq_queues
from stageline.broker.transports.sockets.curve import CurveClient, CurveServer
from stageline.broker.transports.sockets.zeromq_queues import ZeroMQQueues
from stageline.pipeline.addresses import parted
from support.byte_tap import ByteTap, recorded
from support.control_channels import PATIENCE, received, send
from support.keyed import BROKER, KEYS, STRANGER, WORKER, Admitted, of_place
from support.queue_pair import KEY, QueuePair, wait_for
from support.zeromq_queues import line_of, worker

KEYS_OF_BROKER = ServerKeys(BROKER, Admitted())
LOOPBACK = "tcp://127.0.0.1:0"


@contextmanager
def serving(admission: Admission) -> Iterator[ServerChannel]:
    with closing(open_server(LOOPBACK, ServerKeys(BROKER, admission))) as server:
        yield server


@pytest.fixture
def server() -> Iterator[ServerChannel]:
    with serving(Admitted()) as server:
        yield server


@contextmanager
def dialling(endpoint: str, pair: KeyPair = WORKER, broker: KeyPair = BROKER) -> Iterator[ClientChannel]:
    with closing(open_client(keyed(parted(endpoint)[0], broker.public), pair, keeps=True)) as client:
        yield client


def queues_at(url: str) -> ZeroMQQueues:
    return ZeroMQQueues("run", 1, url, QueueOptions(secrets=QueueSecrets(curve=KEYS)))


def refusal(client: ClientChannel) -> str:
    until = monotonic() + PATIENCE
    while not (found := client.refusal):
        assert monotonic() < until, "no refusal"
    return found


def test_messages_pass_between_keys_that_know_each_other_and_the_sender_is_known_by_its_key(
    server: ServerChannel,
) -> None:
    with dialling(server.endpoint) as client:
        send(client, b"hello")
        [(sender, message)] = received(server)
        assert (message, server.key_of(sender)) == (b"hello", WORKER.public.text)
        server.send([(sender, b"welcome")])
        assert client.receive(PATIENCE) == b"welcome"
        assert client.renewed()
        assert client.refusal == ""


def test_a_connection_that_is_idle_for_an_hour_stays(server: ServerChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard's clock is set ahead; nothing else closes a connection, and TCP's own probes keep it in the tables of
    routers, every 10 s. An hour of the real clock is not for a test."""
    looks = 0

    def an_hour_later() -> float:
        nonlocal looks
        looks += threading.current_thread() is not threading.main_thread()
        return monotonic() + 3600

    monkeypatch.setattr(connection_guard, "CALM", 5)
    with capture_logs() as logs, dialling(server.endpoint) as client:
        send(client, b"hello")
        [(sender, _)] = received(server)
        server.trust(sender)
        server.send([(sender, b"welcome")])
        assert client.receive(PATIENCE) == b"welcome"
        assert client.renewed()
        monkeypatch.setattr(connection_guard, "monotonic", an_hour_later)
        wait_for(lambda: (not server.receive(0.0) and looks > 50) or None)  # what the broker has read counts
        client.send(b"again")
        assert received(server) == [(sender, b"again")]
        assert logs == []  # of a connection that was closed


def test_a_broker_with_keys_is_found_at_a_keyed_address_and_listens_there_again() -> None:
    with serving(Admitted()) as server:
        address = server.endpoint
        assert address == f"{parted(address)[0]}#{BROKER.public.text}"
        assert backend_of(address).listens(address)
    assert not backend_of(address).listens(address)
    with closing(open_server(address, KEYS_OF_BROKER)) as server:
        assert server.endpoint == address


def test_an_address_with_a_key_and_a_process_without_one_do_not_go_together() -> None:
    address = f"tcp://127.0.0.1:5600#{BROKER.public.text}"
    with pytest.raises(AddressUnusable, match="this process has none"):
        open_client(address)
    with pytest.raises(AddressUnusable, match=r"tcp://127\.0\.0\.1:5600: it does not end with the key"):
        open_client("tcp://127.0.0.1:5600", WORKER)
    with pytest.raises(AddressUnusable, match="it begins with 'k2', expected k1"):
        open_client("tcp://127.0.0.1:5600#k2.abc", WORKER)
    for keys, named in [(None, "this one has none"), (ServerKeys(WORKER, Admitted()), WORKER.public.text)]:
        with pytest.raises(AddressUnusable, match=f"the key of another broker; .*{named}"):
            open_server(address, keys)


def test_without_keys_no_sender_has_one() -> None:
    with closing(open_server(LOOPBACK)) as server, closing(open_client(server.endpoint)) as client:
        send(client, b"hello")
        [(sender, _)] = received(server)
        assert server.key_of(sender) == ""


def test_a_key_that_is_not_admitted_is_told_so_and_says_nothing(server: ServerChannel) -> None:
    with dialling(server.endpoint, STRANGER) as stranger, dialling(server.endpoint) as client:
        stranger.send(b"let me in")
        assert refusal(stranger) == "not admitted"
        send(client, b"hello")
        assert [message for _, message in received(server)] == [b"hello"]
        assert server.receive(0) == []


def test_a_key_that_is_admitted_later_gets_in_when_it_dials_again() -> None:
    admitted = Admitted([])
    with serving(admitted) as server:
        with dialling(server.endpoint) as client:
            assert refusal(client) == "not admitted"
        admitted.pairs.append(WORKER)
        with dialling(server.endpoint) as client:
            send(client, b"hello")
            assert [message for _, message in received(server)] == [b"hello"]


def test_a_key_that_is_revoked_loses_its_connection_and_another_keeps_its_place() -> None:
    admitted = Admitted([WORKER, STRANGER])
    with ExitStack() as stack:
        server = stack.enter_context(serving(admitted))
        member, revoked = (stack.enter_context(dialling(server.endpoint, pair)) for pair in (WORKER, STRANGER))
        for client in (member, revoked):
            send(client, b"before")
        for sender, message in received(server, 2):
            assert message == b"before"
            server.trust(sender)
        assert member.renewed()
        admitted.pairs.remove(STRANGER)
        server.readmit()
        wait_for(lambda: member.renewed() or None)
        assert refusal(revoked) == "not admitted"
        revoked.send(b"after")
        send(member, b"after")
        [(sender, message)] = received(server)
        assert (server.key_of(sender), message) == (WORKER.public.text, b"after")
        assert received(server, 1, patience=0.3) == []


def test_a_broker_with_another_key_is_told_from_one_that_is_away(server: ServerChannel) -> None:
    with dialling(server.endpoint, broker=STRANGER) as client:
        assert refusal(client) == "another broker's key"
        assert not client.renewed()


def test_a_tunnel_whose_broker_is_away_is_no_broker_with_another_key() -> None:
    """A tunnel, a relay or a container's port accepts and ends each connection: in the events, both look the same."""
    ended = threading.Semaphore(0)

    def end_all(tunnel: socket.socket) -> None:
        with suppress(OSError):
            while True:
                tunnel.accept()[0].close()
                ended.release()

    with socket.create_server(("127.0.0.1", 0)) as tunnel:
        threading.Thread(target=end_all, args=(tunnel,), daemon=True).start()
        with dialling(f"tcp://127.0.0.1:{tunnel.getsockname()[1]}") as client:
            for _ in range(20):
                assert ended.acquire(timeout=PATIENCE)
                assert client.refusal == ""
        tunnel.shutdown(socket.SHUT_RDWR)  # which ends the thread


def test_a_broker_without_keys_is_named_and_gets_no_message() -> None:
    with closing(open_server(LOOPBACK)) as server, dialling(server.endpoint) as client:
        client.send(b"hello")
        assert refusal(client) == "no keys there"
        assert server.receive(0) == []


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2p1\r\n", b"-ERR unknown\r\n"]
)
def test_another_program_at_the_address_has_no_keys(said: bytes) -> None:
    with ExitStack() as stack:
        program = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(dialling(f"tcp://127.0.0.1:{program.getsockname()[1]}"))
        connection = stack.enter_context(program.accept()[0])
        connection.sendall(said)
        assert refusal(client) == "no keys there"


def test_a_client_without_keys_learns_that_they_are_needed(server: ServerChannel) -> None:
    with closing(open_client(parted(server.endpoint)[0], keeps=True)) as client:
        client.send(b"hello")
        assert refusal(client) == "keys needed there"
        assert server.receive(0) == []


def threads(name: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == name]


class Mortal(Admitted):
    """An admission that ends the thread which asks it about a stranger."""

    def admits(self, public: PublicKey) -> bool:
        if public == STRANGER.public:
            raise SystemExit
        return super().admits(public)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_admits_nobody_and_ends_no_connection() -> None:
    """Without a domain that is enforced, a server without a handler admits every key."""
    with serving(Mortal()) as server, dialling(server.endpoint) as member:
        send(member, b"before")
        assert [message for _, message in received(server)] == [b"before"]
        [thread] = threads("zap")
        with dialling(server.endpoint, STRANGER) as stranger:
            stranger.send(b"now")
            thread.join(PATIENCE)
            assert not thread.is_alive()
            with dialling(server.endpoint) as late:
                late.send(b"let me in")
                send(member, b"after")
                assert [message for _, message in received(server)] == [b"after"]
                assert received(server, 1, patience=0.3) == []
                assert late.refusal == ""  # its key is not to blame, nor the broker's


class Failing(Admitted):
    """An admission that fails at its first question."""

    def __init__(self, reason: Exception) -> None:
        super().__init__()
        self._reasons = [reason]

    def admits(self, public: PublicKey) -> bool:
        if self._reasons:
            raise self._reasons.pop()
        return super().admits(public)


@pytest.mark.parametrize(("reason", "is_bug"), [(OSError("the disk is away"), True), (NotReady(), False)])
def test_a_key_that_could_not_be_judged_is_judged_again(
    reason: Exception, is_bug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(zeromq_channel._ROUTER_OPTIONS, zmq.HANDSHAKE_IVL, 50)
    with capture_logs() as logged, serving(Failing(reason)) as server, dialling(server.endpoint) as client:
        send(client, b"hello")
        assert [message for _, message in received(server)] == [b"hello"]
    assert any(line["log_level"] == "error" for line in logged) is is_bug


@pytest.mark.parametrize(("size", "arrives"), [(1000, True), (1001, False)])
def test_the_largest_message_is_as_large_as_without_keys(
    size: int, arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(zeromq_channel._ROUTER_OPTIONS, zmq.MAXMSGSIZE, 1000)
    with serving(Admitted()) as server, dialling(server.endpoint) as client, dialling(server.endpoint) as other:
        send(client, size * b"x")
        send(other, b"y")
        if arrives:
            assert sorted(message[:1] for _, message in received(server, 2)) == [b"x", b"y"]
        else:
            assert [message for _, message in received(server)] == [b"y"]
            assert server.receive(0) == []


def test_all_messages_of_a_sender_in_a_batch_are_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer may name itself as one whose connection has just ended: the key of the second was that of both."""
    monkeypatch.setattr(zeromq_channel, "key_in", lambda frame: frame.bytes.decode())
    with serving(Admitted()) as server, dialling(server.endpoint) as client:
        send(client, b"first")
        [(sender, _)] = received(server)
        server.trust(sender)  # else so many messages would close the connection
        for n in range(500):
            send(client, b"first" if n % 10 else b"second")
        taken = 0
        while taken < 500:
            batch = server.receive(PATIENCE)
            assert batch, "messages were lost"
            taken += len(batch)
            [key] = {server.key_of(sender) for sender, _ in batch}
            assert {message for _, message in batch if message} == {key.encode()}


def test_a_consumer_that_is_admitted_later_gets_its_messages(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq_queues, "NO_HANDSHAKE", 0.1)
    monkeypatch.setattr(zeromq_queues, "CHECK", 0.1)
    admitted = Admitted([])
    keys = QueueSecrets(curve=QueueKeys(WORKER, admitted))
    line = line_of(worker(stack, 1, secrets=keys), worker(stack, 2, secrets=keys))
    line.put(0)
    assert line.consumer.inbound(line.key).take(0.3) is None
    admitted.pairs.append(WORKER)
    assert line.take().number == 0


def test_a_consumer_whose_key_is_revoked_gets_no_more_messages(stack: ExitStack) -> None:
    admitted = Admitted()
    keys = QueueSecrets(curve=QueueKeys(WORKER, admitted))
    line = line_of(worker(stack, 1, secrets=keys), worker(stack, 2, secrets=keys))
    line.put(0)
    assert line.take().number == 0
    admitted.pairs.clear()
    with capture_logs() as logged:
        line.producer.router.readmit()
        wait_for(lambda: logged or None)
    line.put(1)
    line.settle()
    assert line.consumer.inbound(line.key).take(0.3) is None


PLACES = [KeyPair.of_secret(bytes(31) + bytes([n])) for n in (10, 11)]
OF_PLACES = [QueueKeys(pair, Admitted(PLACES)) for pair in PLACES]


def test_queues_of_places_know_each_other_by_the_keys_in_their_endpoints(stack: ExitStack) -> None:
    producer, consumer = (
        worker(stack, n, secrets=QueueSecrets(curve=keys)) for n, keys in enumerate(OF_PLACES, start=1)
    )
    assert producer.endpoint.endswith(f"#{PLACES[0].public.text}")
    line = line_of(producer, consumer)
    line.put(0)
    assert line.take().number == 0


def test_large_tensors_pass_whole_though_they_travel_in_pieces(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve, "PIECE", 64)
    producer, consumer = (worker(stack, n, secrets=QueueSecrets(curve=keys)) for n, keys in enumerate(OF_PLACES, 1))
    line = line_of(producer, consumer)
    sizes = (0, 1, 15, 16, 17, 32, 1000)  # of float32: fewer, as many and more than in one piece or in several
    sent = [torch.arange(float(size)) for size in sizes]
    line.outbound.put(line.message(0, sent))
    found = line.take().payload
    assert len(found) == len(sent)
    assert all(torch.equal(one, other) for one, other in zip(found, sent, strict=True))


@pytest.mark.parametrize("pair", [None, STRANGER])
def test_a_stranger_takes_no_message_of_a_place(pair: KeyPair | None, stack: ExitStack) -> None:
    """It speaks as stageline does, and lacks nothing but a key, or has one that no place has."""
    producer, consumer = (
        worker(stack, n, secrets=QueueSecrets(curve=keys)) for n, keys in enumerate(OF_PLACES, start=1)
    )
    stranger = worker(stack, 3, secrets=QueueSecrets(curve=None if pair is None else QueueKeys(pair, Admitted([]))))
    endpoint = producer.endpoint if pair else parted(producer.endpoint)[0]
    stranger.connect({KEY: endpoint})
    line = line_of(producer, consumer)
    line.put(0)
    assert QueuePair(producer, stranger).inbound.take(0.3) is None
    assert line.take().number == 0


def test_a_place_takes_nothing_from_a_stranger_at_an_address_of_a_place(stack: ExitStack) -> None:
    stranger = worker(stack, 1, secrets=QueueSecrets(curve=QueueKeys(STRANGER, Admitted(PLACES))))
    consumer = worker(stack, 2, secrets=QueueSecrets(curve=OF_PLACES[1]))
    consumer.connect({KEY: keyed(parted(stranger.endpoint)[0], PLACES[0].public)})
    line = QueuePair(stranger, consumer)
    line.put(0)
    line.settle()
    assert line.inbound.take(0.3) is None


@pytest.mark.parametrize(("keys", "endpoint"), [(None, f"tcp://h:1#{WORKER.public.text}"), (KEYS, "tcp://h:1")])
def test_queues_with_keys_and_an_endpoint_without_one_are_not_connected(
    keys: QueueKeys | None, endpoint: str, stack: ExitStack
) -> None:
    with pytest.raises(AddressUnusable):
        worker(stack, 1, secrets=QueueSecrets(curve=keys)).connect({KEY: endpoint})


@pytest.mark.parametrize("open_at", [partial(open_server, keys=KEYS_OF_BROKER), queues_at])
def test_an_address_that_is_taken_leaves_no_thread(open_at: Callable[[str], Any]) -> None:
    with closing(open_server(LOOPBACK)) as other:
        with pytest.raises(EndpointTaken):
            open_at(other.endpoint)
        for thread in threads("zap"):
            thread.join(PATIENCE)
        assert threads("zap") == []


@pytest.mark.parametrize("has_keys", [True, False])
def test_nothing_that_is_said_passes_in_clear(has_keys: bool, tmp_path: Path) -> None:
    said = b"the patient's name"
    with ExitStack() as stack:
        server = stack.enter_context(closing(open_server(LOOPBACK, KEYS_OF_BROKER if has_keys else None)))
        tap = stack.enter_context(ByteTap(parted(server.endpoint)[0], tmp_path))
        client = stack.enter_context(
            dialling(tap.endpoint) if has_keys else closing(open_client(tap.endpoint, keeps=True))
        )
        send(client, said)
        [(sender, _)] = received(server)
        server.send([(sender, said)])
        assert client.receive(PATIENCE) == said
    streams = recorded(tmp_path)
    assert [said in stream for stream in streams] == 2 * [not has_keys]
    assert not any(WORKER.public.raw in stream for stream in streams)  # nor who it is


def test_a_secret_is_in_no_representation_of_keys() -> None:
    shown = f"{KEYS_OF_BROKER!r} {CurveServer(BROKER, Admitted())!r} {CurveClient(WORKER, BROKER.public)!r}"
    assert repr(BROKER.secret)[2:-1] not in shown
    assert repr(WORKER.secret)[2:-1] not in shown


# Other keys for all places, while queues are used


@pytest.mark.parametrize("first", [0, 1], ids=["the producer first", "the consumer first"])
def test_queues_go_on_with_other_keys_and_those_who_know_the_former_ones_get_nothing(
    first: int, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq_queues, "NO_HANDSHAKE", 0.1)
    monkeypatch.setattr(zeromq_queues, "CHECK", 0.1)
    ends = producer, consumer = [worker(stack, 1 + place, secrets=of_place(place, 1, KEY)) for place in (0, 1)]
    line = line_of(producer, consumer)
    line.put(*range(10))
    assert line.take_numbers(5) == list(range(5))
    shut_out, before = worker(stack, 3, secrets=of_place(1, 1, KEY)), producer.endpoint
    ends[first].rekey(of_place(first, 2, KEY))
    for _ in range(10):
        producer.pump(0.01)
        consumer.pump(0.01)
    ends[1 - first].rekey(of_place(1 - first, 2, KEY))
    assert parted(producer.endpoint)[0] == parted(before)[0]
    assert producer.endpoint != before
    consumer.connect({KEY: producer.endpoint})
    line.put(*range(10, 20))
    assert line.take_numbers(15) == list(range(5, 20))
    shut_out.connect({KEY: producer.endpoint})
    shut_out.inbound(KEY).rewind(0)
    line.put(20)
    assert shut_out.inbound(KEY).take(0.5) is None
    assert line.take_numbers(1) == [20]
