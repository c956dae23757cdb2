"""Messages of a worker to the broker and its use of the answers, without sockets, threads or clocks."""

from collections import deque

import msgspec
import pytest

from stageline.broker.control.messages import (
    CONTROL_VERSION,
    MOST_ROUNDS,
    Assigned,
    Confirmed,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Peers,
    Refused,
    Report,
    Standby,
    Stop,
    ToBroker,
)
from stageline.broker.control.place_keys import PlaceKeys
from stageline.broker.control.records import EvaluationRecord, Inspection, ScheduleOrder
from stageline.workers.control.joining import Joining, Stopped, WorkerIdentity
from stageline.workers.control.session import AGAIN, UNANSWERED, Reporter, Session
from stageline.workers.runtime.progress import Progress
from support.conversation import PLAN

RUN = "run-1"
PLACE = Assigned(RUN, 0, 7, 20)
FINISHED = Finished(7, {})
BASE = Hello(CONTROL_VERSION, PLAN, "worker-0", "host", 100, "", 0)


Outbox = deque[Failed | Finished | Goodbye]


class Folder:
    """The snapshots of stage 0, which worker 0 has."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps
        self.read: list[int] = []
        self.abandoned: list[int] = []

    def snapshots(self, run: str) -> list[tuple[int, int]]:
        assert run == RUN
        return [(0, step) for step in self._steps]

    def disk(self, run: str) -> str:
        assert run == RUN
        return "a disk"

    def can_begin(self, assigned: Assigned) -> bool:
        return assigned.step in self._steps

    def inspect(self, run: str, step: int, claim: int | None) -> Inspection:
        assert (run, claim) == (RUN, 0)
        self.read.append(step)
        return Inspection(step, [0], [])

    def abandon(self, assigned: Assigned) -> None:
        self.abandoned.append(assigned.step)


def identity(*steps: int, folder: Folder | None = None) -> WorkerIdentity:
    return WorkerIdentity(BASE, folder or Folder(*steps))


def new_session(identity: WorkerIdentity, progress: Progress, outbox: Outbox) -> Session:
    reporter = Reporter(progress, PLACE.incarnation, 100, lambda: 0.0)
    return Session(identity, PLACE, "ipc://0", reporter, outbox, now=0.0)


@pytest.fixture
def progress() -> Progress:
    """The last stage's, which began at step 20 and has done 20 and 21."""
    progress = Progress(since=0.0, complete=20, last=0, finished={0: 20})
    progress.restored({0: 0.9, 10: 0.8}, [])
    for step in (20, 21):
        progress.losses |= {20: 0.7} if step == 20 else {}
        progress.closed(0, step, {20: 0.7, 21: 0.6}[step])
    progress.durable(0, 22)
    return progress


@pytest.fixture
def outbox() -> Outbox:
    return deque()


@pytest.fixture
def session(progress: Progress, outbox: Outbox) -> Session:
    """With a broker that has received all so far, at time 1."""
    session = new_session(identity(20, 22), progress, outbox)
    list(session.due(0.0))
    session.receive(PLACE, 0.5)
    list(session.due(0.6))
    session.receive(Confirmed(1), 1.0)
    assert session.reporter.all_confirmed
    return session


def kinds(sent: "list[ToBroker]") -> list[type]:
    return [type(message) for message in sent]


# Joining


def test_a_place_is_taken():
    joining = Joining(identity(20))
    assert joining.hello().snapshots is None
    assert joining.receive(PLACE) == PLACE


def test_a_worker_on_standby_that_does_not_know_the_run_reports_no_snapshots():
    joining = Joining(identity(20))
    assert joining.receive(Standby("full")) is None
    assert joining.hello().snapshots is None


def test_an_inspection_of_snapshots_is_sent_at_once_and_made_once():
    folder = Folder(20, 40)
    joining = Joining(identity(folder=folder))
    joining.hello()
    assert not joining.urgent
    for _ in range(2):
        joining.receive(Standby("the run goes on when all have read", RUN, 40))
    assert joining.urgent
    sent = joining.hello()
    assert (sent.inspection, sent.snapshots) == (Inspection(40, [0], []), [(0, 20), (0, 40)])
    joining.receive(Standby("the run goes on when all have read", RUN, 40))
    assert not joining.urgent
    joining.receive(Standby("and the older ones", RUN, 20))
    assert joining.hello().inspection == Inspection(20, [0], [])
    assert folder.read == [40, 20]


