"""The broker's decisions, told as conversations: who says what when, and what is said back. No sockets, no clock."""

from dataclasses import replace

import pytest

from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import (
    Assigned,
    Confirmed,
    Exited,
    Finished,
    Goodbye,
    Refused,
    Report,
    Stop,
    StopRun,
)
from stageline.broker.control.records import Event, RunLength
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.run import RunPhase
from stageline.broker.coordinator.state import Life
from stageline.broker.ledger.losses import Leases
from stageline.pipeline.digest import weights_sha256
from support.conversation import SNAPSHOTS, TERMS, Conversation, finished, hello, name, report, steps, stop_reason


@pytest.fixture
def talk() -> Conversation:
    """A run that has just begun: both workers are there."""
    talk = Conversation()
    talk.join(0), talk.join(1)
    return talk


def test_a_report_is_confirmed_once_it_is_stored(talk: Conversation):
    assert talk.send(b"a", report(0, steps=steps(0, 0, 1), number=5)) == [(b"a", Confirmed(5))]
    assert talk.send(b"a", report(0, number=6, timed=True)) == [(b"a", Confirmed(6, talk.now))]
    assert talk.store.record(0, 1) == steps(0, 1)[0]


def test_a_report_of_a_stale_incarnation_is_refused_and_changes_nothing(talk: Conversation):
    stale = Report(9, 5, "1F3", 0.0, 0.0, steps=steps(0, 0))
    ((recipient, refused),) = talk.send(b"stale", stale)
    assert recipient == b"stale"
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("incarnation 9 is not current in run run-1")
    assert talk.core.run.ledger.finished == [0, 0]
    assert talk.status()["oddities"] == {"fenced": 1}


def test_what_a_worker_cannot_know_is_counted_and_left_out(talk: Conversation):
    talk.send(b"a", report(0, steps=steps(1, 3), events=[Event(0, 0, 9, "forward", 1.0), Event(1, 0, 0, "done", 1.0)]))
    assert talk.core.run.ledger.finished == [0, 0]
    assert talk.status()["oddities"] == {"illegal": 3}
    assert talk.core.run.events.warnings == [
        "worker 0 (stage 0) reports what cannot be: stage 1 is not its own [SL902]",
        "worker 0 (stage 0) reports what cannot be: there is no microbatch 9: a step has 4 [SL902]",
        "worker 0 (stage 0) reports what cannot be: stage 1 is not its own [SL902]",
    ]


def test_queues_are_trimmed_to_what_every_stage_has_finished(talk: Conversation):
    talk.after(1.0)
    assert talk.send(name(0), report(0, steps=steps(0, *range(8)))) == []
    assert talk.send(name(1), report(1, steps=steps(1, *range(5)))) == []
    assert talk.core.tick(talk.now) == [(name(0), Trim(5)), (name(1), Trim(5))]


def test_trims_keep_a_distance(talk: Conversation):
    talk.after(1.0)
    talk.send(name(0), report(0, steps=steps(0, *range(8))))
    sends = []
    for step in range(8):
        talk.send(name(1), report(1, steps=steps(1, step)))
        sends.append(talk.core.tick(talk.now))
    assert sends == [[(name(0), Trim(1)), (name(1), Trim(1))], [], [], [], [], [], [], []]
    assert talk.after(0.1) == [(name(0), Trim(8)), (name(1), Trim(8))]


def test_the_run_is_finished_when_all_workers_are(talk: Conversation):
    assert talk.send(name(0), finished(0)) == []
    assert talk.send(name(0), finished(0)) == []
    stop = Stop("all steps are done", 0)
    assert talk.send(name(1), finished(1)) == [(name(0), stop), (name(1), stop)]
    status = talk.status()
    assert (status["phase"], status["code"]) == ("finished", 0)
    assert status["weights_sha256"] == weights_sha256(dict(finished(0).digests) | dict(finished(1).digests))


