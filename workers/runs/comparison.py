"""Comparison of two runs by their records: plans key by key, pace, losses by step, weights, lost workers."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from stageline.pipeline.addresses import masked
from stageline.pipeline.plan.difference import differences
from stageline.pipeline.plan.tables import canonical, flat

from .account import RunAccount, account_of, losses_of
from .records import RecordedRun, explained

BATCHES = "batches.json"
_SHOWN = 8  # rows of losses
_OWN = "broker.url"  # a socket in a folder for temporary files, which every run of `train` has


class Decides(StrEnum):
    """Effect of a key of a plan."""

    WEIGHTS = "weights"  # what is computed
    LAYOUT = "layout"  # which worker does what, and in which order
    NEITHER = "neither"


class KeyDifference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Key of which two plans have different values.

    Attributes:
        decides: "weights" if the key says what is computed, "layout" if it says which worker does what and in which
            order, "neither" for the rest.
        a: Value of run A; None if its plan does not set the key.
        b: Value of run B, likewise.
    """

    key: str
    decides: str
    a: Any
    b: Any


class LossAt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Losses of two runs in one step; None for a step without rows, or a loss that is no finite number."""

    step: int
    a: float | None
    b: float | None


class LossComparison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Losses of two runs, by step.

    Attributes:
        compared: Number of steps whose losses both runs know.
        first: First of these steps whose losses differ in any bit; None if none does.
        largest: Step with the largest difference; None if no losses differ.
        rows: Losses from the step before the first difference to the last common step, eight at most.
    """

    compared: int
    first: LossAt | None
    largest: LossAt | None
    rows: list[LossAt]


class RunDifference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two runs side by side.

    Attributes:
        a: Run A.
        b: Run B.
        plan: Keys in which the plans differ; None if a run has no plan yet.
        same_data: True if the checksums of the first batches are equal; None if one of the runs has none.
        losses: Losses by step.
        same_weights: True if both have finished with the same weights, bit for bit; None if one has not finished.
    """

    a: RunAccount
    b: RunAccount
    plan: list[KeyDifference] | None
    same_data: bool | None
    losses: LossComparison
    same_weights: bool | None


def difference_of(a: RecordedRun, b: RecordedRun) -> RunDifference:
    """Return two runs side by side. Raises `RecordsDamaged`."""
    accounts = []
    for run in (a, b):
        with explained(str(run.folder)):
            accounts.append(account_of(run))
    of_a, of_b = accounts
    digests = (of_a.weights_sha256, of_b.weights_sha256)
    return RunDifference(
        a=of_a,
        b=of_b,
        plan=None if a.plan is None or b.plan is None else plan_differences(a.plan, b.plan),
        same_data=_same_data(a.folder, b.folder),
        losses=compare_losses(losses_of(a), losses_of(b)),
        same_weights=None if None in digests else digests[0] == digests[1],
    )


def plan_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[KeyDifference]:
    """Return the keys in which two recorded plans differ: those that decide the weights first.

    Addresses are without passwords. Sockets that each run makes for itself are no difference.
    """
    ours, theirs = flat(a), flat(b)
    decides = {
        each.key: Decides.LAYOUT if each.of_layout else Decides.WEIGHTS
        for each in differences(a, b)
        if each.key in ours or each.key in theirs
    }
    found = [
        KeyDifference(
            key=key,
            decides=str(decides.get(key, Decides.NEITHER)),
            a=_shown(ours.get(key)),
            b=_shown(theirs.get(key)),
        )
        for key in sorted(ours.keys() | theirs.keys())
        if canonical(ours.get(key)) != canonical(theirs.get(key)) and not _own(key, ours.get(key), theirs.get(key))
    ]
    return sorted(found, key=lambda each: [*Decides].index(Decides(each.decides)))


def compare_losses(a: Mapping[int, float | None], b: Mapping[int, float | None]) -> LossComparison:
    """Return the comparison of losses by step; they are equal if all their bits are."""
    common = [LossAt(step=step, a=a[step], b=b[step]) for step in sorted(a.keys() & b.keys())]
    differ = [place for place, each in enumerate(common) if each.a != each.b]
    if not differ:
        return LossComparison(compared=len(common), first=None, largest=None, rows=common[-1:])
    return LossComparison(
        compared=len(common),
        first=common[differ[0]],
        largest=max((common[place] for place in differ), key=_apart),
        rows=_spread(common[max(0, differ[0] - 1) :]),
    )


def _apart(each: LossAt) -> float:
    return float("inf") if each.a is None or each.b is None else abs(each.a - each.b)


def _spread(rows: Sequence[LossAt]) -> list[LossAt]:
    """Return the first two rows, and others at distances that double, up to the last."""
    if len(rows) <= _SHOWN:
        return list(rows)
    last = len(rows) - 1
    places = {0, 1, last, *(round((last - 1) ** (part / (_SHOWN - 3))) + 1 for part in range(1, _SHOWN - 2))}
    return [rows[place] for place in sorted(places)][:_SHOWN]


def _same_data(a: Path, b: Path) -> bool | None:
    try:
        return (a / BATCHES).read_bytes() == (b / BATCHES).read_bytes()
    except OSError:
        return None


def _shown(value: object) -> object:
    return masked(value) if isinstance(value, str) else value


def _own(key: str, a: object, b: object) -> bool:
    return key == _OWN and any(str(each).startswith("ipc://") for each in (a, b))
