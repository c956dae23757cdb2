"""Facts of the broker's answer to how much time a run lost, which are a part of the published schema of `why`.

Times are in seconds since the epoch, durations in seconds, shares from 0 to 1.
"""

from .answers import AnswerFacts


class SetbackFact(AnswerFacts, frozen=True, kw_only=True):
    """Time that a run lost at once.

    Attributes:
        what: "loss" of workers, restart of the "broker", or "stall": a step in which nothing went on.
        at: When it began.
        step: The step that was to be finished next.
        seconds: Time until the run was back at its pace, without the usual time of the steps of that time.
        waited: Seconds of it until the lost places were back at work; in the rest, steps were repeated.
        workers: The lost workers.
        hop: The stages between which no message came, of a stall.
        text: The setback in words.
    """

    what: str
    at: float
    step: int
    seconds: float
    waited: float
    workers: list[int]
    hop: list[int] | None
    text: str


class SavingFact(AnswerFacts, frozen=True, kw_only=True):
    """Something to do; it would have saved so many seconds, None if that cannot be told."""

    do: str
    seconds: float | None


class RecoveryFacts(AnswerFacts, frozen=True, kw_only=True):
    """Time that a run lost to losses, restarts of its broker and stalls.

    Attributes:
        seconds: The time in all.
        share: Share of the run's time so far.
        count: Number of the setbacks.
        setbacks: The most expensive ones.
        remedies: What to do.
        text: The sum in words.
    """

    seconds: float
    share: float
    count: int
    setbacks: list[SetbackFact]
    remedies: list[SavingFact]
    text: str
