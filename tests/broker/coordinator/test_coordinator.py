"""The broker's decisions, told as conversations: who says what when, and what is said back. No sockets, no clock."""

from dataclasses import replace

import pytest

from stageline.broker.control.protocol import (
    CONTROL_VERSION,
    Answer,
    Ask,
    Assigned,
    Event,
    Exited,
    Failed,
    FromBroker,
    Goodbye,
    Heard,
    Hello,
    Peers,
    Refused,
    Report,
    Stop,
    StopRun,
    Trim,
)
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.run import OtherRun, RunPhase, run_of
from stageline.broker.coordinator.run_state import RunState
from stageline.broker.membership.failure_detector import EXIT_GRACE
from stageline.pipeline.digest import weights_sha256
from support.conversation import PLAN, SETTINGS, TERMS, WAITING, Talk, finished, hello, name, report, steps


@pytest.fixture
def talk() -> Talk:
    """A run that has just begun: both workers are there."""
    talk = Talk()
    talk.join(0), talk.join(1)
    return talk


def reason(sends: list[tuple[bytes, FromBroker]], to: bytes) -> str:
    (stop,) = [sentence for recipient, sentence in sends if recipient == to]
    assert isinstance(stop, Stop)
    return stop.reason


def test_workers_are_assigned_and_hear_of_each_other_when_all_are_there():
    talk = Talk()
    assert talk.say(b"a", hello(0)) == [(b"a", Assigned("run-1", 0, 1, 0))]
    assert talk.join(1)[1:] == []
    assert talk.core.records.phase is RunPhase.WAITING
    peers = Peers({0: (1, "ipc://a"), 1: (2, "ipc://1")})
    sends = talk.say(b"a", hello(0, incarnation=1, endpoint="ipc://a"))
    assert sends == [(b"a", Assigned("run-1", 0, 1, 0)), (b"a", peers), (name(1), peers)]
    assert talk.core.records.phase is RunPhase.RUNNING


def test_who_says_hello_again_hears_again_where_the_others_are(talk: Talk):
    sends = talk.say(b"new socket", hello(1, incarnation=2, endpoint="ipc://1"))
    assert sends[1:] == [(b"new socket", Peers({0: (1, "ipc://0"), 1: (2, "ipc://1")}))]


def test_a_worker_that_names_its_endpoint_at_once_need_not_say_it_again():
    talk = Talk()
    for index in (0, 1):
        talk.say(name(index), hello(index, endpoint="memory://"))
    assert talk.core.records.phase is RunPhase.RUNNING


def test_an_incarnation_is_stored_before_it_is_handed_out():
    talk = Talk()
    ((_, assigned),) = talk.say(b"a", hello(0))
    assert isinstance(assigned, Assigned)
    assert talk.store.load().facts["registry"]["incarnation"] == assigned.incarnation


def test_another_control_version_is_refused_naming_both():
    ((_, refused),) = Talk().say(b"a", hello(0, version=7))
    assert isinstance(refused, Refused)
    assert "uses control protocol version 7, the broker version 3" in refused.reason


def test_a_worker_that_writes_no_snapshots_is_refused_where_the_others_do():
    """Its stages would have none, no checkpoint would ever be complete, and nobody would know."""
    settings = {"recovery": {"restarts": 0, "snapshot_every": 20}}
    other = Hello(CONTROL_VERSION, PLAN, "desk-2", "desk", 1, "", settings=settings)
    ((_, refused),) = Talk(terms=replace(TERMS, restarts=5, snapshots=True)).say(b"a", other)
    assert isinstance(refused, Refused)
    assert refused.code == 78
    assert "desk-2 has recovery.restarts = 0, the broker has 5" in refused.reason


def test_another_plan_is_refused_naming_what_differs():
    other = Hello(
        CONTROL_VERSION, "e" * 64, "desk-2", "desk", 1, "", settings={"schedule": {"name": "1f1b", "microbatches": 8}}
    )
    ((_, refused),) = Talk().say(b"a", other)
    assert isinstance(refused, Refused)
    assert refused.code == 78
    assert "desk-2 has another plan than the broker: schedule.microbatches: 8 here, 4 there" in refused.reason


