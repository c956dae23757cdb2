"""Whether a worker that says hello may take part in a run at all, whatever place it wants."""

from collections.abc import Iterable

from stageline.broker.control.protocol import CONTROL_VERSION, Hello, Refused
from stageline.broker.membership.member import Member
from stageline.pipeline.exit_code import ExitCode
from stageline.pipeline.plan import differences

from .run import RunConfig, RunOutcome


def misfit(hello: Hello, terms: RunConfig, outcome: RunOutcome | None) -> Refused | None:
    """Why not, and what would help; None if it may."""
    if hello.version != CONTROL_VERSION:
        return Refused(
            f"{hello.name} speaks version {hello.version} of the control language, the broker version "
            f"{CONTROL_VERSION}; install the same stageline on both machines",
            code=ExitCode.FAILED,
        )
    if hello.plan != terms.plan:
        return Refused(
            f"{hello.name} has another plan than the broker: {_difference(hello, terms)}", code=ExitCode.REFUSED
        )
    if (theirs := _restarts(hello)) is not None and (theirs > 0) != (terms.restarts > 0):
        return Refused(
            f"{hello.name} has recovery.restarts = {theirs}, the broker has {terms.restarts}: all write snapshots, or "
            "nobody does",
            code=ExitCode.REFUSED,
        )
    if outcome is not None:
        return Refused(f"the run is over ({outcome.reason}); start the broker again for a new one", code=outcome.code)
    return None


def apart(hello: Hello, members: Iterable[Member]) -> Refused | None:
    """Why the worker's queues cannot be reached: sockets of one machine do not join two. None if they can."""
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
    """What the worker's plan says; None if it has told nothing of it."""
    match hello.settings:
        case {"recovery": {"restarts": int(restarts), "snapshot_every": int(every)}}:
            return restarts if every else 0
        case _:
            return None


def _difference(hello: Hello, terms: RunConfig) -> str:
    try:
        found = "; ".join(map(str, differences(hello.settings, terms.settings))) if hello.settings else ""
    except (TypeError, RecursionError):  # what came is not a plan's settings at all
        found = ""
    if found:
        return f"{found} (here: the worker, there: the broker)"
    return f"its digest is {hello.plan[:12]}, the broker's {terms.plan[:12]}; give both the same plan file"
