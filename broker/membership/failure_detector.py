"""When a worker counts as lost: not heard for a lease, no progress for a lease, or its process is gone."""

import signal
from dataclasses import dataclass

from .member import Member, MemberStatus

LAST_WORDS = 0.5  # seconds that a process's last words may take longer than the news of its exit
LAST_GASP = 0.1  # likewise for a process that was killed
SUCCESSION = 2.0  # seconds of silence after which a worker that was started again counts as gone
BEGINNING = 60.0  # seconds that a worker may take from its first hello to its first report: it loads its model


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """A worker was lost: `why` continues a sentence about it; `status` is its process's exit status, if known."""

    member: Member
    why: str
    status: int | None = None


def loss_of(member: Member, lease: float, now: float) -> WorkerLoss | None:
    """The reason why `member` counts as lost at `now`; None if it does not. `lease` in seconds."""
    if member.exited is not None and now - member.exited[0] >= (LAST_WORDS if member.exited[1] >= 0 else LAST_GASP):
        return WorkerLoss(member, exit_in_words(member.exited[1]), member.exited[1])
    silence = now - member.heard
    if member.succeeded and silence >= SUCCESSION:
        return WorkerLoss(member, f"was started again, and not heard for {silence:.1f} s")
    if silence >= _patience(member, lease):
        return WorkerLoss(member, f"was not heard for {silence:.1f} s (recovery.lease is {lease:g} s)")
    at_work = member.standing is MemberStatus.PRESENT and member.introduced and member.report is not None
    if at_work and now - member.progressed >= lease:
        return WorkerLoss(
            member,
            f"lives, but completed no action for {now - member.progressed:.1f} s; if one may take this long, "
            f"raise recovery.lease ({lease:g} s)",
        )
    return None


def _patience(member: Member, lease: float) -> float:
    """One that stood by has been ready to answer; one that comes of itself may load its model before it does."""
    begins = not member.introduced and (member.aware or not member.called)
    return max(lease, BEGINNING) if begins else lease


def exit_in_words(status: int) -> str:
    """How a process ended, from its status as `subprocess` gives it."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
