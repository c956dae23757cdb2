"""Which processes are killed when: each trial of the sweep as a value, and as a text that names it.

redis/4/worker-1@17+worker-2@17      over Redis, 4 stages: both after their 17th action
ipc/2/worker-0@9+worker-0@3          worker 0 after its 9th action, and its replacement after its 3rd
tcp/2/broker@5                       the broker after the 5th message that it received
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from support.fork_server import Kill

STEPS, MICROBATCHES, SNAPSHOT_EVERY = 6, 2, 2
ACTIONS = STEPS * (2 * MICROBATCHES + 1) + MICROBATCHES  # of each worker; the last are an evaluation's
MESSAGES = 24  # received by the broker: those of two steps at least
TRANSPORTS = ("ipc", "tcp", "redis")
STAGES = (2, 4)


@dataclass(frozen=True, slots=True)
class Trial:
    """One run, and the processes that are killed in it."""

    transport: str
    stages: int
    kills: tuple[Kill, ...]

    def __str__(self) -> str:
        return f"{self.transport}/{self.stages}/{'+'.join(f'{name}@{count}' for name, count in self.kills)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        transport, stages, kills = text.split("/")
        places = (kill.split("@") for kill in kills.split("+"))
        return cls(transport, int(stages), tuple((name, int(count)) for name, count in places))


def all_trials() -> list[Trial]:
    """Every trial, in an order in which any beginning is a fair sample."""
    trials = [
        Trial(transport, stages, kills)
        for transport in TRANSPORTS
        for stages in STAGES
        for kills in dict.fromkeys(_kills(stages))
    ]
    random.Random(0).shuffle(trials)
    return trials


def _kills(stages: int) -> Iterator[tuple[Kill, ...]]:
    workers = [f"worker-{stage}" for stage in range(stages)]
    chance = random.Random(stages)
    for action in range(1, ACTIONS + 1):
        yield from (((worker, action),) for worker in workers)
        yield from (((one, action), (other, action)) for one, other in pairwise(workers))
        yield tuple((worker, action) for worker in workers)
        worker = chance.choice(workers)
        yield (worker, action), (worker, chance.randint(1, SNAPSHOT_EVERY * (2 * MICROBATCHES + 1)))
        yield ("broker", chance.randint(1, MESSAGES)), (chance.choice(workers), action)
        yield ("broker", chance.randint(1, MESSAGES)), *((worker, action) for worker in workers)
    yield from ((("broker", message),) for message in range(1, MESSAGES + 1))
