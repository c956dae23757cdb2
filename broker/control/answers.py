"""Facts of the broker's answers about queues and microbatches, as their published schemas have them.

A command prints such facts with `Envelope` around them. Times are in seconds since the epoch, ages in seconds, sizes in
bytes, paces in messages a second. None stands for what no worker has reported.
"""

from typing import Annotated

import msgspec

from .pauses import PauseFacts
from .queue_counts import ResendReason

LONGEST_PLACE = 300  # characters of a place in the code
MOST_FRAMES = 100  # functions of a thread
MOST_THREADS = 64


class AnswerFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all facts."""


class Bare(AnswerFacts, frozen=True, kw_only=True):
    """Beside the facts of a command that asks no broker: the name of their schema, with its version."""

    schema: str


class Envelope(AnswerFacts, frozen=True, kw_only=True):
    """The origin of an answer, beside its facts.

    Attributes:
        schema: Name of the answer's schema, with its version.
        source: "broker", or "records" if no broker answered.
        as_of: Time at which the answer was true.
        folder: Folder of the run, of an answer from records.
        state: State of the run according to its records.
    """

    schema: str
    source: str
    as_of: float
    folder: str | msgspec.UnsetType = msgspec.UNSET
    state: str | msgspec.UnsetType = msgspec.UNSET


class QueueRow(AnswerFacts, frozen=True, kw_only=True):
    """A queue, with the counts of both its ends. Positions count messages over the whole run.

    Attributes:
        queue: Name of the queue.
        producer: Stage, worker or script that puts messages.
        consumer: Stage, worker or script that takes them.
        put: Position up to which messages were put.
        taken: Position up to which messages were taken.
        ready: Messages put and not yet sent.
        in_flight: Messages sent, and not yet known to have arrived.
        retained: Messages kept for a replacement, the ones above included.
        bytes: Bytes of the retained messages.
        put_pace: Messages put in a second, lately.
        taken_pace: Messages taken in a second, lately.
        credit_used: Messages put that the consumer has granted and not yet taken.
        credit_limit: Messages that the consumer lets the producer be ahead; None without a limit.
        resent: Messages that the producer has sent again.
        oldest: Age of the oldest retained message.
    """

    queue: str
    producer: str
    consumer: str
    put: int | None = None
    taken: int | None = None
    ready: int | None = None
    in_flight: int | None = None
    retained: int | None = None
    bytes: int | None = None
    put_pace: float | None = None
    taken_pace: float | None = None
    credit_used: int | None = None
    credit_limit: int | None = None
    resent: int | None = None
    oldest: float | None = None


class QueuesFacts(AnswerFacts, frozen=True, kw_only=True):
    """Queues of a run.

    Attributes:
        heard: Age of the oldest of the reports that tell of them.
        paused: The pause of the run; None if it goes on.
    """

    run: str
    heard: float | None
    queues: list[QueueRow]
    paused: PauseFacts | None = None


class MessagePlace(AnswerFacts, frozen=True, kw_only=True):
    """A message by its number, and what it is of: "step", "call", "reply", "evaluated batch" or "round"."""

    number: int
    unit: str
    index: int
    microbatch: int


class ResendFact(AnswerFacts, frozen=True, kw_only=True):
    """Messages from `first` up to before `end` that were sent again, for `reason`, `ago` seconds ago."""

    first: int
    end: int
    reason: ResendReason
    ago: float


class ProducerFacts(AnswerFacts, frozen=True, kw_only=True):
    """The end that puts messages, as its process reported it.

    Attributes:
        worker: Place of the process.
        name: Name of the process, with its number and host; "" if none has the place.
        counted: Age of the counts; None if the process has not reported the queue.
        arrived: Position up to which the consumer has said that messages arrived.
        granted: Position up to which the consumer lets messages be sent.
        put_bytes: Bytes of all messages that this process has put.
        resends: The newest messages that were sent again.
    """

    worker: int
    name: str
    counted: float | None = None
    put: MessagePlace | None = None
    sent: int | None = None
    arrived: int | None = None
    granted: int | None = None
    first: MessagePlace | None = None
    ready: int | None = None
    in_flight: int | None = None
    retained: int | None = None
    bytes: int | None = None
    put_bytes: int | None = None
    oldest: float | None = None
    pace: float | None = None
    resent: int | None = None
    resends: list[ResendFact] = []


class ConsumerFacts(AnswerFacts, frozen=True, kw_only=True):
    """The end that takes messages, as its process reported it.

    Attributes:
        worker: Place of the process.
        name: Name of the process, with its number and host; "" if none has the place.
        counted: Age of the counts; None if the process has not reported the queue.
        received: Position up to which messages have arrived.
        taken: The message that is taken next.
        granted: Position up to which this end lets messages be sent.
        waiting: Messages that have arrived and were not taken.
        duplicates: Messages that came although they had arrived before.
        damaged: Messages that came damaged.
        lost: Times that a message was requested again.
    """

    worker: int
    name: str
    counted: float | None = None
    received: int | None = None
    taken: MessagePlace | None = None
    granted: int | None = None
    waiting: int | None = None
    pace: float | None = None
    duplicates: int | None = None
    damaged: int | None = None
    lost: int | None = None


class QueueFacts(AnswerFacts, frozen=True, kw_only=True):
    """Both ends of one queue, and its row in the list of queues.

    Attributes:
        unit: What messages are of: "step", "call", "reply", "evaluated batch" or "round".
        count: Messages of a unit.
        window: Messages that the consumer lets the producer send ahead; None if the schedule decides.
        codec: Name of the codec that encodes the tensors.
    """

    run: str
    row: QueueRow
    unit: str
    count: int
    window: int | None
    codec: str
    producer: ProducerFacts
    consumer: ConsumerFacts


class MicrobatchRow(AnswerFacts, frozen=True, kw_only=True):
    """A microbatch at a stage.

    Attributes:
        stage: Label of the stage, or of its replica.
        worker: Place of the stage's worker.
        state: State there.
        since: When it entered that state; None if that was not reported.
        holder: Name of the process that has it; None before one has it.
    """

    step: int
    microbatch: int
    stage: str
    worker: int
    state: str
    since: float | None
    holder: str | None


class MicrobatchesFacts(AnswerFacts, frozen=True, kw_only=True):
    """Microbatches of the steps that some stage has not finished.

    Attributes:
        state: State that was asked for; None for all that are begun and not done.
        states: Number of microbatches, at all stages, by state.
        microbatches: Those in that state, by step, microbatch and stage, the first `MOST_ROWS` of them.
        left_out: Number of the others.
    """

    run: str
    state: str | None
    states: dict[str, int]
    microbatches: list[MicrobatchRow]
    left_out: int = 0


class TensorValues(AnswerFacts, frozen=True, kw_only=True):
    """Summary of a tensor's numbers.

    Attributes:
        least: The least of its finite numbers; None without any.
        mean: Their mean.
        greatest: The greatest of them.
        nan: Numbers that are not a number.
        infinite: Numbers that are infinite.
    """

    least: float | None
    mean: float | None
    greatest: float | None
    nan: int
    infinite: int


class TensorLook(AnswerFacts, frozen=True, kw_only=True):
    """A tensor of a message.

    Attributes:
        path: Its place in the message: "" for the only one, "[0]", "['mask']".
        dtype: Its type, such as "float32".
        shape: Size of each dimension.
        bytes: Bytes that travel.
        values: Summary of its numbers; None if they were not looked at, or may not be told.
    """

    path: str
    dtype: str
    shape: list[int]
    bytes: int
    values: TensorValues | None = None


class MessageLook(AnswerFacts, frozen=True, kw_only=True):
    """A retained message.

    Attributes:
        place: Its number, and what it is of.
        incarnation: The worker that has put it.
        bytes: Bytes of all its frames.
        on_disk: True if it was moved to the disk.
        tensors: Its tensors, in order.
        damage: Why it cannot be read; "" if it can.
    """

    place: MessagePlace
    incarnation: int
    bytes: int
    on_disk: bool
    tensors: list[TensorLook]
    damage: str = ""


class StackFrame(AnswerFacts, frozen=True, kw_only=True):
    """A function that a thread is in, and the line that it has come to; the text is "" if code is lacking or secret."""

    file: Annotated[str, msgspec.Meta(max_length=LONGEST_PLACE)]
    line: int
    function: Annotated[str, msgspec.Meta(max_length=LONGEST_PLACE)]
    text: Annotated[str, msgspec.Meta(max_length=LONGEST_PLACE)]


class ThreadStack(AnswerFacts, frozen=True, kw_only=True):
    """The functions that a thread of a worker is in.

    Attributes:
        thread: Name of the thread; "main" computes.
        left_out: Outermost functions that are not listed, since the stack is deep.
        frames: Functions, the innermost last.
    """

    thread: Annotated[str, msgspec.Meta(max_length=LONGEST_PLACE)]
    left_out: int
    frames: Annotated[list[StackFrame], msgspec.Meta(max_length=MOST_FRAMES)]


class WorkerStacks(AnswerFacts, frozen=True, kw_only=True):
    """The threads of one worker.

    Attributes:
        worker: Place of the worker.
        name: Name of its process; "" if the place has none now.
        missing: Why no threads are known; "" if they are.
        threads: Its threads, the main one first.
    """

    worker: int
    name: str
    missing: str
    threads: list[ThreadStack]


class StackFacts(AnswerFacts, frozen=True, kw_only=True):
    """The workers whose stacks were asked for."""

    run: str
    workers: list[WorkerStacks]


class ExportFacts(AnswerFacts, frozen=True, kw_only=True):
    """Messages that were written into a file of so many bytes, by their numbers."""

    run: str
    queue: str
    file: str
    messages: list[int]
    bytes: int


class TraceFacts(AnswerFacts, frozen=True, kw_only=True):
    """A trace that was written into a file of so many bytes.

    Attributes:
        steps: First and last step of the trace.
        slices: Number of actions and waits in it.
    """

    run: str
    file: str
    steps: list[int]
    slices: int
    bytes: int


class PeekFacts(AnswerFacts, frozen=True, kw_only=True):
    """Messages that the producer of a queue retains.

    Attributes:
        first: Number of the oldest retained message.
        end: Number of the next message that will be put.
        withheld: Why no numbers are told; "" if they are.
        messages: The messages that were asked for, as far as they are retained.
    """

    run: str
    queue: str
    worker: int
    first: int
    end: int
    withheld: str
    messages: list[MessageLook]
