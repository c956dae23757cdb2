"""Looks into this worker, for the control thread: at retained messages and stacks, while the compute loop goes on.

For `stageline stack`, the control thread reads the stacks of all others, so no debugger is attached. For `queue`, a
message is copied out of the log without a lock, decoded, and summed up here; the broker gets shapes, dtypes and
summaries. Where it may not learn of a queue's content, it gets shapes and dtypes alone.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from traceback import StackSummary, walk_stack
from types import FrameType

import msgspec
import torch
from torch import Tensor

from stageline.broker.codec.message import Frame, Header, decode, read_header
from stageline.broker.codec.tensors import DTYPES
from stageline.broker.control.answers import (
    LONGEST_PLACE,
    MOST_FRAMES,
    MOST_THREADS,
    MessageLook,
    MessagePlace,
    PeekFacts,
    StackFrame,
    TensorLook,
    TensorValues,
    ThreadStack,
)
from stageline.broker.control.peek import LONGEST_REFUSAL, PIECE, Peek, Peeked, ShowStacks
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.broker.queues.base import Outbound, WorkerQueues
from stageline.broker.queues.spill import LoggedFrames
from stageline.pipeline.plan import Plan
from stageline.pipeline.program import Queue
from stageline.pipeline.tree import leaves

MOST_BYTES = 64 * 2**20  # of messages whose numbers are looked at for one answer: reports wait for it
_AT_ONCE = 2**20  # numbers

Withheld = Callable[[Queue], str]
_KEYED = "the run has keys: what its queues carry is for the workers at their ends"
_STAYS = "data.stays is set: rows and what is made of them stay with the workers"
_SCRIPT = "the queue carries batches or results of the script"
_CUT = "..."


def withheld_by(plan: Plan, *, keyed: bool) -> Withheld:
    """Return the function that returns why a queue's content must not reach the broker, "" if it may.

    Args:
        plan: Plan of the run.
        keyed: True if the broker knows processes by keys.
    """
    of_all = all_withheld_by(plan, keyed=keyed)

    def withheld(queue: Queue) -> str:
        return of_all or (_SCRIPT if queue.source is None and queue.target is None else "")

    return withheld


def all_withheld_by(plan: Plan, *, keyed: bool) -> str:
    """Return why the broker must learn neither content nor code of a process, "" if it may. Arguments as above."""
    if plan.data.stays is not None:
        return _STAYS
    return _KEYED if keyed else ""


class Peeker:
    """Answers to the broker's requests for looks. For the control thread."""

    def __init__(self, run: str, worker: int, queues: WorkerQueues, withheld: Withheld) -> None:
        """Take what it needs to answer.

        Args:
            run: Id of the run.
            worker: Place of this process.
            queues: Queues of this process.
            withheld: Returns why the content of a queue must not reach the broker, "" if it may.
        """
        self._run = run
        self._worker = worker
        self._queues = queues
        self._withheld = withheld

    def __call__(self, peek: Peek) -> Peeked:
        """Return the answer, without the incarnation. Raises nothing: the control thread must go on."""
        try:
            return self._answer(peek)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
            return _refusal(peek, f"{peek.queue} cannot be looked at: an error of type {type(error).__name__}")

    def _answer(self, peek: Peek) -> Peeked:
        outbound = self._queues.opened(peek.queue)
        if outbound is None or outbound.queue.producer != self._worker:
            return _refusal(peek, f"worker {self._worker} does not put into {peek.queue}")
        if peek.offset is None:
            return Peeked(0, peek.id, self._facts(outbound, peek))
        if reason := self._withheld(outbound.queue):
            return _refusal(peek, f"the messages of {peek.queue} are not given away: {reason}")
        return self._piece(outbound, peek, peek.offset)

    def _piece(self, outbound: Outbound, peek: Peek, offset: int) -> Peeked:
        """Return the bytes of a message from `offset` on, as many as are sent at once; none if it is not retained."""
        look = outbound.look(0 if peek.at is None else peek.at, room=0)
        if look is None:
            return Peeked(0, peek.id)
        if look.piece is None:
            piece = b"".join(_cut(look.frames, offset, offset + PIECE))
        else:
            try:
                piece = bytes(look.piece(offset, offset + PIECE))
            except (OSError, ValueError):  # forgotten since
                return Peeked(0, peek.id)
        return Peeked(0, peek.id, piece=piece, sizes=list(look.sizes))

    def _facts(self, outbound: Outbound, peek: Peek) -> PeekFacts:
        held, reason = outbound.held, self._withheld(outbound.queue)
        at = max(held.start, held.stop - peek.count) if peek.at is None else peek.at
        numbers = range(max(at, held.start), min(at + peek.count, held.stop))
        room = 0 if reason else MOST_BYTES
        found: list[MessageLook] = []
        for number in numbers:
            if (look := outbound.look(number, room)) is not None:
                found.append(_look(outbound.queue, number, look, room))
                room -= found[-1].bytes
        return PeekFacts(
            run=self._run,
            queue=peek.queue,
            worker=self._worker,
            first=held.start,
            end=held.stop,
            withheld=reason,
            messages=found,
        )


