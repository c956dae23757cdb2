"""Copies of snapshots on other workers' disks: what a checkpoint waits for, and who is told to send what to whom."""

import msgspec
import pytest

from stageline.broker.control.checkpoints import Copying, CopyOrder, CopyReport, CopyState
from stageline.broker.control.messages import Hello, Report
from stageline.broker.ledger.checkpoint_tracker import CheckpointTracker
from stageline.broker.ledger.copies import CopyBook
from stageline.pipeline.program import SnapshotCopies, SumExchange, compile_program, neighbours_of
from stageline.pipeline.schedule import make_schedule
from support.conversation import SCHEDULE, Conversation, hello, name, report
from support.replacements import REPLACING, kill, replacement, said, talk_of, trims

PROGRAM = compile_program(SCHEDULE, [SumExchange(), SnapshotCopies(neighbours_of(2, [range(2)]))])


def copying(disks: tuple[str, str] = ("a", "b")) -> Conversation:
    """Both workers are there, with queues for copies, on these disks."""
    talk = Conversation(terms=REPLACING)
    for index in range(2):
        talk.send(name(index), hello(index))
    for index, disk in enumerate(disks):
        talk.send(name(index), placed(hello(index, incarnation=index + 1, endpoint=f"tcp://{index}"), index, disk))
    return talk


def placed(hello: Hello, index: int, disk: str) -> Hello:
    return msgspec.structs.replace(hello, queues=PROGRAM.ends_of(index), disk=disk)


def orders(sends: list[tuple[bytes, object]], to: bytes) -> list[tuple[CopyOrder, ...]]:
    return [message.orders for recipient, message in sends if recipient == to and isinstance(message, Copying)]


def snapshots_of_20(talk: Conversation) -> None:
    for stage in range(2):
        talk.send(name(stage), said(1 + stage, stage=stage, upto=20, snapshots=[(stage, 20)]))


def transfer(talk: Conversation, sender: bytes, receiver: bytes, incarnations: tuple[int, int]) -> CopyOrder:
    """Carries out the one transfer between two workers. Until then nothing is announced."""
    sends = talk.after(0.3)
    assert trims(sends) == []
    order = next(each for told in orders(sends, receiver) for each in told)
    talk.send(receiver, here(incarnations[1], (order.number, CopyState.READY)))
    assert (order,) in orders(talk.after(0.2), sender) or any(order in each for each in orders(talk.after(1.2), sender))
    talk.send(receiver, here(incarnations[1], (order.number, CopyState.DONE)))
    return order


def here(incarnation: int, *copies: tuple[int, CopyState], **more: object) -> Report:
    told = CopyReport(list(copies), **more)  # type: ignore[arg-type]
    return msgspec.structs.replace(report(incarnation - 1, copies=told), incarnation=incarnation)


def test_a_checkpoint_is_announced_once_every_snapshot_is_on_a_second_disk() -> None:
    talk = copying()
    snapshots_of_20(talk)
    first = transfer(talk, name(0), name(1), (1, 2))
    assert (first.stage, first.step, first.queue) == (0, 20, "copies-0-1")
    transfer(talk, name(1), name(0), (2, 1))
    assert trims(talk.after(0.5)) == [20]
    assert [(row["stage"], row["holder"], row["step"]) for row in talk.status()["copies"]] == [(0, 1, 20), (1, 0, 20)]


def test_workers_with_one_disk_hold_no_copies_for_each_other() -> None:
    talk = copying(("a", "a"))
    snapshots_of_20(talk)
    sends = talk.after(0.5)
    assert trims(sends) == [20]
    assert orders(sends, name(0)) == orders(sends, name(1)) == []
    assert talk.status()["copies"] == []


