"""Lost workers are replaced and checkpoints completed: conversations with the core, rule by rule."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from stageline.broker.control.protocol import (
    CONTROL_VERSION,
    Answer,
    Ask,
    Assigned,
    Event,
    Exited,
    Failed,
    Finished,
    FromBroker,
    Goodbye,
    Hello,
    Peers,
    Refused,
    Report,
    Standby,
    Stop,
    StopRun,
    Trim,
)
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.run import RunConfig, RunPhase
from stageline.broker.membership.failure_detector import EXIT_GRACE
from stageline.broker.membership.standby import SILENCE
from stageline.broker.stores.base import Store
from stageline.workers.control.session import acknowledgement
from support.conversation import TERMS, Talk, finished, hello, name, report, steps

REPLACING = replace(TERMS, restarts=2, snapshots=True)
Sends = list[tuple[bytes, FromBroker]]


def talk_of(store: Store | None = None, terms: RunConfig = REPLACING) -> Talk:
    """A run that has just begun: both workers are there, under incarnations 1 and 2."""
    talk = Talk(store, terms=terms)
    talk.join(0), talk.join(1)
    return talk


@pytest.fixture
def talk() -> Talk:
    return talk_of()


def said(incarnation: int, *, stage: int = 1, actions: int = 5, upto: int = 0, **more: object) -> Report:
    """A report of `stage`'s owner, which has finished the steps before `upto`."""
    records = steps(stage, *range(upto))
    return Report(incarnation, actions, "computes", 999.0, 0.25, records, **more)  # type: ignore[arg-type]


def reach(talk: Talk, step: int, *, incarnations: tuple[int, int] = (1, 2)) -> None:
    """Both stages have finished the steps before `step`, and have a snapshot of it."""
    for stage, incarnation in enumerate(incarnations):
        talk.say(name(stage), said(incarnation, stage=stage, upto=step, snapshots=[(stage, step)]))


def kill(talk: Talk, index: int, pid: int, status: int = -9) -> Sends:
    """The supervisor sees the process of worker `index` end, and its last words have had time."""
    return talk.say(b"supervisor", Exited(index, pid, status)) + talk.after(EXIT_GRACE + 0.2)


def replacement(index: int, pid: int, incarnation: int = 0, endpoint: str = "") -> Hello:
    return Hello(CONTROL_VERSION, "d" * 64, f"worker-{index}", "desk", pid, endpoint, index, incarnation)


def trims(sends: Sends) -> list[int]:
    return [sentence.step for recipient, sentence in sends if recipient == name(0) and isinstance(sentence, Trim)]


def stops(sends: Sends) -> list[Stop]:
    return [sentence for _, sentence in sends if isinstance(sentence, Stop)]


# Complete checkpoints


def test_a_checkpoint_is_announced_when_every_stage_has_its_snapshot(talk: Talk):
    talk.say(name(0), said(1, stage=0, upto=20, snapshots=[(0, 20)]))
    talk.say(name(1), said(2, upto=20))
    assert trims(talk.after(1.0)) == []
    talk.say(name(1), said(2, upto=20, snapshots=[(1, 20)]))
    assert trims(talk.after(1.0)) == [20]
    assert talk.status()["checkpoint"] == 20


def test_a_checkpoint_waits_for_the_losses_before_it(talk: Talk):
    talk.say(name(0), said(1, stage=0, upto=20, snapshots=[(0, 20)]))
    talk.say(name(1), said(2, upto=19, snapshots=[(1, 20)]))
    assert trims(talk.after(1.0)) == []
    talk.say(name(1), said(2, upto=20))
    assert trims(talk.after(1.0)) == [20]


def test_a_checkpoint_is_stored_before_it_is_announced(talk: Talk):
    reach(talk, 20)
    kept = talk.store.load().facts["registry"]["checkpoints"]
    assert kept == {"complete": 20, "newer": [[], []]}


def test_the_newest_step_that_all_have_is_complete_whatever_came_in_between(talk: Talk):
    talk.say(name(0), said(1, stage=0, upto=60, snapshots=[(0, 20), (0, 60), (0, 40)]))
    talk.say(name(1), said(2, upto=40, snapshots=[(1, 40)]))
    assert trims(talk.after(1.0)) == [40]
    talk.say(name(1), said(2, upto=60, snapshots=[(1, 20), (1, 60)]))
    assert trims(talk.after(1.0)) == [60]


