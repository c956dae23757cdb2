"""The script of a scripted run is one more member: lost by silence alone, and never replaced out of the budget."""

from dataclasses import replace

import msgspec
import pytest

from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import Assigned, Exited, Failed, Goodbye, Peers, Refused, Standby, Stop, StopRun
from stageline.broker.coordinator.run import RunPhase, ScriptCode
from stageline.broker.coordinator.state import Life
from stageline.broker.ledger.losses import PARTING
from support.conversation import TERMS, Conversation, finished, hello, name, report, steps
from support.scripted import (
    SCRIPT,
    SCRIPTED,
    heartbeats,
    join_script,
    reach,
    script_hello,
    script_says,
    scripted,
)


@pytest.fixture
def talk() -> Conversation:
    return scripted()


def stops(sends: list[tuple[bytes, object]]) -> list[Stop]:
    return list(dict.fromkeys(message for _, message in sends if isinstance(message, Stop)))


def kill_script(talk: Conversation) -> None:
    talk.send(b"launcher", Exited(SCRIPT, 102, -9))
    heartbeats(talk, 1.0, 0, 1)


def test_the_run_begins_when_the_script_is_there_too_and_all_learn_where_it_is():
    talk = Conversation(terms=SCRIPTED)
    talk.join(0), talk.join(1)
    assert talk.core.run.lifecycle.state is Life.WAITING
    assert talk.status()["missing"] == []
    assert talk.status()["script"] == {"index": 2, "stages": [], "standing": "missing"}
    talk.assigned(name(SCRIPT), script_hello())
    sends = talk.send(name(SCRIPT), script_hello(3))
    peers = Peers({0: (1, "ipc://0"), 1: (2, "ipc://1"), 2: (3, "ipc://script")})
    assert {to for to, message in sends if message == peers} == {name(0), name(1), name(SCRIPT)}
    assert talk.core.run.lifecycle.state is Life.RUNNING
    assert "the script is script (pid 102, host desk), generation 1, incarnation 3" in talk.core.run.events.infos


def test_a_worker_without_a_claim_never_gets_the_scripts_place():
    talk = Conversation(terms=SCRIPTED)
    for index in (0, 1):
        assert talk.assigned(name(index), msgspec.structs.replace(hello(index), claim=None)).index == index
    ((_, refused),) = talk.send(b"third", msgspec.structs.replace(hello(7), host="other", claim=None))
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("all 2 workers of the plan have joined: 0 is worker-0")


def test_a_spare_without_a_claim_never_gets_the_scripts_place(talk: Conversation):
    spare = msgspec.structs.replace(hello(7), claim=None, spare=True)
    assert isinstance(talk.send(b"spare", spare)[0][1], Standby)
    talk.send(b"launcher", Exited(SCRIPT, 102, -9))
    for _ in range(10):
        talk.send(b"spare", spare)
        assert not [each for each in heartbeats(talk, 0.5, 0, 1) if isinstance(each[1], Assigned)]
    assert SCRIPT in talk.core.run.registry.missing


def test_a_claim_beyond_the_scripts_place_is_told_which_workers_there_are(talk: Conversation):
    ((_, refused),) = talk.send(b"x", hello(3))
    assert isinstance(refused, Refused)
    assert refused.reason == "there is no worker 3: the plan has workers 0 to 1"


def test_the_scripts_own_code_may_take_hours(talk: Conversation):
    assert stops(heartbeats(talk, 3 * 60.0, 0, 1, SCRIPT)) == []
    assert talk.core.run.phase is RunPhase.RUNNING


def test_silence_makes_it_lost_and_after_another_lease_the_run_stops_with_its_newest_checkpoint(talk: Conversation):
    reach(talk, 40)
    talk.send(name(SCRIPT), script_says("its own code after call 41"))
    assert stops(heartbeats(talk, 19.0, 0, 1)) == []
    assert talk.core.run.registry.missing == [SCRIPT]
    (stop,) = stops(heartbeats(talk, 2.0, 0, 1))
    assert (stop.code, stop.at_step_end, stop.step) == (75, True, 40)
    assert stop.reason == (
        "the script is gone: script (pid 102, host desk) was silent for 10.0 s (recovery.lease is 10 s). "
        'It last reported: "its own code after call 41" since 10.0 s; the state after 40 steps is saved'
    )
    assert talk.core.run.lifecycle.state is Life.STOPPED
    assert (talk.status()["restarts"], talk.status()["recovering"]) == (0, [])


