"""A worker's connection to a broker, over real sockets."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import (
    CONTROL_VERSION,
    Assigned,
    FromBroker,
    Goodbye,
    Hello,
    Peers,
    Refused,
    Report,
    Stop,
    ToBroker,
)
from stageline.broker.control.peek import Peeked, ShowLog, ShowStacks
from stageline.broker.control.protocol import decode_to_broker, encode
from stageline.broker.keys.admission import ServerKeys
from stageline.broker.keys.join_line import keyed
from stageline.broker.keys.pairs import PublicKey
from stageline.broker.transports.base import open_server
from stageline.pipeline.addresses import parted
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.process.lifeline import Lifeline, LifelineOwner
from stageline.workers.control import control_thread, refusals
from stageline.workers.control.client import BrokerUnreachable, KeyRefused
from stageline.workers.control.control_thread import ControlThread
from stageline.workers.control.joining import Stopped, WorkerIdentity
from stageline.workers.control.views import Views
from stageline.workers.runtime.progress import Progress
from support.control_channels import PATIENCE, received
from support.keyed import BROKER, STRANGER, WORKER, Admitted

IDENTITY = WorkerIdentity(Hello(CONTROL_VERSION, "d" * 64, "worker-0", "host", 1, "", 0))
PLACE = Assigned("run-1", 0, 7, 0)
SECRET = b"s" * 32
SEALED_PLACE = Assigned("run-1", 0, 7, 0, secret=SECRET)


class BrokerEnd:
    """The broker's end of the connection to one worker."""

    def __init__(self, keys: ServerKeys | None = None) -> None:
        self.server = open_server("tcp://127.0.0.1:0", keys)
        self.sender = b""
        self._serial = 0
        self._sent = b""
        self._arrived: list[tuple[bytes, bytes | None]] = []

    def send(self, message: FromBroker, secret: bytes = b"") -> None:
        self._serial += 1
        self._sent = encode(message, secret, self._serial)
        self.repeat()

    def repeat(self) -> None:
        """Sends the newest message again."""
        self.server.send([(self.sender, self._sent)])

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
def start(broker: BrokerEnd) -> Iterator[Callable[..., tuple[ControlThread, Event]]]:
    """Starts the thread of a worker that has its place; and what wakes its loop."""
    opened: list[ControlThread] = []

    def started(lifeline: Lifeline | None = None, **more: Any) -> tuple[ControlThread, Event]:
        rung = Event()
        opened.append(ControlThread(broker.server.endpoint, IDENTITY, lifeline=lifeline))
        opened[-1].start(PLACE, "ipc://0", Progress(), steps=10, wake=rung.set, **more)
        return opened[-1], rung

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


def test_a_command_wakes_the_loop(broker: BrokerEnd, start) -> None:
    control, rung = start()
    broker.until(Hello)
    broker.send(Trim(3))
    assert rung.wait(PATIENCE)
    assert control.commands.popleft() == Trim(3)


@pytest.mark.parametrize("shows_code", [False, True])
def test_the_broker_gets_lines_and_paths_of_code_from_a_worker_that_may_show_them_alone(
    broker: BrokerEnd, start, shows_code: bool
) -> None:
    start(views=Views(shows_code=shows_code))
    broker.until(Hello)
    broker.send(ShowStacks(5))
    peeked = broker.until(Peeked)
    assert isinstance(peeked, Peeked)
    frames = [frame for thread in peeked.threads or [] for frame in thread.frames]
    assert any(Path(frame.file).name == "test_control_thread.py" for frame in frames)
    assert any(frame.text for frame in frames) == shows_code
    assert any("/" in frame.file for frame in frames) == shows_code


@pytest.mark.parametrize(("withheld", "told"), [("data.stays is set", False), ("", True)])
def test_the_broker_gets_the_log_of_a_worker_that_may_show_it_alone(
    broker: BrokerEnd, start, withheld: str, told: bool
) -> None:
    start(views=Views(log_withheld=withheld))
    broker.until(Hello)
    broker.send(ShowLog(5))
    peeked = broker.until(Peeked)
    assert isinstance(peeked, Peeked)
    assert (peeked.log is not None, withheld in peeked.refusal) == (told, True)
    assert bool(peeked.refusal) != told


@pytest.fixture
def joined(broker: BrokerEnd) -> Iterator[tuple[ControlThread, Event]]:
    """A worker that has joined with a secret, and what ends its loop's waiting."""
    joining = threading.Thread(target=lambda: (broker.until(Hello), broker.send(SEALED_PLACE)))
    joining.start()
    rung = Event()
    with closing(ControlThread(broker.server.endpoint, IDENTITY)) as control:
        control.start(control.join(PATIENCE), "ipc://0", Progress(), steps=10, wake=rung.set)
        joining.join()
        broker.until(Report)
        yield control, rung


@pytest.fixture
def placed(broker: BrokerEnd, joined: tuple[ControlThread, Event]) -> tuple[ControlThread, Event]:
    """The same after the broker has proven that it has the secret."""
    broker.send(SEALED_PLACE, SECRET)
    return joined


