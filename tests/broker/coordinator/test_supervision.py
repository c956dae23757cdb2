"""Lost workers: which are replaced, and which losses end the run."""

import pytest

from stageline.broker.control.messages import Assigned, Exited, Failed, Goodbye, Stop
from stageline.broker.control.records import Event
from stageline.broker.coordinator.run import RunPhase
from stageline.broker.ledger.losses import EXIT_GRACE, PARTING
from support.conversation import WAITING, Conversation, hello, name, report, stop_reason
from support.replacements import Sends, kill, reach, replacement, said, stops, talk_of

HINT = " (if not by you, then by the kernel's out-of-memory killer: see dmesg)"


@pytest.fixture
def talk() -> Conversation:
    return talk_of()


@pytest.mark.parametrize("status", [2, 78])
def test_a_process_that_would_fail_again_ends_the_run(talk: Conversation, status: int):
    (stop,) = stops(kill(talk, 1, 101, status))
    assert stop.code == status
    assert "exited with status" in stop.reason


def test_a_worker_that_reports_its_failure_ends_the_run(talk: Conversation):
    talk.send(name(1), Failed(2, "the loss of microbatch 3 of step 7 is nan", 1))
    (stop,) = stops(talk.after(PARTING))
    assert stop.reason == "worker 1 (stage 1) failed: the loss of microbatch 3 of step 7 is nan"


@pytest.mark.parametrize("parting", [Failed(2, "so it is", 1), Goodbye(2, "so it is")], ids=["failed", "goodbye"])
def test_the_end_of_a_worker_that_goes_on_is_not_believed_and_named_once(parting: Failed | Goodbye, talk: Conversation):
    """A process that had read the worker's secret ended the run with a text of its own, or emptied the place."""
    for _ in range(30):
        assert talk.send(b"stranger", parting) == []
        assert stops(talk.after(0.1)) == []
        talk.send(name(1), report(1)), talk.send(name(0), report(0))
    assert (talk.core.run.phase, talk.core.run.registry.missing) == (RunPhase.RUNNING, [])
    warning = f"refused: {type(parting).__name__} of worker 1 (stage 1), which goes on"
    assert talk.core.run.events.warnings.count(warning) == 1
    assert talk.status()["oddities"] == {"contradicted": 30}


@pytest.mark.parametrize("exited_first", [True, False])
def test_the_end_of_a_worker_is_believed_at_once_when_its_process_has_ended(talk: Conversation, exited_first: bool):
    said = [(b"supervisor", Exited(1, 101, 1, 1)), (name(1), Failed(2, "it is full", 1))]
    first, second = said if exited_first else said[::-1]
    assert stops(talk.send(*first)) == []
    (stop,) = stops(talk.send(*second))
    assert stop.reason == "worker 1 (stage 1) failed: it is full"


def lose_again(talk: Conversation, times: int) -> Sends:
    """Worker 1 is killed, replaced, killed again, ..."""
    sends, pid = kill(talk, 1, 101), 101
    for pid in range(201, 200 + times):
        talk.assigned(b"new", replacement(1, pid))
        sends += kill(talk, 1, pid)
    return sends


def test_a_worker_that_is_lost_again_and_again_without_a_newer_checkpoint_ends_the_run(talk: Conversation):
    reach(talk, 20)
    assert stops(lose_again(talk, 2)) == []
    talk.assigned(b"new", replacement(1, 301))
    (stop,) = stops(kill(talk, 1, 301))
    assert stop.reason == (
        f"worker 1 (stage 1), worker-1 (pid 301, host desk), was killed by SIGKILL{HINT}. It had sent no report. "
        "It was replaced 2 times since checkpoint 20 (recovery.restarts is 2)"
    )
    assert stop.code == 1


def test_a_newer_checkpoint_restarts_the_count(talk: Conversation):
    lose_again(talk, 2)
    talk.assigned(b"new", replacement(1, 301))
    talk.send(name(0), said(1, stage=0, upto=20, snapshots=[(0, 20)]))
    talk.send(b"new", said(4, upto=20, snapshots=[(1, 20)]))
    assert stops(kill(talk, 1, 301)) == []
    assert talk.status()["restarts"] == 3


def test_processes_that_end_before_they_join_are_counted_too(talk: Conversation):
    kill(talk, 1, 101)
    assert stops(talk.send(b"supervisor", Exited(1, 101, -9))) == []  # told twice, died once
    assert stops(talk.send(b"supervisor", Exited(1, 201, 1, 1))) == []
    (stop,) = stops(talk.send(b"supervisor", Exited(1, 202, 1, 1)))
    assert stop.reason == (
        "worker 1 (stage 1) exited with status 1 before it joined; see its own output. "
        "It was replaced 2 times since checkpoint 0 (recovery.restarts is 2)"
    )


@pytest.mark.parametrize("status", [0, 2, 3, 75, 78, 130])
def test_a_status_that_the_users_code_has_chosen_is_a_loss_and_never_the_runs_code(talk: Conversation, status: int):
    line = "in forward (model.py, line 3)"
    found = []
    for pid in (101, 201, 301):
        if pid > 101:
            talk.send(b"new", replacement(1, pid))
        found += stops(talk.send(b"supervisor", Exited(1, pid, status, None, line)) + talk.after(1.0))
    (stop,) = found
    assert stop.code == 1
    assert f"ended without a result (status {status}), {line}. It had sent no report" in stop.reason
    assert stop.reason.endswith("It was replaced 2 times since checkpoint 0 (recovery.restarts is 2)")


