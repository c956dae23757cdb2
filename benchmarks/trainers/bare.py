"""The floor: a 1F1B loop written by hand for two stages over one ZeroMQ PAIR socket, and nothing else.

Shapes are known in advance, so a message is the tensor's bytes, received into memory that is already a tensor.
There is no header, no receipt, no retention, no seeding, no record and no recovery.
"""

import os
import tempfile
from collections import deque
from functools import partial
from time import time

import torch
import zmq
from torch import Tensor
from torch.nn.functional import mse_loss

from benchmarks.measuring.processes import PATIENCE, together
from benchmarks.workload import MICROBATCHES, Timing, Workload, batch, like, mean_loss, optimizer, share, stage


def train(workload: Workload) -> Timing:
    with tempfile.TemporaryDirectory() as folder:
        url = f"ipc://{os.path.join(folder, 'bare')}"
        [ends, losses] = together(partial(_first, workload, url), partial(_last, workload, url))
    return Timing(tuple(ends), losses[-1])


def _first(workload: Workload, url: str) -> list[float]:
    torch.set_num_threads(1)
    model = stage(workload, 0)
    sgd = optimizer(model)
    inputs, _ = batch(workload)
    gradients = like(inputs.tensor_split(MICROBATCHES))
    views = [_bytes(gradient) for gradient in gradients]
    stash: deque[Tensor] = deque()
    ends = []

    def forward(x: Tensor) -> None:
        y = model(x)
        stash.append(y)
        _send(wire, y)

    def backward(microbatch: int) -> None:
        wire.recv_into(views[microbatch])
        torch.autograd.backward(stash.popleft(), gradients[microbatch])

    with zmq.Context() as context, _pair(context) as wire:
        wire.bind(url)
        for _ in range(workload.steps):
            microbatches = inputs.tensor_split(MICROBATCHES)
            forward(microbatches[0])
            for microbatch in range(1, MICROBATCHES):
                forward(microbatches[microbatch])
                backward(microbatch - 1)
            backward(MICROBATCHES - 1)
            sgd.step()
            sgd.zero_grad()
            ends.append(time())
    return ends


def _last(workload: Workload, url: str) -> list[float]:
    torch.set_num_threads(1)
    model = stage(workload, 1)
    sgd = optimizer(model)
    _, targets = batch(workload)
    activations = like(targets.tensor_split(MICROBATCHES))
    views = [_bytes(activation) for activation in activations]
    weight = share()
    losses = []

    def forward_backward(microbatch: int, target: Tensor) -> Tensor:
        wire.recv_into(views[microbatch])
        x = activations[microbatch].detach().requires_grad_()
        loss = mse_loss(model(x), target)
        torch.autograd.backward(loss, weight)
        assert x.grad is not None
        _send(wire, x.grad)
        return loss.detach()

    with zmq.Context() as context, _pair(context) as wire:
        wire.connect(url)
        for _ in range(workload.steps):
            step = [forward_backward(*numbered) for numbered in enumerate(targets.tensor_split(MICROBATCHES))]
            sgd.step()
            sgd.zero_grad()
            losses.append(mean_loss(step))
    return losses


def _pair(context: zmq.Context[zmq.SyncSocket]) -> zmq.SyncSocket:
    wire = context.socket(zmq.PAIR)
    wire.rcvtimeo = wire.linger = int(1000 * PATIENCE)
    return wire


def _send(wire: zmq.SyncSocket, tensor: Tensor) -> None:
    wire.send(_bytes(tensor.detach()), copy=False)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.numpy().data
