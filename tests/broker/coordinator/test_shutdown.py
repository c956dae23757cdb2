"""A run is stopped: the exit code says whether it can go on, and a run that can is resumed."""

import pytest

from stageline.broker.control.messages import Exited, Goodbye, Refused, Report, Stop, StopRun
from stageline.broker.control.records import EvaluationRecord
from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.run import DELAY, OtherRun, RunConfig, RunPhase, run_of
from stageline.broker.ledger.losses import PARTING
from support.conversation import PLAN, SNAPSHOTS, TERMS, Conversation, finished, having_read, name, report, steps

INTERRUPT = StopRun("interrupted", at_step_end=True)


def talk_at(done: int, *, snapshot: int = 0, terms: RunConfig = SNAPSHOTS) -> Conversation:
    """Both stages have finished the steps before `done`, and have a snapshot of step `snapshot`."""
    talk = Conversation(terms=terms)
    for index in (0, 1):
        talk.join(index)
    tell(talk, done, snapshot)
    if done:
        talk.after(DELAY + 0.1)
    return talk


def tell(talk: Conversation, done: int, snapshot: int = 0) -> None:
    for index in (0, 1):
        snapshots = [(index, snapshot)] if snapshot else []
        records = steps(index, *range(done), loss=0.5)
        talk.send(name(index), Report(index + 1, 7, "computes", 0.0, 0.0, records, number=1, snapshots=snapshots))


def stop_of(talk: Conversation, said: StopRun = INTERRUPT) -> Stop:
    first, *_ = [message for _, message in talk.send(b"train", said) if isinstance(message, Stop)]
    return first


def resumed(talk: Conversation) -> Conversation:
    assert run_of(talk.store, PLAN, "run-2", b"", resume=True, alone=True) == "run-1"
    return Conversation(talk.store, now=talk.now + 100.0, terms=SNAPSHOTS)


def test_a_stopped_run_with_a_checkpoint_names_it():
    stop = stop_of(talk_at(37, snapshot=20))
    assert (stop.code, stop.reason) == (75, "interrupted; the state after 20 steps is saved")


def test_a_run_without_a_checkpoint_has_saved_nothing():
    stop = stop_of(talk_at(7))
    assert (stop.code, stop.reason) == (130, "interrupted; nothing is saved yet")


def test_a_run_without_snapshots_ends_with_the_requested_code():
    assert stop_of(talk_at(7, terms=TERMS)) == Stop("interrupted", 130)


def test_a_checkpoint_that_workers_leave_behind_makes_the_outcome_better():
    talk = talk_at(7)
    stop_of(talk)
    tell(talk, 8, snapshot=8)
    assert (talk.status()["code"], talk.status()["reason"]) == (75, "interrupted; the state after 8 steps is saved")
    assert Coordinator(SNAPSHOTS, talk.store, "run-1", talk.now).run.outcome == talk.core.run.outcome


def test_a_failure_is_not_made_better():
    talk = talk_at(7)
    talk.send(name(1), Goodbye(2, "told")), talk.after(PARTING), talk.send(b"supervisor", Exited(1, 9, 78, 78))
    before = talk.core.run.outcome
    tell(talk, 8, snapshot=8)
    assert talk.core.run.outcome == before is not None


# Stages run ahead of each other: told to finish "the step", each would stop after another one.


def runs_on(talk: Conversation, first: int, last: int, seconds: float) -> None:
    """Stage 0 begins the steps up to `last`, evenly over the time, and tells ten times a second."""
    beats = round(seconds * 10)
    for beat in range(1, beats + 1):
        done = first + (last - first) * beat // beats
        talk.send(name(0), Report(1, done, "computes", 0.0, 0.0, steps(0, *range(done))))
        talk.after(0.1)


def test_all_stages_stop_after_one_step_which_none_has_passed():
    talk = talk_at(5)
    runs_on(talk, 5, 25, 2.0)
    assert stop_of(talk).step == 35  # 25 have begun, and 10 a second will


def test_a_slow_run_stops_after_the_step_that_has_begun():
    talk = talk_at(5)
    runs_on(talk, 5, 5, 2.0)
    assert stop_of(talk).step == 5


def test_no_run_stops_after_its_end():
    talk = talk_at(5)
    runs_on(talk, 5, 25, 2.0)
    talk.send(name(0), Report(1, 7, "computes", 0.0, 0.0, training_steps=30))
    assert stop_of(talk).step == 30


def test_a_run_that_has_just_begun_is_watched_for_a_moment_before_the_step_is_named():
    talk = talk_at(0)
    assert talk.send(b"train", INTERRUPT) == []
    runs_on(talk, 0, 20, 0.4)
    assert talk.status()["code"] == 130
    stop = stop_of(talk)  # asked again
    assert stop.step is not None
    assert 60 <= stop.step <= 80