def test_a_worker_that_returns_success_while_steps_are_left_is_a_loss(talk: Conversation):
    assert stops(talk.send(b"supervisor", Exited(1, 101, 0, 0)) + talk.after(1.0)) == []
    assert talk.status()["restarts"] == 1


def test_where_a_lost_worker_hung_is_kept_with_its_loss(talk: Conversation):
    kill(talk, 1, 101)
    talk.send(b"supervisor", Exited(1, 101, -9, None, "in forward (model.py, line 3)"))
    (pending,) = talk.status()["recovering"]
    assert pending["why"].endswith(". It was in forward (model.py, line 3)")


def test_a_process_that_ends_before_it_joins_as_it_always_will_ends_the_run_at_once(talk: Conversation):
    kill(talk, 1, 101)
    (stop,) = stops(talk.send(b"supervisor", Exited(1, 201, 78, 78)))
    assert stop.code == 78


def test_a_run_whose_lost_worker_is_not_replaced_is_given_up_naming_it(talk: Conversation):
    kill(talk, 1, 101)
    sends: Sends = []
    while not stops(sends):
        talk.send(name(0), report(0))
        sends = talk.after(1.0)
    (stop,) = stops(sends)
    assert stop.code == 69
    assert stop.reason.startswith(
        "no replacement joined within 60 s for worker 1 (stage 1): stage 1 (worker 1) was lost 60 s ago "
        f"and has not been replaced: worker 1 (stage 1), worker-1 (pid 101, host desk), was killed by SIGKILL{HINT}. "
        "It had sent no report"
    )


# Where no worker can be replaced


@pytest.fixture
def final() -> Conversation:
    """A run that has just begun, in which no worker can be replaced."""
    talk = Conversation()
    talk.join(0), talk.join(1)
    return talk


def test_a_silent_worker_ends_the_run_naming_what_it_held(final: Conversation):
    held = [Event(1, 118, 2, "stashed", 1000.0), Event(1, 118, 3, "forward", 1000.2)]
    final.send(name(1), report(1, actions=7, now="1F3 of step 118", events=held))
    sends = []
    while not sends:
        final.send(name(0), report(0))
        sends = final.after(0.1)
    assert [recipient for recipient, _ in sends] == [name(0)]
    assert stop_reason(sends, name(0)) == (
        "worker 1 (stage 1), worker-1 (pid 101, host desk), was silent for 10.0 s (recovery.lease is 10 s). "
        "It held 1F3 of step 118 since 9.8 s; microbatch 2 of step 118, stashed at stage 1"
    )
    assert (final.core.run.phase, final.status()["code"]) == (RunPhase.FAILED, 1)


def test_a_killed_process_ends_the_run_naming_its_signal(final: Conversation):
    final.send(name(1), report(1))
    assert final.send(b"supervisor", Exited(1, 101, -9)) == []
    why = stop_reason(final.after(EXIT_GRACE + 0.2), name(0))
    assert why == (
        f"worker 1 (stage 1), worker-1 (pid 101, host desk), was killed by SIGKILL{HINT}. "
        f'It last reported: "{WAITING}" since 1.0 s'
    )


def test_the_last_message_of_a_process_explains_more_than_its_exit(final: Conversation):
    final.send(b"supervisor", Exited(1, 101, 1, 1))
    sends = final.send(name(1), Failed(2, "the loss is not a scalar: it has shape (4,)", 78))
    assert sends == [(name(0), Stop("worker 1 (stage 1) failed: the loss is not a scalar: it has shape (4,)", 78))]
    assert final.after(1.0) == []


def test_the_exit_of_a_former_process_is_no_news(final: Conversation):
    final.send(b"supervisor", Exited(1, 55, 1, 1))
    assert final.after(1.0) == []
    assert final.core.run.phase is RunPhase.RUNNING


def test_a_process_that_exits_before_it_joined_ends_the_run_with_its_code():
    talk = Conversation()
    talk.join(0)
    sends = talk.send(b"supervisor", Exited(1, 101, 78, 78))
    words = "worker 1 (stage 1) exited with status 78 before it joined; see its own output"
    assert sends == [(name(0), Stop(words, 78))]


def test_the_first_cause_stays(final: Conversation):
    final.send(name(1), Failed(2, "out of memory", 1))
    final.after(0.1), final.send(name(0), Failed(1, "stopped", 1)), final.after(PARTING)
    assert final.status()["reason"] == "worker 1 (stage 1) failed: out of memory"


def test_a_worker_that_leaves_before_the_run_is_over_ends_it(final: Conversation):
    final.send(name(1), Goodbye(2, "interrupted"))
    sends = final.after(PARTING)
    assert stop_reason(sends, name(0)).startswith(
        "worker 1 (stage 1), worker-1 (pid 101, host desk), left: interrupted."
    )


def test_while_the_run_waits_a_lost_worker_only_leaves_its_place():
    talk = Conversation()
    talk.join(0)
    assert talk.after(10.5) == []
    assert (talk.core.run.phase, talk.status()["missing"]) == (RunPhase.WAITING, [0, 1])
    ((_, assigned), *_) = talk.send(b"b", hello(0))
    assert assigned == Assigned("run-1", 0, 2, 0)


@pytest.mark.parametrize(("code", "meant"), [(0, 1), (7, 1), (-9, 1), (78, 78)])
def test_a_failed_run_never_ends_with_0_whatever_its_worker_says(code: int, meant: int):
    talk = Conversation()
    talk.join(0), talk.join(1)
    talk.send(name(1), Failed(2, "so it is", code)), talk.after(PARTING)
    assert talk.status()["code"] == meant
