"""Claim: stageline's own code takes microseconds for a microbatch; the table shows for what.

Each part is timed alone, in a tight loop, on the smallest workload; where a plain loop does the same thing with less
(running the layers, splitting the batch), the plain loop's time is subtracted.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter, sleep
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import alternate
from benchmarks.wires.ours import KEYS, ROUND, TERMS, OurWire
from benchmarks.workload import MICROBATCHES, SEED, WORKLOADS, batch, share
from stageline.broker.codec.message import Message
from stageline.broker.transports.sockets.zeromq_queues import ZeroMQQueues
from stageline.pipeline.data import cut
from stageline.pipeline.evaluation import Rounds
from stageline.pipeline.program import Instruction, Queue, compile_program
from stageline.pipeline.schedule import make_schedule
from stageline.pipeline.stage.layers.passage import layer_seed
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree
from stageline.workers.runtime.loop import WorkerLoop
from stageline.workers.runtime.plan_calls import PlanCalls

CALLS = 400

STAGES = FIRST, LAST = "first stage", "last stage"
BOTH = "both"

ABOUT = """\
Time that stageline's own code takes for one microbatch on one worker, forward and backward, beside torch's: each part
in a loop of its own, less what the same work costs in a plain loop. The activation is float32 of shape {shape}."""


@dataclass(frozen=True, slots=True)
class Part:
    """`ours` does the part `per` times, for as many microbatches; `plain` is the plain loop's way to do the same."""

    ours: Callable[[], object]
    plain: Callable[[], object] = lambda: None
    per: int = 1


class _Scale(nn.Module):
    """The smallest layer that trains, so that nearly all of a stage's time is the stage's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def measure(rounds: int) -> BenchmarkResult:
    torch.set_num_threads(1)
    with _Queue() as queue:
        found = alternate({**_loops(), **_ends(queue), ("deciding and recording", BOTH): _turns}, rounds)
    costs = {key: median(seconds) for key, seconds in found.items()}
    rows = [(part, *(_shown(costs, part, stage) for stage in STAGES)) for part in dict.fromkeys(p for p, _ in costs)]
    sums = [f"{1e6 * sum(s for (_, at), s in costs.items() if at in (stage, BOTH)):.1f}" for stage in STAGES]
    table = Table("Microseconds a microbatch", ("part", *STAGES), (*rows, ("all", *sums)))
    facts = {f"{part}, {stage}": seconds for (part, stage), seconds in found.items()}
    about = ABOUT.format(shape=tuple(_activation().shape))
    return BenchmarkResult("Our own Python", about, (table,), {"seconds_per_microbatch": facts})


def _shown(costs: dict[tuple[str, str], float], part: str, stage: str) -> str:
    seconds = costs.get((part, stage), costs.get((part, BOTH)))
    return "" if seconds is None else f"{1e6 * seconds:.1f}"


def _cost(part: Part) -> float:
    """Seconds a microbatch, beyond the plain loop's."""
    return (_time(part.ours) - _time(part.plain)) / part.per


def _time(call: Callable[[], object]) -> float:
    started = perf_counter()
    for _ in range(CALLS):
        call()
    return (perf_counter() - started) / CALLS


def _loops() -> dict[tuple[str, str], Callable[[], float]]:
    """Time of a microbatch, by its part and by the stage that does it; each gives seconds a microbatch."""
    x = _activation()
    parts = {
        ("cutting the batch", BOTH): _cutting(),
        ("seeding one layer", BOTH): Part(_seed),
        ("forward and backward, the layer apart", FIRST): _first_stage(x),
        ("forward and backward, the layer apart", LAST): _last_stage(x),
    }
    return {key: partial(_cost, part) for key, part in parts.items()}


def _ends(queue: "_Queue") -> dict[tuple[str, str], Callable[[], float]]:
    return {
        ("putting a message: encode, retain, send", BOTH): queue.put,
        ("taking a message: receive, check, decode", BOTH): queue.take,
    }


def _activation() -> Tensor:
    inputs, _ = batch(WORKLOADS[0])
    return inputs.tensor_split(MICROBATCHES)[0]


