"""When a checkpoint is complete, and what of a lost worker does not count."""

import pytest

from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import Refused
from stageline.broker.ledger.checkpoint_tracker import CheckpointTracker
from support.conversation import TERMS, Conversation, hello, name
from support.replacements import kill, reach, replacement, said, talk_of, trims


@pytest.fixture
def talk() -> Conversation:
    return talk_of()


def test_a_checkpoint_is_announced_when_every_stage_has_its_snapshot(talk: Conversation):
    talk.send(name(0), said(1, stage=0, upto=20, snapshots=[(0, 20)]))
    talk.send(name(1), said(2, upto=20))
    assert trims(talk.after(1.0)) == []
    talk.send(name(1), said(2, upto=20, snapshots=[(1, 20)]))
    assert trims(talk.after(1.0)) == [20]
    assert talk.status()["checkpoint"] == 20


def test_a_checkpoint_waits_for_the_losses_before_it(talk: Conversation):
    talk.core.run.registry.members[1].counted.clear()  # the broker was restarted, and its records are a little old
    talk.send(name(0), said(1, stage=0, upto=20, snapshots=[(0, 20)]))
    talk.send(name(1), said(2, snapshots=[(1, 20)]))
    talk.send(name(1), said(2, upto=19))
    assert trims(talk.after(1.0)) == []
    talk.send(name(1), said(2, upto=20))
    assert trims(talk.after(1.0)) == [20]


def test_a_checkpoint_is_stored_before_it_is_announced(talk: Conversation):
    reach(talk, 20)
    kept = talk.store.load().facts["registry"]["checkpoints"]
    assert (kept["complete"], kept["newer"]) == (20, [[], []])


def test_the_newest_step_that_all_have_is_complete_whatever_came_in_between(talk: Conversation):
    talk.send(name(0), said(1, stage=0, upto=60, snapshots=[(0, 20), (0, 60), (0, 40)]))
    talk.send(name(1), said(2, upto=40, snapshots=[(1, 40)]))
    assert trims(talk.after(1.0)) == [40]
    talk.send(name(1), said(2, upto=60, snapshots=[(1, 20), (1, 60)]))
    assert trims(talk.after(1.0)) == [60]


def test_a_snapshot_of_a_stage_that_is_not_the_workers_counts_for_nothing(talk: Conversation):
    talk.send(name(0), said(1, stage=0, upto=20, snapshots=[(0, 20), (1, 20)]))
    talk.send(name(1), said(2, upto=20))
    assert trims(talk.after(1.0)) == []
    assert talk.status()["oddities"] == {"illegal": 1}


def test_a_missed_checkpoint_is_announced_after_the_next_hello(talk: Conversation):
    reach(talk, 20)
    talk.after(1.0)
    sends = talk.send(b"new socket", hello(1, incarnation=2, endpoint="ipc://1"))
    assert sends[-1] == (b"new socket", Trim(20))


def test_without_snapshots_queues_are_trimmed_to_what_all_have_finished():
    talk = talk_of(terms=TERMS)
    reach(talk, 20)
    assert trims(talk.after(1.0)) == [20]
    talk.send(name(0), said(1, stage=0, upto=23)), talk.send(name(1), said(2, upto=22))
    assert trims(talk.after(1.0)) == [22]
    assert talk.status()["checkpoint"] is None


def test_what_a_lost_worker_had_completes_no_checkpoint_of_its_replacement(talk: Conversation):
    talk.send(name(1), said(2, upto=20, snapshots=[(1, 20)]))
    kill(talk, 1, 101)
    talk.assigned(b"new", replacement(1, 201))
    talk.send(name(0), said(1, stage=0, upto=20, snapshots=[(0, 20)]))
    assert trims(talk.after(1.0)) == []
    talk.send(b"new", said(3, upto=20))
    assert trims(talk.after(1.0)) == []
    talk.send(b"new", said(3, upto=20, snapshots=[(1, 20)]))
    assert trims(talk.after(1.0)) == [20]


def test_a_snapshot_of_a_stale_incarnation_completes_nothing(talk: Conversation):
    kill(talk, 1, 101)
    talk.assigned(b"new", replacement(1, 201))
    talk.send(name(0), said(1, stage=0, upto=20, snapshots=[(0, 20)]))
    ((_, refused),) = talk.send(name(1), said(2, upto=20, snapshots=[(1, 20)]))
    assert isinstance(refused, Refused)
    assert refused.code == 1
    assert trims(talk.after(1.0)) == []
    assert talk.core.run.ledger.finished == [20, 0]


def test_no_step_is_awaited_after_a_stages_snapshots_are_forgotten():
    tracker = CheckpointTracker(0, [{40}, {40}])
    assert not tracker.advance(finished=39)
    assert tracker.awaits_steps
    tracker.forget([1])
    assert not tracker.awaits_steps
