"""Which machines the stages of a plan go to: its layers are measured here, in a process of their own."""

from collections.abc import Sequence
from pathlib import Path

from stageline.pipeline.model.layer_costs import LayerRanges
from stageline.pipeline.plan import Plan
from stageline.workers.extras.placement import HostFit, LayerTimes, fit, read_hosts
from stageline.workers.extras.preflight.trial_result import MeasuredLayers

from .template import Template
from .trials import measure_layers


def fitted(plan: Plan, arguments: Sequence[str], hosts: Path) -> HostFit:
    """The stages of `plan`, which `arguments` name on a command line, for the machines in the file `hosts`.

    Raises `PlanRefused`, `ModelRefused` or `DataError` if the plan or the file cannot work, `NoFit` if no stages have
    room there.
    """
    machines = read_hosts(hosts)
    with Template() as processes:
        measured = measure_layers(plan, arguments, processes)
    return fit(_layers(measured), machines, measured.microbatches)


def _layers(measured: MeasuredLayers) -> LayerTimes:
    ranges = LayerRanges(measured.costs)

    def taken(begin: int, end: int, in_flight: int) -> int:
        held, _, saved = ranges.bytes(begin, end)
        return held + saved * in_flight

    seconds = [max(cost.nanoseconds, 1) / 1e9 for cost in measured.costs]
    return LayerTimes(measured.names, seconds, [sum(cost.output.values()) for cost in measured.costs], taken)
