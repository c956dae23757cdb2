"""What a worker says to the broker and makes of the answers, told without sockets, threads or clocks."""

import pytest

from stageline.broker.control.protocol import (
    Assigned,
    Failed,
    Finished,
    Heard,
    Hello,
    Inspection,
    Peers,
    Refused,
    Report,
    Standby,
    Stop,
    ToBroker,
)
from stageline.workers.control.session import AGAIN, UNANSWERED, Joining, Session, TurnedAway, WorkerIdentity
from stageline.workers.runtime.progress import Progress
from support.conversation import PLAN

RUN = "run-1"
PLACE = Assigned(RUN, 0, 7, 20)
FINISHED = Finished(7, {})


class Folder:
    """The snapshots of stage 0, which worker 0 has."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps
        self.read: list[int] = []
        self.abandoned: list[int] = []

    def snapshots(self, run: str) -> list[tuple[int, int]]:
        assert run == RUN
        return [(0, step) for step in self._steps]

    def can_begin(self, assigned: Assigned) -> bool:
        return assigned.step in self._steps

    def inspect(self, run: str, step: int, claim: int | None) -> Inspection:
        assert (run, claim) == (RUN, 0)
        self.read.append(step)
        return Inspection(step, [0], [])

    def abandon(self, assigned: Assigned) -> None:
        self.abandoned.append(assigned.step)


def introduction(*steps: int, folder: Folder | None = None) -> WorkerIdentity:
    return WorkerIdentity(PLAN, "worker-0", "desk", 100, 0, {}, folder or Folder(*steps))


@pytest.fixture
def progress() -> Progress:
    """The last stage's, which began at step 20 and has done 20 and 21."""
    progress = Progress(since=0.0)
    progress.begin([0], 20, last=0)
    progress.restored({0: 0.9, 10: 0.8})
    for step in (20, 21):
        progress.losses |= {20: 0.7} if step == 20 else {}
        progress.closed(0, step, {20: 0.7, 21: 0.6}[step])
    progress.durable(0, 22)
    return progress


@pytest.fixture
def letters(progress: Progress) -> Session:
    """To a broker that has heard all so far, at time 1."""
    letters = Session(introduction(20, 22), PLACE, "ipc://0", progress, steps=100, now=0.0)
    list(letters.due(0.0))
    letters.hear(PLACE, 0.5)
    letters.hear(Heard(1), 1.0)
    assert letters.all_confirmed
    return letters


def kinds(said: "list[ToBroker]") -> list[type]:
    return [type(sentence) for sentence in said]


# Joining


def test_a_place_is_taken():
    joining = Joining(introduction(20))
    assert joining.hello().snapshots is None
    assert joining.hear(PLACE) == PLACE


def test_who_stands_by_is_not_told_which_run_it_is_and_says_nothing_of_its_disk():
    joining = Joining(introduction(20))
    assert joining.hear(Standby("full")) is None
    assert joining.hello().snapshots is None


def test_a_broker_that_asks_what_snapshots_are_like_is_told_at_once_and_they_are_read_once():
    folder = Folder(20, 40)
    joining = Joining(introduction(folder=folder))
    joining.hello()
    assert not joining.urgent
    for _ in range(2):
        joining.hear(Standby("the run goes on when all have read", RUN, 40))
    assert joining.urgent
    said = joining.hello()
    assert (said.inspection, said.snapshots) == (Inspection(40, [0], []), [(0, 20), (0, 40)])
    joining.hear(Standby("the run goes on when all have read", RUN, 40))
    assert not joining.urgent
    joining.hear(Standby("and the older ones", RUN, 20))
    assert joining.hello().inspection == Inspection(20, [0], [])
    assert folder.read == [40, 20]


def test_who_begins_at_an_older_checkpoint_than_it_was_asked_about_deletes_what_is_newer():
    folder = Folder(20, 40)
    joining = Joining(introduction(folder=folder))
    for step in (40, 20):
        joining.hear(Standby("the run goes on when all have read", RUN, step))
    assert joining.hear(PLACE) == PLACE
    assert folder.abandoned == [20]


def test_whoever_begins_where_it_was_asked_about_deletes_nothing():
    folder = Folder(20, 40)
    joining = Joining(introduction(folder=folder))
    joining.hear(Standby("the run goes on when all have read", RUN, 20))
    assert joining.hear(PLACE) == PLACE
    assert folder.abandoned == []


