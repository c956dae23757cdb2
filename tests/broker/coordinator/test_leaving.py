"""Workers that leave on notice: what the broker orders, when a place is free, and what others see of it."""

from dataclasses import replace

import pytest

from stageline.broker.control.leaves import Leave, LeaveWorker, Leaving
from stageline.broker.control.messages import CONTROL_VERSION, Answer, Goodbye, Hello, Refused, Report
from stageline.broker.control.pauses import HeldBack, Hold, PauseRun
from stageline.broker.coordinator.run import RunConfig
from support.conversation import PLAN, SNAPSHOTS, TERMS, Conversation, Sends, name, report, steps

LEAVE = LeaveWorker("ada", 1, 60.0, "the machine is needed")
NOTICE = Leaving(60.0, "SIGTERM")


class NoticedRun(Conversation):
    """Its workers have begun, and finished two steps."""

    def __init__(self, terms: RunConfig = SNAPSHOTS) -> None:
        super().__init__(terms=terms)
        for index in (0, 1):
            self.join(index)
        self.after(0.1)
        for index in (0, 1):
            self.reported(index, steps=steps(index, 0, 1, loss=0.5 if index else None))

    def reported(self, index: int, **more: object) -> Sends:
        return self.send(name(index), report(index, actions=1, **more))

    def asked(self, request: LeaveWorker) -> dict[str, object] | str:
        (answer,) = [message for to, message in self.send(b"me", request) if to == b"me"]
        return answer.facts if isinstance(answer, Answer) else refused(answer)

    def saved(self) -> int:
        """Worker 1 gives notice, and checkpoint 3 is complete, before which both stand. The number of the order."""
        self.reported(1, leaving=NOTICE)
        number = holds(self.after(0.1))[-1].number
        for index in (0, 1):
            self.reported(index, held=HeldBack(number, 3, leaving=True), leaving=NOTICE if index else None)
        number = holds(self.after(0.1))[-1].number
        for index in (0, 1):
            found = {"steps": steps(index, 2), "snapshots": [(index, 3)], "held": HeldBack(number, 3, True, True)}
            self.reported(index, number=1, leaving=NOTICE if index else None, **found)
        return number


def newcomer(pid: int) -> Hello:
    return Hello(CONTROL_VERSION, PLAN, "worker-1", "other", pid, "", 1)


def refused(message: object) -> str:
    assert isinstance(message, Refused)
    return message.reason


def holds(sends: Sends) -> list[Hold]:
    return [message for to, message in sends if to == name(0) and isinstance(message, Hold)]


def test_a_worker_that_is_to_leave_is_told_until_its_reports_show_it() -> None:
    run = NoticedRun()
    sends = run.send(b"me", LEAVE)
    ((_, order),) = [each for each in sends if each[0] == name(1)]
    assert isinstance(order, Leave)
    assert (order.seconds, "ada" in order.reason, "needed" in order.reason) == (60.0, True, True)
    again = [message for to, message in run.after(1) if isinstance(message, Leave)]
    assert 0 < again[-1].seconds < again[0].seconds < 60
    run.reported(1, leaving=NOTICE)
    run.reported(0)
    assert not [message for _, message in run.after(1) if isinstance(message, Leave)]
    assert run.asked(LEAVE) == {"run": "run-1", "worker": 1, "changed": False, "incarnation": 2}


@pytest.mark.parametrize(
    ("terms", "index", "words"),
    [
        (SNAPSHOTS, 2, "workers are 0 to 1"),
        (TERMS, 1, "recovery.restarts"),
        (replace(SNAPSHOTS, restarts=0), 1, "recovery.restarts"),
    ],
)
def test_a_leave_that_cannot_be_is_refused_by_name(terms: RunConfig, index: int, words: str) -> None:
    found = NoticedRun(terms).asked(LeaveWorker("ada", index, 60.0))
    assert isinstance(found, str)
    assert words in found


def test_the_run_pauses_for_a_checkpoint_the_place_is_free_at_the_goodbye_and_the_run_goes_on() -> None:
    run = NoticedRun()
    number = run.saved()
    assert run.status()["checkpoint"] == 3
    assert "worker 1" in str(run.status()["paused"])
    run.send(name(1), Goodbye(2, "SIGTERM"))
    assert run.core.run.registry.missing == [1]
    (place,) = run.status()["recovering"]
    assert (place["index"], place["on_notice"], "SIGTERM" in place["how"]) == (1, True, True)
    over = holds(run.after(0.1))[-1]
    assert (over.number > number, over.step) == (True, None)
    assert run.status()["paused"] is None
    assert [(each.what, each.worker, each.step) for each in run.core.run.milestones.events] == [("leave", 1, 3)]
    place = run.assigned(b"new", newcomer(201))
    assert (place.index, place.step) == (1, 3)


def test_leaves_are_no_failed_restarts_however_many_there_are() -> None:
    run, incarnation = NoticedRun(), 2
    for times in range(5):
        sender = name(1) if not times else b"new"
        run.send(sender, Report(incarnation, 1, "waits", 0.0, 1.0, leaving=NOTICE))
        run.send(sender, Goodbye(incarnation, "SIGTERM"))
        assert run.core.run.outcome is None
        incarnation = run.assigned(b"new", newcomer(201 + times)).incarnation
        run.reported(0)
    assert run.status()["restarts"] == 5


def test_a_goodbye_without_notice_is_believed_once_its_worker_is_silent() -> None:
    run = NoticedRun()
    run.send(name(1), Goodbye(2, "lacks memory"))
    assert run.core.run.registry.missing == []
    run.after(1.1)
    assert run.core.run.registry.missing == [1]


def test_a_person_who_pauses_the_run_while_a_worker_leaves_keeps_it_paused() -> None:
    run = NoticedRun()
    run.saved()
    assert run.status()["paused"]["by"] == "worker 1"
    ((_, answer),) = [each for each in run.send(b"me", PauseRun("ada", "a backup")) if each[0] == b"me"]
    assert isinstance(answer, Answer)
    assert answer.facts["changed"]
    run.send(name(1), Goodbye(2, "SIGTERM"))
    run.after(1)
    assert (run.status()["paused"]["by"], run.core.run.registry.missing) == ("ada", [1])


def test_lost_records_learn_that_a_pause_is_for_leavers() -> None:
    run = NoticedRun()
    run.reported(0, held=HeldBack(5, 3, leaving=True))
    assert run.core.run.pauses.present is not None
    run.reported(1)
    run.after(0.2)
    assert run.core.run.pauses.present is None


def test_a_worker_that_dies_during_its_notice_has_left_as_well() -> None:
    run = NoticedRun()
    run.reported(1, leaving=NOTICE)
    while not run.core.run.registry.missing:
        run.reported(0)
        run.after(1)
    assert [each.what for each in run.core.run.milestones.events] == ["leave"]
    assert run.core.run.replacements.in_a_row[1] == 0
    assert run.core.run.pauses.present is None


def test_a_leave_is_known_to_a_broker_that_is_started_again() -> None:
    run = NoticedRun()
    run.saved()
    run.send(name(1), Goodbye(2, "SIGTERM"))
    again = Conversation(run.store, run.now, SNAPSHOTS)
    (place,) = again.status()["recovering"]
    assert (place["index"], place["on_notice"]) == (1, True)
