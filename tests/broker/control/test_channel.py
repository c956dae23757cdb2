"""Sentences between broker and workers, over ZeroMQ and through a real Redis server: one promise."""

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic

import pytest

from stageline.broker.control import redis_channel as through_redis
from stageline.broker.control.channel import ClientChannel, ServerChannel
from stageline.broker.control.open import open_client, open_server
from stageline.broker.errors import AddressUnusable, EndpointTaken
from stageline.broker.network.redis_connection import RedisUnfit
from support.redis_server import RedisServer, shared_server

BROKER = """
import sys
from stageline.broker.control.open import open_server

office = open_server(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""
PATIENCE = 10.0  # seconds in which whatever a test waits for has come


@pytest.fixture(params=["ipc", "tcp", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "ipc":
            return f"ipc:///tmp/stageline-test-{secrets.token_hex(6)}"
        case "tcp":
            return "tcp://127.0.0.1:*"
        case _:
            return f"{shared_server().tcp_url_of(shared_server().own_number())}#desk"


@pytest.fixture
def redis_url() -> str:
    return shared_server().tcp_url_of(shared_server().own_number())


@pytest.fixture
def office(url: str) -> Iterator[ServerChannel]:
    with closing(open_server(url)) as office:
        yield office
    assert not Path(url.removeprefix("ipc://")).exists()


@pytest.fixture
def box(office: ServerChannel) -> Iterator[ClientChannel]:
    with closing(open_client(office.endpoint, keeps=True)) as box:
        yield box


def hear(office: ServerChannel, count: int = 1) -> list[tuple[bytes, bytes | None]]:
    found: list[tuple[bytes, bytes | None]] = []
    until = monotonic() + PATIENCE
    while len(found) < count and monotonic() < until:
        found += office.receive(0.1) or []
    return found


def send(box: ClientChannel, sentence: bytes) -> None:
    until = monotonic() + PATIENCE
    while not box.send(sentence):
        assert monotonic() < until, "there is no broker"


@contextmanager
def at_work(office: ServerChannel) -> Iterator[None]:
    """Somebody listens in the office."""
    done = threading.Event()

    def listen() -> None:
        while not done.is_set():
            office.receive(0.05)

    listener = threading.Thread(target=listen)
    listener.start()
    yield
    done.set()
    listener.join()


def test_a_sentence_arrives_and_its_answer_finds_the_way_back(office: ServerChannel, box: ClientChannel) -> None:
    send(box, b"hello")
    [(sender, sentence)] = hear(office)
    assert sentence == b"hello"
    office.send([(sender, b"welcome"), (sender, b"sit down")])
    assert [box.receive(PATIENCE), box.receive(PATIENCE)] == [b"welcome", b"sit down"]


def test_sentences_of_one_sender_come_in_order_and_whole(office: ServerChannel, box: ClientChannel) -> None:
    said = [bytes([n]) * (1 + 50_000 * n) for n in range(12)]
    for sentence in said:
        send(box, sentence)
    assert [sentence for _, sentence in hear(office, len(said))] == said


def test_everyone_gets_their_own_answers(office: ServerChannel) -> None:
    with (
        closing(open_client(office.endpoint, keeps=True)) as one,
        closing(open_client(office.endpoint, keeps=True)) as other,
    ):
        send(one, b"one")
        send(other, b"other")
        office.send([(sender, b"to " + (sentence or b"")) for sender, sentence in hear(office, 2)])
        assert other.receive(PATIENCE) == b"to other"
        assert one.receive(PATIENCE) == b"to one"
        assert one.receive(0.01) is None


def test_what_nobody_says_is_waited_for_no_longer_than_asked(office: ServerChannel, box: ClientChannel) -> None:
    assert office.receive(0.01) == []
    assert box.receive(0.01) is None


def test_a_recipient_that_is_gone_is_passed_over(office: ServerChannel, box: ClientChannel) -> None:
    send(box, b"hello")
    [(sender, _)] = hear(office)
    office.send([(b"\0gone", b"?"), (sender, b"welcome")])
    assert box.receive(PATIENCE) == b"welcome"


def test_a_line_notices_that_there_is_another_broker(url: str, office: ServerChannel, box: ClientChannel) -> None:
    send(box, b"hello")
    hear(office)
    assert box.renewed()
    assert not box.renewed()
    office.close()
    with closing(open_server(office.endpoint)):
        until = monotonic() + PATIENCE
        while not box.renewed():
            assert monotonic() < until, "it has not noticed"
            box.receive(0.05)


def test_the_place_of_a_broker_that_is_there_is_not_to_be_had(office: ServerChannel) -> None:
    with at_work(office), pytest.raises(EndpointTaken, match=r"in use|a broker \(pid \d+ on host .+\) is there"):
        open_server(office.endpoint)


def test_without_a_broker_nothing_is_sent(redis_url: str) -> None:
    with closing(open_client(redis_url)) as box:
        assert not box.send(b"hello")


def test_brokers_of_different_names_share_a_server(redis_url: str) -> None:
    with closing(open_server(f"{redis_url}#one")) as one, closing(open_server(f"{redis_url}#other")) as other:
        with closing(open_client(f"{redis_url}#other")) as box:
            send(box, b"hello")
        assert [sentence for _, sentence in hear(other)] == [b"hello"]
        assert one.receive(0.01) == []


@pytest.mark.parametrize("name", ["", "#desk", "#a%20b"])
def test_every_kind_of_address_takes_a_name(name: str) -> None:
    server, number = shared_server(), shared_server().own_number()
    for url in (server.url_of(number), server.tcp_url_of(number)):
        with closing(open_server(url + name)) as office, closing(open_client(url + name)) as box:
            send(box, b"hello")
            assert [sentence for _, sentence in hear(office)] == [b"hello"]


def test_why_a_server_cannot_be_reached_is_known() -> None:
    with closing(open_client("redis://127.0.0.1:1/0#desk")) as box:
        assert not box.send(b"hello")
        assert "Connection refused" in box.trouble


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
def test_a_name_that_cannot_be_resolved_is_known(host: str) -> None:
    with closing(open_client(f"tcp://{host}:5600")) as box:
        assert box.trouble.startswith(f"the name '{host}' in tcp://{host}:5600 cannot be resolved")


def test_the_place_of_a_killed_broker_is_free_after_its_tenure(redis_url: str) -> None:
    imports = "import sys\nfrom stageline.broker.control.open import open_server"
    program = f"{imports}\nopen_server(sys.argv[1])\nprint(flush=True)\nsys.stdin.read()"
    words = [sys.executable, "-c", program, redis_url]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        killed.stdout.readline()
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
    with closing(open_client(redis_url)) as box:
        assert box.send(b"said to the dead")
        with closing(open_server(redis_url)) as office:
            send(box, b"hello")
            assert [sentence for _, sentence in hear(office)] == [b"hello"]


def test_a_broker_whose_place_was_taken_meanwhile_stops(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(through_redis, "_REFRESH", 0.0)
    with closing(open_server(redis_url)) as office:
        with closing(shared_server().client(int(redis_url.rpartition("/")[2]))) as client:
            client.set("stageline:{broker}:broker", "elsewhere/7/x")
        with pytest.raises(EndpointTaken, match=r"a broker \(pid 7 on host elsewhere\)"):
            office.receive(0.01)


def test_nothing_stays_on_the_server(redis_url: str) -> None:
    with closing(open_server(redis_url)) as office, closing(open_client(redis_url)) as box:
        send(box, b"hello")
        [(sender, _)] = hear(office)
        office.send([(sender, b"never read")])
        send(box, b"never heard")
    with closing(shared_server().client(int(redis_url.rpartition("/")[2]))) as client:
        keys = client.keys("*")
        assert keys
        assert all(0 < client.pttl(key) <= 60_000 for key in keys)


@pytest.mark.parametrize("word", [b"", b"short", b"0123456789abcdef"])
def test_what_no_line_of_ours_can_have_brought_is_passed_on_as_unreadable(word: bytes, redis_url: str) -> None:
    with closing(open_server(redis_url)) as office:
        with closing(shared_server().client(int(redis_url.rpartition("/")[2]))) as client:
            client.rpush("stageline:{broker}:to-broker", word)
        assert [sentence for _, sentence in hear(office)] == [None]


def test_a_server_that_goes_and_comes_back_is_waited_for() -> None:
    with RedisServer() as server, closing(open_server(server.url)) as office, closing(open_client(server.url)) as box:
        send(box, b"hello")
        [(sender, _)] = hear(office)
        server.kill()
        assert office.receive(0.01) is None
        office.send([(sender, b"lost")])
        assert not box.send(b"lost")
        assert box.receive(0.01) is None
        server.start()
        until = monotonic() + PATIENCE
        while office.receive(0.05) is None:
            assert monotonic() < until
        send(box, b"again")
        assert hear(office)[-1] == (sender, b"again")


def test_a_server_that_lets_nobody_in_is_named(redis_url: str) -> None:
    url = redis_url.replace("redis://", "redis://nobody:wrong@")
    with closing(open_client(url)) as box, pytest.raises(AddressUnusable, match="does not let this run in") as refused:
        box.send(b"hello")
    assert "wrong@" not in str(refused.value)
    with pytest.raises(RedisUnfit, match="does not let this run in"):
        open_server(url)


@pytest.mark.parametrize("url", ["tcp://nowhere", "redis://127.0.0.1:6379/0?nonsense=1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(AddressUnusable, match=r"cannot use tcp://nowhere|cannot reach the broker"):
        open_client(url)
