"""The broker's records are lost, or a copy from yesterday: the workers and the disks are the records then."""

import copy
from dataclasses import replace

import msgspec
import pytest

from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import (
    CONTROL_VERSION,
    Answer,
    Ask,
    Assigned,
    Confirmed,
    Exited,
    Finished,
    FromBroker,
    Hello,
    Peers,
    Refused,
    Report,
    Standby,
    StopRun,
)
from stageline.broker.control.records import WorkerRecord
from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.run import RunPhase
from stageline.broker.coordinator.state import Life
from support.conversation import PLAN, TERMS, Conversation, name, steps

REPLACING = replace(TERMS, restarts=2, snapshots=True)
LEASE = TERMS.lease
Sends = list[tuple[bytes, FromBroker]]
SHARED = [(stage, step) for stage in (0, 1) for step in (20, 40)]  # on a disk that all workers share


def talk_at(store: MemoryStore) -> Conversation:
    """A run whose checkpoint 40 is complete; workers 0 and 1 work under incarnations 1 and 2."""
    talk = Conversation(store, terms=REPLACING)
    for index in (0, 1):
        talk.join(index)
        talk.send(name(index), report(index, index + 1, 47, snapshots=[(index, 20), (index, 40)]))
    return talk


def report(index: int, incarnation: int, done: int, **more: object) -> Report:
    records = steps(index, *range(done), loss=0.5)
    return Report(incarnation, 9, "computes", 0.0, 0.0, records, number=1, **more)  # type: ignore[arg-type]


def remembering(
    index: int, incarnation: int, *, step: int = 47, complete: int = 40, snapshots: list[tuple[int, int]] | None = None,
    run: str = "run-1", pid: int = 0,
) -> Hello:  # fmt: skip
    return Hello(
        CONTROL_VERSION, PLAN, f"worker-{index}", "desk", pid or 100 + index, f"ipc://{index}", index, incarnation,
        memory=WorkerRecord(run, index, complete, step), snapshots=SHARED if snapshots is None else snapshots,
    )  # fmt: skip


def newcomer(index: int | None, pid: int, *, snapshots: list[tuple[int, int]] | None = None) -> Hello:
    found = SHARED if snapshots is None else snapshots
    return Hello(CONTROL_VERSION, PLAN, f"worker-{pid}", "desk", pid, "", index, snapshots=found)


def blind(index: int | None, pid: int) -> Hello:
    """A newcomer who does not know where to look for snapshots."""
    return msgspec.structs.replace(newcomer(index, pid), snapshots=None)


def assignments(sends: Sends) -> dict[bytes, Assigned]:
    return {to: message for to, message in sends if isinstance(message, Assigned)}


@pytest.fixture
def lost() -> Conversation:
    """The broker is started again, some seconds later, with nothing."""
    assert talk_at(MemoryStore()).status()["checkpoint"] == 40
    return Conversation(MemoryStore(), now=100.0, terms=REPLACING)


def test_running_workers_continue_where_they_are_under_new_incarnations(lost: Conversation):
    for index in (0, 1):
        assert lost.send(name(index), report(index, index + 1, 48)) == []
        assert lost.send(name(index), remembering(index, index + 1)) == []
    sends = lost.after(LEASE + 0.2)
    given = assignments(sends)
    assert [(each.index, each.step, each.keep) for each in given.values()] == [(0, 40, True), (1, 40, True)]
    incarnations = {each.index: each.incarnation for each in given.values()}
    assert min(incarnations.values()) > 100_000
    peers = Peers({index: (incarnations[index], f"ipc://{index}") for index in (0, 1)})
    assert (name(0), peers) in sends
    assert (name(1), Trim(40)) in sends
    assert (lost.core.run.phase, lost.core.run.ledger.finished) == (RunPhase.RUNNING, [47, 47])
    assert lost.send(name(1), report(1, incarnations[1], 48)) == [(name(1), Confirmed(1))]
    assert lost.core.run.ledger.losses == dict.fromkeys(range(0, 48, 10), 0.5)


def test_nothing_is_decided_before_all_workers_had_a_lease_to_reconnect(lost: Conversation):
    lost.send(name(0), remembering(0, 1))
    ((_, standby),) = lost.send(b"new", newcomer(1, 201))
    assert standby == Standby(
        "the broker has lost its records and asks the workers, which keep training, how far the run is", "run-1"
    )
    assert lost.after(LEASE - 0.2) == []
    assert lost.send(name(0), report(0, 1, 48)) == []
    lost.send(name(1), remembering(1, 2))
    assert assignments(lost.after(0.4)).keys() == {name(0), name(1)}