def test_a_snapshot_of_a_stage_that_is_not_the_workers_counts_for_nothing(talk: Talk):
    talk.say(name(0), said(1, stage=0, upto=20, snapshots=[(0, 20), (1, 20)]))
    talk.say(name(1), said(2, upto=20))
    assert trims(talk.after(1.0)) == []
    assert talk.status()["oddities"] == {"illegal": 1}


def test_a_checkpoint_that_was_missed_is_told_with_the_next_hello(talk: Talk):
    reach(talk, 20)
    talk.after(1.0)
    sends = talk.say(b"new socket", hello(1, incarnation=2, endpoint="ipc://1"))
    assert sends[-1] == (b"new socket", Trim(20))


def test_without_snapshots_queues_are_trimmed_to_what_all_have_finished():
    talk = talk_of(terms=TERMS)
    reach(talk, 20)
    assert trims(talk.after(1.0)) == [20]
    talk.say(name(0), said(1, stage=0, upto=23)), talk.say(name(1), said(2, upto=22))
    assert trims(talk.after(1.0)) == [22]
    assert talk.status()["checkpoint"] is None


# A slow snapshot of a stage that has been given away was once taken for its new owner's: the checkpoint looked
# complete, its neighbour forgot what the new owner still had to be sent, and both waited for ever.


def test_what_a_lost_worker_had_completes_no_checkpoint_of_its_replacement(talk: Talk):
    talk.say(name(1), said(2, upto=20, snapshots=[(1, 20)]))
    kill(talk, 1, 101)
    talk.assigned(b"new", replacement(1, 201))
    talk.say(name(0), said(1, stage=0, upto=20, snapshots=[(0, 20)]))
    assert trims(talk.after(1.0)) == []
    talk.say(b"new", said(3, upto=20))
    assert trims(talk.after(1.0)) == []
    talk.say(b"new", said(3, upto=20, snapshots=[(1, 20)]))
    assert trims(talk.after(1.0)) == [20]


def test_a_zombies_snapshot_completes_nothing(talk: Talk):
    kill(talk, 1, 101)
    talk.assigned(b"new", replacement(1, 201))
    talk.say(name(0), said(1, stage=0, upto=20, snapshots=[(0, 20)]))
    ((_, refused),) = talk.say(name(1), said(2, upto=20, snapshots=[(1, 20)]))
    assert isinstance(refused, Refused)
    assert refused.code == 1
    assert trims(talk.after(1.0)) == []
    assert talk.core.records.ledger.finished == [20, 0]


# Replacement


def test_a_lost_workers_place_goes_to_the_next_at_the_newest_complete_checkpoint(talk: Talk):
    reach(talk, 20)
    talk.say(name(1), said(2, upto=37))
    assert stops(kill(talk, 1, 101)) == []
    assert talk.core.records.phase is RunPhase.RUNNING
    assert talk.say(b"new", replacement(1, 201)) == [(b"new", Assigned("run-1", 1, 3, 20)), (b"new", Trim(20))]
    assert talk.core.records.events.infos[-1].endswith("is worker-1 (pid 201, host desk), life 2, incarnation 3")


def test_an_incarnation_and_its_start_are_stored_before_they_are_handed_out(talk: Talk):
    reach(talk, 20)
    kill(talk, 1, 101)
    talk.assigned(b"new", replacement(1, 201))
    kept = talk.store.load().facts["registry"]
    assert kept["incarnation"] == 3
    assert [(member["index"], member["incarnation"], member["start"]) for member in kept["members"]] == [
        (0, 1, 0),
        (1, 3, 20),
    ]


def test_everyone_hears_where_the_replacement_is_and_survivors_keep_their_incarnations(talk: Talk):
    kill(talk, 1, 101)
    talk.assigned(b"new", replacement(1, 201))
    sends = talk.say(b"new", replacement(1, 201, incarnation=3, endpoint="ipc://new"))
    peers = Peers({0: (1, "ipc://0"), 1: (3, "ipc://new")})
    assert sends == [(b"new", Assigned("run-1", 1, 3, 0)), (name(0), peers), (b"new", peers)]


def test_a_lost_stages_ledger_goes_back_to_the_checkpoint_and_the_losses_stay(talk: Talk):
    reach(talk, 20)
    talk.say(name(1), Report(2, 9, "1F3", 0.0, 0.0, steps(1, *range(37), loss=0.5), [Event(1, 40, 2, "forward", 1.0)]))
    kill(talk, 1, 101)
    assert talk.core.records.ledger.finished == [20, 20]
    assert talk.store.load().finished == {0: 20, 1: 20}
    assert talk.core.records.ledger.held([1]) == []
    assert sorted(talk.store.load().losses) == list(range(37))


