"""Checks of what a feature of the user's adds to a program, and which pass a program owes a property to.

A feature adds operations of kinds of its own, and queues of its own between them. Each of these queues has, in every
step, as many messages put as taken, by the stages that are its ends. Whatever was there before stays.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain

from msgspec.structs import replace

from stageline.pipeline.schedule import Action, Kind

from .base import compile_program
from .operations import Op, Per, Queue
from .program import Pass, Program

_QUEUE = re.compile(r"[a-z]{1,16}-\d+(\.\d+)?(-from-\d+(\.\d+)?)?")
_OTHERWISE = "call a queue by what it carries, with a word that no other has, as gradnorms-0"
_BETWEEN_STAGES = ("forward", "backward", "tied", "subtotal", "total", "norms", "clip", "sum", "evaluation", "replayed")
_OURS = (*_BETWEEN_STAGES, "verdict", "call", "reply", "loss")  # the first parts of the names of stageline's own queues


def fault_of_additions(before: Program, found: Program) -> str | None:
    """Return why `found`, which a feature has made of `before`, cannot be used, with the way out.

    Returns None if it can be used. Order and deadlocks are not looked at: `check_schedule` does.
    """
    return next(chain(_of_shape(before, found), _of_operations(before, found), _of_queues(before, found)), None)


def adding_pass(program: Program, has: Callable[[Program], bool]) -> Pass | None:
    """Return the first pass of `program` whose result `has` a property; None if the bare schedule's program has it."""
    made = (compile_program(program.schedule, program.passes[:count]) for count in range(len(program.passes) + 1))
    first = next(count for count, each in enumerate(made) if has(each))
    return program.passes[first - 1] if first else None


def _of_shape(before: Program, found: Program) -> Iterator[str]:
    if found.schedule != before.schedule or found.evaluated != before.evaluated:
        yield "it has another schedule or other evaluated batches; return what methods of the given program return"
    if any(len(each.lists) != len(before.step) for each in found.sections) or not found.sections:
        yield f"it lacks a worker's operations; return lists for all {len(before.step)} workers"
    listed: Iterator[tuple[int, object]] = ((worker, op) for worker, ops in enumerate(found.step) for op in ops)
    for worker, op in listed:
        if not isinstance(op, Op):
            yield f"worker {worker} has {str(op)!r:.60} among its operations; make an operation with program.made"


def _of_operations(before: Program, found: Program) -> Iterator[str]:
    for worker, (old, new) in enumerate(zip(before.step, found.step, strict=True)):
        names = {op.action: op.name for op in (*new, *old)}
        had, has = Counter(op.action for op in old), Counter(op.action for op in new)
        for action in had - has:
            yield f"{names[action]} of worker {worker} is gone; keep the operations that are there"
        for action in has - had:
            yield from _of_action(action, names[action], worker, found.schedule.placement[worker])
            if has[action] > 1:
                yield f"worker {worker} has {names[action]} {has[action]} times in a step; add it once"
        known = {op.action: op for op in old}
        for op in new:
            if op.action in known and (changed := _changed(known[op.action], op)):
                yield f"{changed} of {op.name} is changed, which is there without this feature; put new queues last"


def _changed(old: Op, new: Op) -> str:
    """Return the name of a field that `new` has lost or changed of `old`; "" if it has at most further queues."""
    kept = replace(new, takes=new.takes[: len(old.takes)], gives=new.gives[: len(old.gives)], marks=old.marks)
    return next((name for name in Op.__struct_fields__ if getattr(old, name) != getattr(kept, name)), "")


def _of_action(action: Action, name: str, worker: int, stages: tuple[int, ...]) -> Iterator[str]:
    kind = str(action.kind)
    if not re.fullmatch("[A-Z]", kind) or kind in tuple(Kind):
        yield (
            f"the operation {name} has the kind {kind!r}; expected one capital letter that is none of {', '.join(Kind)}"
        )
    if action.stage not in stages:
        yield f"worker {worker} has the operation {name} of stage {action.stage}; its stages are {stages}"


def _of_queues(before: Program, found: Program) -> Iterator[str]:
    added = [queue for name, queue in found.queues.items() if name not in before.queues]
    for queue in added:
        yield from _of_name(queue)
    known = {op.action for op in chain.from_iterable(before.step)}
    for op in chain.from_iterable(found.step):
        for name in (*op.takes, *op.gives):
            if name not in found.queues:
                yield f"{op.name} uses the queue {name}, which is not there: add it with program.with_queues"
            elif name in before.queues and op.action not in known:
                yield f"{op.name} uses the queue {name}, which is there without this feature; {_OTHERWISE}"
    for name, queue in before.queues.items():
        if name in found.queues and (changed := queue.differing(found.queues[name])):
            yield f"{changed} of the queue {name} is changed, which is there without this feature; {_OTHERWISE}"
    for queue in added:
        yield from _of_end(found, queue, "puts into", ("producer", "source"), lambda op: op.gives)
        yield from _of_end(found, queue, "takes from", ("consumer", "target"), lambda op: op.takes)


def _of_name(queue: Queue) -> Iterator[str]:
    if not _QUEUE.fullmatch(queue.name):
        yield (
            f"a queue is called {queue.name!r}; expected up to 16 small letters, a hyphen and the stage that takes, as "
            "gradnorms-0"
        )
    if queue.flow in _OURS:
        yield f"a queue is called {queue.name!r}, and stageline has queues called {queue.flow}; {_OTHERWISE}"
    if queue.per not in (Per.MICROBATCH, Per.STEP):
        yield f"the queue {queue.name} has per={queue.per.value!r}; expected Per.STEP or Per.MICROBATCH"
    if queue.begins or queue.ends is not None:
        yield f"the queue {queue.name} begins or ends at a step; leave begins and ends out: all steps have messages"


def _of_end(
    program: Program, queue: Queue, verb: str, end: tuple[str, str], uses: Callable[[Op], tuple[str, ...]]
) -> Iterator[str]:
    name, (at, of) = queue.name, end
    worker, stage = getattr(queue, at), getattr(queue, of)
    users = [(number, op) for number, ops in enumerate(program.step) for op in ops if name in uses(op)]
    for number, op in users:
        if worker != number or stage not in (None, op.action.stage):
            yield (
                f"{op.name} {verb} the queue {name}, which has {at}={worker} and {of}={stage}; expected {at}={number} "
                f"and {of}={op.action.stage}"
            )
    if len(users) != queue.count:
        yield f"a step {verb} the queue {name} {len(users)} times; expected {queue.count}, as its count says"
