"""Memory of stages is measured in their first step, and nothing that they compute changes."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from stageline.pipeline.program import Instruction, Op
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree
from stageline.workers.runtime.progress import HeldBytes
from stageline.workers.runtime.stage_memory import StageBytesMeter

WIDTH, ROWS = 8, 4
OF_FLOAT = 4


def test_a_stage_is_measured_once_and_what_it_computes_is_handed_on() -> None:
    stage = Stage([nn.Linear(WIDTH, WIDTH), nn.Tanh()], optimizer=partial(torch.optim.SGD, lr=0.1))
    told: list[tuple[int, HeldBytes]] = []
    meter = StageBytesMeter(lambda index, held: told.append((index, held)))

    def forward(instruction: Instruction, received: Sequence[Tree]) -> Tree:
        return stage.forward(received[0], step=instruction.step, microbatch=instruction.microbatch)

    def update(instruction: Instruction, received: Sequence[Tree]) -> Tree:
        stage.update(instruction.step)
        return "updated"

    measured = [meter.around(stage, Kind.FORWARD, forward), meter.around(stage, Kind.UPDATE, update)]
    assert meter.around(stage, Kind.BACKWARD, update) is update
    for step in range(2):
        x = torch.ones(ROWS, WIDTH)
        output = measured[0](instruction(Kind.FORWARD, step), [x])
        assert torch.equal(output, stage.evaluate(x))
        stage.backward(torch.ones(ROWS, WIDTH), step=step, microbatch=0)
        assert measured[1](instruction(Kind.UPDATE, step), []) == "updated"
    ((index, (lasting, kept, _)),) = told
    assert index == 0
    assert lasting >= (WIDTH + 1) * WIDTH * OF_FLOAT
    assert kept >= ROWS * WIDTH * OF_FLOAT


def instruction(kind: Kind, step: int) -> Instruction:
    return Instruction(step, Op(Action(kind, 0), f"0{kind}"))