def test_two_workers_and_all_workers_may_be_lost_at_once(talk: Talk):
    reach(talk, 20)
    talk.say(b"supervisor", Exited(0, 100, -9))
    assert stops(kill(talk, 1, 101)) == []
    assert talk.assigned(b"b", replacement(1, 201)) == Assigned("run-1", 1, 3, 20)
    assert talk.assigned(b"a", replacement(0, 200)) == Assigned("run-1", 0, 4, 20)
    assert talk.say(b"b", replacement(1, 201, 3, "ipc://b")) == [(b"b", Assigned("run-1", 1, 3, 20)), (b"b", Trim(20))]
    peers = Peers({0: (4, "ipc://a"), 1: (3, "ipc://b")})
    sends = talk.say(b"a", replacement(0, 200, 4, "ipc://a"))
    assert [send for send in sends if isinstance(send[1], Peers)] == [(b"a", peers), (b"b", peers)]


def test_a_worker_without_a_claim_gets_the_lost_ones_place(talk: Talk):
    kill(talk, 1, 101)
    assert talk.assigned(b"new", Hello(CONTROL_VERSION, "d" * 64, "spot-7", "cloud", 1, "")).index == 1


def test_a_worker_that_hangs_is_replaced_and_refused_when_it_wakes(talk: Talk):
    while not talk.status()["recovering"]:
        talk.say(name(0), report(0)), talk.say(name(1), report(1, now="1F3 of step 2"))
        assert stops(talk.after(0.5)) == []
    assert talk.assigned(b"new", replacement(1, 201)).incarnation == 3
    for words in (
        said(2, upto=9),
        Finished(2, {}),
        Failed(2, "timeout", 1),
        Goodbye(2, "told"),
        hello(1, incarnation=2),
    ):
        ((_, refused),) = talk.say(name(1), words)
        assert isinstance(refused, Refused)
        assert refused.code == 1
    assert (talk.core.records.phase, talk.core.records.ledger.finished) == (RunPhase.RUNNING, [0, 0])


def test_a_replacement_may_take_its_time_to_load(talk: Talk):
    kill(talk, 1, 101)
    talk.assigned(b"new", replacement(1, 201))
    for _ in range(40):
        talk.say(name(0), report(0)), talk.after(1.0)
    assert (talk.core.records.phase, talk.core.records.registry.missing) == (RunPhase.RUNNING, [])
    talk.say(b"new", replacement(1, 201, incarnation=3, endpoint="ipc://new"))
    for _ in range(40):
        talk.say(name(0), report(0)), talk.after(1.0)
        talk.say(b"new", Report(3, 0, "waits for its snapshot to be read", 0.0, 0.0))
    assert (talk.core.records.phase, talk.core.records.registry.missing) == (RunPhase.RUNNING, [])


def test_a_finished_worker_that_is_lost_has_to_finish_again(talk: Talk):
    talk.say(name(1), finished(1))
    kill(talk, 1, 101)
    assert stops(talk.say(name(0), finished(0))) == []
    talk.assigned(b"new", replacement(1, 201))
    assert stops(talk.say(b"new", Finished(3, finished(1).digests))) == [Stop("all steps are done", 0)] * 2


def test_a_worker_that_leaves_on_purpose_may_be_replaced(talk: Talk):
    assert stops(talk.say(name(1), Goodbye(2, "the machine is wanted back"))) == []
    assert talk.assigned(b"new", replacement(1, 201)) == Assigned("run-1", 1, 3, 0)


def attempts(talk: Talk, step: int, microbatch: int, stage: int = 1) -> list[dict[str, Any]]:
    """What `story` tells of computing that came to nothing."""
    ((_, told),) = talk.say(b"me", Ask("story", {"step": str(step), "microbatch": str(microbatch)}))
    assert isinstance(told, Answer)
    return told.facts["stages"][stage]["attempts"]  # type: ignore[index, no-any-return, call-overload]