def test_the_end_of_its_process_makes_it_lost_at_once(talk: Conversation):
    reach(talk, 20)
    talk.send(name(SCRIPT), script_says())
    talk.send(b"launcher", Exited(SCRIPT, 102, 0))
    assert stops(heartbeats(talk, 10.0, 0, 1)) == []
    assert talk.core.run.registry.missing == [SCRIPT]
    (stop,) = stops(heartbeats(talk, 1.0, 0, 1))
    assert stop.reason.startswith("the script is gone: script (pid 102, host desk) has ended. It last reported:")


def test_a_run_whose_script_is_gone_before_the_first_checkpoint_has_nothing_saved(talk: Conversation):
    kill_script(talk)
    (stop,) = stops(heartbeats(talk, 12.0, 0, 1))
    assert stop.code == 130
    assert "was killed by SIGKILL" in stop.reason
    assert stop.reason.endswith("nothing is saved yet")


def test_a_goodbye_stops_the_run_after_the_last_step_that_was_called_for_and_waits_until_that_is_saved(
    talk: Conversation,
):
    """It stopped at once, and what came after the newest checkpoint was lost."""
    reach(talk, 40)
    assert talk.send(name(SCRIPT), Goodbye(3, "ValueError in train.py, line 12", training_steps=47)) == []
    assert talk.status()["script"]["standing"] == "left"  # type: ignore[index]
    for stage in (0, 1):
        talk.send(name(stage), report(stage, actions=90, now="computes", steps=steps(stage, *range(40, 47))))
    sends = talk.after(0.1)
    assert {to for to, _ in sends} == {name(0), name(1)}
    reason = "the script left: ValueError in train.py, line 12; the state after 40 steps is saved"
    assert stops(sends) == [Stop(reason, 75, at_step_end=True, step=47)]
    reach(talk, 47)
    assert talk.status()["reason"] == reason.replace("40", "47")
    assert talk.status()["saving"]
    talk.send(name(0), Goodbye(1, "stopped")), talk.send(name(1), Goodbye(2, "stopped"))
    assert not talk.status()["saving"]


def test_a_script_that_is_there_when_its_run_is_stopped_is_asked_what_it_has_called_for(talk: Conversation):
    """The workers had passed the step that was guessed, or waited in vain for steps that no script called for."""
    reach(talk, 40)
    asked = talk.send(b"launcher", StopRun("interrupted", at_step_end=True))
    assert asked == [(name(SCRIPT), Stop("interrupted", 75, at_step_end=True))]
    assert stops(talk.after(0.3)) == []
    talk.send(name(SCRIPT), script_says("its own code", training_steps=40))
    (stop,) = stops(talk.after(0.1))
    assert (stop.at_step_end, stop.step) == (True, 40)


def test_of_long_steps_that_were_called_for_only_those_that_have_begun_are_waited_for(talk: Conversation):
    reach(talk, 40)
    heartbeats(talk, 2.0, 0, 1, SCRIPT)
    talk.send(name(SCRIPT), Goodbye(3, "Ctrl-C", training_steps=42))
    (stop,) = stops(heartbeats(talk, 2.0, 0, 1))
    assert (stop.at_step_end, stop.step) == (True, 40)


def test_if_the_workers_are_elsewhere_the_script_alone_knows_the_calls_before_a_state_and_without_it_none_is_saved():
    talk = scripted(terms=replace(SCRIPTED, code=ScriptCode("2.13.0", {})))
    reach(talk, 40)
    kill_script(talk)
    (stop,) = stops(heartbeats(talk, 12.0, 0, 1))
    assert (stop.code, stop.at_step_end) == (75, False)


