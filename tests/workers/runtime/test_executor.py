"""Carrying out instructions: inputs, losses, metrics, and what the user's own code raises."""

import pytest
import torch
from torch import Tensor, nn

from stageline.broker.control.records import EvaluationRecord
from stageline.pipeline.data import Microbatch
from stageline.pipeline.evaluation import Rounds
from stageline.pipeline.program import Instruction
from stageline.pipeline.schedule import make_schedule
from stageline.pipeline.stage.stage import Stage
from stageline.workers.runtime.executor import Executor
from stageline.workers.runtime.losses import BadMicrobatch, ComputeFailed
from support.programs import calls_of
from support.shapes import line


class OneRow:
    """In place of a feed: microbatches of one row, the second one of a step or a batch without rows."""

    def microbatch(self, step: int, microbatch: int) -> Microbatch:
        rows = 1 - microbatch
        return Microbatch(torch.ones(rows, 2), torch.full((rows, 1), float(step)), rows, float(rows))

    held_out_microbatch = microbatch

    def samples(self, step: int, microbatch: int) -> None:
        """It does not tell."""

    held_out_samples = samples


def executor(loss=nn.functional.mse_loss, **metrics) -> Executor:
    layer = nn.Linear(2, 1, bias=False)
    nn.init.ones_(layer.weight)
    stage = Stage(nn.Sequential(layer), loss=loss, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    return Executor({0: stage}, OneRow(), 0, metrics)


def instructions(evaluated: int = 0) -> list[Instruction]:
    return list(calls_of(make_schedule("gpipe", line(1), 2), 1, Rounds(1, evaluated)).instructions(0))


def test_the_loss_of_a_step_is_the_sum_over_its_microbatches_with_rows() -> None:
    ran = executor()
    for instruction in instructions():
        ran.carry_out(instruction, [])
    assert ran.loss == 4.0  # (2 - 0)²


def test_the_loss_and_the_metrics_of_a_round_are_means_over_its_rows() -> None:
    ran = executor(output=lambda outputs, targets: outputs.mean())
    for instruction in instructions(evaluated=2):
        ran.carry_out(instruction, [])
    assert ran.evaluated(1) == EvaluationRecord(1, rows=2, loss=2.5, metrics={"output": 2.0})  # of (2 - 0)², (2 - 1)²


def test_a_round_without_rows_has_no_loss_and_metrics_that_are_no_number() -> None:
    found = executor(output=lambda outputs, targets: outputs.mean()).evaluated(1)
    assert (found.rows, found.loss, str(found.metrics)) == (0, None, "{'output': nan}")


def test_a_loss_that_is_not_finite_stops_the_run_before_the_update() -> None:
    ran = executor(loss=lambda outputs, targets: outputs.mean() * float("nan"))
    *others, update = instructions()
    for instruction in others:
        ran.carry_out(instruction, [])
    with pytest.raises(BadMicrobatch, match="the loss of microbatch 0 of step 0 is nan on stage 0") as stopped:
        ran.carry_out(update, [])
    assert str(stopped.value.culprit.action) == "0F0"


def test_an_error_of_the_users_code_names_the_stage_the_action_and_the_place() -> None:
    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("no such thing")

    with pytest.raises(ComputeFailed, match=r"stage 0 failed in 0F0 of step 0, the loss: KeyError: 'no such thing'"):
        executor(loss=broken).carry_out(instructions()[0], [])
