"""A run that a person pauses: what its broker tells the workers, keeps, and answers."""

from dataclasses import replace

import msgspec
import pytest

from stageline.broker.control.measures import RunMeasures
from stageline.broker.control.messages import Answer, Ask, Exited, Refused, Stop, StopRun
from stageline.broker.control.pauses import HeldBack, Hold, PauseRun
from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.run import RunConfig
from stageline.broker.ledger.milestones import Milestone
from stageline.pipeline.schedule import Mode, make_schedule
from support.conversation import SNAPSHOTS, Conversation, Sends, hello, name, report, steps

TERMS = replace(SNAPSHOTS, snapshot_every=5)
STOOD = "waits for the end of a pause"
PAUSE = PauseRun("ada", "a backup")
RESUME = PauseRun("bob", resumes=True)


class PausingRun(Conversation):
    """Its workers have begun."""

    def __init__(self, store: MemoryStore | None = None, terms: RunConfig = TERMS) -> None:
        super().__init__(store, terms=terms)
        if store is None:
            for index in (0, 1):
                self.join(index)
            self.after(0.1)
            for index in (0, 1):
                self.reported(index, steps=steps(index, 0, 1, loss=0.5 if index else None))

    def reported(self, index: int, held: HeldBack | None = None, **more: object) -> Sends:
        said = {} if held is None else {"held": held}
        return self.send(name(index), report(index, actions=1, now=STOOD, **said, **more))

    def settled(self) -> int:
        """Pauses, and all workers have answered: returns the number of the order."""
        number = holds(self.send(b"me", PAUSE))[-1].number
        self.reported(0, HeldBack(number, 4))
        self.reported(1, HeldBack(number, 3))
        return holds(self.after(0.1))[-1].number

    def in_effect(self) -> int:
        number = self.settled()
        for index in (0, 1):
            self.reported(index, HeldBack(number, 4, stands=True))
        return number

    def asked(self, request: PauseRun) -> dict[str, object]:
        (answer,) = [message for to, message in self.send(b"me", request) if to == b"me"]
        assert isinstance(answer, Answer)
        assert answer.schema == "pause/1"
        return answer.facts

    def why(self) -> dict[str, object]:
        ((_, answer),) = self.send(b"me", Ask("why"))
        assert isinstance(answer, Answer)
        return answer.facts


def holds(sends: Sends, index: int = 0) -> list[Hold]:
    return [message for to, message in sends if to == name(index) and isinstance(message, Hold)]


def test_a_pause_is_stored_and_told_settles_when_all_have_answered_and_is_in_effect_when_all_stand() -> None:
    run = PausingRun()
    sends = run.send(b"me", PAUSE)
    (first,) = holds(sends)
    assert first == holds(sends, 1)[0]
    assert (first.step, first.settled) == (2, False)
    assert MemoryStore.load(run.store).facts["pauses"]["number"] == first.number
    run.reported(0, HeldBack(first.number, 4))
    assert not [each for each in holds(run.after(1)) if each.settled]
    run.reported(1, HeldBack(first.number, 3))
    (settled,) = {each for each in holds(run.after(0.1)) if each.settled}
    assert settled.step == 4
    assert settled.number > first.number
    run.reported(0, HeldBack(settled.number, 4, stands=True))
    paused = run.status()["paused"]
    assert (paused["by"], paused["reason"], paused["step"], paused["in_effect"]) == ("ada", "a backup", 4, False)
    assert "paused by ada" in run.why()["text"]
    assert "not every worker has come there" in run.why()["text"]
    run.reported(1, HeldBack(settled.number, 4, stands=True))
    assert run.status()["paused"]["in_effect"]
    why = run.why()
    assert why["text"].startswith("the run was paused by ada")
    assert "before step 4 (a backup)" in why["text"]
    assert why["root"] == {"cause": "paused", "worker": None}
    assert "run resume" in why["action"]


def test_a_run_goes_on_once_a_person_says_so_and_a_request_that_is_met_changes_nothing() -> None:
    run = PausingRun()
    number = run.in_effect()
    assert run.asked(PauseRun("eve")) == {"run": "run-1", "changed": False, "paused": run.status()["paused"]}
    (over,) = holds(run.send(b"me", RESUME))
    assert (over.step, over.number > number) == (None, True)
    assert run.status()["paused"] is None
    assert run.asked(RESUME)["changed"] is False
    assert run.core.run.pauses.pauses[0].ended == "bob"


def test_who_has_not_heard_is_told_again_and_nobody_else() -> None:
    run = PausingRun()
    number = holds(run.send(b"me", PAUSE))[-1].number
    run.reported(0, HeldBack(number, 2))
    again = run.after(1)
    assert not holds(again, 0)
    assert len(holds(again, 1)) >= 3


def test_a_worker_that_takes_a_lost_ones_place_hears_of_the_pause_before_it_hears_of_its_peers() -> None:
    run = PausingRun()
    number = run.in_effect()
    run.send(b"supervisor", Exited(1, 101, -9))
    run.after(1)
    run.reported(0, HeldBack(number, 4, stands=True))
    assert not run.status()["paused"]["in_effect"]
    assert run.why()["root"]["cause"] == "missing"
    sends = run.send(b"another", replaced := hello(1))
    incarnation = next(message.incarnation for to, message in sends if to == b"another")
    told = [m for to, m in run.send(b"another", with_endpoint(run, replaced, incarnation)) if to == b"another"]
    kinds = [type(message).__name__ for message in told]
    assert kinds.index("Hold") < kinds.index("Peers")
    assert told[kinds.index("Hold")] == Hold(number, 4, settled=True)


