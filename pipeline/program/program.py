"""The program of a run: for every worker its operations, the table of queues, and a digest over both.

schedule of worker 1    1F0 1F1 1B0 1B1 1U
its program             1F0 takes forward-1 and gives forward-2, ..., 1U

A pass takes a program and returns one with more: `before_updates` puts operations between a step's backwards and its
updates, `with_queues` adds queues, `rewired` changes what operations take and give.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import chain
from typing import Protocol, Self

import msgspec

from stageline.pipeline.schedule import Action, Kind, Schedule

from .operations import Instruction, Op, Per, Queue

OpLists = tuple[tuple[Op, ...], ...]  # of each worker


class Pass(Protocol):
    """Everything that a feature adds to a program. Pure: equal programs give equal programs."""

    def lower(self, program: "Program") -> "Program":
        """Return `program` with the additions of the feature. Raises `ScheduleRefused` if it cannot have them."""


@dataclass(frozen=True, slots=True)
class StepLists:
    """Operations of the workers in each step from step `begins` on."""

    begins: int
    lists: OpLists


@dataclass(frozen=True)
class Program:
    """The operations of all workers.

    Attributes:
        schedule: Schedule that the program was compiled from.
        queues: Every queue of the run, by its name.
        sections: Operations of a training step. The first section begins at step 0, each further one at a later step.
        evaluated: Operations of an evaluated batch.
        passes: Passes that have made the program of the schedule, in order.
    """

    schedule: Schedule
    queues: Mapping[str, Queue]
    sections: tuple[StepLists, ...]
    evaluated: OpLists = ()
    passes: tuple[Pass, ...] = ()

    @property
    def last(self) -> int:
        """Index of the last stage."""
        return self.schedule.stages - 1

    @property
    def script(self) -> int:
        """Place of the script among the workers: after the last of them."""
        return len(self.schedule.placement)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over queues and operations: two processes with equal digests run one program."""
        lists = [(each.begins, each.lists) for each in self.sections]
        parts = (self.schedule.mode, list(self.queues.values()), lists, self.evaluated)
        return sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()

    @property
    def step(self) -> OpLists:
        """Operations of each worker in the first step."""
        return self.sections[0].lists

    @cached_property
    def ahead(self) -> frozenset[str]:
        """Training queues whose consumer's credit says how far the producer may be ahead.

        No gradient comes back for the messages of such a queue.
        """
        return frozenset(op.awaits for op in chain.from_iterable(self.step) if op.awaits)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Kinds of all operations."""
        lists = [*(each.lists for each in self.sections), self.evaluated]
        return frozenset(op.action.kind for ops in lists for op in chain.from_iterable(ops))

    @property
    def scripted(self) -> bool:
        """True if the calls of a script bring the batches."""
        return "call-0" in self.queues

    def inbound(self, worker: int) -> list[Queue]:
        """Return the queues that `worker` takes from."""
        return [queue for queue in self.queues.values() if queue.consumer == worker]

    def outbound(self, worker: int) -> list[Queue]:
        """Return the queues that `worker` puts into."""
        return [queue for queue in self.queues.values() if queue.producer == worker]

    def ends_of(self, worker: int) -> tuple[Queue, ...]:
        """Return the queues that `worker` puts into or takes from."""
        return tuple(queue for queue in self.queues.values() if worker in (queue.producer, queue.consumer))

    def splits(self, copy: int) -> bool:
        """Return True if any backwards of `copy` run in two halves."""
        return any(
            op.action.kind == Kind.INPUT and op.action.stage == copy for op in self.step[self.schedule.owner(copy)]
        )

    def ops(self, worker: int, steps: range) -> Iterator[tuple[int, Op]]:
        """Yield the operations of `worker` over training `steps`, in order, each with its step."""
        return ((each.step, each.op) for each in self.instructions(worker, steps))

    def instructions(self, worker: int, steps: range) -> Iterator[Instruction]:
        """Return the instructions of `worker` over training `steps`. All instructions of a step are made together."""
        if self.schedule.mode == "async":
            return (Instruction(step, op) for step, op in self._overlapping(worker, steps))
        return chain.from_iterable([Instruction(step, op) for op in self.section(step).lists[worker]] for step in steps)

    def evaluation(self, worker: int, batches: range) -> Iterator[Instruction]:
        """Return the instructions of `worker` over evaluated `batches`."""
        lists = self.evaluated[worker] if self.evaluated else ()
        return chain.from_iterable([Instruction(batch, op) for op in lists] for batch in batches)

    def section(self, step: int) -> StepLists:
        """Return the section that is valid in training step `step`."""
        return next(each for each in reversed(self.sections) if each.begins <= step)

    def instruction(self, step: int, action: Action, *, evaluates: bool = False) -> Instruction:
        """Return the instruction that computes `action` in a step, or in an evaluated batch.

        Args:
            step: Training step, or number of the evaluated batch.
            action: Action to compute. The microbatch may be one that the stage's copy does not have: a trial has a
                microbatch of its own.
            evaluates: True for an evaluated batch.

        Raises:
            KeyError: No worker runs an action of this kind for the stage.
        """
        lists = self.evaluated if evaluates else self.section(step).lists
        alike = [op for op in lists[self.schedule.owner(action.stage)] if op.action[:2] == action[:2]]
        if not alike:
            raise KeyError(f"no worker runs {self.schedule.name_of(action)}: see `stageline schedule`")
        same = next((op for op in alike if op.action == action), None)
        return Instruction(step, same or msgspec.structs.replace(alike[0], action=action))

    def with_queues(self, queues: Iterable[Queue]) -> Self:
        """Return the program with further `queues`."""
        return replace(self, queues={**self.queues, **{queue.name: queue for queue in queues}})

    def requeued(self, change: Callable[[Queue], Queue]) -> Self:
        """Return the program with every queue replaced by `change` of it. Names stay."""
        return replace(self, queues={name: change(queue) for name, queue in self.queues.items()})

    def before_updates(self, made: Callable[[tuple[int, ...]], Iterable[Op]]) -> Self:
        """Return the program with operations added right before each worker's updates.

        `made` returns the operations, given the worker's stages.
        """

        def inserted(worker: int, ops: tuple[Op, ...]) -> tuple[Op, ...]:
            end = next((at for at, op in enumerate(ops) if op.action.kind == Kind.UPDATE), len(ops))
            return (*ops[:end], *made(self.schedule.placement[worker]), *ops[end:])

        return self.with_lists(inserted)

    def rewired(self, change: Callable[[Op], Op]) -> Self:
        """Return the program with every operation of a step replaced by `change` of it."""
        return self.with_lists(lambda worker, ops: tuple(map(change, ops)))

    def with_lists(self, change: Callable[[int, tuple[Op, ...]], tuple[Op, ...]]) -> Self:
        """Return the program with the list of every worker changed, in all sections.

        `change` returns the new list, given the worker and its list.
        """
        sections = tuple(
            replace(each, lists=tuple(change(worker, ops) for worker, ops in enumerate(each.lists)))
            for each in self.sections
        )
        return replace(self, sections=sections)

    def queue(self, name: str, source: int, target: int) -> Queue:
        """Return a queue with one message in a step, from one stage (with replicas: copy) to another."""
        owner = self.schedule.owner
        return Queue(
            name=name, producer=owner(source), consumer=owner(target), source=source, target=target, per=Per.STEP
        )

    def made(self, action: Action, takes: Iterable[str] = (), gives: Iterable[str] = ()) -> Op:
        """Return an operation that runs once in a step.

        Args:
            action: Action to compute.
            takes: Names of the queues that the operation takes from.
            gives: Names of the queues that the operation puts into.
        """
        return Op(action, f"{self.schedule.label(action.stage)}{action.kind}", Per.STEP, tuple(takes), tuple(gives))

    def _overlapping(self, worker: int, steps: range) -> Iterator[tuple[int, Op]]:
        """Yield the operations of `worker` over asynchronous `steps`, each with its step.

        Without a flush, the schedule says in which order the operations of several steps run. A list in which nothing
        runs for a microbatch is repeated as it stands.
        """
        tables = {each.begins: {op.action: op for op in each.lists[worker]} for each in self.sections}
        alone = (
            each.begins for each in self.sections if not any(op.per is Per.MICROBATCH for op in each.lists[worker])
        )
        until = min([steps.stop, *alone])
        for step, action in self.schedule.program(worker, range(steps.start, until)):
            if (op := tables[self.section(step).begins].get(action)) is not None:
                yield step, op
        for step in range(max(steps.start, until), steps.stop):
            for op in self.section(step).lists[worker]:
                yield step, op
