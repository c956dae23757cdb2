"""Claim: what stageline itself adds to a microbatch is microseconds, and it is known where they go.

Each part is timed alone, in a tight loop, on the smallest workload; where a plain loop does the same thing with less
(running the layers, splitting the batch), the plain loop's time is subtracted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from broker.message import Flow, Message, allocate, assemble, encode, read_header
from pipeline.feed import cut
from pipeline.stage import Stage, layer_seed

from .finding import Finding, Table
from .rounds import alternate
from .workload import MICROBATCHES, SEED, WORKLOADS, batch, share

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
    """The smallest layer that trains: what is left of a stage's time is the stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def measure(rounds: int) -> Finding:
    torch.set_num_threads(1)
    found = alternate({key: partial(_cost, part) for key, part in _parts().items()}, rounds)
    costs = {key: median(seconds) for key, seconds in found.items()}
    rows = [(part, *(_shown(costs, part, stage) for stage in STAGES)) for part in dict.fromkeys(p for p, _ in costs)]
    sums = [f"{1e6 * sum(s for (_, at), s in costs.items() if at in (stage, BOTH)):.1f}" for stage in STAGES]
    table = Table("Microseconds a microbatch", ("part", *STAGES), (*rows, ("all", *sums)))
    facts = {f"{part}, {stage}": seconds for (part, stage), seconds in found.items()}
    about = ABOUT.format(shape=tuple(_activation().shape))
    return Finding("Our own Python", about, (table,), {"seconds_per_microbatch": facts})


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


def _parts() -> dict[tuple[str, str], Part]:
    """What a microbatch takes, by what it is and by the stage that does it."""
    x = _activation()
    message = Message("benchmark", Flow.FORWARD, 7, 3, 1, 1, 59, x)
    frames = [bytes(frame) for frame in encode(message)]
    return {
        ("cutting the batch", BOTH): _cutting(),
        ("seeding one layer", BOTH): Part(_seed),
        ("forward and backward, the layer apart", FIRST): _first_stage(x),
        ("forward and backward, the layer apart", LAST): _last_stage(x),
        ("encoding a message", BOTH): Part(partial(encode, message)),
        ("decoding a message", BOTH): Part(partial(_decode, frames)),
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


def _decode(frames: list[bytes]) -> Message:
    """As a transport does that receives into the tensors' memory."""
    header = read_header(frames[0])
    buffers = allocate(header)
    for buffer, frame in zip(buffers, frames[1:], strict=True):
        buffer[:] = frame
    return assemble(header, buffers)
