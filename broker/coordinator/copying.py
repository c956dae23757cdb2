"""Copies of snapshots: which worker holds those of which stage, and which snapshot is transferred next.

A stage has a holder if another worker of its party can be reached by a queue for copies, and has another disk. The
holder is chosen once all workers are there, and keeps the copies as long as it can.

Reads `config`, `registry`, `lifecycle`. Writes `copies`, `checkpoints`.
"""

from collections.abc import Iterator

from stageline.broker.control.messages import Report
from stageline.broker.ledger.copies import chosen_holder, link_between, neighbours
from stageline.broker.ledger.member import Member

from . import records
from .state import RunState

Missing = tuple[int, int]  # stage and step of a snapshot


def choose_holders(run: RunState) -> None:
    """Choose the worker that holds the copies of each stage, once all workers are there."""
    members, tracker = run.registry.members, run.checkpoints
    if not run.registry.complete:
        return
    chosen = [
        tracker.hold(stage, chosen_holder(member, tracker.holder(stage), members))
        for member in run.registry.reachable_workers()
        if neighbours(member) or any(tracker.holder(stage) is not None for stage in member.stages)
        for stage in member.stages
    ]
    before = tracker.settled
    tracker.settle()
    if any(chosen) or tracker.settled != before:
        records.save(run)


def note(run: RunState, member: Member, report: Report) -> bool:
    """Note how far a worker's transfers are. Return True if a copy of a snapshot is on a holder's disk now."""
    found = False
    for number, state in report.copies.states:
        done = run.copies.note(member, number, state)
        if done is not None and (done.restores or run.checkpoints.holder(done.order.stage) == done.ends[1]):
            holds = done.ends[0] if done.restores else done.ends[1]
            is_holder = run.checkpoints.holder(done.order.stage) == holds
            found = (is_holder and run.checkpoints.add_copy(done.order.stage, done.order.step)) or found
    return found


def tick(run: RunState, now: float) -> None:
    """Begin the transfers that are due, and tell workers of them. `now` is in seconds since the epoch."""
    if not run.config.snapshots:
        return
    choose_holders(run)
    members = [each for each in run.registry.reachable_workers() if each.sender]
    run.copies.drop_outdated(run.registry.members)
    lost = {each.index: found for each in members if (found := tuple(_restored(run, each, now)))}
    for member in members:
        for stage in member.stages:
            _copy(run, member, stage, now)
    run.outgoing.extend((member.sender, said) for member, said in run.copies.due(members, lost, now))


def _restored(run: RunState, owner: Member, now: float) -> Iterator[Missing]:
    """Begin to restore the snapshots that a worker lacks. Yield those that no other worker holds."""
    for stage, step in owner.report.copies.lacks if owner.report is not None else ():
        if stage in owner.stages and not run.copies.is_under_way(stage, restores=True):
            sources = list(_sources(run, owner, stage))
            asked = [source for source in sources if source is None or not run.copies.lacks(stage, step, source)]
            present = [run.registry.current(source) for source in asked if source is not None]
            if not asked:
                yield stage, step
            elif present and present[0] is not None:
                run.copies.begin(stage, step, present[0], owner, now, restores=True)


def _sources(run: RunState, owner: Member, stage: int) -> Iterator[int | None]:
    """Yield the incarnations of the workers that may hold a snapshot; None for one that is not there now."""
    holder = run.checkpoints.holder(stage)
    for place in sorted(neighbours(owner), key=lambda place: place != holder):
        other = run.registry.members.get(place)
        there = other is not None and other.reachable and other.introduced
        if other is None or not there:
            yield None
        elif link_between(other, owner.index) is not None:
            yield other.incarnation


def _copy(run: RunState, owner: Member, stage: int, now: float) -> None:
    """Begin to copy the snapshot that the stage's holder is to get next, if there is one."""
    place = run.checkpoints.holder(stage)
    wanted = (step for step in run.checkpoints.wanted(stage) if not run.copies.lacks(stage, step, owner.incarnation))
    step = next(wanted, None)
    if step is None or place is None or run.copies.is_under_way(stage, restores=False):
        return
    holder, report = run.registry.members.get(place), owner.report
    begun = report is not None and not report.copies.lacks and owner.introduced
    there = holder is not None and holder.reachable and holder.introduced and holder.report is not None
    if holder is not None and there and begun:
        run.copies.begin(stage, step, owner, holder, now, restores=False)


def told_copies(run: RunState) -> Iterator[dict[str, object]]:
    """Yield the facts about the copies of each stage's snapshots; none of a run in which no stage has any."""
    tracker = run.checkpoints
    moving = {each.order.stage: each.order.step for each in run.copies.transfers.values() if not each.restores}
    for stage, holder in enumerate(tracker.holders if any(each is not None for each in tracker.holders) else ()):
        newest = max({tracker.complete, *tracker.newer[stage]})
        yield {
            "stage": stage,
            "holder": holder,
            "step": max(tracker.copied[stage], default=None),
            "newest": newest,
            "under_way": moving.get(stage),
        }