def test_a_worker_obeys_what_its_broker_has_sealed_once_and_nothing_else(broker: BrokerEnd, placed) -> None:
    """Two unsealed announcements deleted all snapshots of a stage."""
    control, rung = placed
    for message in (Trim(10**6), Stop("so it is", 0), Peers({1: (8, "tcp://127.0.0.1:9")}), Refused("so it is", 1)):
        broker.send(message), broker.send(message, b"a guess".ljust(32))
    broker.send(Trim(3), SECRET)
    broker.repeat()
    broker.send(Trim(4), SECRET)
    while len(control.commands) < 2:
        assert rung.wait(PATIENCE)
        rung.clear()
    assert list(control.commands) == [Trim(3), Trim(4)]
    assert control.ignored == {"Trim": 3, "Stop": 2, "Peers": 2, "Refused": 2}


@pytest.mark.parametrize(
    "renewal", [Refused("the run is over", 1), msgspec.structs.replace(SEALED_PLACE, incarnation=9, keep=True)]
)
def test_a_broker_that_has_lost_the_secrets_is_obeyed_until_one_has_proven_that_it_has_them(
    broker: BrokerEnd, joined, renewal: FromBroker
) -> None:
    control, rung = joined
    broker.send(renewal)
    if isinstance(renewal, Refused):
        assert rung.wait(PATIENCE)
        assert list(control.commands) == [renewal]
    else:
        while broker.until(Report).incarnation != 9:
            continue
    assert not control.ignored


def test_what_the_compute_loop_sends_goes_out_with_its_reports(broker: BrokerEnd, start) -> None:
    control, _ = start()
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
    control, rung = start(lifeline=cut)
    assert rung.wait(PATIENCE)
    assert [type(command) for command in control.commands] == [Stopped]


def test_a_worker_whose_lifeline_is_cut_asks_for_no_place(broker: BrokerEnd, cut: Lifeline) -> None:
    control = ControlThread(broker.server.endpoint, IDENTITY, lifeline=cut)
    with closing(control), pytest.raises(Stopped, match="the process that started this worker is gone"):
        control.join(PATIENCE)


def test_a_worker_that_finds_no_broker_says_so() -> None:
    control = ControlThread("tcp://127.0.0.1:9", IDENTITY)
    with closing(control), pytest.raises(BrokerUnreachable, match="no broker"):
        control.join(0.1)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times after a refusal are tenths of a second."""
    monkeypatch.setattr(refusals, "REDIAL", 0.1)
    monkeypatch.setattr(control_thread, "REVOKED", 0.3)


class AdmittedLater:
    """An admission by a person, who has seen that a key was refused a few times."""

    def __init__(self) -> None:
        self.refused = 0

    def admits(self, public: PublicKey) -> bool:
        self.refused += 1
        return self.refused > 3

    def has_revoked(self, public: PublicKey) -> bool:
        return False


def test_a_worker_whose_key_is_not_admitted_says_so_once_and_has_its_place_once_it_is(quick: None) -> None:
    end = BrokerEnd(ServerKeys(BROKER, AdmittedLater()))
    with closing(end.server), closing(ControlThread(end.server.endpoint, IDENTITY, WORKER)) as control:
        broker = threading.Thread(target=lambda: (end.until(Hello), end.send(PLACE)))
        broker.start()
        with capture_logs() as logged:
            assert control.join(PATIENCE) == PLACE
        broker.join()
        assert sum(f"stageline keys admit {WORKER.public.text}. It" in each["event"] for each in logged) == 1


def test_a_worker_whose_key_is_not_admitted_in_time_ends_with_the_command_that_admits_it(quick: None) -> None:
    end = BrokerEnd(ServerKeys(BROKER, Admitted([])))
    with closing(end.server), closing(ControlThread(end.server.endpoint, IDENTITY, WORKER)) as control:
        ended: BrokerUnreachable | None = None
        while not isinstance(ended, KeyRefused):  # the first attempts end before the broker has refused
            with pytest.raises(BrokerUnreachable) as raised:
                control.join(0.1)
            ended = raised.value
        assert f"stageline keys admit {WORKER.public.text}" in str(ended)
        assert ended.exit_code == ExitCode.NOT_ADMITTED


def test_a_worker_does_not_wait_where_there_is_another_broker(quick: None) -> None:
    end = BrokerEnd(ServerKeys(BROKER, Admitted()))
    other = keyed(parted(end.server.endpoint)[0], STRANGER.public)
    refused = pytest.raises(KeyRefused, match="another key than the address says")
    with closing(end.server), closing(ControlThread(other, IDENTITY, WORKER)) as control, refused:
        control.join(PATIENCE)


def test_a_worker_whose_key_is_revoked_ends_with_the_command_that_admits_it_again(quick: None) -> None:
    admission = Admitted()
    end, rung = BrokerEnd(ServerKeys(BROKER, admission)), Event()
    with closing(end.server), closing(ControlThread(end.server.endpoint, IDENTITY, WORKER)) as control:
        control.start(PLACE, "ipc://0", Progress(), steps=10, wake=rung.set)
        end.until(Hello)
        admission.pairs.clear()
        end.server.readmit()
        while not rung.wait(0.05):
            end.server.receive(0.0)
        (stop,) = control.commands
        assert isinstance(stop, Stop)
        assert stop.code == ExitCode.NOT_ADMITTED
        assert f"stageline keys admit {WORKER.public.text}" in stop.reason
