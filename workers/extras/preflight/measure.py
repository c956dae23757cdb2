"""Measures what each layer of a plan's model costs, run alone as a stage of its own; decides where the model is cut."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from time import perf_counter_ns

import torch
from torch.autograd.graph import saved_tensors_hooks

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.features.ties import SharedParameters
from stageline.pipeline.model.edges import EACH_LAYER
from stageline.pipeline.model.layer_costs import CutWish, LayerCost, chosen_edges
from stageline.pipeline.plan import Plan
from stageline.pipeline.program import check_schedule
from stageline.pipeline.schedule import DELAYED, Action, Kind, ScheduleRefused, make_schedule
from stageline.pipeline.stage.held import total_bytes
from stageline.pipeline.stage.layers.memory import own_copy
from stageline.pipeline.tree import Tree, map_tensors, tensors
from stageline.workers.runtime.executor import Executor
from stageline.workers.runtime.job import Job, prepare
from stageline.workers.runtime.losses import ComputeFailed

from .trial_result import MeasuredCut, MeasuredLayers
from .trial_stages import TrialStages, with_gradients

REPETITIONS = 5  # of which the median counts


@dataclass(frozen=True, slots=True)
class Handed:
    """Output of one layer for the next, and numbers that identify its memory, by address.

    Later memory may have the address of memory that has been freed, so addresses alone do not tell what layers share.
    """

    output: Tree = None
    numbers: Mapping[int, int] = field(default_factory=dict)
    used: int = 0  # how many numbers are


class LayerRun:
    """Run of one layer, stage `index` of `job`, on the first microbatch and the previous layer's output, `handed`.

    All gradients are ones: values do not matter to time and memory.
    """

    def __init__(self, job: Job, executor: Executor, index: int, handed: Handed) -> None:
        """Prepare the run of a layer.

        Args:
            job: Job that has each layer in a stage of its own.
            executor: Executor of the stage.
            index: Number of the stage.
            handed: Output of the layer before it; not used for layer 0, which reads the data.
        """
        self._job = job
        self._executor = executor
        self._index = index
        self._received = [handed.output] if index else []
        self._numbers = dict(handed.numbers)
        self._used = handed.used
        self._stage = executor.stages[index]
        self._output: Tree = None

    def cost(self) -> LayerCost:
        """Return the cost of the layer. Time is the median of `REPETITIONS` forwards and backwards.

        The first forward and backward warm the layer up, and show which tensors autograd keeps.

        Raises:
            ComputeFailed: The layer could not be computed.
        """
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
        """The input of the next layer, to be read after `cost`."""
        addresses = [tensor.untyped_storage().data_ptr() for tensor in tensors(self._output)]
        return Handed(self._output, {each: self._number(each) for each in addresses}, self._used)

    def _number(self, address: int) -> int:
        """Return the number of the memory at `address`, which must be in use."""
        if address not in self._numbers:
            self._numbers[address] = self._used
            self._used += 1
        return self._numbers[address]

    def _timed(self) -> int:
        """Return the duration of a forward and a backward, in nanoseconds.

        Both write to copies of the input: the next layer is given the first output.
        """
        given = [map_tensors(own_copy, tree) for tree in self._received]
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
        """Return the bytes that the layer holds after an update, and the bytes of its trained parameters, both by name.

        Held are weights, gradients and the optimizer's state. A tensor is named as in the first stage that has it, so
        tensors that layers share count once where these layers are in one stage.
        """
        parameters = with_gradients(self._stage)
        self._carry_out(Kind.UPDATE, [])
        part, optimizer = self._job.segments[self._index], self._stage.optimizer
        states = {} if optimizer is None else optimizer.state
        names = {id(tensor): part.copies.get(name, name) for name, tensor in part.variables.items()}
        weights = {part.copies.get(name, name): tensor.nbytes for name, tensor in self._stage.state_dict().items()}
        trained = {names.get(id(each), str(id(each))): each for each in parameters}
        held = {
            **{f"weights {name}": size for name, size in weights.items()},
            **{f"gradient {name}": each.nbytes for name, each in trained.items()},
            **{f"optimizer {name}": _state_bytes(states.get(each, {})) for name, each in trained.items()},
            **{f"average {name}": each.nbytes for name, each in trained.items() if self._job.plan.averages},
        }
        return held, {name: each.nbytes for name, each in trained.items()}


def _state_bytes(state: Mapping[str, object]) -> int:
    return total_bytes(each for each in state.values() if isinstance(each, torch.Tensor))


def _now(device: torch.device) -> int:
    """Return the time in nanoseconds at which `device` has finished all work given to it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter_ns()


