"""When a worker counts as lost, and when all wait for each other."""

import re

import pytest

from stageline.broker.control.messages import Exited, Stop
from stageline.broker.ledger.losses import EXIT_GRACE, Standstill
from stageline.broker.ledger.member import Member, MemberStatus, describe_exit
from stageline.broker.ledger.registry import Registry
from support.conversation import Conversation, name, report
from support.registered import LEASE, LEASES, PLACEMENT, introduced, lost, placed, progress_report


@pytest.fixture
def registry() -> Registry:
    return Registry(PLACEMENT)


def test_a_silent_worker_is_lost_after_a_lease(registry: Registry):
    anna = introduced(registry, "anna")
    anna.note_contact(b"anna", 5.0)
    assert lost(registry, 14.9) == []
    (loss,) = lost(registry, 15.1)
    assert (loss.member, loss.why) == (anna, "was silent for 10.1 s (recovery.lease is 10 s)")


def test_a_worker_that_has_not_begun_may_take_longer(registry: Registry):
    placed(registry, "anna")
    assert lost(registry, LEASE + 1) == []
    (loss,) = lost(registry, LEASES.loading)
    assert loss.why == "was silent for 60.0 s (recovery.loading is 60 s)"


def beats(registry: Registry, member: Member, *reports: tuple[float, int, str]) -> None:
    for now, actions, doing in reports:
        member.note_contact(b"", now)
        member.note_report(progress_report(member.incarnation, actions, doing), now)


def test_a_worker_that_computes_without_progress_is_lost_though_it_reports(registry: Registry):
    anna = introduced(registry, "anna")
    beats(registry, anna, (1.0, 5, "0F3"), (11.0, 5, "0F3"), (20.9, 5, "0F3"))
    assert lost(registry, 20.9) == []  # an action may take longer than a worker may be silent
    (loss,) = lost(registry, 21.0)
    assert loss.why == (
        "is alive, but completed no action for 20.0 s; if one may take this long, raise recovery.action (20 s)"
    )


def test_a_worker_that_waits_or_makes_progress_is_not_lost(registry: Registry):
    anna, berta = introduced(registry, "anna"), introduced(registry, "berta")
    beats(registry, anna, (1.0, 5, "0F3"), (6.0, 5, "waits for backward-0"), (11.0, 5, "0B3"))
    beats(registry, berta, (1.0, 5, "1F3"), (6.0, 6, "1F3"), (11.0, 6, "1B3"))
    assert lost(registry, 11.0) == []


def test_a_finished_worker_need_not_get_on(registry: Registry):
    anna = introduced(registry, "anna")
    anna.status = MemberStatus.FINISHED
    beats(registry, anna, (1.0, 5, "0U"), (9.0, 5, "0U"), (15.0, 5, "0U"))
    assert lost(registry, 15.0) == []


def test_a_worker_whose_process_ended_is_lost_once_its_last_messages_had_time_to_arrive(registry: Registry):
    anna = introduced(registry, "anna")
    anna.exited = (2.0, Exited(0, 1, -9))
    assert lost(registry, 2.0) == []
    (loss,) = lost(registry, 2.0 + EXIT_GRACE)
    assert (loss.why, loss.exited, loss.result) == ("was killed by SIGKILL", True, None)


@pytest.mark.parametrize(
    ("status", "result", "words"),
    [
        (0, 0, "exited with status 0"),
        (78, 78, "exited with status 78"),
        (78, None, r"ended without a result \(status 78\)"),
        (0, None, r"ended without a result \(status 0\)"),
        (-11, None, "was killed by SIGSEGV"),
        (-77, None, "by signal 77"),
    ],
)
def test_an_end_is_described_and_only_a_result_counts_as_the_commands_status(
    status: int, result: int | None, words: str
):
    assert re.search(f"{words}$", describe_exit(Exited(0, 1, status, result)))
    line = "in forward (model.py, line 3)"
    assert describe_exit(Exited(0, 1, -11, None, line)) == f"was killed by SIGSEGV, {line}"


def test_all_leases_restart_when_the_broker_was_away(registry: Registry):
    anna = introduced(registry, "anna")
    beats(registry, anna, (1.0, 5, "0F3"))
    anna.restart_lease(100.0)
    assert lost(registry, 109.0) == []


BOUND = 60.0


def test_a_run_in_which_all_wait_for_ever_ends_and_names_the_queues():
    talk = Conversation()
    for index in (0, 1):
        talk.join(index)
    received = []
    for number in range(1, 800):
        for index in (0, 1):
            received += talk.send(name(index), report(index, actions=3, number=number))
        received += talk.after(0.1)
    stops = [message for _, message in received if isinstance(message, Stop)]
    assert stops
    assert stops[0].code == 1
    assert "every worker has been waiting for another for 60 s" in stops[0].reason
    assert "worker 1 at ipc://1 on host desk" in stops[0].reason


def test_a_worker_that_makes_progress_restarts_the_bound():
    talk = Conversation()
    for index in (0, 1):
        talk.join(index)
    for number in range(1, 1500):
        for index in (0, 1):
            talk.send(name(index), report(index, actions=number // 500, number=number))
        talk.after(0.1)
    assert talk.status()["phase"] == "running"


def test_there_is_no_standstill_before_all_workers_have_reported():
    standstill = Standstill(lease=10.0)
    assert standstill.bound == BOUND
    assert standstill.lasts([], 5.0) == 0.0
