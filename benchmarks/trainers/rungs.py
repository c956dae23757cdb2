"""From the bare loop to a run of stageline: the same two workers, with one more of stageline's parts at each rung.

    computes with    torch's modules ── stages
    sends            tensors ── messages ── messages that are retained ── messages through queues with credit
    loop             written by hand ── a worker's own
    processes        two ── two with a control thread, a broker and a supervisor
    over             ZeroMQ's sockets ── Unix sockets and shared memory

The batches, the models and the order of additions are the same for all.
"""

import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial, reduce
from operator import add
from typing import Protocol, cast

import torch
import zmq
from torch import Tensor
from torch.nn.functional import mse_loss

from benchmarks.measuring.processes import PATIENCE, together
from benchmarks.workload import (
    LEARNING_RATE,
    MICROBATCHES,
    STAGES,
    Timing,
    Workload,
    batch,
    layers,
    like,
    mean_loss,
    optimizer,
    share,
    stage,
)
from stageline import Rows, make_schedule
from stageline.broker.codec.message import Frame, Message, decode, encode
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.log import Log, RetentionBudget
from stageline.broker.transports.sockets.zeromq_queues import ZERO_COPY, ZeroMQQueues
from stageline.pipeline.data import Feed
from stageline.pipeline.evaluation import Rounds
from stageline.pipeline.program import Queue, compile_program
from stageline.pipeline.stage.stage import Stage
from stageline.workers.runtime.executor import Executor
from stageline.workers.runtime.loop import WorkerLoop
from stageline.workers.runtime.plan_calls import PlanCalls

from . import bare, ours

RUN = "rungs"
WINDOW = 2 + MICROBATCHES  # as a run has it: what 1F1B may have on its way, and a step's messages
FORWARD, BACKWARD = (
    Queue(name=name, producer=producer, consumer=1 - producer, count=MICROBATCHES, window=WINDOW)
    for name, producer in (("forward-1", 0), ("backward-0", 1))
)
KEYS = BACKWARD, FORWARD  # the queue that each worker takes from
_MORE, _LAST = int(zmq.SNDMORE), 0  # what follows a frame of a message


class RungModel(Protocol):
    """Computation of one worker."""

    def forward(self, x: Tensor, target: Tensor | None, step: int, microbatch: int) -> Tensor:
        """The activation; with a target, the loss, or the microbatch's part of it."""

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Of the oldest microbatch that has only been forward; the gradient of its input, if that is wanted."""

    def update(self) -> None:
        """One optimizer step."""

    def mean(self, losses: Sequence[Tensor]) -> float:
        """The loss of a step, from what its forwards gave."""


class RungWire(Protocol):
    """Messages that one worker sends to the other, and receives from it."""

    def put(self, tensor: Tensor, step: int, microbatch: int) -> None: ...

    def take(self, microbatch: int) -> Tensor: ...

    def trim(self, step: int) -> None:
        """The messages before `step` have arrived."""

    def close(self) -> None: ...


class TorchModules:
    """torch's modules, as the bare loop uses them."""

    def __init__(self, workload: Workload, index: int) -> None:
        self._model = stage(workload, index)
        self._sgd = optimizer(self._model)
        self._share = share()
        self._stash: deque[tuple[Tensor, Tensor]] = deque()

    def forward(self, x: Tensor, target: Tensor | None, step: int, microbatch: int) -> Tensor:
        if target is not None:
            x = x.detach().requires_grad_()
        y = self._model(x)
        if target is not None:
            y = mse_loss(y, target)
        self._stash.append((x, y))
        return y.detach()

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        x, y = self._stash.popleft()
        torch.autograd.backward(y, self._share if gradient is None else gradient)
        return x.grad

    def update(self) -> None:
        self._sgd.step()
        self._sgd.zero_grad()

    def mean(self, losses: Sequence[Tensor]) -> float:
        return mean_loss(losses)


class OurStages:
    """A stage of stageline."""

    def __init__(self, workload: Workload, index: int) -> None:
        self._stage = make_stage(workload, index)
        self._first = index == 0

    def forward(self, x: Tensor, target: Tensor | None, step: int, microbatch: int) -> Tensor:
        x = x if self._first else x.requires_grad_()
        part = 1 / MICROBATCHES
        done = self._stage.forward(x, target, step=step, microbatch=microbatch, share=part, owned=not self._first)
        return cast(Tensor, done)

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return cast(Tensor, self._stage.backward())
        return cast("Tensor | None", self._stage.backward(gradient, owned=True))

    def update(self) -> None:
        self._stage.update()

    def mean(self, losses: Sequence[Tensor]) -> float:
        return float(reduce(add, losses))