def test_a_goodbye_does_not_cut_short_a_stop_that_waits_for_a_steps_end(talk: Conversation):
    reach(talk, 40)
    talk.send(b"me", StopRun("interrupted", at_step_end=True))
    talk.send(name(SCRIPT), Goodbye(3, "interrupted"))
    (stop,) = stops(heartbeats(talk, 2.0, 0, 1))
    assert (stop.at_step_end, stop.step) == (True, 40)


def test_a_failure_of_the_script_is_the_runs(talk: Conversation):
    talk.send(name(SCRIPT), Failed(3, "call 7 has no targets", 1))
    (stop,) = stops(talk.after(PARTING))
    assert (stop.reason, stop.code) == ("the script failed: call 7 has no targets", 1)


def test_another_process_takes_the_place_meanwhile_and_begins_at_the_newest_checkpoint(talk: Conversation):
    reach(talk, 40)
    kill_script(talk)
    assert join_script(talk, pid=777) == 40
    talk.send(name(SCRIPT), script_says(incarnation=4))
    assert talk.status()["script"]["pid"] == 777  # type: ignore[index]
    sends = []
    for _ in range(40):
        talk.send(name(SCRIPT), script_says(incarnation=4))
        sends += heartbeats(talk, 0.5, 0, 1)
    assert stops(sends) == []
    assert talk.status()["restarts"] == 0
    assert talk.core.run.replacements.pending == {}


def test_the_workers_learn_where_the_new_script_is(talk: Conversation):
    kill_script(talk)
    talk.assigned(b"new", script_hello(pid=777))
    sends = talk.send(b"new", msgspec.structs.replace(script_hello(4, pid=777), endpoint="ipc://again"))
    peers = next(message for to, message in sends if to == name(0) and isinstance(message, Peers))
    assert peers.workers[SCRIPT] == (4, "ipc://again")


def test_it_is_lost_any_number_of_times_if_another_takes_its_place(talk: Conversation):
    for turn in range(5):
        talk.send(b"launcher", Exited(SCRIPT, 102 + turn, -9))
        assert stops(heartbeats(talk, 2.0, 0, 1)) == []
        join_script(talk, pid=103 + turn)
        talk.send(name(SCRIPT), script_says(incarnation=4 + turn))
    assert talk.status()["restarts"] == 0


@pytest.mark.parametrize("host", ["desk", "laptop"])
def test_a_script_that_comes_while_another_is_alive_is_refused(talk: Conversation, host: str):
    ((_, first),) = talk.send(b"new", script_hello(pid=777, host=host))
    assert isinstance(first, Standby)
    heartbeats(talk, 1.0, 0, 1, SCRIPT)
    ((_, refused),) = talk.send(b"new", script_hello(pid=777, host=host))
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("the run has its script: script (pid 102, host desk), alive 0.")


@pytest.mark.parametrize("host", ["desk", "laptop"])
def test_a_script_that_comes_after_another_was_killed_waits_for_its_place(talk: Conversation, host: str):
    """From any host, until the lease is over: it may be paused."""
    sends: list[tuple[bytes, object]] = []
    for _ in range(24):
        sends += talk.send(b"new", script_hello(pid=777, host=host))
        sends += heartbeats(talk, 0.5, 0, 1)
        if any(isinstance(message, Assigned) for _, message in sends):
            break
    (assigned,) = {message for to, message in sends if isinstance(message, Assigned)}
    assert assigned.index == SCRIPT
    assert not [message for _, message in sends if isinstance(message, Refused)]
    assert talk.now == pytest.approx(SCRIPTED.lease, abs=0.6)


def test_a_script_that_is_lost_before_the_run_begins_stops_it_too():
    """The run would wait for it forever."""
    talk = Conversation(terms=SCRIPTED)
    talk.join(0)
    join_script(talk)
    assert stops(heartbeats(talk, 19.0, 0)) == []
    (stop,) = stops(heartbeats(talk, 2.0, 0))
    assert stop.reason.startswith("the script is gone")
    assert stop.code == 130