def _refusal(peek: Peek, reason: str) -> Peeked:
    return Peeked(0, peek.id, refusal=reason[:LONGEST_REFUSAL])


def _cut(frames: Sequence[Frame], start: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes from `start` up to before `end` of the frames one after another."""
    sizes = [memoryview(frame).nbytes for frame in frames]
    for frame, size, last in zip(frames, sizes, accumulate(sizes), strict=True):
        begins = last - size
        if begins < end and last > start:
            yield memoryview(frame).cast("B")[max(0, start - begins) : end - begins]


def _look(queue: Queue, number: int, look: LoggedFrames, room: int) -> MessageLook:
    """Return what a message is; its numbers are looked at if its bytes are no more than `room`."""
    index, microbatch = queue.at(number)
    size = sum(look.sizes)
    found = MessageLook(
        place=MessagePlace(number=number, unit=queue.unit, index=index, microbatch=microbatch),
        incarnation=0,
        bytes=size,
        on_disk=look.on_disk,
        tensors=[],
    )
    try:
        header = read_header(look.frames[0])
        tensors = _values(look.frames) if size <= room else _shapes(header)
    except (BadMessage, ForeignMessage) as error:
        return msgspec.structs.replace(found, damage=f"{error}. It may have been forgotten during the look: look again")
    return msgspec.structs.replace(found, incarnation=header.incarnation, tensors=tensors)


def _shapes(header: Header) -> list[TensorLook]:
    several = len(header.tensors) > 1
    return [
        TensorLook(
            path=f"[{place}]" if several else "",
            dtype=str(DTYPES[each.dtype]).removeprefix("torch."),
            shape=list(each.shape),
            bytes=each.nbytes,
        )
        for place, each in enumerate(header.tensors)
    ]


def _values(frames: Sequence[Frame]) -> list[TensorLook]:
    """Return the tensors of a message with summaries of their numbers. Raises `BadMessage`."""
    message, header = decode(frames), read_header(frames[0])
    found = [(path, leaf) for path, leaf in leaves(message.payload) if isinstance(leaf, Tensor)]
    return [
        msgspec.structs.replace(shape, path=path, values=summary(tensor))
        for shape, (path, tensor) in zip(_shapes(header), found, strict=True)
    ]


def summary(tensor: Tensor) -> TensorValues | None:
    """Return the summary of a tensor's numbers; None for complex ones. A part is looked at at a time."""
    if tensor.is_complex():
        return None
    least, greatest, total, count, nan, infinite = float("inf"), float("-inf"), 0.0, 0, 0, 0
    with torch.no_grad():
        for part in torch.split(tensor.reshape(-1), _AT_ONCE):
            numbers = part.double()
            finite = numbers[torch.isfinite(numbers)]
            nan += int(torch.isnan(numbers).sum())
            infinite += int(torch.isinf(numbers).sum())
            if finite.numel():
                least, greatest = min(least, finite.min().item()), max(greatest, finite.max().item())
                total, count = total + finite.sum().item(), count + finite.numel()
    if not count:
        return TensorValues(least=None, mean=None, greatest=None, nan=nan, infinite=infinite)
    return TensorValues(least=least, mean=total / count, greatest=greatest, nan=nan, infinite=infinite)


def shown_stacks(request: ShowStacks, *, bare: bool = False) -> Peeked:
    """Return the stacks of all threads but the calling one, without the incarnation.

    A thread goes on while its stack is read; what it computes outside of Python is the line that called it.

    Args:
        request: Question to answer.
        bare: True to leave out lines of code, and all of a file's path but its name.
    """
    return Peeked(0, request.id, threads=list(islice(_stacks(bare=bare), MOST_THREADS)))


def _stacks(*, bare: bool) -> Iterator[ThreadStack]:
    running = sys._current_frames()
    main, own = threading.main_thread().ident, threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident in sorted(running, key=lambda each: (each != main, each)):
        if ident != own:
            name = "main" if ident == main else names.get(ident, f"thread {ident}, not of Python")
            yield _stack(name, running[ident], bare=bare)


def _stack(name: str, frame: FrameType, *, bare: bool) -> ThreadStack:
    depth = sum(1 for _ in walk_stack(frame))
    found = StackSummary.extract(islice(walk_stack(frame), MOST_FRAMES), capture_locals=False)
    frames = [
        StackFrame(
            file=_end(Path(each.filename).name if bare else each.filename),
            line=each.lineno or 0,
            function=_start(each.name),
            text="" if bare else _start(each.line or ""),
        )
        for each in reversed(found)
    ]
    return ThreadStack(thread=_start(name), left_out=max(0, depth - len(frames)), frames=frames)


def _start(text: str) -> str:
    return text if len(text) <= LONGEST_PLACE else text[: LONGEST_PLACE - len(_CUT)] + _CUT


def _end(path: str) -> str:
    return path if len(path) <= LONGEST_PLACE else _CUT + path[len(_CUT) - LONGEST_PLACE :]
