"""In which keys two plans of one run disagree, which keys may differ between its machines, and which keep the bits."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import IN_A_PLAN, EachOnce, Setting, Wording
from .tables import canonical, flat

# What neither decides the computation nor which worker does which part of it. The digest leaves it out.
UNCOUNTED = frozenset(
    {
        "run.name",
        "run.dir",
        "run.log_every",
        "model.balance",  # what the two lead to is in model.cut
        "model.stage_memory",
        "model.accept_difference",
        "memory.limit",
        "memory.recompute",
        "memory.offload",
        "memory.tight",
        "schedule.file",  # what it says is in schedule.rows
        "schedule.memory",  # by what the run chooses its schedule
        "data.check",
        "data.num_workers",
        "queues.url",
        "queues.retain_bytes",
        "recovery.lease",
        "recovery.action",
        "recovery.loading",
        "recovery.restarts",
        "recovery.record",
        "broker.url",
        "broker.store",
        "broker.patience",
    }
)

# Which worker does which part of it, in which order, when it is saved and what is stored of it: another synchronous run
# has the same bits, but for a stage that is computed by another number of processes: those add in another order.
_LAYOUT_KEYS = (
    *("model.cut", "model.stages", "workers", "stage.N.tensor", "stage.N.styles", "stage.N.shard"),
    *("schedule.name", "schedule.window", "schedule.times", "schedule.rows", "recovery.snapshot_every", "taps"),
)
LAYOUT = EachOnce(tuple(map(Setting, _LAYOUT_KEYS)), ", ")
_LAYOUT = re.compile(
    r"model\.(cut|stages)|workers\.\d+\.(stages|device|threads)|schedule\.(name|window|times|rows)|recovery\.snapshot_every|"
    r"taps\.\w+|stage\.\d+\.(tensor|shard|styles\..*)"
)


_UNCOUNTED_PART = re.compile(r"stage\.\d+\.(recompute|offload|elastic)|workers\.\d+\.memory")
_ONE = re.compile(r"stage\.\d+\.(replicas|tensor|shard)")  # 1 is what a stage without the table has
_WEIGHTS = re.compile(r"(model|workers\.\d+)\.weights")


@dataclass(frozen=True, slots=True)
class Difference:
    """A dotted key that two plans set differently; None where a plan does not set it."""

    key: str
    here: object
    there: object

    @property
    def of_layout(self) -> bool:
        """Whether it is in how the work is laid out, and not in what is computed."""
        return _LAYOUT.fullmatch(self.key) is not None

    def __str__(self) -> str:
        return self.said(IN_A_PLAN)

    def said(self, words: Wording) -> str:
        here, there = ("not set" if value is None else words.show(value) for value in (self.here, self.there))
        return f"{words.name(self.key)}: {here} here, {there} there"


def is_weights_path(key: str) -> bool:
    """Whether a dotted key says where weights are on this machine."""
    return _WEIGHTS.fullmatch(key) is not None


def counted(tables: Mapping[str, object]) -> dict[str, object]:
    """What `Plan.digest` counts of a plan, given as `Plan.as_mapping`, by dotted key. Of paths of weights it counts
    that there are any: each machine has its own."""
    found = {key: value for key, value in flat(tables).items() if _is_counted(key, value)}
    paths = [key for key in found if is_weights_path(key)]
    for key in paths:
        del found[key]
    return {**found, "model.weights": True} if paths else found


def _is_counted(key: str, value: object) -> bool:
    """A stage's table may be there for what is not counted alone: then it says that it has one replica, one process."""
    one = _ONE.fullmatch(key) is not None and value == 1
    return not (key in UNCOUNTED or one or _UNCOUNTED_PART.fullmatch(key))


def differences(here: Mapping[str, object], there: Mapping[str, object]) -> tuple[Difference, ...]:
    """What `Plan.digest` counts and two plans, given as `Plan.as_mapping`, set differently, in order of the keys."""
    ours, theirs = counted(here), counted(there)
    keys = sorted(ours.keys() | theirs.keys())
    pairs = (Difference(key, ours.get(key), theirs.get(key)) for key in keys)
    return tuple(pair for pair in pairs if canonical(pair.here) != canonical(pair.there))
