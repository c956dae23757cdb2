"""Records that control messages contain: of steps, evaluations, waits, snapshots, and of what a run is.

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
    """Base of all; the field "is" of an encoded record tells which."""


class ScheduleOrder(_ControlRecord, frozen=True, tag="order"):
    """From `step` on, until the next order, steps run by the schedule `name`, with `window` if it has one."""

    step: Count
    name: Name
    window: tuple[Count, ...] | None = None


class WorkerRecord(_ControlRecord, frozen=True, tag="memory"):
    """A worker's own record of its run, in case the broker has lost its records: the `run`, its `index`, the newest
    checkpoint announced to it as `complete`, and the first `step` that it has not finished at all its stages; for the
    script, the first that it has not asked for. `orders`: all that it knows, of a run that chooses its schedule."""

    run: RunId
    index: Count
    complete: Count
    step: Count
    orders: list[ScheduleOrder] = []


class Inspection(_ControlRecord, frozen=True, tag="inspection"):
    """Result of reading the worker's snapshots of `step`: those of `stages` are intact; `damages` describes the others,
    each with its folder."""

    step: Count
    stages: list[Count]
    damages: list[str]


class SampleOrder(_ControlRecord, frozen=True, tag="order"):
    """Order of the samples in batches: the arguments of `pipeline.data.Order`."""

    count: Count
    batch_size: Count
    seed: int
    shuffle: bool


class RunLength(_ControlRecord, frozen=True, tag="length"):
    """Number of steps that a run trains, and of batches in each of its rounds of evaluation: known where the data is.
    `epoch`: how many steps an epoch has, where workers need to know; else 0. `order`: which samples each batch has,
    where workers without data need to know, and the data source draws them so."""

    training: Count
    evaluation: Count
    epoch: Count = 0
    order: SampleOrder | None = None


class StepRecord(_ControlRecord, frozen=True, tag="step"):
    """A step that a stage has finished. `times` holds each action of that stage in the order in which the worker ran
    them: its kind, its microbatch, its start and its end (`ledger/ledger.py` packs and reads them).

    Empty `times`: not measured. `loss` is the step's on the last stage, None elsewhere and for a step without rows.
    `norm`, also on the last stage, is that of all gradients, where they are clipped.
    """

    stage: Count
    step: Count
    times: bytes
    loss: float | None = None
    norm: float | None = None


class EvaluationRecord(_ControlRecord, frozen=True, tag="evaluation"):
    """Result of the round of evaluation after `step` training steps: means over `rows` rows, which may be infinite or
    no number. `loss` is None without rows; `metrics` are by name."""

    step: Count
    rows: Count
    loss: float | None = None
    metrics: dict[Name, float] = {}

    @property
    def values(self) -> dict[str, float | None]:
        """Values by which evaluations may be compared."""
        return {**self.metrics, "loss": self.loss}


class Event(_ControlRecord, frozen=True, tag="event"):
    """A microbatch entered a state at a stage (`ledger.MicrobatchState`), `at` seconds since the epoch."""

    stage: Count
    step: Count
    microbatch: Count
    state: str
    at: float


class Lack(StrEnum):
    """Reason why a process cannot go on."""

    MESSAGE = "message"  # it has not come
    ROOM = "room"  # to keep the message that was computed
    CREDIT = "credit"  # of the consumer, for the message that would be computed


class Wait(_ControlRecord, frozen=True, tag="wait"):
    """A process lacks message `number` of `queue` for `action` ("1F3") of `step`, `since` then: it has not come, or
    there is no room or no credit to put it. Of a call, a loss and a reply, `step` is the call's number.
    """

    queue: Name
    number: Count
    action: Name
    step: Count
    since: float
    lacks: Lack = Lack.MESSAGE
