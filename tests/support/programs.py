"""Programs of workers in a run, made in one line."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from msgspec.structs import replace as replace_queue

from stageline.pipeline.evaluation import Criterion, Rounds
from stageline.pipeline.program import Evaluation, Pass, Queue, Replays, ScriptCalls, SumExchange, compile_program
from stageline.pipeline.schedule import Schedule
from stageline.workers.runtime.call_sequence import QueuedCalls
from stageline.workers.runtime.orders import FixedSchedule
from stageline.workers.runtime.plan_calls import NO_ROUNDS, PlanCalls


def calls_of(
    schedule: Schedule,
    steps: int,
    rounds: Rounds = NO_ROUNDS,
    *,
    passes: Sequence[Pass] = (),
    criterion: Criterion | None = None,
    replayed_from: int | None = None,
    orders: FixedSchedule | None = None,
) -> PlanCalls:
    """`steps` of a schedule with what `passes` add, and with what the rest asks for."""
    wanted = [*passes, SumExchange()]
    wanted += Evaluation.of(rounds.batches, is_told=(criterion or Criterion()).is_told)
    if replayed_from is not None and replayed_from < steps:
        wanted.append(Replays(replayed_from))
    program = compile_program(schedule, wanted)
    return PlanCalls(program, replace(rounds, steps=steps), criterion or Criterion(), orders or FixedSchedule())


def queued_calls(schedule: Schedule, passes: Sequence[Pass] = ()) -> QueuedCalls:
    """The calls of a script to the workers of a schedule, with what `passes` add."""
    return QueuedCalls(compile_program(schedule, [*passes, SumExchange(), *ScriptCalls.with_evaluation()]))


def queue_named(name: str, count: int = 1) -> Queue:
    """A queue of this name as data; for ends that there are already, the name is enough."""
    return Queue(name=name, producer=0, consumer=1, count=count)


AnyCalls = TypeVar("AnyCalls", PlanCalls, QueuedCalls)


def with_windows(calls: AnyCalls, window: Callable[[Queue], int]) -> AnyCalls:
    """The same, with these windows of its queues."""
    program = calls.program.requeued(lambda queue: replace_queue(queue, window=window(queue)))
    return replace(calls, program=program)
