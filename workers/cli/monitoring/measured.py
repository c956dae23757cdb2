"""A run's broker, as it is asked by threads of `train` or `broker` that hand its numbers to monitoring systems."""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

import msgspec

from stageline.broker.control.measures import RunMeasures
from stageline.workers.control.questions import Questions

FRESH = 1.0  # seconds for which an answer serves all who ask
PATIENCE = 2.0  # seconds for the broker to answer: Prometheus waits for ten

AskBroker = Callable[[str], Mapping[str, Any] | None]
"""Returns the facts of the broker's answer to a question, such as "measures"; None if it does not answer."""
Monitoring = Callable[[Path, AskBroker], AbstractContextManager[None]]
"""Returns a context in which the run in a folder is shown to monitoring systems."""


def asked_by(run: Path) -> AskBroker:
    """Return a function that asks the broker of the run in the folder `run`, as its file there names it."""
    from stageline.workers.keys.keyring import pair_towards  # takes longer than a command that only asks
    from stageline.workers.runs.folder import read_broker_url
    from stageline.workers.script.calls.news import ask

    def asked(what: str) -> Mapping[str, Any] | None:
        url = read_broker_url(run)
        facts = None if url is None else ask(url, what, pair_towards(url, os.environ))
        return None if facts is None else {name: each for name, each in facts.items() if name != "schema"}

    return asked


def asked_here(questions: Questions) -> AskBroker:
    """Return a function that asks the broker in this process."""

    def asked(what: str) -> Mapping[str, Any] | None:
        try:
            return questions.ask(what, PATIENCE)
        except (TimeoutError, ValueError):  # it is not answered in time, or refused
            return None

    return asked


class CachedMeasures:
    """A run's measures, for any number of threads: they are asked for once in `FRESH` seconds."""

    def __init__(self, ask: AskBroker) -> None:
        """Start without any; `ask` asks the broker."""
        self._ask = ask
        self._lock = Lock()
        self._known: RunMeasures | None = None
        self._newest: RunMeasures | None = None
        self._until = float("-inf")

    def finish(self) -> None:
        """Note that the run has finished, whose broker answers no more: the newest measures are those of its end."""
        with self._lock:
            self._until = float("inf")
            if self._newest is not None:
                self._known = msgspec.structs.replace(self._newest, phase="finished", stalled=None)

    def __call__(self) -> RunMeasures | None:
        """Return the measures; None if the broker does not answer."""
        with self._lock:
            if monotonic() >= self._until:
                facts = self._ask("measures")
                self._known = None if facts is None else msgspec.convert(facts, RunMeasures)
                self._newest = self._known or self._newest
                self._until = monotonic() + FRESH
            return self._known
