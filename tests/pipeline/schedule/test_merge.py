"""Several stages on one worker take turns by when each would start alone."""

import pytest

from stageline.pipeline.program import Timed, check_schedule
from stageline.pipeline.schedule import (
    Kind,
    make_schedule,
)
from support.shapes import drawn, line, scattered


def picture(text: str) -> str:
    return "\n".join(row.strip() for row in text.strip().splitlines())


def test_the_first_and_the_last_stage_may_share_a_worker() -> None:
    assert drawn(make_schedule("1f1b", ((0, 3), (1,), (2,)), 3)) == picture("""
        0F0 0F1 0F2 3F0 3B0 === 3F1 3B1 === 3F2 0B0 === 3B2 === 0B1 === ... ... 0B2 ===
        ... 1F0 1F1 1F2 ... ... ... ... 1B0 === ... 1B1 === ... ... ... 1B2 ===
        ... ... 2F0 2F1 ... ... 2B0 === 2F2 2B1 === ... ... ... 2B2 ===
    """)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_stages_of_one_worker_go_by_their_start_on_workers_of_their_own(name: str) -> None:
    for seed in range(60):
        stages, microbatches = 2 + seed % 6, 1 + seed % 9
        alone = check_schedule(make_schedule(name, line(stages), microbatches)).timed
        placed = make_schedule(name, scattered(stages, seed), microbatches)
        for worker, own in enumerate(placed.placement):
            mine = [each for each in alone if each.action.stage in own and each.action.kind is not Kind.UPDATE]
            order = [str(each.action) for each in sorted(mine, key=by_start)]
            assert [str(action) for action in placed.workers[worker] if action.kind is not Kind.UPDATE] == order


def by_start(each: Timed) -> tuple[float, bool, int]:
    """Ties go to backwards, then to the lower microbatch."""
    return each.start, each.action.kind is Kind.FORWARD, each.action.microbatch


def test_asynchronous_stages_of_one_worker_keep_their_own_lists() -> None:
    alone = make_schedule("1f1b", line(4), 1, mode="async")
    for seed in range(20):
        placed = make_schedule("1f1b", scattered(4, seed), 1, mode="async")
        for stage in range(4):
            merged = [run for run in placed.program(placed.owner(stage), range(9)) if run[1].stage == stage]
            assert merged == list(alone.program(stage, range(9)))