def test_the_story_of_a_microbatch_tells_the_attempts_that_were_lost(talk: Talk):
    reach(talk, 20)
    begun = [Event(1, 22, 0, "done", talk.now), Event(1, 22, 1, "forward", talk.now)]
    talk.say(name(1), msgspec.structs.replace(said(2, stage=1, upto=22), events=begun))
    kill(talk, 1, 101)
    assert [attempts(talk, *place) for place in [(19, 0), (22, 2), (23, 0)]] == [[], [], []]
    assert attempts(talk, 21, 0, stage=0) == []
    assert [attempts(talk, *place)[0]["state"] for place in [(20, 0), (21, 3), (22, 0), (22, 1)]] == [
        "done",
        "done",
        "done",
        "forward",
    ]
    talk.assigned(b"new", replacement(1, 201))
    talk.say(b"new", msgspec.structs.replace(said(3, stage=1, upto=21), events=[Event(1, 22, 1, "forward", talk.now)]))
    kill(talk, 1, 201, status=3)
    [first, second] = attempts(talk, 22, 1)
    assert (first["name"], first["life"], first["why"]) == ("worker-1", 1, "was killed by SIGKILL")
    assert (second["name"], second["life"], second["why"]) == ("worker-1", 2, "exited with status 3")
    talk.core = Coordinator(REPLACING, talk.store, "run-1", talk.now)
    assert attempts(talk, 22, 1) == [first, second]


# Workers that stand by


def spare(pid: int, *, claim: int | None = None, name: str = "spare") -> Hello:
    return Hello(CONTROL_VERSION, "d" * 64, name, "cloud", pid, "", claim, spare=True)


def test_a_spare_stands_by_until_a_worker_is_lost_and_is_called_at_once(talk: Talk):
    ((_, standby),) = talk.say(b"spare", spare(1))
    assert isinstance(standby, Standby)
    assert standby.reason.startswith("all 2 workers of the plan have joined")
    reach(talk, 20)
    told = [sentence for recipient, sentence in kill(talk, 1, 101) if recipient == b"spare"]
    assert told[0] == Assigned("run-1", 1, 3, 20)
    assert talk.status()["spares"] == []


def test_a_spare_leaves_the_places_to_others_before_the_run_has_begun():
    talk = Talk(terms=REPLACING)
    ((_, standby),) = talk.say(b"spare", spare(1))
    assert standby == Standby("the run has not begun; a spare takes the place of a lost worker")
    talk.join(0), talk.join(1)
    assert talk.core.records.phase is RunPhase.RUNNING


def test_spares_are_called_in_turn_and_only_to_places_that_they_want(talk: Talk):
    talk.say(b"a", spare(1, claim=0)), talk.say(b"b", spare(2)), talk.say(b"c", spare(3))
    talk.say(b"b", spare(2))
    assert talk.status()["spares"] == [
        {"name": "spare", "host": "cloud", "pid": pid, "heard": 0.0} for pid in (1, 2, 3)
    ]
    assert [to for to, sentence in kill(talk, 1, 101) if isinstance(sentence, Assigned)] == [b"b"]
    talk.say(b"a", spare(1, claim=0)), talk.say(b"c", spare(3))
    assert [to for to, sentence in kill(talk, 0, 100) if isinstance(sentence, Assigned)] == [b"a"]


def test_a_spare_that_is_silent_is_not_called(talk: Talk):
    talk.say(b"spare", spare(1))
    talk.after(SILENCE)
    assert kill(talk, 1, 101) == []
    assert talk.core.records.registry.missing == [1]


def test_a_spare_that_does_not_answer_its_call_loses_the_place_to_the_next(talk: Talk):
    talk.say(b"dead", spare(1))
    kill(talk, 1, 101)
    sends: Sends = []
    while not sends:
        talk.say(name(0), report(0)), talk.say(b"next", spare(2))
        sends = talk.after(0.5)
    assert sends == [(b"next", Assigned("run-1", 1, 4, 0))]


def test_a_spare_that_has_answered_may_take_its_time_to_load(talk: Talk):
    talk.say(b"spare", spare(1))
    kill(talk, 1, 101)
    talk.say(b"spare", Report(3, 0, "waits for its model", 0.0, 0.0))
    for _ in range(40):
        talk.say(name(0), report(0)), talk.after(1.0)
    assert talk.core.records.registry.missing == []


def test_loading_for_longer_than_a_lease_is_no_lack_of_progress_once_it_is_done(talk: Talk):
    """What a worker says at once after its call counted as its last progress: it was lost as soon as it was ready."""
    talk.say(b"spare", spare(1))
    kill(talk, 1, 101)
    talk.say(b"spare", acknowledgement(Assigned("run-1", 1, 3, 0), talk.now))
    for _ in range(30):
        talk.say(name(0), report(0)), talk.after(1.0)
    talk.say(b"spare", msgspec.structs.replace(spare(1), endpoint="tcp://cloud:5555", incarnation=3))
    assert talk.core.records.registry.members[1].introduced
    for _ in range(5):
        talk.say(name(0), report(0)), talk.say(b"spare", Report(3, 0, "1F0 of step 0", talk.now, 0.0)), talk.after(1.0)
    assert talk.core.records.registry.missing == []