def _cutting() -> Part:
    inputs, targets = batch(WORKLOADS[0])

    def plain() -> None:
        inputs.tensor_split(MICROBATCHES)
        targets.tensor_split(MICROBATCHES)

    return Part(partial(cut, inputs, targets, MICROBATCHES), plain, per=MICROBATCHES)


def _seed() -> None:
    torch.default_generator.manual_seed(layer_seed(SEED, 7, 3, 1))


def _first_stage(x: Tensor) -> Part:
    layer = _Scale()
    stage = Stage([layer])
    gradient = torch.ones_like(x)

    def ours() -> None:
        stage.forward(x, step=0, microbatch=0)
        stage.backward(gradient, step=0, microbatch=0)

    def plain() -> None:
        _seed()
        torch.autograd.backward(layer(x), gradient)

    return Part(ours, plain)


def _last_stage(x: Tensor) -> Part:
    layer = _Scale()
    stage = Stage([layer], loss=mse_loss)
    target, weight = torch.zeros_like(x), share()

    def ours() -> None:
        received = x.detach().requires_grad_()
        stage.forward(received, target, step=0, microbatch=0, share=1 / MICROBATCHES, owned=True)
        stage.backward(step=0, microbatch=0)

    def plain() -> None:
        _seed()
        leaf = x.detach().requires_grad_()
        torch.autograd.backward(mse_loss(layer(leaf), target), weight)

    return Part(ours, plain)


class _Queue:
    """A queue over ipc whose two ends are in this process: a step's messages are put, and taken on arrival."""

    STEPS = CALLS // ROUND

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        first, last = [ZeroMQQueues("wire", end + 1, f"ipc://{self._folder.name}/{end}", TERMS) for end in (0, 1)]
        last.connect({KEYS[0]: first.endpoint})
        self._queues = first, last
        self._wire, self._in = OurWire(first, 0), last.inbound(KEYS[0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for queues in self._queues:
            queues.close()
        self._folder.cleanup()

    def put(self) -> float:
        return self._go()[0]

    def take(self) -> float:
        return self._go()[1]

    def _go(self) -> tuple[float, float]:
        """Seconds for one message, put and taken."""
        x, putting, taking = _activation(), 0.0, 0.0
        for _ in range(self.STEPS):
            began = perf_counter()
            for _ in range(ROUND):
                self._wire.send(x)
            putting += perf_counter() - began
            while not self._in.take(0):  # untimed: the first of them, and the delivery of all
                for queues in self._queues:
                    queues.pump(0.001)
            sleep(0.002)
            began = perf_counter()
            for _ in range(ROUND - 1):
                assert self._in.take(0)
            taking += perf_counter() - began
            self._queues[0].pump(0)
        return putting / (self.STEPS * ROUND), taking / (self.STEPS * (ROUND - 1))


def _turns() -> float:
    """Seconds that a worker takes for a microbatch that costs nothing to compute, to take and to put."""
    schedule = make_schedule("1f1b", ((0,), (1,)), MICROBATCHES)
    steps = CALLS // MICROBATCHES
    program = PlanCalls(compile_program(schedule), Rounds(steps))
    worker = WorkerLoop(program, 0, _Nothing(), _Ready(), run="cost", incarnation=1)  # type: ignore[arg-type]
    began = perf_counter()
    while worker.poll(0):
        pass
    return (perf_counter() - began) / (steps * MICROBATCHES)


class _Nothing:
    """An executor that computes nothing."""

    loss: float | None = None

    def carry_out(self, instruction: Instruction, received: list[Tree]) -> Tree:
        return None


class _Ready:
    """Queues in which every message has arrived already; what is put is dropped."""

    def inbound(self, queue: Queue) -> "_Ready":
        self._taken, self.queue = 0, queue
        return self

    def outbound(self, queue: Queue) -> "_Ready":
        return self

    def take(self, timeout: float) -> Message:
        self._taken += 1
        return Message("cost", self.queue.name, self._taken - 1, 2, None)

    def put(self, message: Message) -> None:
        return

    def pump(self, timeout: float) -> None:
        return
