"""Differences between two plans of one run: which keys disagree, which may differ by machine, which keep the bits."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import IN_A_PLAN, EachOnce, Setting, Wording
from .tables import canonical, flat

# Keys that decide neither the computation nor which worker does which part of it. The digest leaves them out.
UNCOUNTED = frozenset(
    {
        "run.name",
        "run.dir",
        "run.log_every",
        "model.balance",  # model.cut has the result of this key and the next
        "model.stage_memory",
        "model.accept_difference",
        "memory.limit",
        "memory.recompute",
        "memory.offload",
        "memory.tight",
        "schedule.file",  # schedule.rows has its content
        "schedule.memory",  # decides only which schedule the run chooses
        "data.check",
        "data.num_workers",
        "queues.url",
        "queues.retain_bytes",
        "queues.padding",
        "recovery.lease",
        "recovery.action",
        "recovery.loading",
        "recovery.copies",
        "recovery.copy_bandwidth",
        "recovery.restarts",
        "recovery.record",
        "broker.url",
        "broker.store",
        "broker.insecure",
        "broker.patience",
    }
)

# Keys that decide which worker does which part of the work, in which order, when it is saved and what is stored of it.
# A synchronous run with other values has the same bits, except for a stage that is computed by another number of
# processes, since these add in another order.
_LAYOUT_KEYS = (
    *("model.cut", "model.stages", "workers", "stage.N.tensor", "stage.N.styles", "stage.N.shard"),
    *("schedule.name", "schedule.window", "schedule.times", "schedule.rows", "recovery.snapshot_every", "taps"),
)
LAYOUT = EachOnce(tuple(map(Setting, _LAYOUT_KEYS)), ", ")
_LAYOUT = re.compile(
    r"model\.(cut|stages)|workers\.\d+\.(stages|device|threads)|schedule\.(name|window|times|rows)|recovery\.snapshot_every|"
    r"taps\.\w+|stage\.\d+\.(tensor|shard|styles\..*)"
)


_UNCOUNTED_PART = re.compile(r"stage\.\d+\.(recompute|offload|elastic)|workers\.\d+\.memory|parties\..*")
_ONE = re.compile(r"stage\.\d+\.(replicas|tensor|shard)")  # 1 is what a stage without the table has
_WEIGHTS = re.compile(r"(model|workers\.\d+)\.weights")


@dataclass(frozen=True, slots=True)
class Difference:
    """A dotted key that two plans set differently.

    Attributes:
        key: The dotted key.
        here: The value in the first plan; None if that plan does not set the key.
        there: The value in the second plan; None if that plan does not set the key.
    """

    key: str
    here: object
    there: object

    @property
    def of_layout(self) -> bool:
        """True if the key says only how the work is laid out, and not what is computed."""
        return _LAYOUT.fullmatch(self.key) is not None

    @property
    def lengthens(self) -> bool:
        """True if both plans say how long the run is in the same key, and the first has more steps or epochs."""
        here, there = self.here, self.there
        return (
            self.key in ("run.steps", "run.epochs")
            and isinstance(here, int)
            and isinstance(there, int)
            and here > there
        )

    @property
    def of_rates(self) -> bool:
        """True if the key belongs to the learning rate schedule, and not to the steps at which it advances."""
        return self.key.startswith("lr_scheduler.") and self.key != "lr_scheduler.every"

    def __str__(self) -> str:
        """Return the difference in the words of a plan file."""
        return self.said(IN_A_PLAN)

    def said(self, words: Wording) -> str:
        """Return the key and both values in `words`; "not set" stands for a value that is None."""
        here, there = ("not set" if value is None else words.show(value) for value in (self.here, self.there))
        return f"{words.name(self.key)}: {here} here, {there} there"


def is_weights_path(key: str) -> bool:
    """Return True if `key` says where weights are on one machine: `model.weights` or `workers.N.weights`."""
    return _WEIGHTS.fullmatch(key) is not None


def counted(tables: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that `Plan.digest` counts, by dotted key; `tables` are those of `Plan.as_mapping`.

    Paths of weights are replaced by one entry, `model.weights` = True, since each machine has paths of its own.
    """
    found = {key: value for key, value in flat(tables).items() if _is_counted(key, value)}
    paths = [key for key in found if is_weights_path(key)]
    for key in paths:
        del found[key]
    return {**found, "model.weights": True} if paths else found


def _is_counted(key: str, value: object) -> bool:
    """Return True if `Plan.digest` counts the key.

    A table [stage.N] may exist only for keys that are not counted. Its one replica and one process are not counted
    then, since a stage without a table has the same.
    """
    one = _ONE.fullmatch(key) is not None and value == 1
    return not (key in UNCOUNTED or one or _UNCOUNTED_PART.fullmatch(key))


def differences(here: Mapping[str, object], there: Mapping[str, object]) -> tuple[Difference, ...]:
    """Return the counted settings in which two plans differ, sorted by key; each plan is given as `Plan.as_mapping`.

    Only settings that `Plan.digest` counts are compared.
    """
    ours, theirs = counted(here), counted(there)
    keys = sorted(ours.keys() | theirs.keys())
    pairs = (Difference(key, ours.get(key), theirs.get(key)) for key in keys)
    return tuple(pair for pair in pairs if canonical(pair.here) != canonical(pair.there))