def test_a_spare_whose_call_got_lost_hears_it_again(talk: Talk):
    talk.say(b"spare", spare(1))
    kill(talk, 1, 101)
    assert talk.assigned(b"spare", spare(1)) == Assigned("run-1", 1, 3, 0)


def test_a_spare_hears_of_the_end(talk: Talk):
    talk.say(b"spare", spare(1))
    stop = Stop("enough; nothing is saved yet", 130)
    assert (b"spare", stop) in talk.say(b"train", StopRun("enough", 130))
    assert talk.say(b"late", spare(2)) == [(b"late", stop)]


def test_where_nobody_may_be_replaced_there_are_no_spares():
    talk = talk_of(terms=TERMS)
    ((_, refused),) = talk.say(b"spare", spare(1))
    assert isinstance(refused, Refused)


# A container that is restarted says hello long before the lease of its former self is over.


def test_a_worker_that_was_started_again_before_its_loss_was_noticed_stands_by_and_soon_has_its_place(talk: Talk):
    talk.after(1.5)
    talk.say(name(0), report(0))
    ((_, standby),) = talk.say(b"again", replacement(1, 101))
    assert isinstance(standby, Standby)
    assert talk.after(1.0) == [(b"again", Assigned("run-1", 1, 3, 0))]
    assert "was restarted" in talk.core.records.events.infos[-2]


def test_a_worker_that_is_heard_is_not_pushed_out_by_another_of_its_name(talk: Talk):
    for _ in range(30):
        talk.say(name(0), report(0)), talk.say(name(1), report(1)), talk.say(b"again", replacement(1, 201))
        assert talk.after(0.3) == []
    assert talk.core.records.registry.members[1].pid == 101


def test_two_machines_that_claim_one_place_have_made_a_mistake(talk: Talk):
    ((_, refused),) = talk.say(b"other", Hello(CONTROL_VERSION, "d" * 64, "worker-1", "laptop", 7, "", 1))
    assert isinstance(refused, Refused)


def test_a_worker_that_comes_back_after_its_place_was_given_away_stands_by(talk: Talk):
    talk.say(b"spare", spare(1))
    kill(talk, 1, 101)
    ((_, standby),) = talk.say(b"back", replacement(1, 201))
    assert isinstance(standby, Standby)


# What ends the run all the same


@pytest.mark.parametrize("status", [2, 78])
def test_a_process_that_would_fail_again_ends_the_run(talk: Talk, status: int):
    (stop,) = stops(kill(talk, 1, 101, status))
    assert stop.code == status
    assert "exited with status" in stop.reason


def test_a_worker_that_says_it_failed_ends_the_run(talk: Talk):
    (stop,) = stops(talk.say(name(1), Failed(2, "the loss of microbatch 3 of step 7 is nan", 1)))
    assert stop.reason == "worker 1 (stage 1) failed: the loss of microbatch 3 of step 7 is nan"


def lose_again(talk: Talk, times: int) -> Sends:
    """Worker 1 is killed, replaced, killed again, ..."""
    sends, pid = kill(talk, 1, 101), 101
    for pid in range(201, 200 + times):
        talk.assigned(b"new", replacement(1, pid))
        sends += kill(talk, 1, pid)
    return sends


def test_a_worker_that_is_lost_again_and_again_without_a_newer_checkpoint_ends_the_run(talk: Talk):
    reach(talk, 20)
    assert stops(lose_again(talk, 2)) == []
    talk.assigned(b"new", replacement(1, 301))
    (stop,) = stops(kill(talk, 1, 301))
    assert stop.reason == (
        "worker 1 (stage 1), worker-1 (pid 301, host desk), was killed by SIGKILL. It had sent no report. "
        "It was replaced 2 times since checkpoint 20 (recovery.restarts is 2)"
    )
    assert stop.code == 1


