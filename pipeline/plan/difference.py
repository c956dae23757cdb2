"""In what two plans of one run disagree, by name, so that nobody has to compare two digests by eye."""

from collections.abc import Mapping
from dataclasses import dataclass

from .refusal import shown
from .tables import canonical, flat
from .value import UNCOUNTED


@dataclass(frozen=True, slots=True)
class Difference:
    """A dotted key that two plans set differently; None where a plan does not set it."""

    key: str
    here: object
    there: object

    def __str__(self) -> str:
        return f"{self.key}: {_said(self.here)} here, {_said(self.there)} there"


def differences(here: Mapping[str, object], there: Mapping[str, object]) -> tuple[Difference, ...]:
    """What `Plan.digest` counts and two plans, given as `Plan.as_mapping`, set differently, in order of the keys."""
    ours, theirs = flat(here), flat(there)
    keys = sorted((ours.keys() | theirs.keys()) - UNCOUNTED)
    pairs = (Difference(key, ours.get(key), theirs.get(key)) for key in keys)
    return tuple(pair for pair in pairs if canonical(pair.here) != canonical(pair.there))


def _said(value: object) -> str:
    return "not set" if value is None else shown(value)
