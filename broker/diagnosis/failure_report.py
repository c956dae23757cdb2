"""What is said of a worker that was lost: how, and what it held when it was."""

import signal

from stageline.broker.ledger.ledger import Held, Ledger
from stageline.broker.ledger.member import Member, WorkerLoss

_OUT_OF_MEMORY = " (if not by you, then by the kernel's out-of-memory killer: see dmesg)"


def failure_report(loss: WorkerLoss, ledger: Ledger, now: float) -> str:
    """Of a worker that was found to be lost at `now` (seconds since the epoch), without a full stop."""
    member = loss.member
    end = member.exited[0] if member.exited is not None else now
    who = f"the script is gone: {member.process}" if member.is_script else f"{member.label}, {member.process},"
    return f"{who} {how_lost(loss)}. It {_held(member, ledger.held(member.stages), end)}"


def how_lost(loss: WorkerLoss) -> str:
    """Continues a sentence about the worker: "was killed by SIGKILL (...)"."""
    exit = loss.member.exited[1] if loss.member.exited is not None else None
    killed = exit is not None and (exit.status, exit.detail) == (-signal.SIGKILL, "")
    return f"{loss.why}{_OUT_OF_MEMORY if killed else ''}"


def _held(member: Member, held: list[Held], now: float) -> str:
    computed = next((each for each in held if each.computed), None)
    stashed = [each for each in held if not each.computed]
    doing = f"held {computed}{_since(computed.entry.since, now)}" if computed else _last_known(member, now)
    return f"{doing}; {_stash(stashed)}" if stashed else doing


def _last_known(member: Member, now: float) -> str:
    if member.report is None:
        return "had sent no report" if member.sender else "had sent no report to this broker"
    return f'last reported: "{member.report.now}"{_since(member.report.since, now)}'


def _stash(stashed: list[Held]) -> str:
    if len(stashed) == 1:
        return str(stashed[0])
    return f"{len(stashed)} microbatches were stashed there, the first being {stashed[0]}"


def _since(then: float | None, now: float) -> str:
    return "" if then is None else f" since {max(0.0, now - then):.1f} s"