def test_an_absent_worker_is_replaced_at_the_newest_step_of_which_all_snapshots_are_on_disk(lost: Conversation):
    lost.send(name(0), remembering(0, 1))
    lost.after(LEASE - 1)
    lost.send(b"new", newcomer(1, 201))
    given = assignments(lost.after(2.0))
    assert (given[b"new"].step, given[b"new"].keep) == (40, False)
    assert (given[name(0)].step, given[name(0)].keep) == (40, True)
    assert lost.core.run.ledger.finished == [47, 40]


def test_a_worker_behind_that_step_is_replaced(lost: Conversation):
    lost.send(name(0), remembering(0, 1)), lost.send(name(1), remembering(1, 2, step=31, complete=20))
    assert assignments(lost.after(LEASE + 0.2)).keys() == {name(0)}
    ((_, refused),) = lost.send(name(1), report(1, 2, 31))
    assert isinstance(refused, Refused)
    assert lost.assigned(b"new", newcomer(1, 201)).step == 40


def test_what_another_has_seen_later_does_not_make_an_owner_look_behind(lost: Conversation):
    """While everyone was asked, training went on, and its owner lost its place: another had seen its newest snapshot,
    and it had not yet said how far it was."""
    lost.send(name(0), remembering(0, 1, step=47, snapshots=[(0, 20), (0, 40), (1, 40)]))
    everything = [(stage, step) for stage in (0, 1) for step in (20, 40, 60)]
    lost.send(name(1), remembering(1, 2, step=61, snapshots=everything))
    given = assignments(lost.after(LEASE + 0.2))
    assert {to: (each.step, each.keep) for to, each in given.items()} == {name(0): (40, True), name(1): (40, True)}


def test_snapshots_that_each_finds_on_its_own_disk_are_put_together(lost: Conversation):
    lost.send(name(0), remembering(0, 1, snapshots=[(0, 20), (0, 40), (0, 60)], step=61, complete=20))
    lost.send(name(1), remembering(1, 2, snapshots=[(1, 20), (1, 40)]))
    assert {each.step for each in assignments(lost.after(LEASE + 0.2)).values()} == {40}


def test_of_two_owners_of_one_place_the_higher_incarnation_counts(lost: Conversation):
    lost.send(b"owner", remembering(1, 7, pid=901)), lost.send(b"stale", remembering(1, 2, pid=101))
    lost.send(name(0), remembering(0, 1))
    given = assignments(lost.after(LEASE + 0.2))
    assert given.keys() == {b"owner", name(0)}
    ((_, refused),) = lost.send(b"stale", remembering(1, 2, pid=101))
    assert isinstance(refused, Refused)


# Snapshots of a stage that no worker can see may be newer than those of the others, but what came before them is gone.


def test_the_decision_waits_until_the_snapshots_of_every_stage_are_known(lost: Conversation):
    own = [(0, 20), (0, 40)]
    lost.send(name(0), remembering(0, 1, snapshots=own))
    assert lost.after(3 * LEASE) == []
    lost.send(b"new", newcomer(1, 201, snapshots=[(1, 20), (1, 40)]))
    assert {each.step for each in assignments(lost.after(0.2)).values()} == {40}


def test_a_worker_that_has_not_read_its_disk_does_not_count_yet(lost: Conversation):
    lost.send(name(0), remembering(0, 1, snapshots=[(0, 20), (0, 40)]))
    lost.send(b"new", blind(1, 201))
    assert lost.after(3 * LEASE) == []
    lost.send(b"new", newcomer(1, 201))
    assert {each.step for each in assignments(lost.after(0.2)).values()} == {40}


def test_unread_disks_do_not_mean_that_the_run_is_at_its_beginning(lost: Conversation):
    """In a container, a worker that is started again is the same process by name, host and number."""
    lost.send(name(0), remembering(0, 1, pid=100))
    lost.send(b"again", msgspec.structs.replace(blind(0, 100), name="worker-0"))
    assert lost.after(3 * LEASE) == []
    lost.send(b"again", msgspec.structs.replace(newcomer(0, 100), name="worker-0")), lost.send(b"new", newcomer(1, 201))
    lost.after(0.2)
    assert lost.core.run.checkpoints.complete == 40


def test_if_the_snapshots_of_a_stage_stay_unknown_the_run_is_given_up_naming_it(lost: Conversation):
    lost.send(name(0), remembering(0, 1, snapshots=[(0, 20), (0, 40)]))
    lost.after(61.0)
    assert lost.status()["code"] == 69
    assert "no worker joined that knows which snapshots exist of worker 1 (stage 1)" in str(lost.status()["reason"])


def test_if_the_announced_checkpoint_is_nowhere_every_stage_goes_back(lost: Conversation):
    lost.send(name(0), remembering(0, 1)), lost.send(b"new", newcomer(1, 201, snapshots=[]))
    lost.send(name(0), remembering(0, 1, snapshots=[(0, 20), (0, 40), (1, 20)]))
    given = assignments(lost.after(LEASE + 0.2))
    assert name(0) not in given
    assert lost.core.run.checkpoints.complete == 20
    ((_, refused),) = lost.send(name(0), report(0, 1, 48))
    assert isinstance(refused, Refused)


