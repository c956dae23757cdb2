"""Settings of a stage that are plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SharedParameters:
    """What a stage shares with others. Each parameter is called by its name in the first stage that uses it.

    `own` are those that this stage uses, with their names here; `above` those whose gradients come from a later stage,
    and whose totals go there; `below` those whose gradients go to an earlier one. One that only passes through is in
    both, and not the stage's own.
    """

    own: Mapping[str, str] = field(default_factory=dict)
    above: frozenset[str] = frozenset()
    below: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.above or self.below)
