"""What has happened in a run since the last status, each told once: losses, standstills, damages, evaluations."""

from collections.abc import Callable, Iterator
from time import monotonic

from stageline.broker.diagnosis.wait_graph import HARMLESS
from stageline.broker.ledger.evaluations import record_of, told
from stageline.workers.runs.result import Facts
from stageline.workers.script.calls.news import LostWorkers

STALL = 5.0  # seconds without a finished step, and
SLOW = 3  # times as long as a step has taken of late, before it is told what the run waits for


class News:
    """Lines for people. `start`: how a replacement is started. `why` asks the broker what the run waits for."""

    def __init__(self, start: str, why: Callable[[], Facts | None]) -> None:
        self._lost = LostWorkers(start)
        self._stalled = StalledSteps(why)
        self._damages = 0
        self._evaluated: int | None = None  # steps before the newest evaluation that was told; None before a status

    def lines(self, facts: Facts) -> Iterator[str]:
        """Yield what was not told before."""
        new = facts["damaged"][self._damages :]
        self._damages += len(new)
        yield from new
        yield from self._lost.lines(facts)
        yield from self._stalled.lines(facts)
        yield from self._evaluations(facts)

    def _evaluations(self, facts: Facts) -> list[str]:
        """Several, if they follow each other faster than statuses; the last one of those before a run was resumed."""
        told = self._evaluated
        found = facts["evaluations"][-1:] if told is None else [e for e in facts["evaluations"] if e["step"] > told]
        self._evaluated = found[-1]["step"] if found else told or 0
        return [evaluation_told(each, facts["best"]) for each in found]


class StalledSteps:
    """Notices that a run finishes no step, though no loss or fault has been told that explains it."""

    def __init__(self, why: Callable[[], Facts | None]) -> None:
        self._why = why
        self._finished: int | None = None  # steps, as of the last status of a run without a known cause to wait
        self._since = 0.0  # when that became so
        self._asked = 0.0
        self._took = 0.0  # seconds of a step, the last ones above all
        self._told: set[tuple[str, object]] = set()  # causes, with the worker that is to blame

    def lines(self, facts: Facts) -> Iterator[str]:
        """Tell each cause once until a step is finished, and then that the run goes on."""
        now, finished = monotonic(), facts["finished_floor"]
        if facts["phase"] != "running" or facts["recovering"] or _has_fault(facts):
            self._finished = None
            self._told.clear()
        elif finished != self._finished:
            yield from self._moved(finished, now)
        elif now - max(self._since, self._asked) >= max(STALL, SLOW * self._took):
            self._asked = now
            yield from self._cause(now)

    def _moved(self, finished: int, now: float) -> Iterator[str]:
        if self._told:
            yield f"the run goes on, after {now - self._since:.0f} s without a finished step"
        elif self._finished is not None and finished > self._finished:
            self._took += ((now - self._since) / (finished - self._finished) - self._took) / 2
        self._told.clear()
        self._finished, self._since = finished, now

    def _cause(self, now: float) -> Iterator[str]:
        facts = self._why()
        if facts is None or facts["root"] is None or facts["root"]["cause"] in HARMLESS:
            return
        worker = facts["root"]["worker"]
        cause = facts["root"]["cause"], worker and worker["index"]
        if cause not in self._told:
            self._told.add(cause)
            yield f"no step was finished for {now - self._since:.0f} s: {facts['text']}. What to do: {facts['action']}"


def _has_fault(facts: Facts) -> bool:
    return bool(facts.get("fault")) or any(row.get("fault") or row.get("trouble") for row in facts["workers"])


def evaluation_told(found: Facts, best: Facts | None) -> str:
    """`evaluation after step 100: loss 0.1234, accuracy 0.93, the best so far`."""
    text = f"evaluation after step {found['step']}: {told(record_of(found))}"
    return f"{text}, the best so far" if best is not None and best["step"] == found["step"] else text