class BareTensors:
    """Bytes over one PAIR socket, received into memory that is already a tensor."""

    def __init__(self, workload: Workload, folder: str, index: int) -> None:
        self._context: zmq.Context[zmq.SyncSocket] = zmq.Context()
        self.socket = self._context.socket(zmq.PAIR)
        self.socket.rcvtimeo = self.socket.linger = int(1000 * PATIENCE)
        url = f"ipc://{folder}/wire"
        self.socket.bind(url) if index == 0 else self.socket.connect(url)
        self._received = like(batch(workload)[0].tensor_split(MICROBATCHES))
        self._views = [tensor.numpy().data for tensor in self._received]

    def put(self, tensor: Tensor, step: int, microbatch: int) -> None:
        self.socket.send(tensor.detach().numpy().data, copy=False)

    def take(self, microbatch: int) -> Tensor:
        self.socket.recv_into(self._views[microbatch])
        return self._received[microbatch].detach()

    def trim(self, step: int) -> None:
        """Nothing is retained."""

    def close(self) -> None:
        self.socket.close()
        self._context.term()


class WireMessages(BareTensors):
    """Messages of stageline's format over the same socket: a header, then the bytes, both with checksums."""

    def __init__(self, workload: Workload, folder: str, index: int) -> None:
        super().__init__(workload, folder, index)
        self.key = KEYS[1 - index]
        self._incarnation = index + 1

    def put(self, tensor: Tensor, step: int, microbatch: int) -> None:
        self._send(self._frames(self._message(tensor, step, microbatch)))

    def take(self, microbatch: int) -> Tensor:
        frame = self.socket.recv(copy=False)
        frames = [frame.buffer]
        while frame.more:
            frame = self.socket.recv(copy=False)
            frames.append(frame.buffer)
        return cast(Tensor, decode(frames).payload)

    def _message(self, tensor: Tensor, step: int, microbatch: int) -> Message:
        number = step * MICROBATCHES + microbatch
        return Message(RUN, self.key.name, number, self._incarnation, tensor)

    def _frames(self, message: Message) -> list[Frame]:
        return encode(message)

    def _send(self, frames: list[Frame]) -> None:
        for frame in frames[:-1]:
            self.socket.send(frame, _MORE, copy=len(frame) < ZERO_COPY)
        self.socket.send(frames[-1], _LAST, copy=len(frames[-1]) < ZERO_COPY)


class RetainedMessages(WireMessages):
    """The same, retained until both workers are past their step."""

    def __init__(self, workload: Workload, folder: str, index: int) -> None:
        super().__init__(workload, folder, index)
        self._log = Log(RUN, self.key, RetentionBudget())

    def trim(self, step: int) -> None:
        self._log.trim(step)

    def _frames(self, message: Message) -> list[Frame]:
        return self._log.put(message, time.monotonic()) or []


class CreditQueues:
    """The queues of a worker: a ROUTER that sends what credit allows, a DEALER that requests it."""

    def __init__(self, workload: Workload, folder: str, index: int) -> None:
        self._queues = open_queues(folder, index)
        self._out, self._in = self._queues.outbound(KEYS[1 - index]), self._queues.inbound(KEYS[index])
        self._incarnation = index + 1

    def put(self, tensor: Tensor, step: int, microbatch: int) -> None:
        number = step * MICROBATCHES + microbatch
        self._out.put(Message(RUN, self._out.queue.name, number, self._incarnation, tensor))

    def take(self, microbatch: int) -> Tensor:
        message = self._in.take(PATIENCE)
        assert message is not None, "the other worker is gone"
        return cast(Tensor, message.payload)

    def trim(self, step: int) -> None:
        self._out.trim(step)
        self._queues.pump(0)

    def close(self) -> None:
        end(self._queues)


Parts = tuple[type[RungModel], Callable[[Workload, str, int], RungWire]]

BY_HAND: Mapping[str, Parts] = {
    "the loop by hand": (TorchModules, BareTensors),
    "stages": (OurStages, BareTensors),
    "headers and checksums": (OurStages, WireMessages),
    "messages retained": (OurStages, RetainedMessages),
    "queues with credit": (OurStages, CreditQueues),
}