def test_a_script_whose_process_ends_before_it_joins_stops_the_run():
    talk = Conversation(terms=SCRIPTED)
    talk.join(0), talk.join(1)
    (stop,) = stops(talk.send(b"launcher", Exited(SCRIPT, 102, 1)))
    assert stop.reason == "the script has ended before it joined; see its own output; nothing is saved yet"


def test_without_snapshots_no_other_process_can_go_on_where_the_script_was():
    talk = scripted(terms=replace(TERMS, scripted=True))
    talk.send(name(SCRIPT), script_says())
    talk.send(b"launcher", Exited(SCRIPT, 102, -9))
    (stop,) = stops(talk.after(1.0))
    assert stop.code == 130
    assert stop.reason.startswith("the script is gone: script (pid 102, host desk) was killed by SIGKILL")


def test_without_snapshots_a_script_that_reconnects_goes_on_where_all_stages_are():
    talk = scripted(terms=replace(TERMS, scripted=True))
    for stage in (0, 1):
        talk.send(name(stage), report(stage, steps=steps(stage, *range(3 + stage))))
    assert talk.assigned(name(SCRIPT), script_hello(3)).step == 3


def test_trims_reach_the_script(talk: Conversation):
    reach(talk, 20)
    assert (name(SCRIPT), Trim(20)) in talk.after(0.2)


def test_workers_finish_the_run_and_the_script_is_told(talk: Conversation):
    reach(talk, 27)  # where the script has ended it: no multiple of snapshot_every
    assert talk.status()["training_steps"] is None
    talk.send(name(SCRIPT), finished(SCRIPT))
    assert talk.status()["oddities"] == {"illegal": 1}
    talk.send(name(SCRIPT), report(SCRIPT, now="has called", training_steps=27))
    talk.send(name(0), finished(0))
    stop = Stop("all steps are done", 0)
    assert talk.send(name(1), finished(1)) == [(name(index), stop) for index in (0, 1, SCRIPT)]
    status = talk.status()
    assert (status["phase"], status["training_steps"], status["checkpoint"]) == ("finished", 27, 27)
    talk.send(name(SCRIPT), Goodbye(3, "over"))
    assert talk.core.run.all_left
    assert talk.status()["reason"] == "all steps are done"


def test_workers_have_not_finished_while_the_script_calls(talk: Conversation):
    reach(talk, 20)
    for index in (0, 1):
        assert talk.send(name(index), finished(index)) == []
    heartbeats(talk, 3.0, 0, 1, SCRIPT)
    assert talk.status()["oddities"] == {}  # the script may be about to say that it makes no more calls
    heartbeats(talk, 3.0, 0, 1, SCRIPT)
    assert talk.core.run.outcome is None
    assert talk.status()["oddities"] == {"unsupported": 2}


def test_workers_have_not_finished_while_the_place_of_a_script_that_makes_more_calls_is_empty(talk: Conversation):
    """A process that knew the workers' secrets ended the run as finished, after 0 steps."""
    kill_script(talk)
    for index in (0, 1):
        assert talk.send(name(index), finished(index)) == []
    assert talk.core.run.outcome is None
    (stop,) = stops(heartbeats(talk, 12.0, 0, 1))
    assert (stop.code, "was killed by SIGKILL" in stop.reason) == (130, True)


def test_what_a_lost_script_had_called_for_holds_until_its_successor_speaks(talk: Conversation):
    """The run finished with the steps that a lost script had called for, while its successor called for more."""
    reach(talk, 20)
    talk.send(name(SCRIPT), script_says("its end", training_steps=20))
    kill_script(talk)
    join_script(talk, pid=777)
    talk.send(name(SCRIPT), script_says(incarnation=4))
    for index in (0, 1):
        talk.send(name(index), finished(index))
    assert talk.core.run.outcome is None
    talk.send(name(SCRIPT), script_says("its end", incarnation=4, training_steps=20))
    for index in (0, 1):
        talk.send(name(index), finished(index))
    assert talk.core.run.phase is RunPhase.FINISHED