def test_a_worker_of_a_run_that_was_never_restarted_as_a_whole_deletes_nothing():
    folder = Folder(20, 40)
    joining = Joining(identity(folder=folder))
    joining.receive(Standby("the run goes on when all have read", RUN, 20))
    assert joining.receive(PLACE) == PLACE
    assert folder.abandoned == []


def test_a_worker_of_a_run_that_was_restarted_as_a_whole_deletes_what_an_ended_life_of_it_left():
    """A result was compared with the former one, though the run may have been resumed because that was wrong."""
    folder = Folder(20, 40)
    joining, place = Joining(identity(folder=folder)), msgspec.structs.replace(PLACE, since=6)
    for step in (40, 20):
        joining.receive(Standby("the run goes on when all have read", RUN, step))
    assert joining.receive(place) == place
    assert folder.abandoned == [20]


def test_the_folder_of_another_run_is_neither_read_nor_changed():
    folder = Folder(20, 40)
    joining = Joining(WorkerIdentity(BASE, folder, lambda run: f"{run} is another run"))
    for message in (Standby("the run goes on when all have read", RUN, 40), PLACE):
        with pytest.raises(Stopped, match="run-1 is another run") as stopped:
            joining.receive(message)
        assert stopped.value.exit_code == 78
        assert joining.hello().snapshots is None
    assert (folder.read, folder.abandoned) == ([], [])


def test_once_the_run_is_known_hello_lists_its_snapshots():
    joining = Joining(identity(20, 40))
    joining.receive(Standby("the broker asks everyone", RUN))
    assert joining.hello().snapshots == [(0, 20), (0, 40)]
    assert joining.hello().incarnation == 0


def test_a_place_that_begins_with_a_deleted_snapshot_is_not_taken_and_the_broker_learns_why():
    joining = Joining(identity(40))
    assert joining.receive(PLACE) is None
    sent = joining.hello()
    assert (sent.incarnation, sent.memory, sent.snapshots) == (7, None, [(0, 40)])
    joining.receive(Standby("the broker asks everyone", RUN))
    assert joining.hello().incarnation == 0
    assert joining.receive(Assigned(RUN, 0, 9, 40)) is not None


@pytest.mark.parametrize("message", [Refused("another plan", 78), Stop("the run is over", 1)], ids=str)
def test_a_worker_that_is_refused_exits_with_the_given_code(message):
    with pytest.raises(Stopped) as turned:
        Joining(identity()).receive(message)
    assert turned.value.exit_code == message.code


# At work


def test_hello_is_sent_until_it_is_answered(progress):
    session = new_session(identity(20), progress, deque())
    assert kinds(list(session.due(0.0))) == [Hello, Report]
    assert kinds(list(session.due(AGAIN / 2))) == [Report]
    assert kinds(list(session.due(AGAIN))) == [Hello, Report]
    assert session.receive(PLACE, 0.5) is None
    assert kinds(list(session.due(2 * AGAIN))) == [Report]


def test_hello_holds_what_a_broker_may_have_lost(session, progress):
    session.reconnected()
    hello, _ = session.due(1.0)
    assert (hello.endpoint, hello.incarnation, hello.snapshots) == ("ipc://0", 7, [(0, 20), (0, 22)])
    assert (hello.memory.run, hello.memory.index, hello.memory.complete, hello.memory.step) == (RUN, 0, 20, 22)


def test_without_recovery_hello_holds_nothing_that_a_broker_may_have_lost(progress):
    plain = WorkerIdentity(BASE)
    hello, _ = new_session(plain, progress, deque()).due(0.0)
    assert (hello.memory, hello.snapshots) == (None, None)


def test_another_broker_receives_again_how_far_the_stage_is_and_the_losses_that_count(session):
    session.reconnected()
    session.receive(PLACE, 0.9)
    (report,) = session.due(1.0)
    assert {record.step: record.loss for record in report.steps} == {0: 0.9, 10: 0.8, 20: 0.7, 21: 0.6}
    assert report.snapshots == [(0, 22)]
    session.receive(Confirmed(1), 1.1)  # what the former broker had still to send
    assert not session.reporter.all_confirmed
    session.receive(Confirmed(report.number), 1.1)
    assert session.reporter.all_confirmed