def test_before_the_first_step_there_is_nothing_to_wait_for(lost: Conversation):
    lost.send(name(0), remembering(0, 1, step=0, complete=0, snapshots=[]))
    given = assignments(lost.after(LEASE + 0.2))
    assert (given[name(0)].step, given[name(0)].keep) == (0, True)


# Words that get lost


def test_a_worker_that_missed_its_new_incarnation_gets_it_again(lost: Conversation):
    lost.send(name(0), remembering(0, 1)), lost.send(name(1), remembering(1, 2))
    given = assignments(lost.after(LEASE + 0.2))
    for words in (report(1, 2, 48), remembering(1, 2), Finished(2, {})):
        assert assignments(lost.send(name(1), words)) == {name(1): given[name(1)]}
    assert lost.core.run.phase is RunPhase.RUNNING


def test_a_broker_that_is_killed_again_knows_what_was_decided(lost: Conversation):
    lost.send(name(0), remembering(0, 1)), lost.send(name(1), remembering(1, 2))
    given = assignments(lost.after(LEASE + 0.2))
    again = Conversation(lost.store, now=200.0, terms=REPLACING)
    assert again.send(name(0), report(0, given[name(0)].incarnation, 48)) == [(name(0), Confirmed(1))]
    assert assignments(again.send(name(1), report(1, 2, 48))) == {name(1): given[name(1)]}
    assert again.core.run.checkpoints.complete == 40


def test_a_broker_that_is_killed_while_it_asks_asks_again(lost: Conversation):
    lost.send(name(0), remembering(0, 1))
    again = Conversation(lost.store, now=105.0, terms=REPLACING)
    again.send(name(0), remembering(0, 1)), again.send(name(1), remembering(1, 2))
    assert assignments(again.after(LEASE + 0.2)).keys() == {name(0), name(1)}


# A process that is started afresh may come before the first of the old ones.


def test_a_worker_placed_before_the_loss_was_noticed_is_placed_again(lost: Conversation):
    hasty = lost.assigned(b"new", blind(1, 201))
    assert hasty.step == 0
    lost.send(name(0), remembering(0, 1)), lost.send(name(1), remembering(1, 2))
    assert assignments(lost.after(LEASE + 0.2)).keys() == {name(0), name(1)}
    ((_, refused),) = lost.send(b"new", Report(hasty.incarnation, 0, "waits", 0.0, 0.0))
    assert isinstance(refused, Refused)


def test_once_all_workers_are_there_an_earlier_incarnation_is_stale(lost: Conversation):
    for index in (0, 1):
        given = lost.assigned(name(index), blind(index, 200 + index))
        lost.send(name(index), replace_hello(blind(index, 200 + index), given.incarnation))
    assert lost.core.run.phase is RunPhase.RUNNING
    ((_, refused),) = lost.send(b"stale", remembering(1, 2))
    assert isinstance(refused, Refused)


def replace_hello(said: Hello, incarnation: int) -> Hello:
    return Hello(said.version, said.plan, said.name, said.host, said.pid, "ipc://x", said.claim, incarnation)


def test_a_worker_of_another_run_proves_nothing(lost: Conversation):
    ((_, refused),) = lost.send(name(0), remembering(0, 1, run="yesterday"))
    assert isinstance(refused, Refused)
    assert lost.core.run.lifecycle.state is not Life.RECONCILING


def test_without_restarts_an_unknown_incarnation_is_refused():
    talk = Conversation(terms=TERMS)
    ((_, refused),) = talk.send(name(0), remembering(0, 7))
    assert isinstance(refused, Refused)


# A store from a backup


def test_an_old_store_is_noticed_by_an_incarnation_that_is_not_in_it():
    store = MemoryStore()
    talk = talk_at(store)
    backup = copy.deepcopy(store)
    talk.send(b"supervisor", Exited(1, 101, -9)), talk.after(1.0)
    owner = talk.assigned(b"owner", newcomer(1, 301))
    assert owner.incarnation == 3
    old = Conversation(backup, now=100.0, terms=REPLACING)
    old.send(b"owner", remembering(1, 3, pid=301)), old.send(name(0), remembering(0, 1))
    given = assignments(old.after(LEASE + 0.2))
    assert given.keys() == {b"owner", name(0)}
    assert old.core.run.registry.members[1].pid == 301