def test_a_run_finishes_whose_script_is_lost_after_its_last_call(talk: Conversation):
    reach(talk, 20)
    talk.send(name(SCRIPT), script_says("its end", training_steps=20))
    kill_script(talk)
    for index in (0, 1):
        talk.send(name(index), finished(index))
    assert (talk.core.run.phase, talk.core.run.training_steps) == (RunPhase.FINISHED, 20)


def test_a_worker_cannot_say_how_many_steps_a_script_will_ask_for(talk: Conversation):
    talk.send(name(0), report(0, training_steps=12))
    assert talk.status()["training_steps"] is None


def test_a_snapshot_of_a_step_that_is_not_finished_is_still_refused(talk: Conversation):
    talk.send(name(0), report(0, steps=steps(0, *range(5)), snapshots=[(0, 5), (0, 6)]))
    assert talk.core.run.checkpoints.newer[0] == {5}
    assert talk.status()["oddities"] == {"illegal": 1}


def test_everything_waits_for_messages_only_if_the_script_does_too(talk: Conversation):
    for index in (0, 1):
        talk.send(name(index), report(index))
    heartbeats(talk, 120.0, 0, 1, SCRIPT)
    assert talk.core.run.phase is RunPhase.RUNNING
    sends: list[tuple[bytes, object]] = []
    for _ in range(140):
        sends += talk.send(name(SCRIPT), script_says("waits for reply-1 to call 7"))
        sends += heartbeats(talk, 0.5, 0, 1)
    reason = stops(sends)[0].reason
    assert reason.startswith("every worker has been waiting for another for 6")
    assert "the script at ipc://script on host desk" in reason


def test_a_lost_worker_is_replaced_as_ever(talk: Conversation):
    reach(talk, 20)
    talk.send(b"launcher", Exited(1, 101, -9))
    heartbeats(talk, 1.0, 0, SCRIPT)
    assert talk.assigned(b"new", msgspec.structs.replace(hello(1), pid=201)).step == 20
    assert talk.status()["restarts"] == 1


def test_the_scripts_loss_survives_the_brokers(talk: Conversation):
    """The broker is killed while the place is empty: its successor gives it another lease, then stops the run."""
    reach(talk, 20)
    kill_script(talk)
    again = Conversation(talk.store, now=talk.now + 5.0, terms=SCRIPTED)
    assert again.core.run.registry.missing == [SCRIPT]
    assert stops(heartbeats(again, 9.0, 0, 1)) == []
    (stop,) = stops(heartbeats(again, 2.0, 0, 1))
    assert stop.reason.startswith("the script is gone: script (pid 102, host desk) was killed by SIGKILL")


def test_the_reason_stays_true_if_workers_complete_a_newer_checkpoint_after_the_stop(talk: Conversation):
    reach(talk, 20)
    talk.send(name(SCRIPT), Goodbye(3, "enough", training_steps=20))
    reach(talk, 40)
    assert talk.status()["reason"] == "the script left: enough; the state after 40 steps is saved"


def test_a_worker_whose_queues_the_script_cannot_reach_is_refused_naming_it():
    talk = Conversation(terms=SCRIPTED)
    join_script(talk)
    said = msgspec.structs.replace(hello(0, endpoint="ipc://0"), host="elsewhere")
    ((_, refused),) = talk.send(name(0), said)
    assert isinstance(refused, Refused)
    assert "where the script on host desk cannot reach them" in refused.reason


def test_a_script_that_makes_no_more_calls_says_after_which_step_all_can_stop(talk: Conversation):
    """It was interrupted: the workers, which have begun 50 steps in the last second, get no others."""
    reach(talk, 40)
    heartbeats(talk, 1.0, 0, 1, SCRIPT)
    for stage in (0, 1):
        talk.send(name(stage), report(stage, actions=91, now="computes", steps=steps(stage, *range(40, 91))))
    talk.send(name(SCRIPT), script_says("its end", calls=95, training_steps=91))
    talk.send(b"launcher", StopRun("interrupted", at_step_end=True))
    (stop,) = stops(heartbeats(talk, 2.0, 0, 1, SCRIPT))
    assert (stop.at_step_end, stop.step) == (True, 91)
    assert talk.status()["training_steps"] is None
