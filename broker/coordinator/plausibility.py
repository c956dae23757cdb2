"""What a report of a genuine worker cannot say: numbers that nothing has, snapshots that are not due.

Such a report, or such a part of it, has no effect; it is counted, and named in the log.
"""

import re
from collections.abc import Iterable, Iterator
from math import isfinite

from stageline.broker.control.messages import MOST_DIGESTS, MOST_ROUNDS, Report
from stageline.broker.control.records import LONGEST_NAME

_STAGE = r"[0-9]{1,6}(\.[0-9]{1,6})?"  # or one of its replicas
_QUEUE = re.compile(f"[a-z]{{1,16}}-{_STAGE}(-from-{_STAGE})?")  # `Flow` has the words; its module needs torch


def implausible(report: Report) -> str:
    """What is wrong with the numbers and texts of a report; "" if nothing is."""
    return next(_wrongs(report), "")


def _wrongs(report: Report) -> Iterator[str]:
    for name, number in (("since", report.since), ("troubled", report.troubled)):
        if not (isfinite(number) and number >= 0):
            yield f"{name} is {number}"
    if not 0 <= report.idle <= 1:
        yield f"idle is {report.idle}"
    if report.retained_bytes < 0:
        yield f"it retains {report.retained_bytes} bytes"
    for name, depths in report.queues.items():
        if len(depths) > 5 or not all(isfinite(depth) and depth >= 0 for depth in depths):
            yield f"queue {name} has the depths {depths}"
    if any(len(name) > LONGEST_NAME for name in report.queues):
        yield "a name is too long"
    if len(report.evaluations) > MOST_ROUNDS:
        yield f"it has {len(report.evaluations)} evaluations"
    if len(report.digests) > MOST_DIGESTS:
        yield f"it has {len(report.digests)} digests of queues"
    for name in {queue for queue, _, _ in report.digests}:
        if _QUEUE.fullmatch(name) is None:
            yield f"it has a digest of {name[:40]!r}, which is no queue"
    if not all(isfinite(wait.since) for wait in report.waits):
        yield "a wait has no time"


def is_due(step: int, every: int, ends: Iterable[int | None]) -> bool:
    """Whether a snapshot of `step` is written: every so many steps, and of the steps that the run may end with."""
    return not every or step % every == 0 or step in ends
