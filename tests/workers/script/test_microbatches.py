"""The number of microbatches of a line that names none, and what is said of workers that wait for long."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stageline import Line
from stageline.workers.script.arguments import LineCall, LineOptions
from stageline.workers.script.begin import plan_of
from stageline.workers.script.microbatches import idle_news, microbatches_for, recorded_microbatches


def options(**given: Any) -> LineOptions:
    return LineOptions(loss=len, optimizer=len, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("placement", "rows", "number"),
    [
        ([[0]], None, 1),
        ([[0, 1]], None, 1),
        ([[0], [1]], None, 4),
        ([[0, 2], [1, 3]], None, 8),
        ([[0], [1]], 64, 4),
        ([[0], [1]], 7, 2),
        ([[0], [1]], 1, 1),
        ([[0], [1], [2]], 11, 3),
        ([[0], [1], [2]], 4, 2),
    ],
)
def test_there_are_two_for_each_stage_with_two_rows_or_more(
    placement: list[list[int]], rows: int | None, number: int
) -> None:
    assert microbatches_for(options(), placement, rows) == number
    assert microbatches_for(options(microbatches=5), placement, rows) == 5


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager-1f1b", "zb-h1"])
@pytest.mark.parametrize("stages", range(1, 8))
def test_of_the_number_by_default_nothing_is_said(stages: int, schedule: str) -> None:
    plan = plan_of(options(schedule=schedule), stages)
    assert idle_news(plan, plan.make_schedule(), ()) == ()


@pytest.mark.parametrize(
    ("stages", "microbatches", "facts"),
    [
        (2, 1, ("1 microbatch in 1f1b", "idle for 50% of each step", "microbatches=4", "20%")),
        (4, 4, ("idle for 43% of each step", "microbatches=8", "27%")),
    ],
)
def test_of_fewer_it_is_said_how_many_would_do(stages: int, microbatches: int, facts: tuple[str, ...]) -> None:
    plan = plan_of(options(microbatches=microbatches), stages)
    (told,) = idle_news(plan, plan.make_schedule(), ())
    assert all(fact in told for fact in facts)


def test_of_several_batches_in_a_step_their_number_is_said() -> None:
    plan = plan_of(options(microbatches=1, accumulate=4), 3)
    (told,) = idle_news(plan, plan.make_schedule(), ())
    assert "1 microbatch of each of 4 batches in 1f1b" in told


def test_a_line_that_is_resumed_has_the_number_of_its_run(tmp_path: Path) -> None:
    run = tmp_path / "line-1"
    run.mkdir()
    (run / "plan.json").write_text('{"schedule": {"microbatches": 3}}')
    call = LineCall(nn.ReLU(), loss=len, optimizer=len, folder=tmp_path, resume="line-1")  # type: ignore[arg-type]
    assert recorded_microbatches(call).microbatches == 3
    call = LineCall(nn.ReLU(), loss=len, optimizer=len, resume=run, microbatches=2)  # type: ignore[arg-type]
    assert recorded_microbatches(call).microbatches == 2


def test_inline_every_batch_is_cut_into_the_number_by_default() -> None:
    sizes = []

    class Sized(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sizes.append(len(x))
            return super().forward(x)

    with Line(
        nn.Sequential(Sized(2, 2), nn.Linear(2, 2)),
        cut=[1],
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        workers="inline",
    ) as line:
        line.step(torch.ones(10, 2), torch.ones(10, 2))
    assert sizes == [3, 3, 2, 2]
