"""The queues between a script and the workers that it calls.

script  --- call-0, call-1 --->  each worker
script  <-- loss-1 ------------  the worker of the last stage: of each call to train
script  <-- reply-0, reply-1 --  each worker: to any other call
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .evaluation import Evaluation
from .operations import FEW, Per, Queue
from .program import Pass, Program


@dataclass(frozen=True, slots=True)
class ScriptCalls:
    """Pass for a run whose batches come with a script's calls."""

    @classmethod
    def with_evaluation(cls) -> tuple[Pass, ...]:
        """Return the passes of a run whose batches a script brings, evaluated ones too."""
        return (Evaluation(by_credit=False), cls())

    def lower(self, program: Program) -> Program:
        """Return `program` with the queues of calls, losses and replies."""
        return program.with_queues(_queues(program))


def _queues(program: Program) -> Iterator[Queue]:
    for worker in range(program.script):
        yield Queue(name=f"call-{worker}", producer=program.script, consumer=worker, per=Per.CALL, window=FEW)
        yield Queue(name=f"reply-{worker}", producer=worker, consumer=program.script, per=Per.REPLY, window=FEW)
    last = program.schedule.owner(program.last)
    yield Queue(name=f"loss-{last}", producer=last, consumer=program.script, per=Per.STEP, window=FEW)
