"""Calls of a user's script to the workers, and positions in a run that count them.

    script  --- Call 0, 1, 2, ... (one queue for each worker) --->  worker
    script  <-- Loss 0, 1, 2, ... (of training steps) -----------  worker with the last stage
    script  <-- Reply 0, 1, 2, ... (to other calls; one queue from each worker) --  worker

Every worker gets every call, and carries them out in order. A call's batch goes only where it is needed: the inputs to
the owner of stage 0, the targets to the owner of the last stage. A worker cuts it into microbatches itself.

    kind       what the workers do                            what the reply holds
    TRAIN      one training step                              (loss, gradient norm, rates, rows)     (last stage)
    EVALUATE   one batch forward, with loss and metrics       {"rows": 7, "loss": 9.1, ...}: sums   (last stage)
    PREDICT    one batch forward                              a tuple: the microbatches' outputs    (last stage)
    STATE      nothing                                        the weights of the worker's stages
               (with `ema`, these three are of the averages of the weights)
    LOAD       set the weights of their stages                None
    SAVE       write snapshots into the folder `inputs`       None; a stage that could not is lacking there
               on other machines: nothing                     the state of the worker's stages
    STOP       end: save the weights                          None

A batch that was only run forward has changed nothing. Once the script has all replies to it, the call is *settled*: its
content is forgotten, that of its activations too, and a worker that begins again before it computes nothing for it, but
passes on messages without content in their place. So does a worker that was given such a message, though it has read
the call before it was settled: the script has its reply.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec
from torch import Tensor

from stageline.broker.codec.structure import emptied, is_emptied, rest_of
from stageline.pipeline.data import Batch, Microbatch, cut, cut_step, rows, split_batch
from stageline.pipeline.errors import DataError, StagelineError
from stageline.pipeline.program import Instruction, Per, Program, Queue
from stageline.pipeline.tree import Tree, describe, tensors

from .orders import FixedSchedule

UNDER_WAY = 2  # calls that a script may be ahead of the replies that it has; a worker relies on it
LAST_REPLIES = 2.0  # seconds that the replies to a script's last calls may take, once the run is over


class CallKind(StrEnum):
    """The kind of a script's call."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"
    STATE = "state"
    LOAD = "load"
    SAVE = "save"
    STOP = "stop"

    @property
    def takes_batch(self) -> bool:
        """True if a call of this kind brings a batch."""
        return self is CallKind.TRAIN or self.runs_forward_only

    @property
    def runs_forward_only(self) -> bool:
        """True if a call of this kind takes a batch through the stages without training on it."""
        return self in (CallKind.EVALUATE, CallKind.PREDICT)