def test_an_end_that_the_ledger_does_not_have_is_refused_and_named_once():
    """Two forged messages ended a run of 150 steps after 25 of them, as finished, and its result told of 150."""
    talk = Conversation(terms=replace(TERMS, length=RunLength(150, 0)))
    talk.join(0), talk.join(1)
    for index in (0, 1):
        talk.send(name(index), report(index, steps=steps(index, *range(25)), training_steps=25))
    for index in (0, 1):
        assert talk.send(b"stranger", finished(index)) == []
    for _ in range(60):
        talk.send(name(0), report(0)), talk.send(name(1), report(1)), talk.after(0.1)
    status = talk.status()
    assert (status["phase"], status["training_steps"], status["weights_sha256"]) == ("running", 150, None)
    assert talk.core.run.events.warnings == [
        f"refused: worker {index} (stage {index}) has not finished: stage {index} has trained 25 of 150 steps"
        for index in (0, 1)
    ]
    for index in (0, 1):
        talk.send(name(index), report(index, steps=steps(index, *range(25, 150))))
        talk.send(name(index), finished(index))
    status = talk.status()
    assert (status["phase"], status["training_steps"], status["finished_floor"]) == ("finished", 150, 150)


def test_a_run_whose_stages_have_different_copies_of_one_parameter_fails(talk: Conversation):
    talk.send(name(0), finished(0))
    (_, stop), _ = talk.send(name(1), Finished(2, finished(1).digests, {"1.weight": "0.weight"}))
    assert isinstance(stop, Stop)
    assert stop.code == 1
    assert stop.reason.startswith("1.weight and 0.weight: two stages have a copy of this parameter, and the copies")


def test_a_worker_that_leaves_after_the_end_is_not_lost(talk: Conversation):
    talk.send(name(0), finished(0)), talk.send(name(1), finished(1))
    assert [worker["standing"] for worker in talk.status()["workers"]] == ["finished", "finished"]  # type: ignore[attr-defined]
    talk.after(11.0)
    assert [worker["standing"] for worker in talk.status()["workers"]] == ["left", "left"]  # type: ignore[attr-defined]


def test_a_worker_that_missed_the_stop_message_gets_it_again(talk: Conversation):
    talk.send(name(0), finished(0)), talk.send(name(1), finished(1))
    stop = Stop("all steps are done", 0)
    assert talk.send(b"a", finished(0)) == [(b"a", stop)]
    assert talk.send(b"a", report(0, number=3)) == [(b"a", Confirmed(3)), (b"a", stop)]
    assert talk.send(b"a", hello(0, incarnation=1)) == [(b"a", stop)]


def test_after_the_run_new_workers_are_refused(talk: Conversation):
    talk.send(name(0), finished(0)), talk.send(name(1), finished(1))
    ((_, refused),) = talk.send(b"a", hello(0))
    assert isinstance(refused, Refused)
    assert refused.reason == "the run is over (all steps are done); start the broker again for a new one"
    assert refused.code == 0  # so that it is not restarted again and again


def test_a_stopped_run_stops_every_worker_with_its_code(talk: Conversation):
    stop = Stop("interrupted, nothing saved", 130)
    sends = talk.send(b"train", StopRun("interrupted, nothing saved", at_step_end=True))
    assert sends == [(name(0), stop), (name(1), stop)]
    assert talk.send(name(0), report(0)) == [(name(0), stop)]
    assert (talk.core.run.phase, talk.status()["code"]) == (RunPhase.FAILED, 130)


def test_a_second_stop_does_not_wait_for_the_steps_end(talk: Conversation):
    talk.send(b"train", StopRun("interrupted", at_step_end=True))
    now = Stop("interrupted", 130)
    assert talk.send(b"train", StopRun("interrupted")) == [(name(0), now), (name(1), now)]


def test_the_broker_is_dismissed_after_the_run_not_by_ending_it(talk: Conversation):
    talk.send(b"train", StopRun("enough"))
    assert talk.core.run.lifecycle.state is not Life.DISMISSED
    talk.send(b"train", StopRun("over", over=True))
    assert talk.core.run.lifecycle.state is Life.DISMISSED
    assert talk.status()["reason"] == "enough"


