"""When a worker counts as lost: not heard for a lease, no progress for a lease, or its process is gone."""

import signal
from dataclasses import dataclass

from .member import Member, Standing

LAST_WORDS = 0.5  # seconds that a process's last words may take longer than the news of its exit
BEGINNING = 60.0  # seconds that a worker may take from its first hello to its first report: it loads its model


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker was lost: `why` continues a sentence about it; `status` is its process's exit status, if known."""

    member: Member
    why: str
    status: int | None = None


def loss_of(member: Member, lease: float, now: float) -> Loss | None:
    """The reason why `member` counts as lost at `now`; None if it does not. `lease` in seconds."""
    if member.exited is not None and now - member.exited[0] >= LAST_WORDS:
        return Loss(member, exit_in_words(member.exited[1]), member.exited[1])
    patience = lease if member.introduced else max(lease, BEGINNING)
    if now - member.heard >= patience:
        return Loss(member, f"was not heard for {now - member.heard:.1f} s (recovery.lease is {lease:g} s)")
    if member.standing is Standing.PRESENT and member.report and now - member.progressed >= lease:
        return Loss(
            member,
            f"lives, but completed no action for {now - member.progressed:.1f} s; if one may take this long, "
            f"raise recovery.lease ({lease:g} s)",
        )
    return None


def exit_in_words(status: int) -> str:
    """How a process ended, from its status as `subprocess` gives it."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