def with_endpoint(run: PausingRun, said: object, incarnation: int) -> object:
    return msgspec.structs.replace(said, incarnation=incarnation, endpoint="ipc://another", queues=run.queues(1))


def test_a_broker_that_was_restarted_goes_on_with_the_pause() -> None:
    run = PausingRun()
    number = run.in_effect()
    another = PausingRun(run.store)
    assert another.core.run.pauses.order == Hold(number, 4, settled=True)
    paused = another.status()["paused"]
    assert (paused["by"], paused["step"], paused["in_effect"]) == ("ada", 4, False)  # no worker has reported to it


def test_records_that_are_lost_are_made_anew_from_what_workers_report() -> None:
    run = PausingRun()
    run.reported(0, HeldBack(7000, 4, stands=True))
    assert run.status()["paused"]["step"] is None
    (told,) = set(holds(run.after(0.3), 1))
    assert told == Hold(7000, 4)
    run.reported(1, HeldBack(7000, 4))
    (settled,) = {each for each in holds(run.after(0.1), 1) if each.settled}
    assert (settled.step, settled.number > 7000) == (4, True)
    run.reported(0, HeldBack(10**9, None))
    assert run.status()["paused"] is None


def test_a_stop_ends_a_paused_run_at_the_step_of_the_pause_and_the_pause_with_it() -> None:
    run = PausingRun()
    run.settled()
    sends = run.send(b"me", StopRun("enough", at_step_end=True)) + run.after(2)
    (stop,) = {message for to, message in sends if to == name(0) and isinstance(message, Stop)}
    assert stop.step is not None
    assert stop.step <= 4
    assert not [each for each in holds(sends) if each.step is None]
    assert run.core.run.pauses.present is None
    assert MemoryStore.load(run.store).facts["pauses"]["pauses"][0]["until"] is not None
    refused = [message for to, message in run.send(b"me", PAUSE) if to == b"me"]
    assert isinstance(refused[0], Refused)
    assert "is over" in refused[0].reason


def test_a_stop_that_comes_before_the_step_of_a_pause_is_known_ends_the_pause() -> None:
    run = PausingRun()
    run.send(b"me", PAUSE)
    sends = run.send(b"me", StopRun("enough", at_step_end=True))
    assert holds(sends)[-1].step is None
    refused = [message for to, message in run.send(b"me", PAUSE) if to == b"me"]
    assert isinstance(refused[0], Refused)
    assert "is to stop" in refused[0].reason


def test_a_paused_run_does_not_end_for_want_of_progress() -> None:
    run = PausingRun()
    number = run.in_effect()
    for _ in range(40):
        run.after(5)
        for index in (0, 1):
            run.reported(index, HeldBack(number, 4, stands=True))
    assert run.status()["reason"] is None


@pytest.mark.parametrize("number", [2**51, 2**62])
def test_a_number_that_no_broker_gives_is_not_taken_over(number: int) -> None:
    run = PausingRun()
    run.reported(0, HeldBack(number, 4))
    assert run.core.run.pauses.number == 0


def test_the_snapshot_at_a_pause_may_be_reported_though_none_is_due_there() -> None:
    run = PausingRun()
    run.settled()
    for index in (0, 1):
        of = steps(index, 2, 3, loss=0.5 if index else None)
        run.reported(index, steps=of, snapshots=[(index, 4)], number=1)
    assert run.status()["checkpoint"] == 4


def test_a_pause_shows_in_the_measures_and_does_not_count_as_a_time_without_steps() -> None:
    run = PausingRun()

    def measured() -> RunMeasures:
        ((_, answer),) = run.send(b"me", Ask("measures"))
        assert isinstance(answer, Answer)
        return msgspec.convert(answer.facts, RunMeasures)

    run.in_effect()
    run.now += 5.0
    found = measured()
    assert (found.paused, found.stalled) == (True, None)
    run.asked(RESUME)
    run.now += 2.0
    found = measured()
    assert (found.paused, found.stalled) == (False, 2.0)


def test_a_pause_and_its_end_are_milestones_of_the_run() -> None:
    run = PausingRun()

    def milestones() -> list[tuple[object, ...]]:
        ((_, answer),) = run.send(b"me", Ask("history"))
        assert isinstance(answer, Answer)
        found = msgspec.convert(answer.facts["milestones"], list[Milestone])
        assert [each.at for each in found] == sorted(each.at for each in found)
        return [(each.what, each.step, each.why) for each in found if each.what.startswith("pause")]

    assert not milestones()
    run.in_effect()
    paused = ("pause", 4, "by ada (a backup)")
    assert milestones() == [paused]
    run.now += 2.0
    run.asked(RESUME)
    assert milestones() == [paused, ("pause-end", 4, "by bob")]
    run.send(b"me", PAUSE)  # ends before workers agree on a step: the run has never paused
    run.asked(RESUME)
    assert milestones() == [paused, ("pause-end", 4, "by bob")]
    another = PausingRun(run.store)
    assert [each.what for each in another.core.run.pauses.milestones] == ["pause", "pause-end"]


@pytest.mark.parametrize(("mode", "told"), [("sync", True), ("async", False)])
def test_only_a_schedule_that_flushes_has_done_the_steps_before_a_pause(mode: Mode, told: bool) -> None:
    terms = replace(TERMS, schedule=make_schedule("1f1b", ((0,), (1,)), 4 if mode == "sync" else 1, mode=mode))
    run = PausingRun(terms=terms)
    run.in_effect()
    text = str(run.why()["text"])
    assert ("has done the steps before it" in text) is told
    assert ("earlier steps under way" in text) is not told
