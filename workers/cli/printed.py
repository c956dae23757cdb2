"""What commands print with --json where no other class says it."""

import msgspec


class _Printed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all."""


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
    """DoctorFinding of a check.

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