def test_a_run_that_goes_on_is_not_over_because_it_is_said_to_be(talk: Conversation):
    """It ended with exit code 0, and nothing was trained."""
    assert talk.send(b"train", StopRun("over", over=True)) == []
    assert talk.core.run.outcome is None
    assert talk.status()["oddities"] == {"too early": 1}


def test_all_workers_have_left_after_goodbyes_and_exits(talk: Conversation):
    talk.send(b"train", StopRun("enough"))
    talk.send(name(0), Goodbye(1, "told to stop"))
    assert not talk.core.run.all_left
    talk.send(b"train", Exited(1, 101, 130, 130))
    assert talk.core.run.all_left


def test_the_goodbye_of_a_finished_worker_is_not_waited_for(talk: Conversation):
    talk.send(name(0), finished(0)), talk.send(name(1), finished(1))
    assert talk.core.run.all_left


def test_a_broker_that_was_away_gives_every_worker_a_new_lease(talk: Conversation):
    talk.send(name(0), report(0)), talk.send(name(1), report(1))
    talk.now += 1000.0
    assert talk.core.tick(talk.now) == []
    assert talk.after(5.0) == []


def test_a_lease_shorter_than_the_brokers_turn_still_ends():
    talk = Conversation()
    talk.core = Coordinator(replace(TERMS, leases=Leases(0.05, 0.05, 60.0)), talk.store, "run-1", talk.now)
    talk.join(0), talk.join(1)
    talk.after(0.2)
    assert talk.core.run.phase is RunPhase.FAILED


def test_a_restarted_broker_continues_the_run(talk: Conversation):
    talk.send(name(0), report(0, steps=steps(0, *range(5))))
    talk.send(name(1), report(1, steps=steps(1, *range(3), loss=0.5)))
    again = Conversation(talk.store, now=talk.now + 3.0)
    assert (again.core.run.id, again.core.run.phase, again.core.run.ledger.finished) == (
        "run-1",
        RunPhase.RUNNING,
        [5, 3],
    )
    assert again.send(b"new", report(0, number=9)) == [(b"new", Confirmed(9))]
    assert again.send(b"new", hello(1, incarnation=2, endpoint="ipc://1"))[0] == (b"new", Assigned("run-1", 1, 2, 3))
    assert again.status()["losses"] == {"0": 0.5}


def test_workers_that_do_not_return_to_a_restarted_broker_are_lost(talk: Conversation):
    again = Conversation(talk.store)
    again.after(9.0)
    again.send(b"new", report(0))
    assert "worker 1 (stage 1)" in stop_reason(again.after(2.0), b"new")


def test_a_restarted_broker_knows_how_the_run_ended(talk: Conversation):
    talk.send(name(0), finished(0)), talk.send(name(1), finished(1))
    again = Coordinator(TERMS, talk.store, "run-1", 2000.0)
    assert again.run.outcome == talk.core.run.outcome
    assert again.handle(b"a", finished(0), 2000.0) == [(b"a", Stop("all steps are done", 0))]


def test_a_consumer_that_took_what_its_producer_has_not_put_ends_the_run_and_completes_no_checkpoint():
    """Another client of the server replaced a queue's stream, and the run trained on what was in it."""
    talk = Conversation(terms=SNAPSHOTS)
    talk.join(0), talk.join(1)
    put = [("forward-1", step, f"{step:016x}") for step in range(6)]
    talk.send(name(0), report(0, number=1, steps=steps(0, *range(6)), snapshots=[(0, 3)], digests=put))
    taken = [*put[:2], ("forward-1", 2, "f" * 16)]
    sends = talk.send(name(1), report(1, number=1, steps=steps(1, 0, 1, 2), snapshots=[(1, 3)], digests=taken))
    assert "forward-1 in step 2" in stop_reason(sends, name(0))
    assert talk.status()["phase"] == "failed"
    for index in (1, 0):  # reports that were under way before the workers were stopped
        talk.send(name(index), report(index, number=2, steps=steps(index, *range(3, 6)), snapshots=[(index, 6)]))
    assert talk.core.run.checkpoints.complete == 0
