"""Facts that commands print with --json where no other class has them."""

from typing import Literal

import msgspec

from stageline.workers.runs.metrics import EvaluationMetrics, StepMetrics

Number = float | Literal["nan", "inf", "-inf"]  # a text where JSON has no number


class _Printed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the facts in this file."""


class RemovedRun(_Printed, frozen=True, kw_only=True):
    """A run whose folder, of so many bytes, was deleted."""

    run: str
    folder: str
    bytes: int


class RemovedRuns(_Printed, frozen=True, kw_only=True):
    """The runs that `stageline run rm` has deleted."""

    removed: list[RemovedRun]


class StoppedRun(_Printed, frozen=True, kw_only=True):
    """A run that `stageline run stop` has ended.

    Attributes:
        reason: Why it ended.
        code: Exit code of the run.
        checkpoint: Step of its newest complete checkpoint; None for a run without snapshots.
        finished_floor: Steps that every stage has finished.
    """

    run: str
    reason: str
    code: int
    checkpoint: int | None
    finished_floor: int


class LeftWorker(_Printed, frozen=True, kw_only=True):
    """A worker that `stageline run leave` has had leave its place.

    Attributes:
        worker: Number of the worker.
        changed: False if it was leaving already.
        process: The process that has taken its place by now; None if the place is free.
    """

    run: str
    worker: int
    changed: bool
    process: str | None


class DoctorFinding(_Printed, frozen=True, kw_only=True):
    """Result of one check.

    Attributes:
        what: What was checked.
        health: "good", "note" or "bad".
        found: What was found.
    """

    what: str
    health: str
    found: str


class DoctorFindings(_Printed, frozen=True, kw_only=True):
    """The findings of `stageline doctor`."""

    findings: list[DoctorFinding]


class ErrorText(_Printed, frozen=True, kw_only=True):
    """Explanation of the errors of one code.

    Attributes:
        code: Code, such as "SL101".
        name: Name of the class.
        cause: What went wrong.
        mend: What can be done.
        example: Example of a message.
    """

    code: str
    name: str
    cause: str
    mend: str
    example: str


class ErrorList(_Printed, frozen=True, kw_only=True):
    """Errors as `stageline errors` explains them."""

    errors: list[ErrorText]


class ScheduleName(_Printed, frozen=True, kw_only=True):
    """A schedule, and what it does."""

    name: str
    about: str


class ScheduleList(_Printed, frozen=True, kw_only=True):
    """Schedules that `stageline schedule list` knows."""

    schedules: list[ScheduleName]


class ShownSchedule(_Printed, frozen=True, kw_only=True):
    """A schedule that `stageline schedule show` draws. Times are in the unit of the durations that were given.

    Attributes:
        mode: "sync" or "async".
        placement: Stages of each worker.
        microbatches: Microbatches of a step.
        actions: Actions of each worker in a step, such as "0F3".
        span: Time from the first start to the last end.
        ideal: Time that the busiest worker computes.
        bubble: Time that the busiest worker waits.
        idle: Share of the span that each worker waits.
        stage_peak: Most microbatches that each stage holds.
        worker_peak: Most microbatches that the stages of each worker hold together.
        queue_bound: Most messages put and not yet taken, by queue.
    """

    name: str
    mode: str
    placement: list[list[int]]
    microbatches: int
    actions: list[list[str]]
    span: float
    ideal: float
    bubble: float
    idle: list[float]
    stage_peak: list[int]
    worker_peak: list[int]
    queue_bound: dict[str, int]


class RunMetrics(_Printed, frozen=True, kw_only=True):
    """Measurements of a run, in the order of training."""

    run: str
    lines: list[StepMetrics | EvaluationMetrics]


class EvaluatedModel(_Printed, frozen=True, kw_only=True):
    """Loss and metrics that `stageline eval` has measured.

    Attributes:
        step: Step of the checkpoint; None for the weights that the run ended with.
        ema: True if the averages of the weights were used.
        data: The data, in words.
        rows: Number of rows.
        loss: Mean loss; None for a plan without one.
        metrics: Means of the metrics, by name.
    """

    run: str
    step: int | None
    ema: bool
    data: str
    rows: int
    loss: Number | None
    metrics: dict[str, Number]


class ReplayedAction(_Printed, frozen=True, kw_only=True):
    """An action of a microbatch that ran again.

    Attributes:
        gave: Description of its result.
        same: True if the result has the recorded bits; None if none were recorded.
    """

    action: str
    gave: str
    same: bool | None


class ReplayedMicrobatch(_Printed, frozen=True, kw_only=True):
    """A microbatch that `stageline replay` ran again.

    Attributes:
        stage: Number of the stage or replica.
        snapshot: Step of the snapshot that it began with; None if the stage's state was recorded.
        actions_before: Other actions of the stage that ran before.
        stopped_the_run: Why the microbatch stopped the run; None if it did not.
        raised: What was raised this time; None if nothing was.
        reproduced: True if all that can be compared is as it was in the run.
    """

    run: str
    stage: int
    step: int
    microbatch: int
    snapshot: int | None
    actions_before: int
    outcomes: list[ReplayedAction]
    stopped_the_run: str | None
    raised: str | None
    reproduced: bool


class NewStage(_Printed, frozen=True, kw_only=True):
    """A stage of the new layout, and the snapshots that it is made from.

    Attributes:
        worker: Place of its worker.
        layers: Names of its layers.
        old_stages: Stages of the run that have them.
        snapshots: Paths of their snapshots.
        absent: Those that are not on this machine.
        best_snapshots: Paths of the snapshots of the best evaluation's checkpoint.
        best_absent: Those of them that are not on this machine.
    """

    worker: int
    stage: int
    layers: list[str]
    old_stages: list[int]
    snapshots: list[str]
    absent: list[str]
    best_snapshots: list[str]
    best_absent: list[str]


class CheckpointSplit(_Printed, frozen=True, kw_only=True):
    """A checkpoint in another layout, of `stageline checkpoint split`.

    Attributes:
        step: Step of the checkpoint.
        new_run: Run that goes on from it.
        written: True if the snapshots of the new stages were written.
    """

    run: str
    step: int
    new_run: str
    written: bool
    stages: list[NewStage]


class PlanFault(_Printed, frozen=True, kw_only=True):
    """A fault of a plan.

    Attributes:
        where: File and line, "--set", or a variable of the environment; "" if it has no single place.
        file: File; None for a value from no file.
        line: Line of the file; None if it is not known.
        key: Key of the plan.
        value: Its value, as text.
        message: What is wrong, and the way out.
    """

    where: str
    file: str | None
    line: int | None
    key: str
    value: str
    message: str


class CommandError(_Printed, frozen=True, kw_only=True):
    """Error that any command prints with --json in place of its result.

    Attributes:
        exit_code: Exit code of the command.
        message: Message for the user.
        errors: All faults of a plan; empty for any other error.
    """

    exit_code: int
    message: str
    errors: list[PlanFault]
