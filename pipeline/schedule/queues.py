"""The queues between stages, and which of them an action takes from and puts into.

Hop h is between stages h and h+1. A queue is named by what it carries and the stage that takes from it:

    stage 1  --- forward-2 --->   stage 2        hop 1
    stage 1  <-- backward-1 ---   stage 2
"""

from .action import Action, Kind
from .value import Schedule


def hops(schedule: Schedule) -> dict[str, int]:
    """Every queue between stages, with the hop it crosses."""
    forward = {f"forward-{stage}": stage - 1 for stage in range(1, schedule.stages)}
    backward = {f"backward-{stage}": stage for stage in range(schedule.first_trainable, schedule.stages - 1)}
    return forward | backward


def inbound(action: Action) -> str:
    """The queue that `action` takes from, "" for none. At the ends of the pipeline there is no queue of that name."""
    return f"{_CARRIED[action.kind]}-{action.stage}" if action.kind in _CARRIED else ""


def outbound(action: Action) -> str:
    """The queue that `action` puts into, named in the same way."""
    consumer = action.stage + 1 if action.kind is Kind.FORWARD else action.stage - 1
    return f"{_CARRIED[action.kind]}-{consumer}" if action.kind in _CARRIED and consumer >= 0 else ""


_CARRIED = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "backward"}