def train_by_hand(parts: Parts, workload: Workload) -> Timing:
    with tempfile.TemporaryDirectory() as folder:
        tasks = [partial(_by_hand, parts, workload, folder, index) for index in range(STAGES)]
        (ends, _), (_, losses) = together(*tasks)
    return Timing(tuple(ends), losses[-1])


def train_with_loops(workload: Workload) -> Timing:
    """Two workers' loops, without the processes around them."""
    with tempfile.TemporaryDirectory() as folder:
        (ends, _), (_, losses) = together(*[partial(_loop, workload, folder, index) for index in range(STAGES)])
    return Timing(tuple(ends), losses[-1])


RUNGS: Mapping[str, Callable[[Workload], Timing]] = {
    "bare": bare.train,
    **{name: partial(train_by_hand, parts) for name, parts in BY_HAND.items()},
    "a worker's loop": train_with_loops,
    "processes": partial(ours.train, sets=("queues.url=ipc://",)),
    "shared memory": ours.train,
}


def make_stage(workload: Workload, index: int) -> Stage:
    first = index * workload.layers
    return Stage(
        layers(workload)[first : first + workload.layers],
        index=index,
        first_layer=first,
        optimizer=partial(torch.optim.SGD, lr=LEARNING_RATE),
        loss=mse_loss if index == STAGES - 1 else None,
    )


def open_queues(folder: str, index: int) -> ZeroMQQueues:
    places = [f"ipc://{folder}/{each}" for each in range(STAGES)]
    options = QueueOptions(patience=PATIENCE, ahead=WINDOW)
    queues = ZeroMQQueues(RUN, index + 1, places[index], options)
    queues.connect({KEYS[index]: places[1 - index]})
    return queues


def end(queues: ZeroMQQueues) -> None:
    """Serves the other worker until it has all."""
    until = time.monotonic() + 1.0
    while (left := until - time.monotonic()) > 0:
        queues.pump(left)
    queues.close()


def _by_hand(parts: Parts, workload: Workload, folder: str, index: int) -> tuple[list[float], list[float]]:
    """When each step ended, and its loss. 1F1B: the first worker is one microbatch ahead."""
    torch.set_num_threads(1)
    make, connect = parts
    compute = cast("Callable[[Workload, int], RungModel]", make)(workload, index)
    ends: list[float] = []
    losses: list[float] = []
    with closing(connect(workload, folder, index)) as wire:
        step = _first if index == 0 else _last
        data = [each.tensor_split(MICROBATCHES) for each in batch(workload)]
        for number in range(workload.steps):
            losses.append(step(compute, wire, data[index], number))
            compute.update()
            ends.append(time.time())
            wire.trim(number)  # the other worker may still receive what is of this step
    return ends, losses


def _first(compute: RungModel, wire: RungWire, inputs: tuple[Tensor, ...], step: int) -> float:
    for microbatch, x in enumerate(inputs):
        wire.put(compute.forward(x, None, step, microbatch), step, microbatch)
        if microbatch:
            compute.backward(wire.take(microbatch - 1))
    compute.backward(wire.take(MICROBATCHES - 1))
    return 0.0


def _last(compute: RungModel, wire: RungWire, targets: tuple[Tensor, ...], step: int) -> float:
    losses = []
    for microbatch, target in enumerate(targets):
        losses.append(compute.forward(wire.take(microbatch), target, step, microbatch))
        gradient = compute.backward(None)
        assert gradient is not None
        wire.put(gradient, step, microbatch)
    return compute.mean(losses)


def _loop(workload: Workload, folder: str, index: int) -> tuple[list[float], list[float]]:
    torch.set_num_threads(1)
    made = make_schedule("1f1b", [(each,) for each in range(STAGES)], MICROBATCHES)
    program = PlanCalls(compile_program(made), Rounds(workload.steps))
    data = Rows(*batch(workload), MICROBATCHES * workload.rows, 0, shuffle=False)
    feed = Feed(data, MICROBATCHES, workload.steps, MICROBATCHES * workload.rows)
    executor = Executor({index: make_stage(workload, index)}, feed, STAGES - 1)
    ends: list[float] = []
    losses: list[float] = []
    with ExitStack() as stack:
        queues = open_queues(folder, index)
        stack.callback(end, queues)

        def on_step(stage: int, step: int, loss: float | None) -> None:
            ends.append(time.time())
            losses.append(loss or 0.0)
            queues.outbound(KEYS[1 - index]).trim(step)
            loop.progress.steps.clear()

        loop = WorkerLoop(program, index, executor, queues, run=RUN, incarnation=index + 1)
        loop.run(lambda: None, on_step)
    return ends, losses
