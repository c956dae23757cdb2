"""The queues that an action takes from and puts on, and the hop that each queue crosses.

Hop h is between stages h and h+1. Queues are named by what they carry and the stage that takes from them.
"""

from collections.abc import Mapping

from stageline.pipeline.schedule import Action, Kind, Schedule

from .costs import Costs


def check_fit(schedule: Schedule, costs: Costs, windows: Mapping[str, int]) -> None:
    """Raises `ValueError` unless the costs are for the schedule's stages and the windows for its queues."""
    if costs.stages != schedule.stages:
        raise ValueError(f"schedule {schedule.name} has {schedule.stages} stages, and the costs are for {costs.stages}")
    queues = hops(schedule)
    for name, window in windows.items():
        if name not in queues:
            raise ValueError(f"there is a window for {name}, and the only queues are: {', '.join(queues) or 'none'}")
        if window < 1:
            raise ValueError(f"the window of {name} is {window}; nothing moves with less than 1")


def hops(schedule: Schedule) -> dict[str, int]:
    """The queues between stages, each with the hop it crosses: hop h is between stages h and h+1."""
    forward = {f"forward-{stage}": stage - 1 for stage in range(1, schedule.stages)}
    backward = {f"backward-{stage}": stage for stage in range(schedule.first_trainable, schedule.stages - 1)}
    return forward | backward


def latency(schedule: Schedule, costs: Costs, hop: int) -> float:
    """The time that a message takes over `hop`: none if one worker owns both its ends."""
    return 0 if schedule.owner(hop) == schedule.owner(hop + 1) else costs.latency[hop]


def inbound(action: Action) -> str:
    """The queue that `action` takes from, "" for none. At the ends of the pipeline there is no queue of that name."""
    match action.kind:
        case Kind.FORWARD:
            return f"forward-{action.stage}"
        case Kind.BACKWARD | Kind.INPUT:
            return f"backward-{action.stage}"
        case _:
            return ""


def outbound(action: Action) -> str:
    """The queue that `action` puts on, named in the same way."""
    match action.kind:
        case Kind.FORWARD:
            return f"forward-{action.stage + 1}"
        case Kind.BACKWARD | Kind.INPUT:
            return f"backward-{action.stage - 1}"
        case _:
            return ""


def needed(action: Action) -> tuple[str, int]:
    """What `action` takes, "activation" or "gradient", and the stage that sends it."""
    if action.kind is Kind.FORWARD:
        return "activation", action.stage - 1
    return "gradient", action.stage + 1


def consumer_of(action: Action) -> int:
    """The stage that takes the result of `action`."""
    return action.stage + 1 if action.kind is Kind.FORWARD else action.stage - 1