@pytest.mark.parametrize("settings", [{}, {"a": [{b"\xff": 1}]}, {"schedule": SETTINGS["schedule"]}])
def test_another_plan_whose_difference_cannot_be_told_is_refused_by_digest(settings: dict[str, object]):
    ((_, refused),) = Talk().say(b"a", Hello(CONTROL_VERSION, "e" * 64, "desk-2", "desk", 1, "", settings=settings))
    assert isinstance(refused, Refused)
    assert "its digest is eeeeeeeeeeee, the broker's dddddddddddd" in refused.reason


def test_a_report_is_confirmed_once_it_is_stored(talk: Talk):
    assert talk.say(b"a", report(0, steps=steps(0, 0, 1), number=5)) == [(b"a", Heard(5))]
    assert talk.store.record(0, 1) == steps(0, 1)[0]


def test_a_zombies_report_is_refused_and_changes_nothing(talk: Talk):
    zombie = Report(9, 5, "1F3", 0.0, 0.0, steps=steps(0, 0))
    ((recipient, refused),) = talk.say(b"zombie", zombie)
    assert recipient == b"zombie"
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("incarnation 9 is not current in run run-1")
    assert talk.core.records.ledger.finished == [0, 0]
    assert talk.status()["oddities"] == {"fenced": 1}


def test_what_a_worker_cannot_know_is_counted_and_left_out(talk: Talk):
    talk.say(b"a", report(0, steps=steps(1, 3), events=[Event(0, 0, 9, "forward", 1.0), Event(1, 0, 0, "done", 1.0)]))
    assert talk.core.records.ledger.finished == [0, 0]
    assert talk.status()["oddities"] == {"illegal": 3}
    assert talk.core.records.events.warnings == [
        "worker 0 (stage 0) reports what cannot be: stage 1 is not its own",
        "worker 0 (stage 0) reports what cannot be: there is no microbatch 9: a step has 4",
        "worker 0 (stage 0) reports what cannot be: stage 1 is not its own",
    ]


def test_queues_are_trimmed_to_what_every_stage_has_finished(talk: Talk):
    talk.after(1.0)
    assert talk.say(name(0), report(0, steps=steps(0, *range(8)))) == []
    assert talk.say(name(1), report(1, steps=steps(1, *range(5)))) == []
    assert talk.core.tick(talk.now) == [(name(0), Trim(5)), (name(1), Trim(5))]


def test_trims_keep_a_distance(talk: Talk):
    talk.after(1.0)
    talk.say(name(0), report(0, steps=steps(0, *range(8))))
    sends = []
    for step in range(8):
        talk.say(name(1), report(1, steps=steps(1, step)))
        sends.append(talk.core.tick(talk.now))
    assert sends == [[(name(0), Trim(1)), (name(1), Trim(1))], [], [], [], [], [], [], []]
    assert talk.after(0.1) == [(name(0), Trim(8)), (name(1), Trim(8))]


def test_the_run_is_finished_when_all_workers_are(talk: Talk):
    assert talk.say(name(0), finished(0)) == []
    assert talk.say(name(0), finished(0)) == []
    stop = Stop("all steps are done", 0)
    assert talk.say(name(1), finished(1)) == [(name(0), stop), (name(1), stop)]
    status = talk.status()
    assert (status["phase"], status["code"]) == ("finished", 0)
    assert status["weights_sha256"] == weights_sha256(dict(finished(0).digests) | dict(finished(1).digests))


def test_who_leaves_after_the_end_is_not_lost(talk: Talk):
    talk.say(name(0), finished(0)), talk.say(name(1), finished(1))
    assert [worker["standing"] for worker in talk.status()["workers"]] == ["finished", "finished"]  # type: ignore[attr-defined]
    talk.after(11.0)
    assert [worker["standing"] for worker in talk.status()["workers"]] == ["left", "left"]  # type: ignore[attr-defined]


def test_who_missed_the_end_is_told_again(talk: Talk):
    talk.say(name(0), finished(0)), talk.say(name(1), finished(1))
    stop = Stop("all steps are done", 0)
    assert talk.say(b"a", finished(0)) == [(b"a", stop)]
    assert talk.say(b"a", report(0, number=3)) == [(b"a", Heard(3)), (b"a", stop)]
    assert talk.say(b"a", hello(0, incarnation=1)) == [(b"a", stop)]


