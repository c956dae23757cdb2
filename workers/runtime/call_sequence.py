"""Calls of a script as one worker sees them: what each has it compute, and what it replies.

take the next call -> its instructions -> computed -> the reply is put -> take the next call ... until STOP
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from stageline.broker.codec.message import Message
from stageline.broker.codec.structure import emptied
from stageline.broker.queues.base import Inbound
from stageline.pipeline.errors import DataError
from stageline.pipeline.program import Instruction, Per, Program, Queue
from stageline.pipeline.stage.layers.memory import copied
from stageline.pipeline.tree import Tree

from .call_source import CallSource, Keep, LoopParts, SaveStages
from .calls import Call, CallFeed, CallKind, CallRefused, Position, answers, decode_call, instructions_of
from .executor import Executor
from .idle import CallWait
from .left_out import is_left_out
from .orders import FixedSchedule


class CallSequence:
    """The sequence of a script's calls to one worker.

    Attributes:
        calls: Name of the queue that brings the calls.
        replies: Queues that take the replies.
        position: Position before the open call, or before the next one.
        start: Position at which the worker has begun.
        open: Call that is carried out; None between two calls.
        over: True once no other call comes.
    """

    def __init__(
        self,
        program: Program,
        worker: int,
        executor: Executor,
        position: Position,
        keep: Keep = lambda step: None,
        save: SaveStages = lambda folder, position: None,
    ) -> None:
        """Begin at a position, without an open call.

        Args:
            program: Operations of each worker.
            worker: Place of the worker.
            executor: Computes for the calls.
            position: Position before which all calls are done.
            keep: Saves the state after so many steps. Called before a script's call changes the weights, and last.
            save: Carries out a call to save the worker's stages.
        """
        self.calls = f"call-{worker}"
        self.replies = [queue for queue in program.outbound(worker) if queue.consumer == program.script]
        self.position = self.start = position
        self.open: Call | None = None
        self.over = False
        self._keep = keep
        self._save = save
        self._program = program
        self._worker = worker
        self._executor = executor
        self._outputs: list[Tree] = []  # of the last stage, if the open call wants them
        self._next: Message | None = None  # with the call after the open one
        self._settled = self._emptied = position.evaluations  # batches that are, and those whose activations are gone

    def begin_at(self, position: Position) -> None:
        """Continue from `position`, before any call was begun."""
        self.position = self.start = position
        self._settled = self._emptied = position.evaluations

    @property
    def looks_ahead(self) -> bool:
        """True if the call after the open one may be taken while there is nothing else to do."""
        return self._next is None and self.open is not None and self.open.kind is CallKind.TRAIN

    def look_at(self, message: Message) -> None:
        """Cut the batch of the call that comes after the open one, so that it can begin at once."""
        self._next = message
        if isinstance(self._executor.feed, CallFeed):
            with suppress(CallRefused, DataError):  # `begin` raises it
                self._executor.feed.prepare(decode_call(message.payload))

    def take_next(self) -> Message | None:
        """Return the message that was looked at, once; None if there is none."""
        found, self._next = self._next, None
        return found

    def begin(self, message: Message) -> Iterator[Instruction]:
        """Open the call that `message` brought, and return the instructions that the worker computes for it.

        Raises:
            CallRefused: The message is no call, or not the next one.
            DataError: The batch of the call is malformed.
        """
        call = decode_call(message.payload)
        self.position.check_next(call)
        instructions = instructions_of(call, self._program, self._worker)
        if isinstance(self._executor.feed, CallFeed):
            self._executor.feed.open(call)
        self._executor.begin_call(ema=call.ema, settled=call.settled, epoch=call.epoch)
        if call.value is not None:
            self._executor.told(call.step, call.value)
        self.open = call
        return instructions

    def take_settled(self) -> range:
        """Return the evaluated batches that have been settled since the last call of this method.

        A script is `UNDER_WAY` calls ahead of the replies that it has, so all are from before the call before the open
        one.
        """
        before, self._emptied = self._emptied, self._settled
        return range(before, self._settled)

    def evaluated(self, stage: int, output: Tree) -> None:
        """Note that `stage` has run a microbatch of the open call forward, with this output."""
        wanted = self.open is not None and self.open.kind is CallKind.PREDICT and stage == self._program.last
        if wanted and not is_left_out(output):
            self._outputs.append(output)

    @property
    def answer(self) -> Queue | None:
        """The queue that the reply to the open call is put into; None if this worker gives no reply to it."""
        queues = () if self.open is None else answers(self._program, self.open.kind)
        return next((queue for queue in queues if queue.producer == self._worker), None)

    def reply(self) -> Tree:
        """Return the reply to the open call, after everything is computed. LOAD, SAVE and STOP are carried out here.

        Raises `CallRefused` for weights that do not fit.
        """
        last = self._program.last in self._executor.stages
        match self.open:
            case Call(settled=True) as call:
                return call.reply
            case Call() if last and self._executor.gives_up:
                return emptied()
            case Call(CallKind.TRAIN) if last:
                found = self._executor
                return found.loss, found.gradient_norm, found.learning_rates, found.rows
            case Call(CallKind.EVALUATE) if last:
                sums = self._executor.sums
                return {"rows": sums.rows, "loss": sums.loss, **sums.metrics}
            case Call(CallKind.PREDICT) if last:
                return tuple(self._outputs)
            case Call(CallKind.STATE) as call:
                return {name: copied(tensor.detach()) for name, tensor in self._weights(ema=call.ema).items()}
            case Call(CallKind.LOAD) as call:
                self._keep(self.position.step)
                self._load(call)
            case Call(CallKind.STOP):
                self._keep(self.position.step)  # a run that has finished can be continued from its last step
            case Call(CallKind.SAVE, inputs=str(folder)):
                return self._save(Path(folder), self.position)
        return None

    def close(self) -> None:
        """Close the open call, after its reply was put."""
        call, self.open = self.open, None
        if call is not None:
            self._settled = self.position.evaluations
            self.position = self.position.after(call.kind)
            self.over = call.kind is CallKind.STOP
        if isinstance(self._executor.feed, CallFeed):
            self._executor.feed.close()
        self._outputs.clear()

    def _weights(self, *, ema: bool = False) -> dict[str, Tensor]:
        parts = (stage.state_dict(ema=ema) for stage in self._executor.stages.values())
        return {name: tensor for part in parts for name, tensor in part.items()}

    def _load(self, call: Call) -> None:
        state = call.state or {}
        if differing := sorted(self._weights().keys() ^ state.keys()):
            raise CallRefused(
                f"the weights to load differ from those of stages {', '.join(map(str, self._executor.stages))} in "
                f"their names: {', '.join(differing[:8])}"
            )
        for stage in self._executor.stages.values():
            try:
                stage.load_state_dict(state)
            except RuntimeError as error:
                raise CallRefused(f"the weights to load do not fit stage {stage.index}: {error}") from error


@dataclass(frozen=True, slots=True)
class QueuedCalls:
    """The calls of a script, which come in queues.

    Attributes:
        program: Operations of each worker in a step, and in an evaluated batch.
        orders: Schedules of the steps: the plan's for all.
    """

    program: Program
    orders = FixedSchedule()

    def position(self, step: int) -> Position:
        """Return the part of the position after `step` steps that is known before any call has come: the step."""
        return Position(step)

    def source(self, parts: LoopParts) -> "QueuedCallSource":
        """Return the calls to the worker that `parts` belong to."""
        return QueuedCallSource(self.program, parts)


class QueuedCallSource(CallSource):
    """The calls to one worker, taken from its queue. Their replies are put into other queues."""

    def __init__(self, program: Program, parts: LoopParts) -> None:
        """Begin at step `parts.start`.

        Args:
            program: Operations of each worker.
            parts: Parts of the worker's loop.
        """
        self._program, self._parts = program, parts
        self._sequence = CallSequence(
            program, parts.worker, parts.executor, Position(parts.start), parts.keep, parts.save
        )
        self._evaluation = [queue.name for queue in program.outbound(parts.worker) if queue.per is Per.EVALUATED]
        self.begin_at(Position(parts.start))  # no reply has arrived: snapshots wait for the first one

    @property
    def over(self) -> bool:
        """True if the script has said that the run is over."""
        return self._sequence.over

    @property
    def doing(self) -> str:
        """The state between two calls, in words."""
        return f"waits for call {self._sequence.position.calls} of the script"

    @property
    def done(self) -> int:
        """The number of calls that have been carried out."""
        return self._sequence.position.calls

    def step(self, instruction: Instruction | None) -> int | None:
        """Return the number of training steps before the open or next call; None if all calls are over."""
        return None if self._sequence.over else self._sequence.position.step

    def begin_at(self, position: Position) -> None:
        """Continue from `position`, whose checkpoint has been restored."""
        sequence = self._sequence
        sequence.begin_at(position)
        self._parts.progress.begins_at(position, {queue.per: position.of(queue.per) for queue in sequence.replies})

    def around(self, inbound: Inbound) -> Inbound:
        """Return `inbound` with a look at the script's next call, which takes a while, whenever it has no message."""
        sequence = self._sequence
        return LookingAhead(inbound, sequence, lambda: self._parts.inbound(sequence.calls).take(0))

    def evaluated(self, stage: int, output: Tree) -> None:
        """Note that `stage` has run a microbatch of the open call forward, with this output."""
        self._sequence.evaluated(stage, output)

    def next(self, timeout: float) -> Iterator[Instruction] | None:
        """Return the instructions of the next call; none if the open call was only to be answered, which is done then.

        Returns None if no call has come within about `timeout` seconds, or all are over.
        """
        if self._sequence.open is not None:
            self._reply()
            return iter(())
        return None if self._sequence.over else self._taken(timeout)

    def note_answered(self) -> None:
        """Note which replies have arrived at the script, as far as the queues know now.

        All replies from before the checkpoint that this worker has begun at have arrived.
        """
        sequence = self._sequence
        for queue in sequence.replies:
            if (outbound := self._parts.opened.get(queue.name)) is not None:
                depth, per = outbound.depth(), queue.per
                arrived = sequence.position.of(per) - depth.ready - depth.in_flight
                self._parts.progress.arrived(per, max(sequence.start.of(per), arrived))

    def lacks_room(self, now: float) -> None:
        """Note at `now`, in seconds since the epoch, that the reply to the open call finds no room."""
        number = self._sequence.position.calls
        if (queue := self._sequence.answer) is not None:
            said = f"the script to take its replies: there is no room for the one to call {number}"
            self._parts.progress.lacks_room_for(CallWait(said, queue.name, number, f"call {number}"), now)

    def _reply(self) -> None:
        sequence, parts = self._sequence, self._parts
        reply, queue = sequence.reply(), sequence.answer
        if queue is not None:
            parts.put_reply(queue.name, sequence.position.of(queue.per), reply)
            parts.progress.replied()
        trained = sequence.open is not None and sequence.open.kind is CallKind.TRAIN
        sequence.close()
        if not trained:  # the end of a training step has just done so
            parts.pump(0)

    def _taken(self, timeout: float) -> Iterator[Instruction] | None:
        sequence, parts = self._sequence, self._parts
        if parts.progress.snapshots:  # which are reported once the script has the replies before them
            self.note_answered()
        message = sequence.take_next()
        if message is None:
            number = sequence.position.calls
            call = CallWait(f"call {number} of the script", sequence.calls, number, f"call {number}")
            parts.progress.waiting_for_call(call, parts.now())
            message = parts.inbound(sequence.calls).take(timeout)
        if message is None:
            return None
        instructions = sequence.begin(message)
        trains = sequence.open is not None and sequence.open.kind is CallKind.TRAIN
        parts.progress.called_to(sequence.position.after(CallKind.TRAIN) if trains else None, parts.now())
        for batch in sequence.take_settled():
            for name in self._evaluation:
                parts.outbound(name).empty(batch)
        return instructions


class LookingAhead:
    """Consumer's end of a queue that looks at the script's next call before it waits for a message."""

    def __init__(self, inbound: Inbound, sequence: CallSequence, next_call: Callable[[], Message | None]) -> None:
        """Wrap `inbound`; `next_call` takes a call from the script's queue, if one is there."""
        self.queue = inbound.queue
        self.rewind = inbound.rewind
        self.intake = inbound.intake
        self._inbound = inbound
        self._sequence = sequence
        self._next_call = next_call

    def take(self, timeout: float) -> Message | None:
        """Return the next message in order, or None after `timeout` seconds, as `Inbound.take`."""
        if not self._sequence.looks_ahead:
            return self._inbound.take(timeout)
        message = self._inbound.take(0)
        if message is not None:
            return message
        if (call := self._next_call()) is not None:
            self._sequence.look_at(call)
        return self._inbound.take(timeout)
