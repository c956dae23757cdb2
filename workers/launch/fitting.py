"""Which machines the stages of a plan go to: its layers are measured here, in a process of their own."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from stageline.pipeline.model.division.layer_costs import LayerRanges
from stageline.pipeline.placement import ComparedWay, HostFit, HostFitStage, LayerTimes, fit, read_hosts
from stageline.pipeline.plan import Plan
from stageline.workers.preflight.trial_result import MeasuredLayers

from .template import Template
from .trials import measure_layers


class FittedStage(msgspec.Struct, frozen=True):
    """A stage at `host`: its layers' names and first number, seconds for a microbatch there, bytes of those that a
    worker there may take; the bytes of the message that it hands on, and the seconds of its way."""

    stage: int
    host: str
    layers: tuple[str, ...]
    first_layer: int
    seconds: float
    in_flight: int
    bytes: int
    memory: int
    message: int
    carrying: float


class FittedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Schema fit/1. `seconds` of a step, as simulated; `ways` are all that were compared."""

    schema: str = "fit/1"
    stages: tuple[FittedStage, ...]
    schedule: str
    window: tuple[int, ...] | None
    microbatches: int
    seconds: float
    ways: tuple[ComparedWay, ...]

    @property
    def cut(self) -> tuple[int, ...]:
        """The first layer of each stage but the first."""
        return tuple(stage.first_layer for stage in self.stages[1:])


def fitted(plan: Plan, arguments: Sequence[str], hosts: Path) -> FittedPlan:
    """The stages of `plan`, which `arguments` name on a command line, for the machines in the file `hosts`.

    Raises `PlanRefused`, `ModelRefused` or `DataError` if the plan or the file cannot work, `NoFit` if no stages have
    room there.
    """
    machines = read_hosts(hosts)
    with Template() as processes:
        measured = measure_layers(plan, arguments, processes)
    found = fit(_layers(measured), machines, measured.microbatches)
    return _of(found, measured)


def _layers(measured: MeasuredLayers) -> LayerTimes:
    ranges = LayerRanges(measured.costs)

    def taken(begin: int, end: int, in_flight: int) -> int:
        held, _, saved = ranges.bytes(begin, end)
        return held + saved * in_flight

    seconds = [max(cost.nanoseconds, 1) / 1e9 for cost in measured.costs]
    return LayerTimes(measured.names, seconds, [sum(cost.output.values()) for cost in measured.costs], taken)


def _of(found: HostFit, measured: MeasuredLayers) -> FittedPlan:
    stages = tuple(_stage(number, stage, measured.names) for number, stage in enumerate(found.stages))
    return FittedPlan(
        stages=stages,
        schedule=found.schedule,
        window=found.window,
        microbatches=measured.microbatches,
        seconds=found.seconds,
        ways=found.ways,
    )


def _stage(number: int, stage: HostFitStage, names: Sequence[str]) -> FittedStage:
    return FittedStage(
        stage=number,
        host=stage.host,
        layers=tuple(names[stage.begin : stage.end]),
        first_layer=stage.begin,
        seconds=stage.seconds,
        in_flight=stage.in_flight,
        bytes=stage.bytes,
        memory=stage.memory,
        message=stage.message,
        carrying=stage.carrying,
    )
