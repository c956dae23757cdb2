"""A run that a script wants in another layout is refused in words of the script."""

from pathlib import Path

import pytest

from stageline.pipeline.plan import PlanRefused
from stageline.workers.checkpoint.recut import needs_recut
from stageline.workers.checkpoint.source import CheckpointSource
from stageline.workers.script.arguments.plan_errors import in_arguments_words
from support.small_plans import plan


def test_what_a_run_was_begun_with_is_told_by_the_names_of_arguments() -> None:
    """It named keys of a plan, and an option of a command."""
    before = {"workers": {"0": {"stages": [0]}, "1": {"stages": [1]}}}
    source = CheckpointSource(Path("runs/line-1"), "line-1", plan(**before).resolved(2))
    now = {"workers": {"0": {"stages": [0, 1]}}, "schedule__name": "gpipe", "optimizer__lr": 0.2}
    with pytest.raises(PlanRefused) as refused, in_arguments_words():
        needs_recut(plan(**now, run__seed=7).resolved(2), source)
    assert str(refused.value).endswith(
        "run line-1 was begun with other arguments: optimizer.lr: 0.2 here, 0.1 there; seed: 7 here, 0 there "
        "(here: these, there: the run's). Call Line.resume with the arguments that it began with, but for cut, stages, "
        'placement, schedule, window, settings["recovery.snapshot_every"] and taps, or begin another run with Line(...)'
    )
    tied = CheckpointSource(Path("runs/line-1"), "line-1", plan(schedule__tied="step").resolved(2))
    with pytest.raises(PlanRefused) as refused, in_arguments_words():
        needs_recut(plan(model__cut=[3], schedule__tied="step").resolved(2), tied)
    assert "this line cuts the model in another way: cut: [3] here, [5] there" in str(refused.value)
    coded = CheckpointSource(Path("runs/line-1"), "line-1", plan(queues__codec="int8").resolved(2))
    with pytest.raises(PlanRefused) as refused, in_arguments_words():
        needs_recut(plan(model__cut=[3], queues__codec="int8").resolved(2), coded)
    assert 'has queues.codec = "int8", and this line cuts the model in another way: cut: [3]' in str(refused.value)


def test_another_number_of_microbatches_is_told_once() -> None:
    """A scripted plan has it as the size of a batch, too."""
    source = CheckpointSource(Path("runs/line-1"), "line-1", plan(schedule__microbatches=2).resolved(2))
    with pytest.raises(PlanRefused) as refused, in_arguments_words():
        needs_recut(plan(schedule__microbatches=4, data__batch_size=4).resolved(2), source)
    assert "was begun with other arguments: microbatches: 4 here, 2 there (here" in str(refused.value)
