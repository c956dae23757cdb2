"""What a stage may do to take less memory: its switches, what it then takes of its workers, and what time it costs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .load import StageLoad, WorkerRoom

Loads = Mapping[int, StageLoad]  # by worker
Options = Sequence["StageOption"]  # of one stage


@dataclass(frozen=True, slots=True)
class Switches:
    """What a stage does to take less: the values of `stage.N.recompute` and `stage.N.offload`."""

    recompute: str | tuple[str, ...] = "nothing"
    offload: tuple[str, ...] = ()

    def unlike(self, other: "Switches") -> int:
        """In how many of the two they differ."""
        return (self.recompute != other.recompute) + (self.offload != other.offload)

    def __str__(self) -> str:
        """`recompute = "stage", offload = ["weights"]`."""
        recompute = f'"{self.recompute}"' if isinstance(self.recompute, str) else _listed(self.recompute)
        return f"recompute = {recompute}, offload = {_listed(self.offload)}"


@dataclass(frozen=True, slots=True)
class StageOption:
    """A stage with these `switches`: what each of its replicas takes of its worker, and by how many `nanoseconds` a
    step of the stage takes longer than without any. In `ample` is what they take of workers that neither give back what
    they free nor wait for snapshots."""

    switches: Switches
    nanoseconds: int
    loads: Loads
    ample: Loads = field(default_factory=dict)


def beside(loads: Loads, others: Loads) -> Loads:
    """What both take of each worker."""
    nothing = StageLoad()
    return {worker: loads.get(worker, nothing).beside(others.get(worker, nothing)) for worker in {*loads, *others}}


def fit(loads: Loads, workers: Sequence[WorkerRoom]) -> bool:
    """Whether no worker takes more than it may."""
    return all(workers[worker].fits(load) for worker, load in loads.items())


def _listed(names: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
