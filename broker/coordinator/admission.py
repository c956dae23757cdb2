"""Checks of a Hello that need no free place: whether the worker fits the run, and whether its queues are reachable."""

from collections.abc import Iterable

from stageline.broker.control.protocol import CONTROL_VERSION, Hello, Refused
from stageline.broker.membership.member import Member
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import differences

from .run import RunConfig, RunOutcome


def mismatch(hello: Hello, config: RunConfig, outcome: RunOutcome | None) -> Refused | None:
    """Refusal of a worker of another version or plan, or of a run that is over; None if the worker fits."""
    if hello.version != CONTROL_VERSION:
        return Refused(
            f"{hello.name} uses control protocol version {hello.version}, the broker version {CONTROL_VERSION}; "
            "install the same stageline on both machines",
            code=ExitCode.FAILED,
        )
    if hello.plan != config.plan:
        return Refused(
            f"{hello.name} has another plan than the broker: {_difference(hello, config)}", code=ExitCode.REFUSED
        )
    if (theirs := _restarts(hello)) is not None and (theirs > 0) != (config.restarts > 0):
        return Refused(
            f"{hello.name} has recovery.restarts = {theirs}, the broker has {config.restarts}: either all workers "
            "write snapshots, or none does",
            code=ExitCode.REFUSED,
        )
    if outcome is not None:
        return Refused(f"the run is over ({outcome.reason}); start the broker again for a new one", code=outcome.code)
    return None


def unreachable_queues(hello: Hello, members: Iterable[Member]) -> Refused | None:
    """Refusal of a worker whose ipc:// queues workers on other hosts cannot reach; None if all can."""
    for other in members:
        local = hello.endpoint.startswith("ipc://") and other.endpoint
        if local and other.host != hello.host and other.index != hello.claim:
            return Refused(
                f"the queues of {hello.name} are at {hello.endpoint} on host {hello.host}, where worker {other.index} "
                f"on host {other.host} cannot reach them; set queues.url to tcp://ADDRESS:0, or to redis://..., for "
                "every worker",
                code=ExitCode.REFUSED,
            )
    return None


def _restarts(hello: Hello) -> int | None:
    """`recovery.restarts` of the worker's plan, 0 without snapshots; None if its settings do not include it."""
    match hello.settings:
        case {"recovery": {"restarts": int(restarts), "snapshot_every": int(every)}}:
            return restarts if every else 0
        case _:
            return None


def _difference(hello: Hello, config: RunConfig) -> str:
    try:
        found = "; ".join(map(str, differences(hello.settings, config.settings))) if hello.settings else ""
    except (TypeError, RecursionError):  # the settings received are not a plan's
        found = ""
    if found:
        return f"{found} (here: the worker, there: the broker)"
    return f"its digest is {hello.plan[:12]}, the broker's {config.plan[:12]}; give both the same plan file"