def test_the_receiving_end_is_told_before_the_sending_end() -> None:
    """The other order lets the sending end forget what the receiving end still asks for: of a former transfer."""
    talk = copying()
    talk.send(name(1), said(2))
    talk.send(name(0), said(1, stage=0, upto=20, snapshots=[(0, 20)]))
    sends = talk.after(0.5)
    ((order,),) = orders(sends, name(1))
    assert orders(sends, name(0)) == []
    talk.send(name(1), here(2, (order.number, CopyState.READY)))
    assert orders(talk.after(0.5), name(0)) == [(order,)]


def test_a_holder_that_is_lost_takes_its_copies_with_it_and_its_successor_gets_the_newest_at_once() -> None:
    talk = copying()
    snapshots_of_20(talk)
    transfer(talk, name(0), name(1), (1, 2)), transfer(talk, name(1), name(0), (2, 1))
    talk.after(0.5)
    kill(talk, 1, 101)
    talk.send(b"new", replacement(1, 201))
    talk.send(b"new", placed(replacement(1, 201, 3, "tcp://new"), 1, "c"))
    talk.send(b"new", here(3, lacks=[(1, 20)]))
    assert talk.status()["checkpoint"] == 20
    (told, *_) = orders(talk.after(0.5), b"new")
    assert {(each.stage, each.step, each.queue) for each in told} == {(1, 20, "copies-0-1")}
    number = told[0].number
    talk.send(b"new", here(3, (number, CopyState.READY), lacks=[(1, 20)]))
    talk.after(0.5)
    talk.send(b"new", here(3, (number, CopyState.DONE)))
    again = transfer(talk, name(0), b"new", (1, 3))
    assert (again.stage, again.step) == (0, 20)


def test_a_snapshot_that_no_worker_holds_is_said_to_be_lost() -> None:
    talk = copying()
    snapshots_of_20(talk)
    transfer(talk, name(0), name(1), (1, 2)), transfer(talk, name(1), name(0), (2, 1))
    kill(talk, 1, 101)
    talk.send(b"new", replacement(1, 201))
    talk.send(b"new", placed(replacement(1, 201, 3, "tcp://new"), 1, "c"))
    talk.send(b"new", here(3, lacks=[(1, 20)]))
    ((order, *_), *_) = orders(talk.after(0.5), b"new")
    talk.send(b"new", here(3, (order.number, CopyState.READY), lacks=[(1, 20)]))
    talk.after(0.5)
    talk.send(name(0), here(1, (order.number, CopyState.LACKING)))
    lost = [each.lost for to, each in talk.after(0.5) if to == b"new" and isinstance(each, Copying)]
    assert ((1, 20),) in lost


def test_a_worker_that_is_restored_goes_before_a_copy_on_the_same_queue() -> None:
    """The copy waited for an activation that was granted to the lost worker, and the worker for the copy."""
    talk = copying()
    snapshots_of_20(talk)
    transfer(talk, name(0), name(1), (1, 2)), transfer(talk, name(1), name(0), (2, 1))
    kill(talk, 1, 101)
    talk.send(b"new", replacement(1, 201))
    talk.send(b"new", placed(replacement(1, 201, 3, "tcp://new"), 1, "c"))
    talk.send(b"new", here(3))
    ((copy,), *_) = orders(talk.after(0.5), b"new")
    talk.send(b"new", here(3, (copy.number, CopyState.READY), lacks=[(1, 20)]))
    ((restored,), *_) = orders(talk.after(0.5), b"new")
    assert (copy.stage, restored.stage) == (0, 1)
    assert copy.queue == restored.queue == "copies-0-1"


def test_a_transfer_of_a_former_incarnation_counts_for_nothing() -> None:
    talk = copying()
    snapshots_of_20(talk)
    ((order,),) = orders(talk.after(0.3), name(1))
    kill(talk, 0, 100)
    talk.send(b"new", replacement(0, 200))
    talk.send(name(1), here(2, (order.number, CopyState.DONE)))
    assert talk.core.run.checkpoints.copied[0] == set()
    assert trims(talk.after(1.0)) == []


