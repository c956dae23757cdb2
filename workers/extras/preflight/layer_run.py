"""Runs one layer of a model forward and backward a few times, as a stage of its own, and measures it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns

import torch
from torch.autograd.graph import saved_tensors_hooks

from stageline.pipeline.model.layer_costs import LayerCost
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.stage.layers.memory import copied
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree, map_tensors, tensors
from stageline.workers.runtime.executor.executor import Executor
from stageline.workers.runtime.job import Job

REPETITIONS = 5  # of which the median counts


@dataclass(frozen=True, slots=True)
class Handed:
    """What one layer hands to the next, and the numbers of its memory, by address. Later memory may have the address of
    what is freed by then, so addresses alone would not tell what layers share."""

    output: Tree = None
    numbers: Mapping[int, int] = field(default_factory=dict)
    used: int = 0  # how many numbers are


class LayerRun:
    """Stage `index` of `job`, a layer, which works on the first microbatch, and on what the layer before it `handed`.

    Its gradients are ones: values do not matter to time and memory.
    """

    def __init__(self, job: Job, executor: Executor, index: int, handed: Handed) -> None:
        self._job = job
        self._executor = executor
        self._index = index
        self._received = [handed.output] if index else []
        self._numbers = dict(handed.numbers)
        self._used = handed.used
        self._stage = executor.stages[index]
        self._output: Tree = None

    def cost(self) -> LayerCost:
        """The first forward and backward warm it up, and show what autograd keeps. Raises `ComputeFailed`."""
        weights = {tensor.untyped_storage().data_ptr() for tensor in self._stage.state_dict().values()}
        saved: dict[int, int] = {}
        output: dict[int, int] = {}

        def note(tensor: torch.Tensor, where: dict[int, int] = saved) -> torch.Tensor:
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in weights:
                where.setdefault(self._number(memory.data_ptr()), memory.nbytes())
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            self._output = self._carry_out(Kind.FORWARD, self._received)
        for tensor in tensors(self._output):
            note(tensor, output)
        self._backward()
        nanoseconds = int(median(self._timed() for _ in range(REPETITIONS)))
        held, trained = self._held()
        count = sum(each.numel() for layer in self._job.segments[self._index].layers for each in layer.parameters())
        return LayerCost(count, nanoseconds, held, trained, saved, output)

    @property
    def hands(self) -> Handed:
        """What the next layer is given."""
        addresses = [tensor.untyped_storage().data_ptr() for tensor in tensors(self._output)]
        return Handed(self._output, {each: self._number(each) for each in addresses}, self._used)

    def _number(self, address: int) -> int:
        """Of memory that is there."""
        if address not in self._numbers:
            self._numbers[address] = self._used
            self._used += 1
        return self._numbers[address]

    def _timed(self) -> int:
        """Nanoseconds of a forward and a backward. They write to copies: the next layer is given the first output."""
        given = [map_tensors(_copy, tree) for tree in self._received]
        began = _now(self._stage.device)
        self._carry_out(Kind.FORWARD, given)
        self._backward()
        return _now(self._stage.device) - began

    def _backward(self) -> None:
        if self._stage.in_flight:
            last = self._index == self._job.program.last
            ones = map_tensors(lambda tensor: torch.ones_like(tensor) if tensor.requires_grad else None, self._output)
            self._carry_out(Kind.BACKWARD, [] if last else [ones])

    def _carry_out(self, kind: Kind, received: Sequence[Tree]) -> Tree:
        return self._executor.carry_out(self._job.program.instruction(0, Action(kind, self._index)), received)

    def _held(self) -> tuple[dict[str, int], dict[str, int]]:
        """The bytes of weights, gradients and the optimizer's state after an update, and of what is trained.

        A tensor is named as in the first stage that has it: what layers share is there once where they are one stage.
        """
        for parameter in _trained(self._stage):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._carry_out(Kind.UPDATE, [])
        part, optimizer = self._job.segments[self._index], self._stage.optimizer
        names = {id(tensor): part.copies.get(name, name) for name, tensor in part.variables.items()}
        weights = {part.copies.get(name, name): tensor.nbytes for name, tensor in self._stage.state_dict().items()}
        trained = {names.get(id(each), str(id(each))): each for each in _trained(self._stage)}
        held = {
            **{f"weights {name}": size for name, size in weights.items()},
            **{f"gradient {name}": each.nbytes for name, each in trained.items()},
            **{f"optimizer {name}": _state_bytes(optimizer, each) for name, each in trained.items()},
            **{f"average {name}": each.nbytes for name, each in trained.items() if self._job.plan.averages},
        }
        return held, {name: each.nbytes for name, each in trained.items()}


def _trained(stage: Stage) -> list[torch.Tensor]:
    return [] if stage.optimizer is None else [p for group in stage.optimizer.param_groups for p in group["params"]]


def _state_bytes(optimizer: torch.optim.Optimizer | None, parameter: torch.Tensor) -> int:
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    return sum(each.nbytes for each in state.values() if isinstance(each, torch.Tensor))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return copied(tensor.detach()).requires_grad_(tensor.requires_grad)


def _now(device: torch.device) -> int:
    """Nanoseconds, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter_ns()
