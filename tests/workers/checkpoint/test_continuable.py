"""Which plans with more steps a run may go on with."""

from pathlib import Path
from typing import Any

import pytest

from stageline.pipeline.plan import Plan, PlanRefused
from stageline.workers.checkpoint.continuable import needs_recut
from stageline.workers.checkpoint.source import CheckpointSource
from stageline.workers.disk.atomic_file import persist_json
from stageline.workers.runs.folder import RESULT, Result
from support.small_plans import plan

TORCH = "torch.optim.lr_scheduler."
FOLLOWS = {"evaluation": {"every": 3}}


def planned(**changes: Any) -> Plan:
    return plan(**changes).resolved(2)


def goes_on(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> bool:
    return needs_recut(planned(**now), CheckpointSource(folder, "small-1", planned(**before)))


def rates(name: str, **options: object) -> dict[str, Any]:
    return {"lr_scheduler": {"factory": name, **options}}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        rates(f"{TORCH}StepLR", step_size=3),
        rates(f"{TORCH}ExponentialLR", gamma=0.9),
        {**FOLLOWS, **rates(f"{TORCH}ReduceLROnPlateau", patience=3, every="evaluation")},
        {"model__cut": [4]},  # another layout at the same time
    ],
)
def test_more_epochs_are_taken_where_no_schedule_was_told_their_number(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    assert goes_on(tmp_path, {**settings, "model__cut": [5]}, {**settings, "run__epochs": 3})


@pytest.mark.parametrize(
    "schedule",
    [
        rates(f"{TORCH}CosineAnnealingLR", T_max=2),
        rates(f"{TORCH}OneCycleLR", max_lr=0.1, total_steps=20),
        rates(f"{TORCH}LinearLR", total_iters=20),
        rates("schedules.py:mine"),
    ],
)
def test_a_schedule_that_may_know_the_total_is_refused_unless_another_is_named(
    schedule: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(PlanRefused, match="may have been told the number of steps: name the schedule of the longer"):
        goes_on(tmp_path, schedule, {**schedule, "run__epochs": 3})
    renewed = {"lr_scheduler": {**schedule["lr_scheduler"], "total": 30}}
    assert goes_on(tmp_path, schedule, {**renewed, "run__epochs": 3})
    with pytest.raises(PlanRefused, match=r"was begun with another plan: lr_scheduler\.total: 30 here"):
        goes_on(tmp_path, schedule, renewed)  # without more epochs, it is another plan


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"run__epochs": 1}, "run.epochs: 1 here, 2 there"),
        ({}, {"run__epochs": 3, "optimizer__lr": 0.2}, "optimizer.lr: 0.2 here"),
        ({}, {"run__epochs": None, "run__steps": 9}, "run.epochs: not set here, 2 there; run.steps: 9 here"),
        ({"schedule__mode": "async", "schedule__microbatches": 1},) * 2 + ("it is asynchronous",),
        ({}, rates(f"{TORCH}StepLR", step_size=3), "lr_scheduler.factory"),
        (
            {**FOLLOWS, **rates(f"{TORCH}ReduceLROnPlateau", patience=3, every="evaluation")},
            {**FOLLOWS, **rates(f"{TORCH}ReduceLROnPlateau", patience=4, every="evaluation")},
            "lr_scheduler.patience: 4 here",  # which of the former evaluations would it count?
        ),
    ],
)
def test_what_changes_the_steps_before_is_refused(
    before: dict[str, Any], now: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanRefused) as refused:
        goes_on(tmp_path, before, {"run__epochs": 3, **now})
    assert said in str(refused.value)


def test_a_run_that_stopped_early_does_not_go_on(tmp_path: Path) -> None:
    early = "stopped early after step 4: loss was not better than 0.1 (step 2) in 2 evaluations"
    sums: dict[str, Any] = {"losses": {}, "metrics": {}, "weights_sha256": "", "seconds": 1.0}
    persist_json(
        tmp_path / RESULT, Result(run="small-1", steps=4, microbatches=3, loss=0.5, stopped_early=early, **sums)
    )
    with pytest.raises(PlanRefused, match=r"it was stopped early after step 4: .*, as a longer run would have been"):
        goes_on(tmp_path, {}, {"run__epochs": 3})
