"""In which keys two plans of one run disagree, and which keys may differ between its machines."""

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import shown
from .tables import canonical, flat

# What neither decides the computation nor which worker does which part of it. The digest leaves it out.
UNCOUNTED = frozenset(
    {
        "run.name",
        "run.dir",
        "run.log_every",
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


@dataclass(frozen=True, slots=True)
class Difference:
    """A dotted key that two plans set differently; None where a plan does not set it."""

    key: str
    here: object
    there: object

    def __str__(self) -> str:
        here, there = ("not set" if value is None else shown(value) for value in (self.here, self.there))
        return f"{self.key}: {here} here, {there} there"


def differences(here: Mapping[str, object], there: Mapping[str, object]) -> tuple[Difference, ...]:
    """What `Plan.digest` counts and two plans, given as `Plan.as_mapping`, set differently, in order of the keys."""
    ours, theirs = flat(here), flat(there)
    keys = sorted((ours.keys() | theirs.keys()) - UNCOUNTED)
    pairs = (Difference(key, ours.get(key), theirs.get(key)) for key in keys)
    return tuple(pair for pair in pairs if canonical(pair.here) != canonical(pair.there))
