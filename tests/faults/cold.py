"""Kills in runs that a user starts: each trial as a value, drawn once for all time, and as the name that repeats it.

tcp/31      the trial number 31 over tcp; what it kills, and when, follows from this name alone
"""

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

TRANSPORTS = ("ipc", "tcp", "redis")
EACH = 50  # trials over each transport
WORKERS = ("worker-0", "worker-1")
BROKER, TEMPLATE = "broker", "template"
ALL = (*WORKERS, BROKER, TEMPLATE)  # and spare workers: all processes but `train` itself
FIRST_SECONDS = 2.5  # of the run, from the moment at which all workers have joined


class Moment(StrEnum):
    """When processes are killed."""

    START = "while it starts"
    FIRST = f"in its first {FIRST_SECONDS:g} s"
    LATER = "later"


DELAYS = {Moment.START: (0.0, 1.0), Moment.FIRST: (0.0, FIRST_SECONDS), Moment.LATER: (FIRST_SECONDS, 4.0)}


@dataclass(frozen=True, slots=True)
class ColdTrial:
    """One run, and what is killed in it, all at once: `targets`, `delay` seconds after the run's folder is there
    (`Moment.START`) or after all workers have joined. `busy`: another trial, and a process that only computes, run
    beside it."""

    transport: str
    number: int
    targets: tuple[str, ...]
    moment: Moment
    delay: float
    spares: int
    busy: bool

    def __str__(self) -> str:
        return f"{self.transport}/{self.number}"

    def words(self) -> str:
        """Events in it."""
        killed = "all processes" if self.targets == ALL else " and ".join(self.targets)
        where = f"{'busy' if self.busy else 'quiet'} machine, {self.spares} spare workers"
        return f"{self}: {killed} killed {self.moment} ({self.delay:.2f} s), {where}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The trial of this name."""
        transport, number = text.split("/")
        return cls._drawn(transport, int(number))

    @classmethod
    def _drawn(cls, transport: str, number: int) -> Self:
        chance = random.Random(f"{transport}/{number}")
        moment = chance.choices(list(Moment), weights=(1, 2, 2))[0]
        delay = chance.uniform(*DELAYS[moment])
        kinds = ((chance.choice(WORKERS),), WORKERS, (BROKER,), (TEMPLATE,), ALL)
        targets = chance.choices(kinds, weights=(10, 4, 3, 2, 2))[0]
        return cls(transport, number, targets, moment, delay, int(chance.random() < 1 / 3), number % 2 == 1)


def all_cold_trials() -> list[ColdTrial]:
    """Every trial. Any beginning is a fair sample: the transports take turns, and quiet trials with busy ones."""
    return [ColdTrial.parse(f"{transport}/{number}") for number in range(EACH) for transport in TRANSPORTS]