def test_after_the_run_new_workers_are_refused(talk: Talk):
    talk.say(name(0), finished(0)), talk.say(name(1), finished(1))
    ((_, refused),) = talk.say(b"a", hello(0))
    assert isinstance(refused, Refused)
    assert refused.reason == "the run is over (all steps are done); start the broker again for a new one"
    assert refused.code == 0  # so that nobody starts it again and again


def test_a_silent_worker_ends_the_run_naming_what_it_held(talk: Talk):
    held = [Event(1, 118, 2, "stashed", 1000.0), Event(1, 118, 3, "forward", 1000.2)]
    talk.say(name(1), report(1, actions=7, now="1F3 of step 118", events=held))
    sends = []
    while not sends:
        talk.say(name(0), report(0))
        sends = talk.after(0.1)
    assert [recipient for recipient, _ in sends] == [name(0)]
    assert reason(sends, name(0)) == (
        "worker 1 (stage 1), worker-1 (pid 101, host desk), was silent for 10.0 s (recovery.lease is 10 s). "
        "It held 1F3 of step 118 since 9.8 s; microbatch 2 of step 118, stashed at stage 1"
    )
    assert (talk.core.records.phase, talk.status()["code"]) == (RunPhase.FAILED, 1)


def test_a_killed_process_ends_the_run_naming_its_signal(talk: Talk):
    talk.say(name(1), report(1))
    assert talk.say(b"supervisor", Exited(1, 101, -9)) == []
    why = reason(talk.after(EXIT_GRACE + 0.2), name(0))
    assert why == (
        "worker 1 (stage 1), worker-1 (pid 101, host desk), was killed by SIGKILL. "
        f'It last reported: "{WAITING}" since 1.0 s'
    )


def test_a_processs_last_words_say_more_than_its_exit(talk: Talk):
    talk.say(b"supervisor", Exited(1, 101, 1))
    sends = talk.say(name(1), Failed(2, "the loss is not a scalar: it has shape (4,)", 78))
    assert sends == [(name(0), Stop("worker 1 (stage 1) failed: the loss is not a scalar: it has shape (4,)", 78))]
    assert talk.after(1.0) == []


def test_the_exit_of_a_former_process_is_no_news(talk: Talk):
    talk.say(b"supervisor", Exited(1, 55, 1))
    assert talk.after(1.0) == []
    assert talk.core.records.phase is RunPhase.RUNNING


def test_a_process_that_exits_before_it_joined_ends_the_run_with_its_code():
    talk = Talk()
    talk.join(0)
    sends = talk.say(b"supervisor", Exited(1, 101, 78))
    words = "worker 1 (stage 1) exited with status 78 before it joined; see its own output"
    assert sends == [(name(0), Stop(words, 78))]


def test_the_first_cause_stays(talk: Talk):
    talk.say(name(1), Failed(2, "out of memory", 1))
    talk.say(name(0), Failed(1, "stopped", 1))
    assert talk.status()["reason"] == "worker 1 (stage 1) failed: out of memory"


def test_a_worker_that_leaves_before_the_run_is_over_ends_it(talk: Talk):
    sends = talk.say(name(1), Goodbye(2, "interrupted"))
    assert reason(sends, name(0)).startswith("worker 1 (stage 1), worker-1 (pid 101, host desk), left: interrupted.")


def test_while_the_run_waits_a_lost_worker_only_leaves_its_place():
    talk = Talk()
    talk.join(0)
    assert talk.after(10.5) == []
    assert (talk.core.records.phase, talk.status()["missing"]) == (RunPhase.WAITING, [0, 1])
    ((_, assigned), *_) = talk.say(b"b", hello(0))
    assert assigned == Assigned("run-1", 0, 2, 0)


def test_a_stopped_run_stops_every_worker_with_its_code(talk: Talk):
    stop = Stop("interrupted, nothing saved", 130, at_step_end=True)
    sends = talk.say(b"train", StopRun("interrupted, nothing saved", 130, at_step_end=True))
    assert sends == [(name(0), stop), (name(1), stop)]
    assert talk.say(name(0), report(0)) == [(name(0), stop)]
    assert (talk.core.records.phase, talk.status()["code"]) == (RunPhase.FAILED, 130)