def test_an_old_store_that_names_only_stale_incarnations_is_noticed_though_they_sent_messages():
    store = MemoryStore()
    talk = talk_at(store)
    backup = copy.deepcopy(store)
    for index in (0, 1):
        talk.send(b"supervisor", Exited(index, 100 + index, -9))
    talk.after(1.0)
    owners = {index: talk.assigned(b"owner-%d" % index, newcomer(index, 301 + index)) for index in (0, 1)}
    old = Conversation(backup, now=100.0, terms=REPLACING)
    for index in (0, 1):
        old.send(name(index), remembering(index, index + 1))
    for index, owner in owners.items():
        old.send(b"owner-%d" % index, remembering(index, owner.incarnation, pid=301 + index))
    assert assignments(old.after(LEASE + 0.2)).keys() == {b"owner-0", b"owner-1"}


def test_an_old_store_is_noticed_by_a_checkpoint_that_is_not_in_it():
    store = MemoryStore()
    talk = talk_at(store)
    backup = copy.deepcopy(store)
    for index in (0, 1):
        talk.send(name(index), report(index, index + 1, 61, snapshots=[(index, 60)]))
    assert talk.status()["checkpoint"] == 60
    old = Conversation(backup, now=100.0, terms=REPLACING)
    assert old.send(name(0), report(0, 1, 61, complete=60)) == []
    snapshots = [(stage, step) for stage in (0, 1) for step in (40, 60)]
    for index in (0, 1):
        old.send(name(index), remembering(index, index + 1, step=61, complete=60, snapshots=snapshots))
    given = assignments(old.after(LEASE + 0.2))
    assert {(each.step, each.keep) for each in given.values()} == {(60, True)}


def test_silence_does_not_mean_that_an_old_run_is_at_its_beginning() -> None:
    """Running workers may take longer than a lease to notice that the broker wants to hear from them."""
    store = MemoryStore()
    talk_at(store)
    old = Conversation(store, now=100.0, terms=REPLACING)
    for index in (0, 1):
        old.send(name(index), remembering(index, index + 1))
    old.send(name(0), report(0, 1, 61, complete=60))
    assert assignments(old.after(3 * LEASE)) == {}
    assert old.core.run.lifecycle.state is Life.RECONCILING
    snapshots = [(stage, step) for stage in (0, 1) for step in (40, 60)]
    for index in (0, 1):
        old.send(name(index), remembering(index, index + 1, step=61, complete=60, snapshots=snapshots))
    assert {each.step for each in assignments(old.after(0.2)).values()} == {60}


def old_store_of_40() -> Conversation:
    """A broker that knows of checkpoint 40, when 60 was announced and all workers have been killed since."""
    store = MemoryStore()
    talk_at(store)
    old = Conversation(store, now=100.0, terms=REPLACING)
    for index in (0, 1):
        old.send(b"supervisor", Exited(index, 100 + index, -9))
    old.after(1.0)
    return old


def beginning(index: int, incarnation: int, snapshots: list[tuple[int, int]]) -> Hello:
    """Says a worker that has not begun: it was given its place, and has looked for the snapshots to begin with."""
    return msgspec.structs.replace(newcomer(index, 300 + index, snapshots=snapshots), incarnation=incarnation)


def test_an_old_store_is_noticed_by_a_worker_whose_snapshot_to_begin_with_was_deleted_since():
    old = old_store_of_40()
    on_disk = [(0, 40), (0, 60), (1, 60)]
    first = old.assigned(b"1", blind(1, 301))
    assert first.step == 40
    ((_, standby),) = old.send(b"1", beginning(1, first.incarnation, on_disk))
    assert isinstance(standby, Standby)
    assert standby.run == "run-1"
    for index in (1, 0):
        old.send(b"%d" % index, newcomer(index, 300 + index, snapshots=on_disk))
    old.after(LEASE + 0.2)
    assert [old.assigned(b"%d" % index, blind(index, 300 + index)).step for index in (0, 1)] == [60, 60]


@pytest.mark.parametrize("snapshots", [[], [(1, 20)], [(0, 60)], [(1, 40), (1, 60)]], ids=str)
def test_a_disk_on_which_nothing_newer_is_shows_nothing(snapshots: list[tuple[int, int]]):
    old = old_store_of_40()
    first = old.assigned(b"1", blind(1, 301))
    (again, *_) = old.send(b"1", beginning(1, first.incarnation, snapshots))
    assert again == (b"1", first)
    assert old.core.run.lifecycle.state is not Life.RECONCILING


def test_why_explains_that_the_broker_reconciles(lost: Conversation):
    lost.send(name(0), remembering(0, 1))
    ((_, answer),) = lost.send(b"me", Ask("why"))
    assert isinstance(answer, Answer)
    assert "has lost its records" in str(answer.facts["text"])


def test_a_run_can_be_stopped_while_the_broker_asks(lost: Conversation):
    lost.send(name(0), remembering(0, 1))
    lost.send(b"train", StopRun("enough"))
    ((_, refused),) = lost.send(name(0), remembering(0, 1))
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("the run is over (enough")
    assert lost.after(2 * LEASE) == []
