"""Shows on stderr how a run goes: bars on a terminal, else a line every few seconds."""

import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any

import click

from stageline.broker.control.protocol import WAITS
from stageline.pipeline.exit_code import ExitCode
from stageline.workers.launch.launch import Launch

from .tables import share

Facts = dict[str, Any]
Show = Callable[[Facts], None]

EVERY = 5.0  # seconds between two lines
_INTERRUPTED = (ExitCode.SAVED, ExitCode.INTERRUPTED)  # codes of a run that somebody stopped: saved, not saved
OVER = 3.0  # seconds over which a rate is measured


def display(launch: Launch) -> AbstractContextManager[Show]:
    """A context whose value takes each new status of the broker."""
    if sys.stderr.isatty():
        from .bars import Bars

        return Bars(launch)
    return nullcontext(Lines(launch))


class Lines:
    """`step 120 of 460, loss 0.1234, 3456 samples/s, idle 12 %, 30 %`."""

    def __init__(self, launch: Launch) -> None:
        self._pace = Pace(launch)
        self._said = monotonic()
        self._phase = ""
        self._told = 0  # damages

    def __call__(self, facts: Facts) -> None:
        self._pace.note(facts)
        for damage in facts["damaged"][self._told :]:
            self._say(damage)
        self._told = len(facts["damaged"])
        now = monotonic()
        if (begun := phase(facts, self._pace.steps)) != self._phase:
            self._phase = begun
            self._say(begun)
        elif facts["phase"] == "running" and now - self._said >= EVERY:
            self._said = now
            self._say(f"{progress(facts, self._pace)}, idle {', '.join(share(each) for each in self._pace.idle)}")

    def _say(self, text: str) -> None:
        click.echo(f"stageline: {text}", err=True)


class Pace:
    """What single statuses do not tell: samples a second, and each worker's share of idle time, over a while."""

    def __init__(self, launch: Launch) -> None:
        self._rows = launch.plan.data.batch_size
        self._steps: deque[tuple[float, int]] = deque()
        self.steps = launch.steps
        self.idle = [0.0] * len(launch.plan.workers)

    def note(self, facts: Facts) -> None:
        """Takes in a status."""
        now = monotonic()
        self._steps.append((now, min(facts["finished_floor"], self.steps)))
        while now - self._steps[0][0] > OVER and len(self._steps) > 2:
            self._steps.popleft()
        for worker in facts["workers"]:
            if (idle := worker.get("idle")) is not None:
                self.idle[worker["index"]] += (idle - self.idle[worker["index"]]) * 0.2

    @property
    def rate(self) -> float:
        """Samples a second."""
        (earlier, before), (later, after) = self._steps[0], self._steps[-1]
        return (after - before) * self._rows / (later - earlier) if later > earlier else 0.0


def progress(facts: Facts, pace: Pace) -> str:
    """How far the run is, on one line."""
    last = facts["last_loss"]
    parts = (
        f"step {min(facts['finished_floor'], pace.steps)} of {pace.steps}",
        f"loss {last['loss']:.4g}" if last and last["loss"] is not None else "",
        f"{pace.rate:.4g} samples/s",
    )
    return ", ".join(part for part in parts if part)


def phase(facts: Facts, steps: int) -> str:
    """What the run as a whole is at, of its `steps` training steps."""
    if facts["phase"] in ("waiting", "running") and (held_up := _held_up(facts)):
        return held_up
    if facts["recollecting"]:
        return "the broker's records are lost: asking the workers how far the run is"
    if facts["missing"]:
        return f"waiting for worker {', '.join(map(str, facts['missing']))}"
    if facts["phase"] == "running" and facts["finished_floor"] >= steps:
        return "evaluating"
    if facts["phase"] == "waiting":
        return "waiting for the workers to connect their queues"
    if facts["phase"] == "failed" and facts.get("code") in _INTERRUPTED:
        return "interrupted"
    return str(facts["phase"])


def _held_up(facts: Facts) -> str:
    """Which worker waits for the server of its queues, and why that keeps it; "" if none does."""
    waits = ((row["index"], row["now"]) for row in facts["workers"] if row.get("trouble"))
    return next((f"worker {index} {now}" for index, now in waits if now.startswith(WAITS)), "")


def doing(facts: Facts, stage: int) -> tuple[int, str]:
    """The worker of a stage, and what it does there at the moment."""
    worker = next(worker for worker in facts["workers"] if stage in worker["stages"])
    now = str(worker.get("now", "starts"))
    action = now.partition(" ")[0]
    elsewhere = action[:1].isdigit() and not action.startswith(f"{stage}{action.lstrip('0123456789')[:1]}")
    return worker["index"], "" if elsewhere else now