def test_a_second_stop_does_not_wait_for_the_steps_end(talk: Talk):
    talk.say(b"train", StopRun("interrupted", 130, at_step_end=True))
    now = Stop("interrupted", 130)
    assert talk.say(b"train", StopRun("interrupted", 130)) == [(name(0), now), (name(1), now)]


def test_the_broker_is_dismissed_after_the_run_not_by_ending_it(talk: Talk):
    talk.say(b"train", StopRun("enough", 130))
    assert talk.core.records.lifecycle.state is not RunState.DISMISSED
    talk.say(b"train", StopRun("over", 0))
    assert talk.core.records.lifecycle.state is RunState.DISMISSED
    assert talk.status()["reason"] == "enough"


def test_everyone_has_left_after_goodbyes_and_exits(talk: Talk):
    talk.say(b"train", StopRun("enough", 130))
    talk.say(name(0), Goodbye(1, "told to stop"))
    assert not talk.core.records.all_left
    talk.say(b"train", Exited(1, 101, 130))
    assert talk.core.records.all_left


def test_nobody_waits_for_the_goodbye_of_a_worker_that_has_finished(talk: Talk):
    talk.say(name(0), finished(0)), talk.say(name(1), finished(1))
    assert talk.core.records.all_left


def test_a_broker_that_was_away_gives_everyone_a_new_lease(talk: Talk):
    talk.say(name(0), report(0)), talk.say(name(1), report(1))
    talk.now += 1000.0
    assert talk.core.tick(talk.now) == []
    assert talk.after(5.0) == []


def test_a_lease_shorter_than_the_brokers_turn_still_ends():
    talk = Talk()
    talk.core = Coordinator(replace(TERMS, lease=0.05), talk.store, "run-1", talk.now)
    talk.join(0), talk.join(1)
    talk.after(0.2)
    assert talk.core.records.phase is RunPhase.FAILED


def test_a_restarted_broker_goes_on_with_the_run(talk: Talk):
    talk.say(name(0), report(0, steps=steps(0, *range(5))))
    talk.say(name(1), report(1, steps=steps(1, *range(3), loss=0.5)))
    again = Talk(talk.store, now=talk.now + 3.0)
    assert (again.core.records.run, again.core.records.phase, again.core.records.ledger.finished) == (
        "run-1",
        RunPhase.RUNNING,
        [5, 3],
    )
    assert again.say(b"new", report(0, number=9)) == [(b"new", Heard(9))]
    assert again.say(b"new", hello(1, incarnation=2, endpoint="ipc://1"))[0] == (b"new", Assigned("run-1", 1, 2, 3))
    assert again.status()["losses"] == {"0": 0.5}


def test_workers_that_do_not_return_to_a_restarted_broker_are_lost(talk: Talk):
    again = Talk(talk.store)
    again.after(9.0)
    again.say(b"new", report(0))
    assert "worker 1 (stage 1)" in reason(again.after(2.0), b"new")


def test_a_restarted_broker_knows_how_the_run_ended(talk: Talk):
    talk.say(name(0), finished(0)), talk.say(name(1), finished(1))
    again = Coordinator(TERMS, talk.store, "run-1", 2000.0)
    assert again.records.outcome == talk.core.records.outcome
    assert again.handle(b"a", finished(0), 2000.0) == [(b"a", Stop("all steps are done", 0))]


def test_a_store_gives_its_unfinished_run_and_forgets_an_ended_one_unless_asked_for_it(talk: Talk):
    assert run_of(talk.store, PLAN, "run-2") == "run-1"
    talk.say(b"train", StopRun("enough", 130))
    assert run_of(talk.store, PLAN, "run-1") == "run-1"
    assert "outcome" in talk.store.load().facts
    assert run_of(talk.store, PLAN, "run-2") == "run-2"
    assert set(talk.store.load().facts) == {"run"}


def test_a_store_with_an_unfinished_run_of_another_plan_is_not_overwritten(talk: Talk):
    with pytest.raises(OtherRun, match=r"holds run run-1 of another plan \(digest dddddddddddd, now eeeeeeeeeeee\)"):
        run_of(talk.store, "e" * 64, "run-2")


