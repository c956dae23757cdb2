"""A call arrives as it was handed over: its arguments, and the state of a stage with that of its optimizer."""

import socket
from functools import partial
from threading import Thread
from typing import Any

import torch
from torch import nn

from stageline.pipeline.stage.stage import Stage
from stageline.workers.process.group_calls import encode_call, receive_call, send_call


def handed_over(name: str, *arguments: Any) -> tuple[str, tuple[Any, ...]] | None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames = encode_call(name, arguments)
        sending = Thread(target=send_call, args=(ours, frames))
        sending.start()
        received = receive_call(theirs)
        sending.join()
    return received


def test_arguments_arrive_with_their_bits_layouts_and_whether_they_require_gradients() -> None:
    x = torch.randn(3, 4).t().requires_grad_()
    received = handed_over("forward", (x, [None, "mask"]), torch.arange(5), 7, None, 0.25)
    assert received is not None
    name, ((y, rest), target, *others) = received
    assert (name, rest, others) == ("forward", [None, "mask"], [7, None, 0.25])
    assert torch.equal(y, x)
    assert (y.stride(), y.requires_grad) == (x.stride(), True)
    assert torch.equal(target, torch.arange(5))


def test_a_state_arrives_with_the_optimizer_s() -> None:
    layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    stage = Stage(layers, optimizer=partial(torch.optim.AdamW, lr=0.1), loss=lambda output, target: output.sum())
    stage.forward(torch.randn(5, 4), torch.zeros(5))
    stage.backward()
    stage.update()
    state = stage.snapshot()
    received = handed_over("restore", state)
    assert received is not None
    (there,) = received[1]
    assert there.weights.keys() == state.weights.keys()
    assert all(torch.equal(there.weights[name], each) for name, each in state.weights.items())
    assert there.optimizer.keys() == state.optimizer.keys()  # type: ignore[union-attr]
    assert torch.equal(there.optimizer["state"][0]["exp_avg"], state.optimizer["state"][0]["exp_avg"])  # type: ignore[index]
    stage.restore(there)


def test_the_end_of_the_leader_is_no_call() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(b"\x01\x00")
        ours.close()
        assert receive_call(theirs) is None
