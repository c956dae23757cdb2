"""A worker's connection to a broker, over real sockets."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from threading import Event
from types import SimpleNamespace

import pytest

from stageline.broker.control.messages import (
    CONTROL_VERSION,
    Assigned,
    FromBroker,
    Goodbye,
    Hello,
    Report,
    ToBroker,
    Trim,
)
from stageline.broker.control.open import open_server
from stageline.broker.control.protocol import decode_to_broker, encode
from stageline.workers.control.client import BrokerUnreachable
from stageline.workers.control.control_thread import ControlThread
from stageline.workers.control.lifeline import Lifeline, LifelineOwner
from stageline.workers.control.session import Stopped, WorkerIdentity
from stageline.workers.runtime.progress import Progress
from support.control_channels import PATIENCE, received

IDENTITY = WorkerIdentity(Hello(CONTROL_VERSION, "d" * 64, "worker-0", "host", 1, "", 0))
PLACE = Assigned("run-1", 0, 7, 0)


class BrokerEnd:
    """The broker's end of the connection to one worker."""

    def __init__(self) -> None:
        self.server = open_server("tcp://127.0.0.1:0")
        self.sender = b""
        self._arrived: list[tuple[bytes, bytes | None]] = []

    def send(self, message: FromBroker) -> None:
        self.server.send([(self.sender, encode(message))])

    def until(self, wanted: type[ToBroker]) -> ToBroker:
        """The worker's next message of that kind."""
        while True:
            self._arrived = self._arrived or received(self.server)
            self.sender, frame = self._arrived.pop(0)
            if isinstance(message := decode_to_broker(frame or b"").message, wanted):
                return message


@pytest.fixture
def broker() -> Iterator[BrokerEnd]:
    end = BrokerEnd()
    with closing(end.server):
        yield end


@pytest.fixture
def start(broker: BrokerEnd) -> Iterator[Callable[..., tuple[ControlThread, SimpleNamespace, Event]]]:
    """Starts the thread of a worker that has its place; its loop, and what ends the loop's waiting."""
    opened: list[ControlThread] = []

    def started(lifeline: Lifeline | None = None) -> tuple[ControlThread, SimpleNamespace, Event]:
        loop, rung = SimpleNamespace(progress=Progress(), attention=False), Event()
        opened.append(ControlThread(broker.server.endpoint, IDENTITY, lifeline=lifeline))
        opened[-1].start(PLACE, "ipc://0", loop, steps=10, ring=rung.set)
        return opened[-1], loop, rung

    yield started
    for control in opened:
        control.close()


def test_a_worker_reports_as_soon_as_it_has_its_place(broker: BrokerEnd) -> None:
    done = Event()

    def spawned() -> None:
        broker.until(Hello)
        broker.send(PLACE)
        assert broker.until(Report).waiting
        done.set()

    thread = threading.Thread(target=spawned)
    thread.start()
    with closing(ControlThread(broker.server.endpoint, IDENTITY)) as control:
        assert control.join(PATIENCE) == PLACE
        thread.join()
    assert done.is_set()


def test_a_command_gets_the_loops_attention_and_ends_its_waiting(broker: BrokerEnd, start) -> None:
    control, loop, rung = start()
    broker.until(Hello)
    broker.send(Trim(3))
    assert rung.wait(PATIENCE)
    assert loop.attention
    assert control.commands.popleft() == Trim(3)


def test_what_the_compute_loop_sends_goes_out_with_its_reports(broker: BrokerEnd, start) -> None:
    control, _, _ = start()
    broker.until(Hello)
    control.send(Goodbye(7, "interrupted"))
    assert broker.until(Goodbye) == Goodbye(7, "interrupted")


@pytest.fixture
def cut() -> Iterator[Lifeline]:
    """A lifeline whose other end is closed."""
    with closing(LifelineOwner()) as owner:
        lifeline = Lifeline(owner.end)
        owner.leave_to_parent()
        yield lifeline


def test_a_worker_whose_lifeline_is_cut_stops(broker: BrokerEnd, start, cut: Lifeline) -> None:
    control, loop, rung = start(lifeline=cut)
    assert rung.wait(PATIENCE)
    assert loop.attention
    assert [type(command) for command in control.commands] == [Stopped]


def test_a_worker_whose_lifeline_is_cut_asks_for_no_place(broker: BrokerEnd, cut: Lifeline) -> None:
    control = ControlThread(broker.server.endpoint, IDENTITY, lifeline=cut)
    with closing(control), pytest.raises(Stopped, match="the process that started this worker is gone"):
        control.join(PATIENCE)


def test_a_worker_that_finds_no_broker_says_so() -> None:
    control = ControlThread("tcp://127.0.0.1:9", IDENTITY)
    with closing(control), pytest.raises(BrokerUnreachable, match="no broker"):
        control.join(0.1)
