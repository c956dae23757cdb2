"""Waits for the beginning of a run that its script is about to leave: before it, nothing that was called is begun."""

import threading
from time import monotonic

from stageline.broker.coordinator.run import RunPhase
from stageline.workers.script.calls.news import ask

BEGIN_TIMEOUT = 5.0  # seconds, as the workers have for the steps themselves
_LOOK = 0.05  # seconds between two questions


def await_beginning(broker: str, ended: threading.Event) -> None:
    """Returns once all workers have joined the run at `broker`, the run has `ended`, or `BEGIN_TIMEOUT` has passed."""
    deadline = monotonic() + BEGIN_TIMEOUT
    while not ended.is_set() and monotonic() < deadline:
        facts = ask(broker, "status")
        if facts is None or facts["phase"] != RunPhase.WAITING:
            return
        ended.wait(_LOOK)
