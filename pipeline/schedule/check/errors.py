"""What makes a schedule unsound."""


class UnsoundSchedule(Exception):
    """A schedule that no line of workers can run: the text names the schedule, the worker and the action."""


class Incomplete(UnsoundSchedule):
    """An action is missing, or there more than once, or not one of that worker's."""


class Disordered(UnsoundSchedule):
    """A worker's list has an action before one that it builds on."""


class Deadlock(UnsoundSchedule):
    """Workers wait for each other for ever: the text says who waits for what."""
