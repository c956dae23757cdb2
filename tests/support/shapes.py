"""Shapes and pictures of schedules that several tests share."""

import re
from collections.abc import Iterator
from random import Random
from typing import Any

from stageline.pipeline.program import Costs, Timed, Verdict, check_schedule
from stageline.pipeline.schedule import Action, Kind, Placement, Schedule, ScheduleRefused, make_schedule


def line(stages: int) -> Placement:
    """A worker for each stage."""
    return tuple((stage,) for stage in range(stages))


def looped(workers: int, turns: int) -> Placement:
    """`turns` stages on each worker, as interleaving wants them."""
    return tuple(tuple(range(worker, workers * turns, workers)) for worker in range(workers))


def scattered(stages: int, seed: int) -> Placement:
    """The stages thrown onto some workers, none of them left without a stage."""
    random = Random(seed)
    owners = [random.randrange(stages) for _ in range(stages)]
    return tuple(tuple(stage for stage in range(stages) if owners[stage] == worker) for worker in sorted(set(owners)))


def parsed(text: str) -> Action:
    """The action that is written `2F0`, or `2U`."""
    stage, kind, microbatch = re.fullmatch(r"(\d+)([FBIWTSNCU])(\d*)", text).groups()
    return Action(Kind(kind), int(stage), int(microbatch or 0))


def by_hand(*workers: str, microbatches: int = 1) -> Schedule:
    """A schedule written down, with a worker for each stage."""
    lists = tuple(tuple(map(parsed, actions.split())) for actions in workers)
    return Schedule("by-hand", "sync", line(len(workers)), microbatches, lists)


def random_costs(seed: int, stages: int) -> Costs:
    """Uneven costs and latencies."""
    random = Random(seed)
    return Costs(*[tuple(random.choice((0.5, 1, 2, 3)) for _ in range(count)) for count in (*[stages] * 4, stages - 1)])


def times(verdict: Verdict, worker: int) -> dict[str, tuple[float, float]]:
    """When each of a worker's actions starts and ends."""
    return {str(each.action): (each.start, each.end) for each in verdict.timed if each.worker == worker}


def accepted(name: str, placement: Placement, most: int, **options: Any) -> Iterator[Schedule]:
    """The schedules of `name` for 1 to `most` microbatches, without those it refuses."""
    for microbatches in range(1, most + 1):
        try:
            yield make_schedule(name, placement, microbatches, **options)
        except ScheduleRefused:
            continue


def drawn(schedule: Schedule, steps: int | None = None) -> str:
    """A row for each worker with a cell for each unit of time; a forward takes one, a backward two, an update none.

    The stage is left out where every worker has but one. In asynchronous mode the step stands for the microbatch.
    """
    timed = [each for each in check_schedule(schedule, steps=steps).timed if each.action.kind is not Kind.UPDATE]
    rows = [[each for each in timed if each.worker == worker] for worker in range(len(schedule.placement))]
    return "\n".join(_row(schedule, row) for row in rows)


def _row(schedule: Schedule, row: list[Timed]) -> str:
    width = 2 if schedule.stages == len(schedule.placement) else 3
    cells: list[str] = []
    for each in row:
        cells += ["." * width] * (int(each.start) - len(cells))
        cells += [_label(schedule, each)[-width:], *["=" * width] * (int(each.end - each.start) - 1)]
    return " ".join(cells)


def _label(schedule: Schedule, each: Timed) -> str:
    number = each.step if schedule.mode == "async" else each.action.microbatch
    return f"{each.action.stage}{each.action.kind}{number}"