def test_a_run_that_does_not_move_is_not_watched_for_long():
    talk = talk_at(0)
    assert talk.send(b"train", INTERRUPT) == []
    (stop, _) = [message for _, message in talk.after(DELAY + 0.1) if isinstance(message, Stop)]
    assert stop.step == 0


def test_a_stop_request_without_step_end_does_not_wait_to_know_the_pace():
    talk = talk_at(0)
    talk.send(b"train", INTERRUPT)
    assert stop_of(talk, StopRun("interrupted")).step is None


def test_a_run_that_waits_for_its_workers_stops_at_once():
    talk = Conversation(terms=SNAPSHOTS)
    talk.join(0)
    assert stop_of(talk).code == 130


def test_after_a_second_stop_request_no_step_is_waited_for():
    talk = talk_at(5)
    stop_of(talk)
    stop = stop_of(talk, StopRun("interrupted"))
    assert (stop.at_step_end, stop.step) == (False, None)


def test_a_run_without_a_stop_request_continues():
    talk = talk_at(5)
    talk.after(2 * DELAY)
    assert (talk.core.run.outcome, talk.core.stop_requested) == (None, False)


# Going on


def test_a_resumed_run_begins_at_its_checkpoint_under_new_incarnations():
    talk = talk_at(37, snapshot=20)
    stop_of(talk)
    again = resumed(talk)
    assert (again.core.run.id, again.core.run.phase, again.core.run.outcome) == (
        "run-1",
        RunPhase.WAITING,
        None,
    )
    assert again.core.run.ledger.finished == [20, 20]
    for index in (0, 1):
        again.send(name(index), having_read(index, 20))
    again.after(0.1)
    given = [again.assigned(name(index), having_read(index, 20)) for index in (0, 1)]
    assert [(each.index, each.step) for each in given] == [(0, 20), (1, 20)]
    assert 2 < given[0].incarnation < given[1].incarnation
    assert set(again.store.load().losses) == set(range(37))


def test_a_run_whose_processes_are_all_gone_is_resumed_at_once():
    again = resumed(talk_at(37, snapshot=20))
    assert again.core.run.registry.missing == [0, 1]
    assert again.after(1000.0) == []
    assert again.core.run.outcome is None


def test_a_resumed_run_has_no_outcome_also_after_its_broker_was_killed():
    talk = talk_at(37, snapshot=20)
    stop_of(talk)
    again = resumed(talk)
    for index in (0, 1):
        again.send(name(index), having_read(index, 20))
    again.after(0.1)
    again.send(name(0), having_read(0, 20))
    after = Conversation(talk.store, now=talk.now + 200.0, terms=SNAPSHOTS)
    assert (after.core.run.outcome, after.core.run.registry.missing) == (None, [1])


def test_a_worker_from_before_the_restart_is_refused():
    talk = talk_at(37, snapshot=20)
    stop_of(talk)
    again = resumed(talk)
    ((_, refused),) = again.send(name(0), Report(1, 9, "computes", 0.0, 0.0, steps(0, 50)))
    assert isinstance(refused, Refused)
    assert again.core.run.ledger.finished == [20, 20]


def test_losses_in_a_row_are_counted_from_zero_and_all_restarts_on():
    talk = talk_at(37, snapshot=20)
    talk.send(name(1), Goodbye(2, "the machine is wanted back")), talk.after(PARTING)
    stop_of(talk)
    again = resumed(talk)
    assert (again.status()["recovering"], again.status()["restarts"], again.core.run.replacements.in_a_row[1]) == (
        [],
        1,
        0,
    )


def test_a_finished_run_stays_finished():
    talk = talk_at(37)
    talk.send(name(0), finished(0)), talk.send(name(1), finished(1))
    assert resumed(talk).core.run.phase is RunPhase.FINISHED


def test_a_finished_run_has_its_result_although_its_broker_was_killed_at_once():
    """Its steps were None and its metrics missing in the result that `train --resume` wrote."""
    talk = talk_at(37)
    found = EvaluationRecord(37, 8, 0.5, {"accuracy": 0.5})
    talk.send(name(1), report(1, training_steps=37, evaluations=[found]))
    talk.send(name(0), finished(0)), talk.send(name(1), finished(1))
    found = resumed(talk).status()
    assert (found["training_steps"], found["metrics"]) == (37, {"accuracy": 0.5})


def test_a_run_is_resumed_with_its_own_plan_only():
    with pytest.raises(OtherRun):
        run_of(talk_at(37, snapshot=20).store, "e" * 64, "run-2", b"", resume=True)


def test_without_a_run_to_resume_a_new_one_begins():
    assert run_of(MemoryStore(), PLAN, "run-1", b"", resume=True) == "run-1"
