"""Facts of the broker's answers about the past: of a microbatch, and the time that a run lost, a part of `why`.

The broker makes these facts as plain mappings; a test converts what it makes to these classes. Times are in
seconds since the epoch, durations in seconds, shares from 0 to 1.
"""

from msgspec import UNSET, UnsetType

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


class HolderFacts(AnswerFacts, frozen=True, kw_only=True):
    """A worker that has a microbatch; `generation` is None if another has its place now."""

    name: str
    generation: int | None
    incarnation: int


class AttemptFacts(AnswerFacts, frozen=True, kw_only=True):
    """An attempt that was lost: by which worker, how far it came, when and why it ended."""

    name: str
    generation: int
    state: str
    ended: float
    why: str


class ActionFacts(AnswerFacts, frozen=True, kw_only=True):
    """An action on a microbatch, such as "1F5", with its start and its end."""

    action: str
    start: float
    end: float


class StoryStageFacts(AnswerFacts, frozen=True, kw_only=True):
    """A microbatch at one stage.

    Attributes:
        label: Name of the stage's replica.
        worker: Place of the stage's worker.
        attempts: Attempts that were lost.
        state: State of the one that counts.
        since: Time at which it entered that state.
        holder: Worker that has it.
    """

    stage: int
    worker: int
    attempts: list[AttemptFacts]
    state: str
    since: float | None
    holder: HolderFacts | None
    actions: list[ActionFacts]
    label: str | UnsetType = UNSET


class StoryFacts(AnswerFacts, frozen=True, kw_only=True):
    """History of a microbatch, stage by stage."""

    run: str
    step: int
    microbatch: int
    stages: list[StoryStageFacts]


class BubbleFact(AnswerFacts, frozen=True, kw_only=True):
    """Share of a step in which the busiest worker does not compute, as measured and as planned for equal stages."""

    measured: float | None
    planned: float | None
