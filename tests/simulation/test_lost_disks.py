"""Runs on machines whose disks are lost end as undisturbed; with a rule of copies left out, some do not."""

from collections.abc import Iterable

import pytest

from simulation.run_seeds import simulate
from simulation.scenario import PlannedFault
from simulation.world import NOWHERE
from stageline.broker.control.checkpoints import CopyState
from stageline.broker.ledger.checkpoint_tracker import CheckpointTracker
from stageline.broker.ledger.copies import CopyBook, CopyTransfer
from stageline.broker.ledger.member import Member


@pytest.mark.parametrize(
    "seeds",
    [range(12), *(pytest.param(range(first, first + 100), marks=pytest.mark.slow) for first in (12, 112, 212))],
    ids=str,
)
def test_a_run_of_which_a_disk_is_lost_ends_as_the_undisturbed_one(seeds: range):
    found = [simulate(seed, disks=1) for seed in seeds]
    assert not [str(each) for each in found if each.wrong]
    fired = {fault for each in found for fault, times in each.fired.items() if times}
    assert fired >= {PlannedFault.LOSE_DISK, "a snapshot comes back from its holder"}


@pytest.mark.slow
def test_a_run_of_which_owner_and_holder_lose_their_disks_ends_well_or_with_the_name_of_the_snapshot():
    found = [simulate(seed, disks=2) for seed in range(200)]
    assert not [str(each) for each in found if each.wrong]
    fired = {fault for each in found for fault, times in each.fired.items() if times}
    assert fired >= {PlannedFault.LOSE_DISKS, NOWHERE}


def first_wrong(seeds: Iterable[int]) -> str:
    """Error of the first seed that fails, and the command that repeats it. Ranges begin shortly before such a one."""
    found = (simulate(seed, disks=1) for seed in seeds)
    return next((str(each) for each in found if each.wrong), "nothing")


def test_a_checkpoint_that_counts_before_it_is_copied_is_lost_with_an_owner_that_dies_in_mid_copy(monkeypatch):
    monkeypatch.setattr(CheckpointTracker, "_kept", lambda tracker, stage: tracker.newer[stage])
    assert "no other worker holds a copy" in first_wrong(range(10, 400))


@pytest.mark.slow
def test_a_holder_that_is_replaced_on_another_disk_and_gets_no_copy_again_has_none_when_the_owner_dies(monkeypatch):
    monkeypatch.setattr(CheckpointTracker, "lose_copies", lambda tracker, place: None)
    assert "no other worker holds a copy" in first_wrong(range(150, 600))


def test_a_late_copy_of_a_zombie_that_counts_is_taken_for_one_of_its_successor(monkeypatch):
    monkeypatch.setattr(CopyBook, "drop_outdated", lambda book, members: None)
    note = CopyBook.note

    def note_of_any(book: CopyBook, member: Member, number: int, state: CopyState) -> CopyTransfer | None:
        done = book.transfers.pop(number, None) if state is CopyState.DONE else None
        return done or note(book, member, number, state)

    monkeypatch.setattr(CopyBook, "note", note_of_any)
    assert "is no longer available" in first_wrong(range(17, 400))


@pytest.mark.slow
def test_a_sender_that_is_told_before_the_receiver_forgets_what_that_still_asks_for(monkeypatch):
    monkeypatch.setattr(CopyTransfer, "concerns", lambda transfer, place: place in transfer.ends)
    assert "is no longer available" in first_wrong(range(38, 400))
