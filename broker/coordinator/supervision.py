"""Supervision of the workers: a lost one's place is emptied for a replacement, or the run is given up with the reason.

lost ──(may be replaced)──────────> its place is empty ──(no replacement in time)──> the run ends
  └──(replaced too often already, or it would fail again)──────────────────────────────^

Place by place, as `place` has it for a worker's and `script_place` for the script's.

Reads `config`, `ledger`, `checkpoints`. Writes `registry` and its members, `replacements`, `standstill`; through
`shutdown` and `records`, what follows.
"""

from stageline.broker.control.messages import Exited, Failed, Goodbye
from stageline.broker.ledger.losses import PARTING, WorkerLoss, losses
from stageline.broker.ledger.member import Member, MemberStatus
from stageline.pipeline.errors import ExitCode, failure_code

from .pausing import in_effect
from .place import exit_code
from .script_place import place_of
from .state import RunState
from .waiting import why_waiting


def check(run: RunState, now: float) -> None:
    """Record lost workers, and end the run for the first loss that it cannot survive, or for a standstill.

    All losses are recorded before the run ends.
    """
    check_partings(run, now)
    lost = losses(run.registry.reachable(), run.config.leases, now)
    found = [(place_of(run, loss.member.index).lose(loss, now), loss.result) for loss in lost]
    reason, result = next((fatal for fatal in found if fatal[0]), ("", None))
    if reason:
        run.fail(reason, exit_code(result))
    else:
        _check_standstill(run, now)


def check_empty_places(run: RunState, now: float) -> None:
    """End the run if a place has been empty for too long; stop it if that is the script's place."""
    missing = run.registry.missing
    for pending in [each for each in run.replacements.pending.values() if each.index in missing]:
        place_of(run, pending.index).stay_empty(pending, now)


def mark_lost(run: RunState, now: float) -> None:
    """Mark silent workers of a run that is over as left or lost. Nothing follows from it."""
    for loss in losses(run.registry.reachable(), run.config.leases, now):
        if loss.member.status is MemberStatus.FINISHED:
            loss.member.leave()
        else:
            loss.member.lose()


def note_parting(run: RunState, member: Member, message: Failed | Goodbye, now: float) -> None:
    """Note a worker's message that it ends.

    The worker sends nothing else from then on, and its process ends soon: see `check_partings`.

    Args:
        run: The state.
        member: The sender.
        message: Its last message.
        now: Seconds since the epoch.
    """
    place_of(run, member.index).take_leave(member, message, now)
    check_partings(run, now)


def note_alive(run: RunState, member: Member) -> None:
    """Drop a worker's message that it ends: the worker goes on, so a process that has read its secret sent that."""
    if (said := member.take_parting()) is not None:
        kind = type(said).__name__
        run.events.count_once("contradicted", f"refused: {kind} of {member.label}, which goes on")


def check_partings(run: RunState, now: float) -> None:
    """Accept the ends that workers have announced, once their processes have ended or they have been silent.

    A worker that has given notice is believed at once: its place is free from then on.
    """
    parting = [(*member.parting, member) for member in run.registry.reachable() if member.parting is not None]
    for since, message, member in sorted(parting, key=lambda each: each[0]):
        ends = member.exited is not None or member.leaving is not None or now - since >= PARTING
        if ends and not run.lifecycle.over:
            _part(run, member, message, now)


def note_exit(run: RunState, exited: Exited, now: float) -> None:
    """Note the end of a process. Its worker is lost once its last messages have had time to arrive.

    Args:
        run: The state.
        exited: The process's end.
        now: Seconds since the epoch.
    """
    member, over = run.registry.members.get(exited.index), run.lifecycle.over
    if member is None and exited.index in run.registry.missing and not over:
        place_of(run, exited.index).note_end(exited, now)
    elif member is not None and member.pid == exited.pid:
        if over:
            member.leave()
        elif member.reachable:
            member.note_exit(exited, now)
            check_partings(run, now)


def _part(run: RunState, member: Member, message: Failed | Goodbye, now: float) -> None:
    if isinstance(message, Failed):
        why, code = f"{member.label} failed: {message.reason}", int(failure_code(message.code))
    else:
        loss = WorkerLoss(member, f"left: {message.reason}")
        why, code = place_of(run, member.index).lose(loss, now), int(ExitCode.FAILED)
    member.leave()
    if why:
        run.fail(why, code)


def _check_standstill(run: RunState, now: float) -> None:
    """End the run if all workers wait for each other: nothing will change that."""
    members = run.registry.reachable()
    lasts = run.standstill.lasts(members, now)
    if lasts >= run.standstill.bound and run.registry.complete and not in_effect(run):
        found = why_waiting(run, now)
        places = ", ".join(f"{each.title} at {each.endpoint} on host {each.host}" for each in members)
        hint = f"Can they reach each other's queues? They are: {places}. See queues.url"
        if any(edge.room for edge in found.chain.edges):
            hint = f"{found.action[:1].upper()}{found.action[1:]}"
        reason = f"every worker has been waiting for another for {lasts:.0f} s: {found.text}. {hint}"
        run.fail(reason, ExitCode.FAILED)
