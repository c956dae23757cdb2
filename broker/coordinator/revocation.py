"""End of a machine's part in a run: its workers lose their places, and all places get other keys.

Others are told of the keys after the machine's workers have lost their places, so that none of these is told. What the
machine knows is of no use then: connections with the former keys are closed, and what lies at a server is sealed with
the new ones. A worker that keeps running does not go back for it.

Reads `config`, `registry`. Writes, through `place` and `registration`, what follows from a loss.
"""

from collections.abc import Callable

from stageline.broker.ledger.losses import WorkerLoss
from stageline.pipeline.errors import ExitCode

from .place_keys import rotate
from .registration import assign_again
from .script_place import place_of
from .state import Outgoing, RunState

REVOKED = "speaks with a key that was revoked"


def shut_out(run: RunState, is_out: Callable[[bytes], bool], now: float) -> list[Outgoing]:
    """Take the places of workers away, and give other keys to all places. Return the messages to send.

    Args:
        run: The state.
        is_out: Returns True if the process at an address of the channel must not take part any more.
        now: Seconds since the epoch.
    """
    run.outgoing.clear()
    if run.lifecycle.over:
        return []
    for member in [each for each in run.registry.reachable() if each.sender and is_out(each.sender)]:
        if why := place_of(run, member.index).lose(WorkerLoss(member, REVOKED), now):
            run.fail(why, ExitCode.FAILED)
    rotate(run, now)
    assign_again(run)
    return list(run.outgoing)
