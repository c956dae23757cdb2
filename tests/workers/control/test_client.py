"""A command's questions to a broker."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from stageline.broker.control.messages import Answer, Ask, Confirmed, FromBroker, Refused, StopRun
from stageline.broker.control.protocol import decode_to_broker, encode
from stageline.broker.keys.admission import KeyRefusal, ServerKeys
from stageline.broker.keys.join_line import keyed
from stageline.broker.transports.base import open_server
from stageline.broker.transports.sockets import connection_rules
from stageline.pipeline.addresses import parted
from stageline.pipeline.errors import ExitCode
from stageline.workers.control.client import BrokerUnreachable, Client, KeyRefused
from support.control_channels import received
from support.keyed import BROKER, STRANGER, WORKER, Admitted


@contextmanager
def broker(*answers: FromBroker) -> Iterator[str]:
    """The address of a broker that answers one question."""
    with closing(open_server("tcp://127.0.0.1:0")) as server:

        def serve() -> None:
            ((sender, frame),) = received(server)
            assert decode_to_broker(frame or b"").message == Ask("status", {"of": "run-1"})
            server.send((sender, encode(answer)) for answer in answers)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.endpoint
        thread.join()


def test_the_answer_to_the_question_is_found_among_other_messages() -> None:
    others = (Confirmed(1), Answer("events/1", {}))
    with broker(*others, Answer("status/1", {"phase": "running"})) as url, Client(url) as client:
        assert client.ask("status", of="run-1") == {"schema": "status/1", "phase": "running"}


def test_a_refusal_is_raised_with_its_reason() -> None:
    refused = pytest.raises(ValueError, match="there is no run-1")
    with broker(Refused("there is no run-1", 2)) as url, Client(url) as client, refused:
        client.ask("status", of="run-1")


def test_a_broker_that_does_not_answer_is_named() -> None:
    named = pytest.raises(BrokerUnreachable, match=r"no broker (answered at tcp://127\.0\.0\.1:9|can be reached)")
    with Client("tcp://127.0.0.1:9") as client, named:
        client.ask("status", timeout=0.1)


def test_what_must_be_sealed_waits_for_the_secret_and_questions_do_not() -> None:
    secrets = iter([b"", b"", b"s" * 32, b"s" * 32])
    with closing(open_server("tcp://127.0.0.1:0")) as server, Client(server.endpoint, lambda: next(secrets)) as client:
        client.stop_run("interrupted")
        for _ in range(2):
            with pytest.raises(BrokerUnreachable):
                client.ask("status", timeout=0.0)
        frames = [decode_to_broker(frame or b"") for _, frame in received(server, 3)]
    assert [type(each.message) for each in frames] == [Ask, StopRun, Ask]
    assert [each.seal.is_of(b"s" * 32) for each in frames] == [False, True, True]
    assert frames[1].seal.serial < frames[2].seal.serial


def test_no_answer_is_lost_to_a_connection_that_is_closed_for_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that watches proves nothing, so that its connection is closed every few seconds: it must not notice."""
    monkeypatch.setattr(connection_rules, "UNTRUSTED_SECONDS", 0.1)
    done = threading.Event()
    with closing(open_server("tcp://127.0.0.1:0")) as server, capture_logs() as logged:

        def serve() -> None:
            asked = 0
            while not done.is_set():
                for sender, _ in server.receive(0.02) or []:
                    asked += 1
                    server.send([(sender, encode(Answer("status/1", {"asked": asked})))])

        thread = threading.Thread(target=serve)
        thread.start()
        with Client(server.endpoint) as client:
            while len(logged) < 5:
                assert client.ask("status", timeout=20.0)["asked"]
        done.set()
        thread.join()


