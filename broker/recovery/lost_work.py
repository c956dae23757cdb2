"""What was computed and then lost with its worker: the attempts on a microbatch before the one that counts."""

from collections import deque

import msgspec

from stageline.broker.ledger.ledger import Ledger, MicrobatchState, WorkPosition
from stageline.broker.membership.member import Member

REMEMBERED = 64  # losses of a stage, the newest of a run: they are written with every checkpoint


class _LostAttempt(msgspec.Struct, frozen=True):
    """A stage went back to step `start`. Its worker, `name` in its `life`, had finished the steps before `finished`,
    and `begun` (step, microbatch, state) of those after them, when it was gone at `at`, `why`."""

    stage: int
    start: int
    finished: int
    begun: list[tuple[int, int, str]]
    name: str
    life: int
    at: float
    why: str


class LostWork:
    """Of the microbatches of one run. Times are seconds since the epoch."""

    def __init__(self) -> None:
        self._lost: deque[_LostAttempt] = deque(maxlen=REMEMBERED)

    def lose(self, member: Member, ledger: Ledger, start: int, why: str, now: float) -> None:
        """`member` is gone, and its stages go back to step `start`; `ledger` still says how far they are."""
        at = member.exited[0] if member.exited else now
        for stage in member.stages:
            begun = [(held.step, held.microbatch, str(state)) for held, state in ledger.begun_at(stage)]
            done = ledger.finished[stage]
            self._lost.append(_LostAttempt(stage, start, done, begun, member.name, member.life, at, why))

    def on(self, place: WorkPosition) -> list[dict[str, object]]:
        """The attempts on a microbatch at a stage that came to nothing, the oldest first, as JSON's own types."""
        found = ((lost, _state(lost, place)) for lost in self._lost if lost.stage == place.stage)
        return [
            {"name": lost.name, "life": lost.life, "state": state, "ended": lost.at, "why": lost.why}
            for lost, state in found
            if state is not None
        ]

    def facts(self) -> list[object]:
        """What another broker needs in order to `adopt`, as JSON's own types."""
        return msgspec.convert(msgspec.to_builtins(list(self._lost)), list[object])

    def adopt(self, facts: object) -> None:
        """Takes up what a former broker knew."""
        self._lost.extend(msgspec.convert(facts, list[_LostAttempt]))


def _state(lost: _LostAttempt, place: WorkPosition) -> str | None:
    """How far the lost worker was with a microbatch; None if it had not begun, or if what it did has stayed."""
    if place.step < lost.start:
        return None
    if place.step < lost.finished:
        return str(MicrobatchState.DONE)
    begun = {(step, microbatch): state for step, microbatch, state in lost.begun}
    return begun.get((place.step, place.microbatch))
