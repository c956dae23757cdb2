"""Which run a store holds, and whether a broker continues it."""

import pytest

from stageline.broker.control.messages import StopRun
from stageline.broker.coordinator.run import OtherRun, run_of
from support.conversation import PLAN, Conversation


@pytest.fixture
def talk() -> Conversation:
    """A run that has just begun: both workers are there."""
    talk = Conversation()
    talk.join(0), talk.join(1)
    return talk


def test_a_store_gives_its_unfinished_run_and_forgets_an_ended_one_unless_asked_for_it(talk: Conversation):
    assert run_of(talk.store, PLAN, "run-2", b"") == "run-1"
    talk.send(b"train", StopRun("enough"))
    assert run_of(talk.store, PLAN, "run-1", b"") == "run-1"
    assert "outcome" in talk.store.load().facts
    assert run_of(talk.store, PLAN, "run-2", b"") == "run-2"
    assert set(talk.store.load().facts) == {"run"}


def test_a_store_with_an_unfinished_run_of_another_plan_is_not_overwritten(talk: Conversation):
    with pytest.raises(OtherRun, match=r"holds run run-1 of another plan \(digest dddddddddddd, now eeeeeeeeeeee\)"):
        run_of(talk.store, "e" * 64, "run-2", b"")