def test_a_broker_that_asks_is_told_which_snapshots_there_are():
    joining = Joining(introduction(20, 40))
    joining.hear(Standby("the broker asks everyone", RUN))
    assert joining.hello().snapshots == [(0, 20), (0, 40)]
    assert joining.hello().incarnation == 0


def test_a_place_that_begins_with_a_deleted_snapshot_is_not_taken_and_the_broker_learns_why():
    joining = Joining(introduction(40))
    assert joining.hear(PLACE) is None
    said = joining.hello()
    assert (said.incarnation, said.memory, said.snapshots) == (7, None, [(0, 40)])
    joining.hear(Standby("the broker asks everyone", RUN))
    assert joining.hello().incarnation == 0
    assert joining.hear(Assigned(RUN, 0, 9, 40)) is not None


@pytest.mark.parametrize("sentence", [Refused("another plan", 78), Stop("the run is over", 1)], ids=str)
def test_who_is_turned_away_leaves_with_the_code_it_was_told(sentence):
    with pytest.raises(TurnedAway) as turned:
        Joining(introduction()).hear(sentence)
    assert turned.value.code == sentence.code


# At work


def test_hello_is_said_until_it_is_answered(progress):
    letters = Session(introduction(20), PLACE, "ipc://0", progress, steps=100, now=0.0)
    assert kinds(list(letters.due(0.0))) == [Hello, Report]
    assert kinds(list(letters.due(AGAIN / 2))) == [Report]
    assert kinds(list(letters.due(AGAIN))) == [Hello, Report]
    assert letters.hear(PLACE, 0.5) is None
    assert kinds(list(letters.due(2 * AGAIN))) == [Report]


def test_hello_says_what_a_broker_may_have_lost(letters, progress):
    letters.connected()
    hello, _ = letters.due(1.0)
    assert (hello.endpoint, hello.incarnation, hello.snapshots) == ("ipc://0", 7, [(0, 20), (0, 22)])
    assert (hello.memory.run, hello.memory.index, hello.memory.complete, hello.memory.step) == (RUN, 0, 20, 22)


def test_where_nobody_is_replaced_hello_says_nothing_of_that(progress):
    plain = WorkerIdentity(PLAN, "worker-0", "desk", 100, 0, {})
    hello, _ = Session(plain, PLACE, "ipc://0", progress, steps=100, now=0.0).due(0.0)
    assert (hello.memory, hello.snapshots) == (None, None)


def test_another_broker_is_told_again_how_far_the_stage_is_and_the_losses_that_count(letters):
    letters.connected()
    _, report = letters.due(1.0)
    assert {record.step: record.loss for record in report.steps} == {0: 0.9, 10: 0.8, 20: 0.7, 21: 0.6}
    assert report.snapshots == [(0, 22)]
    letters.hear(Heard(1), 1.1)  # what the former broker had still to say
    assert not letters.all_confirmed
    letters.hear(Heard(report.number), 1.1)
    assert letters.all_confirmed


def test_a_broker_that_does_not_answer_reports_is_told_again_who_speaks(letters):
    assert Hello not in kinds(list(letters.due(1.0 + UNANSWERED)))
    assert Hello in kinds(list(letters.due(1.1 + UNANSWERED)))


def test_a_new_incarnation_is_taken_and_everything_said_again_under_it(letters):
    letters.say(FINISHED)
    assert letters.hear(Assigned(RUN, 0, 5, 20, keep=True), 1.0) is None
    assert letters.incarnation == 7
    letters.hear(Assigned(RUN, 0, 9, 20, keep=True), 1.0)
    (report,) = letters.due(1.0)
    assert (report.incarnation, len(report.steps)) == (9, 4)
    letters.hear(Heard(report.number), 1.1)
    letters.say(Failed(7, "the disk is full", 1))
    failed, _, finished = letters.due(1.2)
    assert (failed.incarnation, finished.incarnation) == (9, 9)


def test_finished_is_said_when_all_else_is_confirmed_and_until_the_run_is_stopped(letters, progress):
    letters.say(FINISHED)
    progress.closed(0, 22, 0.5)
    assert Finished not in kinds(list(letters.due(1.0)))
    letters.hear(Heard(2), 1.1)
    for now in (1.1, 1.2):
        assert kinds(list(letters.due(now)))[-1] is Finished


def test_what_concerns_the_compute_loop_is_handed_on(letters):
    for sentence in (Peers({}), Stop("enough", 1), Refused("zombie", 1)):
        assert letters.hear(sentence, 1.0) == sentence
