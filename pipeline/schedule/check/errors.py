"""The errors of an unsound schedule."""

from stageline.pipeline.errors import StagelineError


class UnsoundSchedule(StagelineError):
    """No workers can run this schedule; the text names the schedule, the worker and the action."""


class Incomplete(UnsoundSchedule):
    """An action is missing, repeated, or another worker's."""


class Disordered(UnsoundSchedule):
    """A worker's list has an action before one that it builds on."""


class Deadlock(UnsoundSchedule):
    """Workers wait for each other for ever; the text names what each of them waits for."""
