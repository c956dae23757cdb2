"""What was computed and then lost with its worker: earlier attempts on a microbatch, for its history."""

from collections import deque

import msgspec

from stageline.broker.ledger.ledger import Ledger, MicrobatchPosition, MicrobatchState
from stageline.broker.membership.member import Member

KEPT_LOSSES = 64  # the newest of a run, one for each stage of a lost worker: they are written with every checkpoint


class _LostAttempt(msgspec.Struct, frozen=True):
    """A stage went back to step `start`. Its worker, `name` in its `life`, had finished the steps before `finished`,
    and `begun` (step, microbatch, state) of those after them, when it was lost at `at`, `why`."""

    stage: int
    start: int
    finished: int
    begun: list[tuple[int, int, str]]
    name: str
    life: int
    at: float
    why: str


class LostWork:
    """The lost attempts of one run. Times are seconds since the epoch."""

    def __init__(self) -> None:
        self._lost: deque[_LostAttempt] = deque(maxlen=KEPT_LOSSES)

    def add(self, member: Member, ledger: Ledger, start: int, why: str, now: float) -> None:
        """`member` is lost, and its stages go back to step `start`; call it while `ledger` still has their progress."""
        at = member.exited[0] if member.exited else now
        for stage in member.stages:
            begun = [
                (held.position.step, held.position.microbatch, str(held.entry.state))
                for held in ledger.unfinished(stage)
            ]
            done = ledger.finished[stage]
            self._lost.append(_LostAttempt(stage, start, done, begun, member.name, member.life, at, why))

    def attempts(self, position: MicrobatchPosition) -> list[dict[str, object]]:
        """Lost attempts on a microbatch at a stage, the oldest first, as JSON's own types."""
        found = ((lost, _state(lost, position)) for lost in self._lost if lost.stage == position.stage)
        return [
            {"name": lost.name, "life": lost.life, "state": state, "ended": lost.at, "why": lost.why}
            for lost, state in found
            if state is not None
        ]

    def facts(self) -> list[object]:
        """What is stored for `restore`, as JSON's own types."""
        return msgspec.convert(msgspec.to_builtins(list(self._lost)), list[object])

    def restore(self, facts: object) -> None:
        self._lost.extend(msgspec.convert(facts, list[_LostAttempt]))


def _state(lost: _LostAttempt, position: MicrobatchPosition) -> str | None:
    """How far the lost worker was with a microbatch; None if it had not begun, or if its work was kept."""
    if position.step < lost.start:
        return None
    if position.step < lost.finished:
        return str(MicrobatchState.DONE)
    begun = {(step, microbatch): state for step, microbatch, state in lost.begun}
    return begun.get((position.step, position.microbatch))
