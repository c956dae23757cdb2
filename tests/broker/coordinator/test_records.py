"""Knowledge of a broker that was killed and started again."""

import pytest

from stageline.broker.coordinator.run import RunPhase
from support.conversation import Conversation, name, report
from support.replacements import REPLACING, kill, reach, replacement, said, stops, talk_of, trims


@pytest.fixture
def talk() -> Conversation:
    return talk_of()


def test_a_restarted_broker_knows_checkpoint_snapshots_gaps_and_counts(talk: Conversation):
    reach(talk, 20)
    talk.send(name(0), said(1, stage=0, upto=40, snapshots=[(0, 40)]))
    talk.send(name(1), said(2, upto=37))
    kill(talk, 1, 101)
    again = Conversation(talk.store, now=talk.now + 3.0, terms=REPLACING)
    assert (again.core.run.phase, again.core.run.registry.missing) == (RunPhase.RUNNING, [1])
    assert again.core.run.ledger.finished == [40, 20]
    given = again.assigned(b"new", replacement(1, 201))
    assert (given.index, given.step) == (1, 20)
    again.send(b"new", said(given.incarnation, upto=40, snapshots=[(1, 40)]))
    assert trims(again.send(name(0), said(1, stage=0)) + again.after(1.0)) == [40]
    assert again.status()["restarts"] == 1


def test_a_replacement_whose_assignment_got_lost_with_the_broker_gets_its_place_again(talk: Conversation):
    kill(talk, 1, 101)
    given = talk.assigned(b"new", replacement(1, 201))
    again = Conversation(talk.store, now=talk.now + 3.0, terms=REPLACING)
    assert again.assigned(b"new", replacement(1, 201)) == given


def test_a_restarted_broker_restarts_the_deadline_for_a_replacement(talk: Conversation):
    kill(talk, 1, 101)
    again = Conversation(talk.store, now=talk.now + 1000.0, terms=REPLACING)
    for _ in range(50):
        again.send(name(0), report(0))
        assert stops(again.after(1.0)) == []
