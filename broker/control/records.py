"""Records that control messages contain: of steps, evaluations, waits, snapshots, and of the run's size and order.

The broker and workers keep some of them, too.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

LONGEST_NAME = 1_000  # characters of a name, an address, or of what a worker does

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]  # stays exact in JSON and in a store
RunId = Annotated[str, msgspec.Meta(pattern=r"^\w[\w.-]*\Z", max_length=200)]  # a folder, and a part of Redis keys
Name = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]


class _ControlRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    """The base of all records; the field "is" of an encoded record names its type."""


class ScheduleOrder(_ControlRecord, frozen=True, tag="order"):
    """An order to run the steps from `step` on, until the next order, by the schedule `name`.

    Attributes:
        step: The first step of the order.
        name: The schedule's name.
        window: The schedule's window, one number for each stage; None if the schedule has none.
    """

    step: Count
    name: Name
    window: tuple[Count, ...] | None = None


class WorkerRecord(_ControlRecord, frozen=True, tag="memory"):
    """A worker's own record of its run, in case the broker has lost its records.

    Attributes:
        run: The run's id.
        index: The worker's index.
        complete: The newest checkpoint announced to the worker.
        step: The first step that the worker has not finished at all its stages; for the script, the first that it has
            not asked for.
        orders: All orders that the worker knows, in a run that chooses its schedule.
    """

    run: RunId
    index: Count
    complete: Count
    step: Count
    orders: list[ScheduleOrder] = []


class Inspection(_ControlRecord, frozen=True, tag="inspection"):
    """A worker's result of reading its snapshots of `step`.

    Attributes:
        step: The snapshots' step.
        stages: The stages whose snapshots are intact.
        damages: Descriptions of the other snapshots, each with its folder.
    """

    step: Count
    stages: list[Count]
    damages: list[str]


class SampleOrder(_ControlRecord, frozen=True, tag="order"):
    """An order of the samples in batches: the arguments of `pipeline.data.Order`."""

    count: Count
    batch_size: Count
    seed: int
    shuffle: bool
    drop_last: bool = False


class RunLength(_ControlRecord, frozen=True, tag="length"):
    """A run's number of training steps and evaluation batches, known where the data is.

    Attributes:
        training: Steps that the run trains.
        evaluation: Batches in each round of evaluation.
        epoch: Steps of an epoch, where workers need to know; otherwise 0.
        order: The samples of each batch, where workers without data need to know and the data source draws them so.
    """

    training: Count
    evaluation: Count
    epoch: Count = 0
    order: SampleOrder | None = None


class StepRecord(_ControlRecord, frozen=True, tag="step"):
    """A step that a stage has finished.

    Attributes:
        stage: The stage.
        step: The step.
        times: Actions and waits of the stage in the order in which the worker ran them, with their start and end, as
            `ledger/times.py` packs and reads them. Empty if not measured.
        loss: The step's loss on the last stage; None elsewhere and for a step without rows.
        norm: The norm of all gradients, on the last stage, where gradients are clipped.
    """

    stage: Count
    step: Count
    times: bytes
    loss: float | None = None
    norm: float | None = None


class EvaluationRecord(_ControlRecord, frozen=True, tag="evaluation"):
    """A round of evaluation after `step` training steps, with its means over `rows` rows.

    Attributes:
        step: The number of training steps before the round.
        rows: The number of evaluated rows.
        loss: The mean loss, which may be infinite or NaN; None without rows.
        metrics: The means of other metrics, by name; they may be infinite or NaN too.
    """

    step: Count
    rows: Count
    loss: float | None = None
    metrics: dict[Name, float] = {}

    @property
    def values(self) -> dict[str, float | None]:
        """The values by which evaluations may be compared: the metrics, and the loss under "loss"."""
        return {**self.metrics, "loss": self.loss}


class Event(_ControlRecord, frozen=True, tag="event"):
    """A microbatch's entry into a state at a stage, at the time `at` in seconds since the epoch.

    `state` is a `ledger.MicrobatchState`.
    """

    stage: Count
    step: Count
    microbatch: Count
    state: str
    at: float


class Lack(StrEnum):
    """A reason why a process cannot go on."""

    MESSAGE = "message"  # it has not come
    ROOM = "room"  # to keep the message that was computed
    CREDIT = "credit"  # of the consumer, for the message that would be computed


class Wait(_ControlRecord, frozen=True, tag="wait"):
    """A process's wait for message `number` of `queue`, which it needs for an action.

    Attributes:
        queue: The queue's name.
        number: The message's number in the queue.
        action: The action that waits, such as "1F3".
        step: The action's step; for a call, a loss and a reply, the call's number.
        since: The start of the wait, in seconds since the epoch.
        lacks: What is missing: the message itself, or room or credit to put it.
    """

    queue: Name
    number: Count
    action: Name
    step: Count
    since: float
    lacks: Lack = Lack.MESSAGE