_KINDS = frozenset(CallKind)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a script.

    Attributes:
        kind: Kind of the call.
        number: Number of the call, from 0; a call that is only submitted has none yet, nor the next two.
        step: Training steps that come before it.
        evaluation: Evaluated batches that come before it.
        inputs: Tree of tensors whose dimension 0 counts the rows of the whole batch; None where the worker has no use
            for it. Of a SAVE, the path of a folder.
        targets: Targets of the same rows; None where the worker has no use for them.
        state: Weights by the unsplit model's names, of a LOAD.
        ema: True if averages stand for weights.
        epoch: Steps of an epoch, of a TRAIN whose script knows it; else 0.
        value: Value of an evaluation just before a TRAIN, which schedulers step by; None if none step by it.
        settled: True if all workers have carried out the call, and the script has their replies.
        reply: Reply of this worker to a settled call.
    """

    kind: CallKind
    number: int = 0
    step: int = 0
    evaluation: int = 0
    inputs: Tree = None
    targets: Tree = None
    state: Mapping[str, Tensor] | None = None
    ema: bool = False
    epoch: int = 0
    value: float | None = None
    settled: bool = False
    reply: Tree = None

    @property
    def position(self) -> "Position":
        """The position before the call."""
        return Position(self.step, self.number, self.evaluation)


class CallRefused(StagelineError):
    """Error that workers cannot carry out a call of a script.

    Mend: Load weights that have the names and shapes of the model that the line was made with.

    Example: the weights to load differ from those of stages 0, 1 in their names: head.weight
    """

    error_code = "SL515"


class Position(msgspec.Struct, frozen=True):
    """A place in a run: the number of training steps, calls, evaluated batches and rounds of evaluation that are done.

    Rounds are counted in a run that no script calls.
    """

    step: int = 0
    calls: int = 0
    evaluations: int = 0
    rounds: int = 0  # of evaluation, in a run that no script calls

    @classmethod
    def of_checkpoint(cls, step: int, calls: int, evaluations: int) -> "Position":
        """Return the position of a checkpoint.

        Args:
            step: Training steps before the checkpoint.
            calls: Calls before it. A checkpoint that was saved or imported knows of no calls: then its steps count as
                calls.
            evaluations: Evaluated batches before it.
        """
        return cls(step, max(calls, step), evaluations)

    def after(self, kind: CallKind) -> "Position":
        """Return the position after one more call, of this `kind`."""
        step = self.step + (kind is CallKind.TRAIN)
        return Position(step, self.calls + 1, self.evaluations + kind.runs_forward_only)

    def of(self, per: Per) -> int:
        """Return the number of the first step, call, reply, evaluated batch or round from here on, as `per` says."""
        match per:
            case Per.CALL:
                return self.calls
            case Per.REPLY:
                return max(0, self.calls - self.step)  # a call to train has none
            case Per.EVALUATED:
                return self.evaluations
            case Per.ROUND:
                return self.rounds
            case _:
                return self.step

    def check_next(self, call: Call) -> None:
        """Raise `CallRefused` if `call` is not the next one at this position."""
        if (call.step, call.number, call.evaluation) != (self.step, self.calls, self.evaluations):
            raise CallRefused(
                f"call {call.number} of the script follows {call.step} training steps and {call.evaluation} evaluated "
                f"batches; this worker has carried out {self.calls} calls, {self.step} steps and {self.evaluations} "
                "evaluated batches: the script has not gone on where the run is"
            )


class RunCalls(Protocol):
    """All calls of a run, from the plan or from a script."""

    @property
    def program(self) -> Program:
        """The operations of each worker in a step, and in an evaluated batch."""

    @property
    def orders(self) -> FixedSchedule:
        """The schedules of the steps."""

    def position(self, step: int) -> Position:
        """Return the position after `step` steps, as far as it is known beforehand."""


def encode_call(call: Call) -> Tree:
    """Return the payload of `call` for a CALL queue."""
    state: Tree = None if call.state is None else {**call.state}
    place = call.number, call.step, call.evaluation
    return (call.kind.value, *place, call.inputs, call.targets, state, call.ema, call.epoch, call.value)


def settled_call(call: Call, reply: Tree) -> Tree:
    """Return the payload that replaces `call` in a CALL queue once the script has all replies to it.

    `reply` is this worker's reply. A reply with tensors is not kept there.
    """
    kept = emptied() if tensors(reply) else reply
    return (call.kind.value, call.number, call.step, call.evaluation, kept)


def decode_call(payload: Tree) -> Call:
    """Return the call that a CALL queue brought. Raises `CallRefused` for another payload."""
    match rest_of(payload) if is_emptied(payload) else payload:
        case (str(kind), int(number), int(step), int(evaluation), reply) if kind in _KINDS:
            return Call(CallKind(kind), number, step, evaluation, settled=True, reply=reply)
        case (
            str(kind),
            int(number),
            int(step),
            int(evaluation),
            inputs,
            targets,
            dict() | None as state,
            bool(ema),
            int(epoch),
            float() | None as value,
        ) if kind in _KINDS and all(isinstance(each, Tensor) for each in (state or {}).values()):
            return Call(CallKind(kind), number, step, evaluation, inputs, targets, state, ema, epoch, value)
        case _:
            raise CallRefused(
                f"a call is (kind, number, step, evaluation, inputs, targets, state, ema, epoch, value); this one is "
                f"{describe(payload)}"
            )


def instructions_of(call: Call, program: Program, worker: int) -> Iterator[Instruction]:
    """Return the instructions that `worker` computes for a call of the script.

    Args:
        call: The call.
        program: Operations of each worker.
        worker: Place of the worker.
    """
    if call.kind is CallKind.TRAIN:
        return program.instructions(worker, range(call.step, call.step + 1))
    if call.kind.runs_forward_only:
        return program.evaluation(worker, range(call.evaluation, call.evaluation + 1))
    return iter(())


def answers(program: Program, kind: CallKind) -> tuple[Queue, ...]:
    """Return the queues that bring the script the results of a call of `kind`.

    A training step brings the last stage's results alone, so that the script does not wait for the backwards and
    updates of other workers. Any other call brings the replies of all workers, first that of the worker with the last
    stage.
    """
    wanted, last = Per.STEP if kind is CallKind.TRAIN else Per.REPLY, program.schedule.owner(program.last)
    found = [queue for queue in program.inbound(program.script) if queue.per is wanted]
    return tuple(sorted(found, key=lambda queue: queue.producer != last))


class CallFeed:
    """A feed of the microbatches of the call that is open, as a `Feed` is of those of a data source."""

    def __init__(self, microbatches: int, accumulate: int = 1) -> None:
        """Begin without an open call.

        Args:
            microbatches: Microbatches of a batch.
            accumulate: Batches of a training step.
        """
        self._count = microbatches
        self._accumulate = accumulate
        self._cut: list[Microbatch] = []
        self._prepared: tuple[int, list[Microbatch]] = -1, []  # with the call's number

    def prepare(self, call: Call) -> None:
        """Cut the batch of a call that is opened later. Raises as `open` does."""
        self._prepared = call.number, cut_call(call, self._count, self._accumulate)

    def open(self, call: Call) -> None:
        """Open a call.

        Raises `DataError` if its batch cannot be cut into microbatches, or rows of inputs and targets differ.
        """
        if self._prepared[0] != call.number:
            self.prepare(call)
        self._cut = self._prepared[1]
        self._prepared = -1, []  # the batch's memory is free once the call is closed

    def close(self) -> None:
        """Forget the open call and its batch."""
        self._cut = []

    def microbatch(self, step: int, microbatch: int) -> Microbatch:
        """Return a microbatch of the open call; `step` is the call's."""
        return self._cut[microbatch]

    held_out_microbatch = microbatch

    def samples(self, step: int, microbatch: int) -> None:
        """Return None: batches of a script come without the numbers of their rows."""

    held_out_samples = samples