def test_a_request_to_stop_that_is_lost_with_its_connection_is_sent_again(tmp_path: Path) -> None:
    """The question alone was put again: its answer said nothing of a refusal, and the run went on."""
    url = f"ipc://{tmp_path}/broker"
    first = open_server(url)
    heard: list[object] = []

    def serve() -> None:
        with closing(first):
            ((sender, _),) = received(first)
            first.send([(sender, encode(Answer("status/1", {"broker": "first"})))])
            received(first, 2)  # lost with it
        with closing(open_server(url)) as second:
            found = received(second, 2)
            heard.extend(type(decode_to_broker(frame or b"").message) for _, frame in found)
            second.send((sender, encode(Answer("status/1", {"broker": "second"}))) for sender, _ in found[-1:])
            answered.wait(60)

    answered = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    with Client(url) as client:
        assert client.ask("status", timeout=60.0)["broker"] == "first"
        assert client.request_stop("enough", at_step_end=True, timeout=60.0)["broker"] == "second"
    answered.set()
    thread.join()
    assert heard == [StopRun, Ask]


def test_a_late_answer_to_a_former_question_is_not_taken_for_the_next() -> None:
    with closing(open_server("tcp://127.0.0.1:0")) as server, Client(server.endpoint) as client:
        with pytest.raises(BrokerUnreachable):
            client.ask("status", timeout=0.0)
        ((sender, _),) = received(server)
        server.send([(sender, encode(Answer("status/1", {"answer": "old"})))])
        assert client._channel._socket.poll(10_000)
        thread = threading.Thread(
            target=lambda: server.send(
                (to, encode(Answer("status/1", {"answer": "new"}))) for to, _ in received(server)
            )
        )
        thread.start()
        assert client.ask("status")["answer"] == "new"
        thread.join()


def test_what_is_no_message_is_passed_over_and_the_question_is_put_once() -> None:
    with closing(open_server("tcp://127.0.0.1:0")) as server, Client(server.endpoint) as client:

        def serve() -> None:
            ((sender, _),) = received(server)
            server.send([(sender, b"no message")])
            again = received(server, patience=0.5)
            server.send([(sender, encode(Answer("status/1", {"asked": 1 + len(again)})))])

        thread = threading.Thread(target=serve)
        thread.start()
        assert client.ask("status", timeout=20.0)["asked"] == 1
        thread.join()


def test_a_key_that_is_not_admitted_is_named_with_the_command_that_admits_it_and_may_ask_again_then() -> None:
    admission = Admitted([])
    with (
        closing(open_server("tcp://127.0.0.1:0", ServerKeys(BROKER, admission))) as server,
        Client(server.endpoint, pair=WORKER) as client,
    ):
        with pytest.raises(KeyRefused, match=f"keys admit {WORKER.public.text}") as refused:
            client.ask("status", timeout=30)
        assert (refused.value.refusal, refused.value.exit_code) == (KeyRefusal.NOT_ADMITTED, ExitCode.NOT_ADMITTED)
        admission.pairs.append(WORKER)

        def serve() -> None:
            ((sender, _),) = received(server)
            server.send([(sender, encode(Answer("status/1", {})))])

        thread = threading.Thread(target=serve)
        thread.start()
        assert client.ask("status", timeout=30) == {"schema": "status/1"}
        thread.join()


def test_a_broker_with_keys_a_broker_without_and_another_broker_are_told_apart() -> None:
    keys = ServerKeys(BROKER, Admitted())
    with closing(open_server("tcp://127.0.0.1:0", keys)) as server, closing(open_server("tcp://127.0.0.1:0")) as bare:
        plain = parted(server.endpoint)[0]
        for url, pair, said in [
            (plain, None, "has keys, and this address has none; paste the line"),
            (keyed(bare.endpoint, BROKER.public), WORKER, "uses no keys"),
            (keyed(plain, STRANGER.public), WORKER, "another key than the address says"),
        ]:
            with Client(url, pair=pair) as client, pytest.raises(KeyRefused, match=said) as refused:
                client.ask("status", timeout=30)
            assert parted(url)[0] in str(refused.value)
            assert refused.value.exit_code == ExitCode.NOT_ADMITTED
