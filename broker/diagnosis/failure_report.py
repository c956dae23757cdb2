"""Says who stopped the line: the worker, its stages, what it held, since when, and why it is gone."""

from stageline.broker.ledger.ledger import Held, Ledger
from stageline.broker.membership.failure_detector import WorkerLoss
from stageline.broker.membership.member import Member


def failure_report(loss: WorkerLoss, ledger: Ledger, now: float) -> str:
    """The sentence that ends a run whose worker was found to be lost at `now` (seconds since the epoch)."""
    member = loss.member
    end = member.exited[0] if member.exited else now
    return f"{member.place}, {member.process}, {loss.why}. It {_held(member, ledger.held(member.stages), end)}"


def _held(member: Member, held: list[Held], now: float) -> str:
    computed = next((each for each in held if each.computed), None)
    stashed = [each for each in held if not each.computed]
    doing = f"held {computed}{_since(computed.entry.since, now)}" if computed else _last_words(member, now)
    return f"{doing}; {_stash(stashed)}" if stashed else doing


def _last_words(member: Member, now: float) -> str:
    if member.report is None:
        return "had not begun" if member.sender else "had not begun, as far as this broker has heard"
    return f'said last: "{member.report.now}"{_since(member.report.since, now)}'


def _stash(stashed: list[Held]) -> str:
    if len(stashed) == 1:
        return f"{stashed[0]}"
    return f"{len(stashed)} microbatches lay stashed with it, the first being {stashed[0]}"


def _since(then: float | None, now: float) -> str:
    return "" if then is None else f" since {max(0.0, now - then):.1f} s"