def test_a_newer_checkpoint_begins_the_count_anew(talk: Talk):
    lose_again(talk, 2)
    talk.assigned(b"new", replacement(1, 301))
    talk.say(name(0), said(1, stage=0, upto=20, snapshots=[(0, 20)]))
    talk.say(b"new", said(4, upto=20, snapshots=[(1, 20)]))
    assert stops(kill(talk, 1, 301)) == []
    assert talk.status()["restarts"] == 3


def test_processes_that_end_before_they_join_are_counted_too(talk: Talk):
    kill(talk, 1, 101)
    assert stops(talk.say(b"supervisor", Exited(1, 101, -9))) == []  # told twice, died once
    assert stops(talk.say(b"supervisor", Exited(1, 201, 1))) == []
    (stop,) = stops(talk.say(b"supervisor", Exited(1, 202, 1)))
    assert stop.reason == "worker 1 (stage 1) exited with status 1 before it joined; see its own output"


def test_a_process_that_ends_before_it_joins_as_it_always_will_ends_the_run_at_once(talk: Talk):
    kill(talk, 1, 101)
    (stop,) = stops(talk.say(b"supervisor", Exited(1, 201, 78)))
    assert stop.code == 78


def test_a_run_whose_lost_worker_nobody_replaces_is_given_up_naming_it(talk: Talk):
    kill(talk, 1, 101)
    sends: Sends = []
    while not stops(sends):
        talk.say(name(0), report(0))
        sends = talk.after(1.0)
    (stop,) = stops(sends)
    assert stop.code == 69
    assert stop.reason.startswith(
        "no replacement joined within 60 s for worker 1 (stage 1): stage 1 (worker 1) was lost 60 s ago "
        "and has not been replaced: worker 1 (stage 1), worker-1 (pid 101, host desk), was killed by SIGKILL. "
        "It had sent no report"
    )


# A broker that is killed and started again


def test_a_restarted_broker_knows_checkpoint_snapshots_gaps_and_counts(talk: Talk):
    reach(talk, 20)
    talk.say(name(0), said(1, stage=0, upto=40, snapshots=[(0, 40)]))
    talk.say(name(1), said(2, upto=37))
    kill(talk, 1, 101)
    again = Talk(talk.store, now=talk.now + 3.0, terms=REPLACING)
    assert (again.core.records.phase, again.core.records.registry.missing) == (RunPhase.RUNNING, [1])
    assert again.core.records.ledger.finished == [40, 20]
    given = again.assigned(b"new", replacement(1, 201))
    assert (given.index, given.step) == (1, 20)
    again.say(b"new", said(given.incarnation, upto=40, snapshots=[(1, 40)]))
    assert trims(again.say(name(0), said(1, stage=0)) + again.after(1.0)) == [40]
    assert again.status()["restarts"] == 1


def test_a_replacement_whose_assignment_got_lost_with_the_broker_gets_its_place_again(talk: Talk):
    kill(talk, 1, 101)
    given = talk.assigned(b"new", replacement(1, 201))
    again = Talk(talk.store, now=talk.now + 3.0, terms=REPLACING)
    assert again.assigned(b"new", replacement(1, 201)) == given


def test_a_restarted_broker_waits_anew_for_somebody_to_take_the_place(talk: Talk):
    kill(talk, 1, 101)
    again = Talk(talk.store, now=talk.now + 1000.0, terms=REPLACING)
    for _ in range(50):
        again.say(name(0), report(0))
        assert stops(again.after(1.0)) == []


# Status


def test_status_tells_who_is_missing_since_when_and_why(talk: Talk):
    kill(talk, 1, 101)
    talk.now += 2.0
    (gap,) = talk.status()["recovering"]  # type: ignore[misc]
    assert gap.pop("why").startswith("worker 1 (stage 1), worker-1 (pid 101, host desk), was killed by SIGKILL")
    assert gap.pop("since") == pytest.approx(2.6, abs=0.1)
    assert gap == {"index": 1, "pid": 101, "stages": [1], "given": False}
    talk.assigned(b"new", replacement(1, 201))
    assert talk.status()["recovering"][0]["given"] is True  # type: ignore[index]
    talk.say(b"new", said(3, actions=0))
    assert talk.status()["recovering"] != []
    talk.say(b"new", said(3, actions=1))
    assert (talk.status()["recovering"], talk.status()["restarts"]) == ([], 1)


def test_where_nobody_may_be_replaced_a_loss_ends_the_run():
    talk = talk_of(terms=replace(REPLACING, restarts=0))
    (stop,) = stops(kill(talk, 1, 101))
    assert stop.reason.endswith("was killed by SIGKILL. It had sent no report")