def test_a_slow_holder_leaves_out_snapshots_that_are_outdated() -> None:
    tracker = CheckpointTracker(0, [{20, 40, 60}, {20, 40}])
    tracker.hold(0, 1), tracker.hold(1, 0)
    assert (tracker.wanted(0), tracker.wanted(1)) == ([40], [40])
    tracker.add_copy(0, 40), tracker.add_copy(1, 40)
    assert tracker.advance(60)
    assert (tracker.complete, tracker.wanted(0), tracker.wanted(1)) == (40, [60], [])


def test_a_stage_that_is_ahead_is_copied_before_the_others_have_come() -> None:
    tracker = CheckpointTracker(0, [{20, 40}, set()])
    tracker.hold(0, 1), tracker.hold(1, 0)
    assert (tracker.wanted(0), tracker.wanted(1)) == ([20], [])


def test_copies_of_an_owner_that_is_lost_are_forgotten_but_for_the_complete_checkpoints() -> None:
    tracker = CheckpointTracker(20, [{40}, {40}])
    tracker.hold(0, 1), tracker.hold(1, 0)
    for stage in range(2):
        tracker.add_copy(stage, 20), tracker.add_copy(stage, 40)
    tracker.forget([1])
    tracker.add(1, 40)
    assert not tracker.advance(60)
    tracker.add_copy(1, 40)
    assert tracker.advance(60)


def test_a_checkpoint_that_was_found_on_the_disks_alone_is_not_announced_before_its_copies_are_there() -> None:
    tracker = CheckpointTracker(20, [set(), set()], settled=20)
    tracker.hold(0, 1), tracker.hold(1, 0)
    tracker.reset(40)
    tracker.settle()
    assert (tracker.complete, tracker.announced) == (40, 0)
    tracker.add_copy(0, 40), tracker.add_copy(1, 40)
    assert tracker.announced == 40


def test_numbers_of_transfers_are_above_those_of_a_former_broker() -> None:
    talk, now = copying(), 1000.0
    sender, receiver = (talk.core.run.registry.members[index] for index in range(2))
    former, present = CopyBook(), CopyBook()
    former.begin(0, 20, sender, receiver, now, restores=False)
    present.begin(0, 20, sender, receiver, now + 0.5, restores=False)
    assert min(present.transfers) > max(former.transfers)


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_every_worker_of_a_group_has_a_holder_and_each_link_goes_both_ways(workers: int) -> None:
    neighbours = neighbours_of(workers, [range(workers)])
    assert all(worker not in others and others for worker, others in enumerate(neighbours))
    assert all(worker in neighbours[other] for worker, others in enumerate(neighbours) for other in others)


def test_copies_stay_within_their_group() -> None:
    assert neighbours_of(5, [(0, 2), (1, 4)]) == ((2,), (4,), (0,), (), (1,))


def test_queues_for_copies_are_no_part_of_the_operations() -> None:
    schedule = make_schedule("1f1b", ((0,), (1,), (2,)), 2)
    plain = compile_program(schedule, [SumExchange()])
    made = compile_program(schedule, [SumExchange(), SnapshotCopies(neighbours_of(3, [range(3)]))])
    assert made.sections == plain.sections
    added = made.queues.keys() - plain.queues.keys()
    assert added == {"copies-0-1", "copies-1-0", "copies-1-2", "copies-2-1", "copies-2-0", "copies-0-2"}


def test_a_worker_without_queues_for_copies_joins_one_that_has_them() -> None:
    talk = talk_of()
    copies = tuple(queue for queue in PROGRAM.ends_of(1) if queue.copies)
    again = hello(1, incarnation=2, endpoint="tcp://1")
    sends = talk.send(name(1), msgspec.structs.replace(again, queues=(*talk.queues(1), *copies), disk="b"))
    assert next(type(message).__name__ for _, message in sends) == "Assigned"