def measured_cut(plan: Plan, doing: Callable[[str], None]) -> MeasuredCut:
    """Measure the layers of `plan`, and return where it is cut, with the seconds of each stage.

    Args:
        plan: Plan whose cut has yet to be measured.
        doing: Called with the next action, in words.

    Raises:
        PlanRefused: The plan cannot work.
        ModelRefused: The model cannot be trained, or no cut fits.
        DataError: The data cannot be read.
    """
    job = _each_layer(plan, doing)
    torch.set_num_threads(job.plan.workers[0].threads)
    costs = layer_costs(job, doing)
    model = plan.model
    delays = plan.schedule.name == DELAYED
    stashes = plan.schedule.mode == "async" and not delays
    wish = CutWish(model.stages or 1, model.balance, model.stage_memory, stashes, delays)
    edges = chosen_edges(costs, wish, lambda stages: _in_flight(plan, stages))
    times = [sum(cost.nanoseconds for cost in costs[begin:end]) / 1e9 for begin, end in pairwise(edges)]
    return MeasuredCut(tuple(edges[1:-1]), tuple(times))


def measured_layers(plan: Plan, doing: Callable[[str], None]) -> MeasuredLayers:
    """Return the cost of each layer of `plan` on its first worker's device.

    Args:
        plan: Plan whose layers are measured.
        doing: Called with the next action, in words.

    Raises:
        PlanRefused: The plan cannot work.
        ModelRefused: The model cannot be trained.
        DataError: The data cannot be read.
    """
    job = _each_layer(plan, doing)
    torch.set_num_threads(job.plan.workers[0].threads)
    names = tuple(part.names[0] for part in job.segments)
    return MeasuredLayers(names, tuple(layer_costs(job, doing)), plan.schedule.in_step)


def layer_costs(job: Job, doing: Callable[[str], None] = lambda what: None) -> list[LayerCost]:
    """Return the cost of each stage of `job`. The stages are used up: prepare the job again to train it.

    Args:
        job: Job that has each layer in a stage of its own.
        doing: Called with the next action, in words.

    Raises:
        ModelRefused: A layer could not be computed.
        DataError: The data gave no batch.
    """
    stages = TrialStages(job, doing)
    costs: list[LayerCost] = []
    handed = Handed()
    try:
        for index, part in enumerate(job.segments):
            doing(f"the measurement of layer {part.names[0]}")
            with stages.there(index):
                layer = LayerRun(job, stages[index], index, handed)
                costs.append(layer.cost())
                handed = layer.hands
    except ComputeFailed as error:
        raise ModelRefused(f"a measurement with the first microbatch failed: {error}") from error
    return costs


def _each_layer(plan: Plan, doing: Callable[[str], None]) -> Job:
    """Return the job of `plan` with each layer in a stage of its own, on the device and threads of the first worker."""
    first = plan.workers[0]
    model = plan.model.model_copy(update={"cut": EACH_LAYER, "stages": None})
    other = {"name": "1f1b", "mode": "sync", "window": None, "times": None, "memory": None, "file": None, "rows": None}
    schedule = plan.schedule.model_copy(update=other)
    job = prepare(plan.model_copy(update={"model": model, "schedule": schedule, "workers": ()}), doing)
    workers = tuple(
        worker.model_copy(update={"device": first.device, "threads": first.threads}) for worker in job.plan.workers
    )
    alone = [replace(part, shared=SharedParameters()) for part in job.segments]  # no gradients of other stages are used
    return replace(job, plan=job.plan.model_copy(update={"workers": workers}), segments=alone)


def _in_flight(plan: Plan, stages: int) -> Sequence[int] | None:
    """Return how many microbatches each of `stages` stages holds at most; None if the schedule has no such number."""
    choice, own = plan.schedule, stages == plan.model.stages
    placement = plan.placement if own else [(stage,) for stage in range(stages)]
    try:
        schedule = make_schedule(
            choice.begins_with,
            placement,
            choice.in_step,
            mode=choice.mode,
            window=choice.window,
            times=choice.times,
            rows=choice.rows,
        )
    except ScheduleRefused:
        return None
    return check_schedule(schedule).stage_peak
