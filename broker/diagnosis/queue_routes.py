"""Says which worker takes from a queue and which one puts into it, by the queue's name.

    forward-2       stage 1 -> stage 2          call-1      the script -> worker 1
    backward-2      stage 3 -> stage 2          reply-1     worker 1 -> the script
    evaluation-2    stage 1 -> stage 2          loss-1      worker 1, which has the last stage -> the script
    verdict-1       the worker that has the last stage -> worker 1, where a run may end early after an evaluation
    norms-2         stage 3 -> stage 2, where gradients are clipped; and clip-2, stage 1 -> stage 2
    replayed-0      stage 1 -> stage 0, where what leaves stage 0 is kept and used again
    tied-0          a later stage that shares parameters with stage 0 -> stage 0; or per step, subtotal-0
    total-2         an earlier stage that shares parameters with stage 2 -> stage 2

Which stages share parameters only the workers know: the one that waits says which stage puts the message.
Calls, losses and replies are those of scripted runs.
"""

from dataclasses import dataclass

from stageline.pipeline.program import SumExchange, compile_program
from stageline.pipeline.schedule import Schedule

CALL, LOSS, REPLY, EVALUATION, VERDICT = "call", "loss", "reply", "evaluation", "verdict"
TIED, SUBTOTAL, TOTAL = "tied", "subtotal", "total"
NORMS, CLIP, REPLAYED, SUM = "norms", "clip", "replayed", "sum"
# From a stage to the one that puts into its queue.
_BEFORE = {"forward": -1, EVALUATION: -1, "backward": 1, NORMS: 1, CLIP: -1, REPLAYED: 1}


@dataclass(frozen=True, slots=True)
class RouteEnd:
    """A worker, with the stage of its own that takes or puts; None for the worker as a whole, and for the script."""

    worker: int
    stage: int | None = None


@dataclass(frozen=True, slots=True)
class QueueRoute:
    """`producer`: None if the messages come from outside the pipeline."""

    flow: str
    consumer: RouteEnd
    producer: RouteEnd | None


def route_of(queue: str, schedule: Schedule, script: int | None, tied_source: int | None = None) -> QueueRoute | None:
    """None for the name of no queue of the run. `script`: the index of the script's place, if there is one.
    `tied_source`: the stage that puts into `queue`, if stages that share parameters are joined by it."""
    if schedule.replicas.several and (found := compile_program(schedule, [SumExchange()]).queues.get(queue)):
        return QueueRoute(found.flow, RouteEnd(found.consumer, found.target), RouteEnd(found.producer, found.source))
    flow, _, number = queue.rpartition("-")
    if not (number.isascii() and number.isdigit() and len(number) < 9):
        return None
    if flow in _BEFORE:
        return _between_stages(flow, int(number), int(number) + _BEFORE[flow], schedule)
    if flow in (TIED, SUBTOTAL, TOTAL):
        return None if tied_source is None else _between_stages(flow, int(number), tied_source, schedule)
    if flow == VERDICT:
        return _verdict(int(number), schedule)
    return None if script is None else _of_script(flow, int(number), script)


def _between_stages(flow: str, stage: int, source: int, schedule: Schedule) -> QueueRoute | None:
    if stage >= schedule.stages:
        return None
    producer = RouteEnd(schedule.owner(source), source) if 0 <= source < schedule.stages else None
    return QueueRoute(flow, RouteEnd(schedule.owner(stage), stage), producer)


def _verdict(worker: int, schedule: Schedule) -> QueueRoute | None:
    if worker >= len(schedule.placement):
        return None
    last = schedule.stages - 1
    return QueueRoute(VERDICT, RouteEnd(worker), RouteEnd(schedule.owner(last), last))


def _of_script(flow: str, index: int, script: int) -> QueueRoute | None:
    """The workers have the places before the script's."""
    if index >= script or flow not in (CALL, LOSS, REPLY):
        return None
    worker, caller = RouteEnd(index), RouteEnd(script)
    return QueueRoute(flow, worker, caller) if flow == CALL else QueueRoute(flow, caller, worker)
