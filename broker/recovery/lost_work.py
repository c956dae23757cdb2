"""What was computed and then lost with its worker: earlier attempts on a microbatch, for its history."""

from collections.abc import Iterable

import msgspec

from stageline.broker.ledger.ledger import Ledger, MicrobatchPosition, MicrobatchState
from stageline.broker.membership.member import Member

KEPT_LOSSES = 64  # the newest of a run, one for each stage of a lost worker: they are written with every checkpoint


class LostAttempt(msgspec.Struct, frozen=True):
    """A stage went back to step `start`. Its worker, `name` of its `generation`, had finished the steps before
    `finished`, and `begun` (step, microbatch, state) of those after them, when it was lost at `at` (seconds since the
    epoch)."""

    stage: int
    start: int
    finished: int
    begun: list[tuple[int, int, str]]
    name: str
    generation: int
    at: float
    why: str

    def state(self, position: MicrobatchPosition) -> str | None:
        """How far the worker was with a microbatch of the stage; None if it had not begun, or if its work was kept."""
        if position.step < self.start:
            return None
        if position.step < self.finished:
            return str(MicrobatchState.DONE)
        begun = {(step, microbatch): state for step, microbatch, state in self.begun}
        return begun.get((position.step, position.microbatch))


def lost_attempts(member: Member, ledger: Ledger, start: int, why: str, now: float) -> list[LostAttempt]:
    """`member` is lost, and its stages go back to step `start`; call it while `ledger` still has their progress."""
    at = member.exited[0] if member.exited else now
    return [
        LostAttempt(
            stage, start, ledger.finished[stage], _begun(ledger, stage), member.name, member.generation, at, why
        )
        for stage in member.stages
    ]


def attempts_on(position: MicrobatchPosition, lost: Iterable[LostAttempt]) -> list[dict[str, object]]:
    """Attempts among the `lost` ones on a microbatch at a stage, as JSON's own types."""
    found = ((each, each.state(position)) for each in lost if each.stage == position.stage)
    return [
        {"name": each.name, "generation": each.generation, "state": state, "ended": each.at, "why": each.why}
        for each, state in found
        if state is not None
    ]


def _begun(ledger: Ledger, stage: int) -> list[tuple[int, int, str]]:
    return [(held.position.step, held.position.microbatch, str(held.entry.state)) for held in ledger.unfinished(stage)]