def test_nothing_long_is_sent_before_the_broker_knows_from_whom(session):
    session.reconnected()
    _, report = session.due(1.0)
    assert (report.steps, report.snapshots, report.number) == ([], [], 0)
    assert not session.reporter.all_confirmed


def test_hello_is_repeated_to_a_broker_that_does_not_answer_reports(session):
    assert Hello not in kinds(list(session.due(1.0 + UNANSWERED)))
    assert Hello in kinds(list(session.due(1.1 + UNANSWERED)))


def test_a_new_incarnation_is_taken_and_everything_sent_again_under_it(session, outbox):
    outbox.append(FINISHED)
    assert session.receive(Assigned(RUN, 0, 5, 20, keep=True), 1.0) is None
    assert session.reporter.incarnation == 7
    session.receive(Assigned(RUN, 0, 9, 20, keep=True), 1.0)
    (report,) = session.due(1.0)
    assert (report.incarnation, len(report.steps)) == (9, 4)
    session.receive(Confirmed(report.number), 1.1)
    _, finished = session.due(1.2)
    outbox.append(Failed(7, "the disk is full", 1))
    (failed,) = session.due(1.3)
    assert (finished.incarnation, failed.incarnation) == (9, 9)


def test_the_orders_in_the_place_that_a_worker_keeps_are_told_to_its_loop(session):
    orders = (ScheduleOrder(22, "window", (3, 2)),)
    place = Assigned(RUN, 0, 9, 20, keep=True, orders=orders, closed=25)
    assert session.receive(place, 1.0) == place


@pytest.mark.parametrize("parting", [Failed(7, "the disk is full", 1), Goodbye(7, "interrupted")])
def test_a_worker_that_has_said_that_it_ends_says_that_again_and_nothing_else(session, outbox, parting):
    """The broker takes one that says anything else for alive."""
    list(session.due(1.0))
    outbox.append(parting)
    session.reconnected()
    for now in (1.1, 1.2, 9.0):
        assert list(session.due(now))[-1] == parting
        assert Hello not in kinds(list(session.due(now)))


def test_finished_is_sent_when_all_else_is_confirmed_and_until_the_run_is_stopped(session, progress, outbox):
    outbox.append(FINISHED)
    progress.closed(0, 22, 0.5)
    assert Finished not in kinds(list(session.due(1.0)))
    session.receive(Confirmed(2), 1.1)
    for now in (1.1, 1.2):
        assert kinds(list(session.due(now)))[-1] is Finished


def test_what_concerns_the_compute_loop_is_handed_on(session):
    for message in (Peers({}), Stop("enough", 1), Refused("stale", 1)):
        assert session.receive(message, 1.0) == message


def test_rounds_of_evaluation_are_told_until_they_are_confirmed_and_before_later_snapshots():
    progress = Progress()
    reporter = Reporter(progress, 1, 10_000, clock=lambda: 0.0)
    rounds = [EvaluationRecord(step, 8, 0.5) for step in range(1, MOST_ROUNDS + 3)]
    progress.evaluations.extend(rounds)
    progress.durable(0, 10_000)
    first = reporter.report(0.0)
    assert (first.evaluations, first.snapshots) == (rounds[:MOST_ROUNDS], [])
    assert reporter.report(AGAIN + 1.0).evaluations == rounds[:MOST_ROUNDS]  # the confirmation was lost
    reporter.confirmed(2)
    second = reporter.report(9.0)
    assert (second.evaluations, second.snapshots) == (rounds[MOST_ROUNDS:], [(0, 10_000)])
    assert not reporter.all_confirmed
    reporter.confirmed(second.number)
    assert reporter.all_confirmed
    reporter.resend_all(7)
    assert not reporter.all_confirmed
    assert reporter.report(10.0).evaluations == rounds[:MOST_ROUNDS]


def test_a_place_that_brings_other_keys_is_told_to_the_loop_once(session):
    place = msgspec.structs.replace(PLACE, keys=PlaceKeys(0, (b"", b"k" * 32), generation=1))
    assert session.receive(place, 1.0) == place
    assert session.receive(place, 2.0) is None
