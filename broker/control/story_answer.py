"""Facts of the broker's answer about one microbatch, as its published schema has them.

The broker makes these facts as plain mappings; a test converts what it makes to this class. Times are in seconds since
the epoch.
"""

from msgspec import UNSET, UnsetType

from .answers import AnswerFacts


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