def test_status_names_run_workers_and_progress(talk: Talk):
    talk.say(name(0), report(0, actions=18, steps=steps(0, 0, 1), metrics={"accuracy": 0.5, "bad": float("-inf")}))
    talk.say(name(1), report(1, now="1F3 of step 1", steps=steps(1, 0, loss=0.25), training_steps=100))
    talk.now += 2.0
    status = talk.status()
    assert (status["run"], status["name"], status["phase"], status["missing"]) == ("run-1", "digits", "running", [])
    assert (status["finished"], status["finished_floor"], status["training_steps"]) == ([2, 1], 1, 100)
    assert (status["last_loss"], status["losses"]) == ({"step": 0, "loss": 0.25}, {"0": 0.25})
    assert status["metrics"] == {"accuracy": 0.5, "bad": "-inf"}
    assert status["workers"][1] == {
        "index": 1,
        "stages": [1],
        "standing": "present",
        "name": "worker-1",
        "host": "desk",
        "pid": 101,
        "endpoint": "ipc://1",
        "incarnation": 2,
        "life": 1,
        "heard": 2.0,
        "now": "1F3 of step 1",
        "trouble": "",
        "since": 999.0,
        "idle": 0.25,
        "layer": "",
        "actions": 0,
        "retained_bytes": 0,
    }


def test_status_tells_the_losses_from_a_step_on(talk: Talk):
    talk.say(name(1), report(1, steps=[record for step in range(41) for record in steps(1, step, loss=float(step))]))
    assert talk.status(losses_from="20")["losses"] == {"20": 20.0, "30": 30.0, "40": 40.0}


def test_a_missing_worker_is_in_the_status():
    assert Talk().status()["workers"] == [
        {"index": 0, "stages": [0], "standing": "missing"},
        {"index": 1, "stages": [1], "standing": "missing"},
    ]


def test_queues_are_told_as_each_end_sees_them(talk: Talk):
    talk.say(name(0), report(0, queues={"forward-1": [1, 2, 3, 4096, 0.5]}))
    ((_, answer),) = talk.say(b"me", Ask("queues"))
    row = {"queue": "forward-1", "worker": 0, "ready": 1, "in_flight": 2, "retained": 3, "bytes": 4096, "oldest": 0.5}
    assert answer == Answer("queues/1", {"run": "run-1", "queues": [row]})


def test_the_story_of_a_microbatch_joins_records_and_open_steps(talk: Talk):
    talk.say(name(0), report(0, events=[Event(0, 7, 2, "stashed", 1002.0)]))
    talk.say(name(1), report(1, steps=steps(1, 7)))
    ((_, answer),) = talk.say(b"me", Ask("story", {"step": "7", "microbatch": "2"}))
    assert isinstance(answer, Answer)
    assert answer.schema == "story/1"
    stashed, done = answer.facts["stages"]
    holder = {"name": "worker-0", "life": 1, "incarnation": 1}
    assert stashed == {
        "stage": 0, "worker": 0, "attempts": [], "state": "stashed", "since": 1002.0, "holder": holder, "actions": []
    }  # fmt: skip
    assert (done["state"], done["since"]) == ("done", 17.0)
    assert done["actions"] == [  # the last stage runs F0 B0 F1 B1 F2 B2 F3 B3 U, each action a second long from 0 on
        {"action": "1F2", "start": 8.0, "end": 9.0},
        {"action": "1B2", "start": 10.0, "end": 11.0},
        {"action": "1U", "start": 16.0, "end": 17.0},
    ]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (Ask("weather"), "no answer to 'weather'; ask for status, queues, story, why"),
        (Ask("story"), "step must be a number from 0 on, not ''"),
        (Ask("story", {"step": "1", "microbatch": "four"}), "microbatch must be a number from 0 on, not 'four'"),
        (Ask("story", {"step": "1", "microbatch": "4"}), "there is no microbatch 4: a step has 4"),
    ],
)
def test_a_question_without_an_answer_is_refused_saying_what_can_be_asked(talk: Talk, ask: Ask, words: str):
    ((_, refused),) = talk.say(b"me", ask)
    assert isinstance(refused, Refused)
    assert words in refused.reason
    assert refused.code == 2
