"""A broker with keys over real sockets: what strangers, guests and thieves say changes nothing, and is named once."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from time import time

import pytest

from stageline.broker.control.channel import ClientChannel
from stageline.broker.control.messages import (
    CONTROL_VERSION,
    Answer,
    Ask,
    Assigned,
    Exited,
    FromBroker,
    Hello,
    Refused,
    Report,
    StopRun,
    ToBroker,
)
from stageline.broker.control.protocol import RunKeys, Sealer, decode_from_broker, encode
from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.gate import KeyEvent, KeyGate
from stageline.broker.coordinator.run import run_of
from stageline.broker.keys.admission import KeyRefusal, ServerKeys
from stageline.broker.keys.changes import KeyChange
from stageline.broker.keys.pairs import KeyPair, invite_pair, operator_pair
from stageline.broker.keys.register import Invitation, KeyRegister, Right
from stageline.broker.transports.base import open_client, open_server
from stageline.pipeline.addresses import parted
from stageline.workers.control.client import Client
from stageline.workers.process.broker_process import serve_channel
from support.conversation import PLAN, TERMS
from support.keyed import BROKER, OTHER, STRANGER, WORKER
from support.workspace import wait_for

RUN = RunKeys("run-1", b"k" * 32)
GUEST, INVITED = KeyPair.of_secret(bytes(31) + b"\x09"), invite_pair(bytes(16))
PATIENCE = 20.0  # seconds


class Desk:
    """A broker in a thread, which has admitted a worker, another, and a guest who may look on."""

    def __init__(self, stack: ExitStack) -> None:
        self.register, self.store, self.events = KeyRegister(), MemoryStore(), list[KeyEvent]()
        self.register.invite(Invitation(INVITED.public.text, ends=time() + 600))
        for pair, rights in ((WORKER, ()), (OTHER, ()), (GUEST, (Right.LOOK,))):
            self.register.admit(pair.public, time(), rights=rights)
        operator = operator_pair(BROKER)
        self.register.admit(operator.public, time(), rights=tuple(Right))
        self.core = Coordinator(TERMS, self.store, run_of(self.store, PLAN, RUN.run, RUN.key, new=True), time())
        events = self.core.run.events
        gate = KeyGate(
            self.register, self.store, self.core.run.keys, operator.public, lambda serial: GUEST.public, events
        )
        channel = stack.enter_context(closing(open_server("tcp://127.0.0.1:0", ServerKeys(BROKER, self.register))))
        self.url, ended = channel.endpoint, threading.Event()
        options = {"stop": ended.is_set, "gate": gate, "note": self.events.extend}
        thread = threading.Thread(target=serve_channel, args=(self.core, channel), kwargs=options)
        thread.start()
        stack.callback(thread.join)
        stack.callback(ended.set)
        self._stack = stack

    def dial(self, pair: KeyPair | None) -> ClientChannel:
        url = parted(self.url)[0] if pair is None else self.url
        return self._stack.enter_context(closing(open_client(url, pair, keeps=True)))

    def hears(self, pair: KeyPair, message: ToBroker, secret: bytes = b"", serial: int = 1) -> FromBroker:
        """The answer to what is said with the key of `pair`."""
        channel = self.dial(pair)
        channel.send(encode(message, secret, serial))
        frame = channel.receive(PATIENCE)
        assert frame is not None, "the broker is silent"
        return decode_from_broker(frame).message

    def refusal(self, pair: KeyPair, message: ToBroker, secret: bytes = b"") -> str:
        answer = self.hears(pair, message, secret)
        assert isinstance(answer, Refused)
        return answer.reason


@pytest.fixture
def desk() -> Iterator[Desk]:
    with ExitStack() as stack:
        yield Desk(stack)


def hello(name: str, **more: object) -> Hello:
    return Hello(CONTROL_VERSION, PLAN, name, "desk", 1, "ipc://w", **more)  # type: ignore[arg-type]


def refused_with(channel: ClientChannel) -> Callable[[], bool]:
    return lambda: bool(channel.refusal)


def test_without_a_key_or_with_an_unknown_one_nothing_is_said(desk: Desk) -> None:
    for pair, why in ((None, KeyRefusal.KEYS_NEEDED), (STRANGER, KeyRefusal.NOT_ADMITTED)):
        channel = desk.dial(pair)
        channel.send(encode(StopRun("enough"), RUN.of_control, 1))
        wait_for(refused_with(channel))
        assert channel.refusal == why
    wait_for(lambda: bool(desk.events))
    assert [(each.what, each.key) for each in desk.events] == [("refused", STRANGER.public.text)]
    assert desk.core.run.outcome is None


def test_a_guest_and_an_invitation_take_no_place_and_give_no_orders(desk: Desk) -> None:
    assert "no right to work" in desk.refusal(GUEST, hello("guest"))
    assert "no right to stop" in desk.refusal(GUEST, StopRun("enough"), RUN.of_control)
    assert "invitation" in desk.refusal(INVITED, hello("invited"))
    order = KeyChange("admit", STRANGER.public.text)
    assert "the broker's own user" in desk.refusal(GUEST, order, RUN.of_control)
    assert "the broker's own user" in desk.refusal(WORKER, Exited(0, 1, 1), RUN.of_control)
    assert isinstance(desk.hears(GUEST, Ask("why")), Answer)
    assert not desk.register.admits(STRANGER.public)
    assert not desk.core.run.registry.members
    assert len({(each.key, each.detail) for each in desk.events}) == len(desk.events) == 5


def test_a_key_with_the_right_to_stop_stops_the_run_without_its_secret_and_others_do_not(desk: Desk) -> None:
    for pair in (WORKER, GUEST):
        client = Client(desk.url, bytes, pair)
        with client, pytest.raises(ValueError, match="no right to stop"):
            client.request_stop("enough", at_step_end=True, timeout=PATIENCE)
    assert desk.core.run.outcome is None
    desk.register.admit(GUEST.public, time(), name="owner", rights=(Right.STOP,))
    with Client(desk.url, bytes, GUEST) as client:
        assert client.request_stop("enough", at_step_end=True, timeout=PATIENCE)["run"] == RUN.run
        wait_for(lambda: client.ask("status", PATIENCE)["reason"] is not None)
        assert "enough (owner)" in client.ask("status", PATIENCE)["reason"]
    assert [each.key for each in desk.events if each.what == "stopped"] == [GUEST.public.text]


def test_a_stolen_incarnation_and_a_recorded_message_of_another_do_not_count(desk: Desk) -> None:
    sealer, mine = Sealer(time), desk.dial(WORKER)
    mine.send(encode(hello("worker-0")))
    frame = mine.receive(PATIENCE)
    assert frame is not None
    assigned = decode_from_broker(frame).message
    assert isinstance(assigned, Assigned)
    sealer.learn(assigned)
    report = Report(assigned.incarnation, 2, "1F0", time(), 0.0, number=1)
    recorded = sealer.worker_message(report)
    mine.send(recorded)
    assert mine.receive(PATIENCE) is not None
    thief = desk.dial(OTHER)
    for stolen in (recorded, encode(report), encode(report, bytes(32), 2**60)):
        thief.send(stolen)
    wait_for(lambda: desk.core.run.events.anomalies["forged"] >= 3)
    (member,) = desk.core.run.registry.members.values()
    assert (member.incarnation, member.name) == (assigned.incarnation, "worker-0")
    assert member.report is not None
    assert member.report.actions == 2
