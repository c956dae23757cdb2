"""Attempts on a microbatch that were lost with their worker."""

from typing import Any

import msgspec
import pytest

from stageline.broker.control.messages import Answer, Ask
from stageline.broker.control.records import Event
from stageline.broker.coordinator.coordinator import Coordinator
from support.conversation import Conversation, name
from support.replacements import REPLACING, kill, reach, replacement, said, talk_of


@pytest.fixture
def talk() -> Conversation:
    return talk_of()


def attempts(talk: Conversation, step: int, microbatch: int, stage: int = 1) -> list[dict[str, Any]]:
    """Answer of `story` about lost work."""
    ((_, told),) = talk.send(b"me", Ask("story", {"step": str(step), "microbatch": str(microbatch)}))
    assert isinstance(told, Answer)
    return told.facts["stages"][stage]["attempts"]  # type: ignore[index, no-any-return, call-overload]


def test_the_story_of_a_microbatch_has_the_lost_attempts(talk: Conversation):
    reach(talk, 20)
    begun = [Event(1, 22, 0, "done", talk.now), Event(1, 22, 1, "forward", talk.now)]
    talk.send(name(1), msgspec.structs.replace(said(2, stage=1, upto=22), events=begun))
    kill(talk, 1, 101)
    assert [attempts(talk, *place) for place in [(19, 0), (22, 2), (23, 0)]] == [[], [], []]
    assert attempts(talk, 21, 0, stage=0) == []
    assert [attempts(talk, *place)[0]["state"] for place in [(20, 0), (21, 3), (22, 0), (22, 1)]] == [
        "done",
        "done",
        "done",
        "forward",
    ]
    talk.assigned(b"new", replacement(1, 201))
    talk.send(b"new", msgspec.structs.replace(said(3, stage=1, upto=21), events=[Event(1, 22, 1, "forward", talk.now)]))
    kill(talk, 1, 201, status=3)
    [first, second] = attempts(talk, 22, 1)
    assert (first["name"], first["generation"], first["why"]) == ("worker-1", 1, "was killed by SIGKILL")
    assert (second["name"], second["generation"], second["why"]) == ("worker-1", 2, "exited with status 3")
    talk.core = Coordinator(REPLACING, talk.store, "run-1", talk.now)
    assert attempts(talk, 22, 1) == [first, second]


@pytest.mark.slow
def test_the_newest_losses_returns_and_checkpoints_are_kept_with_their_times_by_a_broker_started_again(
    talk: Conversation,
) -> None:
    def milestones() -> list[tuple[object, ...]]:
        ((_, told),) = talk.send(b"me", Ask("history"))
        assert isinstance(told, Answer)
        found: Any = told.facts["milestones"]
        assert [each["at"] for each in found] == sorted(each["at"] for each in found)
        return [(each["what"], each["step"], each["worker"], each["why"]) for each in found]

    reach(talk, 20)
    kill(talk, 1, 101)
    talk.assigned(b"new", replacement(1, 201))
    talk.send(b"new", said(3, stage=1, upto=21))
    known = [
        ("checkpoint", 20, None, ""),
        ("loss", 20, 1, "was killed by SIGKILL"),
        ("return", 20, 1, "computes again"),
    ]
    assert milestones() == known
    for step in range(21, 400):
        talk.send(name(0), said(1, stage=0, upto=step, snapshots=[(0, step)]))
        talk.send(b"new", said(3, stage=1, upto=step, snapshots=[(1, step)]))
    talk.core = Coordinator(REPLACING, talk.store, "run-1", talk.now)
    *events, restart = [each for each in milestones() if each[0] != "checkpoint"]
    assert events == known[1:]
    assert restart[:1] == ("broker",)
    newest = [each for each in milestones() if each[0] == "checkpoint"]
    assert newest == [("checkpoint", step, None, "") for step in range(400 - len(newest), 400)]
    assert 100 <= len(newest) < 200
