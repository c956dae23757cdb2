"""What workers do in a run, made in one line."""

from collections.abc import Callable, Sequence

from msgspec.structs import replace as replace_queue

from stageline.pipeline.evaluation import Criterion, Rounds
from stageline.pipeline.program import Evaluation, Pass, Queue, Replays, SumExchange, compile_program
from stageline.pipeline.schedule import Schedule
from stageline.workers.runtime.job import SCRIPTED
from stageline.workers.runtime.plan_calls import NO_ROUNDS, PlanCalls


def calls_of(
    schedule: Schedule,
    steps: int,
    rounds: Rounds = NO_ROUNDS,
    *,
    passes: Sequence[Pass] = (),
    scripted: bool = False,
    criterion: Criterion | None = None,
    replayed_from: int | None = None,
) -> PlanCalls:
    """`steps` of a schedule with what `passes` add, and with what the rest asks for."""
    wanted = [*passes, SumExchange()]
    if scripted:
        wanted += SCRIPTED
    elif rounds.batches:
        wanted.append(Evaluation(may_end=criterion is not None and criterion.patience is not None))
    if replayed_from is not None and replayed_from < steps:
        wanted.append(Replays(replayed_from))
    return PlanCalls(compile_program(schedule, wanted), steps, rounds, criterion)


def queue_named(name: str, count: int = 1) -> Queue:
    """A queue of this name as data; for ends that there are already, the name is enough."""
    return Queue(name=name, producer=0, consumer=1, count=count)


def with_windows(calls: PlanCalls, window: Callable[[Queue], int]) -> PlanCalls:
    """The same, with these windows of its queues."""
    program = calls.program.requeued(lambda queue: replace_queue(queue, window=window(queue)))
    return PlanCalls(program, calls.steps, calls.rounds, calls.criterion)
