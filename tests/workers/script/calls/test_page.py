"""A line as a notebook shows it."""

from functools import partial

import torch
from torch import nn

from stageline import Line


def test_it_shows_position_workers_losses_and_timetable_and_that_it_is_over():
    with Line(
        [nn.Linear(2, 2), nn.Linear(2, 1)],
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        workers="inline",
        name="small",
    ) as line:
        before = line._repr_html_()
        loss = line.step(torch.ones(2, 2), torch.ones(2, 1))
        after = line._repr_html_()
    assert before.startswith("<b>small</b>: position 0, steps that have ended: 0<br>worker 0, stage 0")
    assert after.startswith(f"<b>small</b>: position 1, steps that have ended: 1, loss {loss:.4g}<br>")
    assert (before.count("<img"), after.count("<img")) == (1, 2)
    assert line._repr_html_().startswith("<b>small</b>: finished, steps that have ended: 1")
