"""Workers among which copies of snapshots may go.

no parties                 all workers
[parties]                  the workers of one party: no copy crosses to another party's machine
data.stays                 without the worker that reads the rows: nothing that it has leaves its machine as a copy
"""

from collections.abc import Iterator

from .plan import Plan


def copy_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Return the groups of workers within which copies may go, each of two workers or more.

    Args:
        plan: Plan whose workers are known.
    """
    if not plan.recovery.copies or not plan.recovery.on or plan.queues.in_one_process:
        return []
    return [group for group in _groups(plan) if len(group) > 1]


def _groups(plan: Plan) -> Iterator[tuple[int, ...]]:
    every = range(len(plan.workers))
    home = {index for index in every if plan.data.stays is not None and 0 in plan.workers[index].stages}
    owned = [party.workers for party in plan.parties.values()] if plan.parties else [tuple(every)]
    for group in owned:
        yield tuple(sorted({*group} - home))
