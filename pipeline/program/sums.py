"""Sums of gradients that replicas of a stage send each other once per step; each replica adds them up in one order.

    copy 1.0  --- sum-1.1-from-1.0 --->  copy 1.1      put by 1.0A, taken by 1.1U
    copy 1.0  <-- sum-1.0-from-1.1 ----  copy 1.1      put by 1.1A, taken by 1.0U

First all sums are sent, then stages update: no worker waits for a sum that another one has yet to send. The replicas of
a last stage send their losses with the sums; they do so even if the stage has no trainable parameter.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from stageline.pipeline.schedule import Action, Kind

from .operations import Op, Queue
from .program import Program


@dataclass(frozen=True, slots=True)
class SumExchange:
    """Pass for stages with replicas.

    Attributes:
        frozen: Stages after the first trainable one that have no trainable parameter.
    """

    frozen: tuple[int, ...] = ()

    def lower(self, program: Program) -> Program:
        """Return `program` with the sums between replicas."""
        names = {copy: self._names(program, copy) for copy in program.schedule.replicas.copies}
        if not any(taken for taken, _ in names.values()):
            return program

        def adding(copies: tuple[int, ...]) -> list[Op]:
            given = {copy: names[copy][1] for copy in sorted(copies) if names[copy][1]}
            return [program.made(Action(Kind.ADD, copy), gives=queues) for copy, queues in given.items()]

        def updating(op: Op) -> Op:
            taken = names[op.action.stage][0] if op.action.kind == Kind.UPDATE else ()
            return replace(op, takes=(*op.takes, *taken)) if taken else op

        return program.before_updates(adding).rewired(updating).with_queues(self._queues(program))

    def _names(self, program: Program, copy: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the queues that a copy's update takes from, and those that its sums are put into."""
        replicas = program.schedule.replicas
        others = replicas.others(copy) if self._adds(program, copy) else ()
        return (
            tuple(replicas.queue("sum", other, copy) for other in others),
            tuple(replicas.queue("sum", copy, other) for other in others),
        )

    def _adds(self, program: Program, copy: int) -> bool:
        stage = program.schedule.replicas.stage(copy)
        return program.schedule.trains(copy) and (stage == program.last or stage not in self.frozen)

    def _queues(self, program: Program) -> Iterator[Queue]:
        replicas = program.schedule.replicas
        for copy in replicas.copies:
            for other, name in zip(replicas.others(copy), self._names(program, copy)[1], strict=False):
                yield program.queue(name, copy, other)
