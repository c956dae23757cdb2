"""Turns what the compute loop leaves in its `Progress` into reports for the broker."""

from collections import deque
from time import time

from stageline.broker.control.protocol import WAITS, Event, Report, StepRecord, Wait
from stageline.broker.ledger.ledger import MicrobatchState
from stageline.broker.queues.base import Trouble
from stageline.pipeline.schedule import Kind
from stageline.workers.runtime.progress import Done, Progress

AGAIN = 1.0  # seconds without confirmation after which finished steps and snapshots are said again
FULLEST = 2000  # finished steps in one report at most, so that a broker that comes back is not swamped


class Reporter:
    """What has to arrive, finished steps and snapshots, is said once, and again until it is confirmed; only then comes
    what followed it. So a confirmed report means that all before it were."""

    def __init__(self, progress: Progress, incarnation: int, steps: int) -> None:
        self._progress = progress
        self._incarnation = incarnation
        self._steps = steps
        self._number = 0
        self._records: list[StepRecord] = []  # said, not confirmed
        self._snapshots: list[tuple[int, int]] = []  # likewise
        self._again: deque[StepRecord] = deque()  # what may have been said to a former broker, after the news
        self._said = float("-inf")
        self._busy, self._at = progress.busy, time()

    def report(self, now: float) -> Report:
        """The news. `now` is monotonic, in seconds."""
        if (self._records or self._snapshots) and now - self._said < AGAIN:
            return self._report(now, 0, [], [])
        while self._progress.steps and len(self._records) < FULLEST:
            self._records.append(self._progress.steps.popleft())
        while self._again and not self._progress.steps and len(self._records) < FULLEST:
            self._records.append(self._again.popleft())
        while self._progress.snapshots:
            self._snapshots.append(self._progress.snapshots.popleft())
        self._number += 1
        self._said = now
        return self._report(now, self._number, list(self._records), list(self._snapshots))

    def confirmed(self, number: int) -> None:
        """The broker has stored the report of this number."""
        if number == self._number:
            self._records.clear()
            self._snapshots.clear()

    def begin_anew(self, incarnation: int) -> None:
        """There may be another broker, whose records are old, or lost: says all that it must know of this worker."""
        self._incarnation = incarnation
        self._again = deque(self._progress.records(self._steps))
        self._snapshots = sorted({*self._snapshots, *self._progress.written})
        self._said = float("-inf")

    def confirmed_all(self) -> None:
        """The broker has stored every report so far."""
        self.confirmed(self._number)

    @property
    def all_confirmed(self) -> bool:
        """Whether nothing is left to say."""
        return not (self._records or self._again or self._snapshots or self._progress.steps or self._progress.snapshots)

    def _report(self, now: float, number: int, records: list[StepRecord], snapshots: list[tuple[int, int]]) -> Report:
        progress = self._progress
        depths, progress.depths_wanted = progress.depths, True
        trouble = progress.trouble()
        return Report(
            incarnation=self._incarnation,
            number=number,
            actions=progress.actions,
            now=self._doing(trouble),
            since=progress.since,
            idle=self._idle(),
            steps=records,
            events=self._events(),
            retained_bytes=sum(depth.bytes for depth in depths.values()),
            queues={
                name: [depth.ready, depth.in_flight, depth.retained, depth.bytes, depth.oldest]
                for name, depth in depths.items()
            },
            metrics=dict(progress.metrics),
            training_steps=self._steps,
            snapshots=snapshots,
            complete=progress.complete,
            waits=self._waits(),
            layer=progress.layer,
            trouble=trouble.reason if trouble else "",
            troubled=max(0.0, now - trouble.since) if trouble else 0.0,
        )

    def _waits(self) -> list[Wait]:
        progress, full = self._progress, self._progress.full
        lacking = progress.lacking if progress.waits or full is not None else None
        if lacking is None:
            return []
        action, step = str(lacking.instruction.action), lacking.instruction.step
        since = progress.since if full is None else full
        return [Wait(str(lacking.key), lacking.number, action, step, since, room=full is not None)]

    def _doing(self, trouble: Trouble | None) -> str:
        """What the compute loop does, in words."""
        progress, instruction = self._progress, self._progress.instruction
        if progress.over:
            return f"{WAITS} for the others to finish"
        if trouble is not None and (progress.waits or progress.full is not None):
            return f"{WAITS} for the server of its queues: {trouble.reason}"
        if instruction is None:
            return f"{WAITS} for the other workers"
        if progress.full is not None:
            return f"{WAITS} for room in {instruction.gives} to put what {instruction} gives"
        if not progress.waits:
            return str(instruction)
        return f"{WAITS} for {' and '.join(map(str, instruction.takes))} to run {instruction}"

    def _idle(self) -> float:
        now, progress = time(), self._progress
        full = progress.full
        until = now if full is None else full
        computing = 0.0 if progress.waits else max(0.0, until - max(progress.since, self._at))
        busy = progress.busy - self._busy + computing
        idle = 1 - busy / max(now - self._at, 1e-9)
        self._busy, self._at = progress.busy, now
        return min(1.0, max(0.0, idle))

    def _events(self) -> list[Event]:
        """The states of the open steps' microbatches: those that are done with an action, and the one under way."""
        progress = self._progress
        done = [event for stage in list(progress.open.values()) for each in list(stage) for event in _entered(each)]
        instruction = progress.instruction
        if instruction is None or progress.waits or instruction.action.kind is Kind.UPDATE:
            return done
        begun = MicrobatchState.FORWARD if instruction.action.kind is Kind.FORWARD else MicrobatchState.BACKWARD
        action = instruction.action
        return [*done, Event(action.stage, instruction.step, action.microbatch, begun, progress.since)]


def _entered(done: Done) -> list[Event]:
    action, step = done.instruction.action, done.instruction.step
    states = {
        Kind.FORWARD: (MicrobatchState.FORWARD, MicrobatchState.STASHED),
        Kind.BACKWARD: (MicrobatchState.BACKWARD, MicrobatchState.DONE),
    }
    times = (done.start, done.end)
    entered = zip(states.get(action.kind, ()), times, strict=False)
    return [Event(action.stage, step, action.microbatch, state, at) for state, at in entered]
