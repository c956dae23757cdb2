"""Times of a step as a worker would report them, of actions and waits that a test lists."""

from collections.abc import Iterable

from stageline.broker.ledger.times import ENTRY, NO_STAGE, TimedAction, TimedWait


def packed_times(timed: Iterable[TimedAction | TimedWait]) -> bytes:
    """`StepRecord.times` for the actions and waits of one stage, in the order in which they ran."""
    return b"".join(map(_packed, timed))


def _packed(each: TimedAction | TimedWait) -> bytes:
    if isinstance(each, TimedWait):
        return ENTRY.pack(each.cause.encode(), NO_STAGE if each.other is None else each.other, each.start, each.end)
    action, start, end = each
    return ENTRY.pack(action.kind.encode(), action.microbatch, start, end)
