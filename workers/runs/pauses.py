"""Pauses of a run for people: as a status tells them, and as news of a run that is followed."""

from collections.abc import Iterator
from datetime import datetime

from .folder import Facts

GO_ON = "`stageline run resume` has it go on"


def paused_text(paused: Facts | None) -> str:
    """Return "paused by ada since 2026-01-31 10:15:00, before step 7", of what a status says; "" without a pause."""
    if paused is None:
        return ""
    at, why = f"{datetime.fromtimestamp(paused['since']):%F %T}", f" ({paused['reason']})" if paused["reason"] else ""
    if paused["in_effect"]:
        return f"paused by {paused['by']} since {at}, before step {paused['step']}{why}: {GO_ON}"
    where = "the end of its step" if paused["step"] is None else f"step {paused['step']}"
    return f"to be paused, as {paused['by']} asked at {at}{why}: not every worker has come to {where}"


class PauseNews:
    """Source of lines about pauses, from successive statuses."""

    def __init__(self) -> None:
        """Begin without a pause."""
        self._told = False

    def lines(self, facts: Facts) -> Iterator[str]:
        """Yield a line once the run is paused, and one once it goes on."""
        paused = facts.get("paused")
        if paused is not None and paused["in_effect"] and not self._told:
            self._told = True
            yield f"the run is {paused_text(paused)}"
        elif paused is None and self._told:
            self._told = False
            yield "the run goes on after a pause"
