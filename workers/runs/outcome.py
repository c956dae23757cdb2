"""How a run on this machine ended."""

from dataclasses import dataclass
from typing import Any

Facts = dict[str, Any]  # the broker's answer to the query `status`: schema status/1


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """Exit code, the reason in words, and the broker's last status of the run."""

    code: int
    reason: str
    facts: Facts
