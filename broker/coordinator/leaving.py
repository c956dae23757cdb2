"""Workers that leave on notice: the run pauses before a step, for a checkpoint, until they have left.

    LeaveWorker ──> Leave to the worker ──> its reports show the notice   (or a signal to its process has given it)
    notice ──> the run pauses ──> checkpoint of that step complete ──> Goodbye: its place is free at once
    no worker leaves any more ──> the run goes on, and waits for the place as after a loss

The pause is that of `pausing`, which ends by itself. A worker whose time is over leaves without the checkpoint: then
its replacement begins at the newest complete one. So no worker waits longer than the notice lasts.

Reads `config`, `registry` and its members, `ledger`, `stopping`, `outcome`. Writes `leaves`, and `pauses` through
`pausing`.
"""

from stageline.broker.control.leaves import Leave, LeaveWorker
from stageline.broker.control.messages import Answer, Refused
from stageline.broker.ledger.member import Member
from stageline.pipeline.errors import ExitCode

from . import pausing
from .state import RunState


def request(run: RunState, sender: bytes, asked: LeaveWorker, now: float) -> None:
    """Have a worker leave, and answer.

    Args:
        run: The state.
        sender: The sender's address on the channel.
        asked: The request.
        now: Seconds since the epoch.
    """
    member = _leaver(run, asked.index)
    if isinstance(member, str):
        run.outgoing.append((sender, Refused(member, code=ExitCode.USAGE)))
        return
    new = member.leaving is None and member.incarnation not in run.leaves
    if new:
        run.leaves[member.incarnation] = asked, now
        run.events.infos.append(f"{asked.by} has {member.label} leave within {asked.seconds:g} s")
        _order(run, member, now)
    facts = {"run": run.id, "worker": asked.index, "changed": new, "incarnation": member.incarnation}
    run.outgoing.append((sender, Answer("leave/1", facts)))


def tick(run: RunState, now: float) -> None:
    """Begin the pause of a run that workers leave, and end it once they have left.

    Args:
        run: The state.
        now: Seconds since the epoch.
    """
    workers = run.registry.reachable_workers()
    for gone in run.leaves.keys() - {each.incarnation for each in workers}:
        del run.leaves[gone]
    leaving, found = [each for each in workers if each.leaving is not None], run.pauses.present
    if found is None and leaving and _may_pause(run):
        pausing.begin_for_leaver(run, leaving[0].title, _reason(leaving[0]), now)
    elif found is not None and found.leaving and not leaving and all(each.report is not None for each in workers):
        pausing.end(run, found.by, now)


def tell_again(run: RunState, now: float) -> None:
    """Send the order to leave again to workers whose reports do not show it yet. Call it every `pausing.AGAIN` seconds.

    Args:
        run: The state.
        now: Seconds since the epoch.
    """
    for member in run.registry.reachable_workers():
        if member.incarnation in run.leaves and member.leaving is None:
            _order(run, member, now)


def _order(run: RunState, member: Member, now: float) -> None:
    asked, since = run.leaves[member.incarnation]
    reason = f"{asked.by} asked for it{f' ({asked.reason})' if asked.reason else ''}"
    if member.sender:
        run.outgoing.append((member.sender, Leave(max(0.0, asked.seconds - (now - since)), reason)))


def _may_pause(run: RunState) -> bool:
    return run.registry.begun and run.config.snapshots and run.stopping.request is None and run.outcome is None


def _reason(member: Member) -> str:
    return "" if member.leaving is None else member.leaving.reason


def _leaver(run: RunState, index: int) -> Member | str:
    """Return the worker of a place, or why it cannot leave."""
    workers, member = len(run.config.schedule.placement), run.registry.members.get(index)
    if run.outcome is not None:
        return f"run {run.id} is over: {run.outcome.reason}"
    if index >= workers:
        return f"run {run.id} has no worker {index}: its workers are 0 to {workers - 1}"
    if not (run.config.restarts and run.config.snapshots):
        return (
            f"no worker of run {run.id} can leave: without recovery (recovery.restarts, recovery.snapshot_every) none "
            "can be replaced. `stageline run stop` ends the run"
        )
    if member is None or not member.reachable:
        return f"worker {index} of run {run.id} is not there: its place is free"
    return member
