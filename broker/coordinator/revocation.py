"""End of a machine's part in a run: its workers lose their places, and all places get other keys.

Nothing is told of the keys here: once the channel has closed its connections, workers say Hello again, and get their
places with the new keys, if their own key is still admitted. What the machine knows is of no use then: workers close
connections with the former keys, and seal with the new ones what lies at a server. A worker that keeps running does not
go back for it.

Reads `config`, `registry`. Writes, through `place`, what follows from a loss.
"""

from collections.abc import Callable

from stageline.broker.ledger.losses import WorkerLoss
from stageline.pipeline.errors import ExitCode

from .place_keys import rotate
from .script_place import place_of
from .state import Outgoing, RunState

REVOKED = "speaks with a key that was revoked"


def shut_out(run: RunState, is_out: Callable[[bytes], bool], now: float) -> list[Outgoing]:
    """Take the places of workers away, and begin other keys of all places. Return the messages to send.

    The caller closes all connections of the channel afterwards. A worker of the machine that is not known by an address
    cannot come back, and loses its place with its lease.

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
    return list(run.outgoing)
