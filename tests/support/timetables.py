"""Planned and measured timetables to draw."""

from random import Random

from stageline.pipeline.program import Timed, check_schedule
from stageline.pipeline.schedule import make_schedule
from support.shapes import line


def planned(stages: int = 2, microbatches: int = 3) -> list[Timed]:
    return list(check_schedule(make_schedule("1f1b", line(stages), microbatches)).timed)


def measured(seed: int, workers: int = 2) -> list[Timed]:
    random = Random(seed)
    timed = []
    for worker, actions in enumerate(make_schedule("1f1b", line(workers), 4).workers):
        now = 1_700_000_000.0
        for action in actions:
            start = now + random.random() * 0.001
            now = start + random.random() * 0.004
            timed.append(Timed(worker, action, start, now))
    return timed
