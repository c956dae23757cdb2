"""Answers of a broker that a screen of `top` is made from, without a broker's process."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from stageline.broker.control.messages import Answer, Ask, Refused
from stageline.broker.coordinator.queries import answer
from stageline.workers.control.client import BrokerUnreachable
from support.conversation import Conversation

Facts = dict[str, Any]
PANELS = ("status", "queues", "timetable", "microbatches", "why")


def asked(talk: Conversation, what: str, **of: str) -> Facts:
    """Answers of the broker of a conversation; raises `ValueError` as a client does."""
    found = answer(talk.core.run, Ask(what, of), talk.now)
    if isinstance(found, Refused):
        raise ValueError(found.reason)
    assert isinstance(found, Answer)
    return {"schema": found.schema, **found.facts}


def answers(talk: Conversation) -> Mapping[str, Facts]:
    """Its answers to the questions of all panels."""
    return {what: asked(talk, what) for what in PANELS}


class AskedBroker:
    """Stands for the connection to a broker, which may be away; counts what it was asked."""

    def __init__(self, talk: Conversation) -> None:
        self.talk = talk
        self.away = ""
        self.questions: list[str] = []
        self.breaks: Callable[..., Facts] | None = None

    @contextmanager
    def __call__(self) -> Iterator[Any]:
        if self.away:
            raise BrokerUnreachable(self.away)
        yield self.breaks or self._ask

    def _ask(self, what: str, **of: str) -> Facts:
        self.questions.append(what)
        if self.away:
            raise BrokerUnreachable(self.away)
        return asked(self.talk, what, **of)


def ran(worker: int, start: float, end: float, kind: str = "F", microbatch: int = 0) -> Facts:
    """An action of a worker, which has the stage of its number."""
    return {"kind": kind, "stage": worker, "microbatch": microbatch, "worker": worker, "start": start, "end": end}


def idle(worker: int, cause: str, start: float, end: float, stage: int | None = None) -> Facts:
    """A stretch without an action."""
    return {"worker": worker, "cause": cause, "stage": stage, "start": start, "end": end}


def step(number: int, actions: list[Facts], waits: list[Facts]) -> Facts:
    """A step of the answer `timetable`, planned as it was measured."""
    start = min(each["start"] for each in actions)
    planned = [{**each, "start": each["start"] - start, "end": each["end"] - start} for each in actions]
    return {
        "step": number,
        "schedule": "1f1b",
        "start": start,
        "seconds": max(each["end"] for each in actions) - start,
        "actions": actions,
        "idle": waits,
        "planned": planned,
    }


def timetable(workers: int, microbatches: int = 4) -> Facts:
    """The answer `timetable`: one step in which each worker runs forwards, then backwards."""
    actions = [
        ran(worker, 100.0 + (worker + each + 1) * 0.1, 100.1 + (worker + each + 1) * 0.1, "F", each)
        for worker in range(workers)
        for each in range(microbatches)
    ]
    waits = [idle(worker, "schedule", 100.1, 100.1 + worker * 0.1, worker - 1) for worker in range(1, workers)]
    found = step(7, actions, waits)
    return {"schema": "timetable/1", "run": "run-1", "step": 7, "actions": actions, "steps": [found], "clocks": []}