def cut_call(call: Call, microbatches: int, accumulate: int = 1) -> list[Microbatch]:
    """Return the microbatches of a call's batch, or of all batches of its step, as far as this worker has them.

    If only one of inputs and targets is sent to this worker, it stands in for the other so that rows and shares can be
    counted; its values are not used. Without rows, microbatches of a PREDICT call count as one each, to be computed.

    Args:
        call: The call. A kind that takes no batch has no microbatches.
        microbatches: Microbatches of a batch.
        accumulate: Batches of a training step.

    Raises:
        DataError: The batch cannot be cut, or rows of inputs and targets differ.
    """
    inputs, targets, count = call.inputs, call.targets, microbatches * accumulate
    if not call.kind.takes_batch:
        return []
    if inputs is None and targets is None:
        return [Microbatch(None, None, 0, 1.0)] * count
    if call.kind is CallKind.PREDICT:
        least = 0 if rows(inputs) else 1  # what the model returns for no rows has a shape, too
        return [Microbatch(each, None, max(rows(each), least), 1.0) for each in split_batch(inputs, count)]
    given: Batch = targets if inputs is None else inputs, inputs if targets is None else targets
    if call.kind is CallKind.TRAIN and accumulate > 1:
        return cut_step(batches_of_step(*given, accumulate), microbatches)
    return cut(*given, count)


def batches_of_step(inputs: Tree, targets: Tree, accumulate: int) -> list[Batch]:
    """Return the batches of a step that has several.

    Args:
        inputs: A tuple or list with the inputs of each batch.
        targets: A tuple or list with the targets of each batch.
        accumulate: Number of batches.

    Raises:
        DataError: There are not so many batches.
    """
    for tree, name in ((inputs, "x"), (targets, "y")):
        if not isinstance(tree, tuple | list) or len(tree) != accumulate:
            size = f" with {len(tree)} entries" if isinstance(tree, tuple | list) else ""
            raise DataError(
                f"a step has accumulate = {accumulate} batches: {name} is a tuple with that of each, and it is of type "
                f"{type(tree).__name__}{size}. Call line.step((x0, x1, ...), (y0, y1, ...))"
            )
    return list(zip(inputs, targets, strict=True))  # type: ignore[arg-type]  # both are sequences
