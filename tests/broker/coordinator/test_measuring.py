"""The broker's answer for monitoring systems: it agrees with its other answers, and tells numbers alone."""

import json

import msgspec
import pytest

from stageline.broker.control.measures import RunMeasures
from stageline.broker.control.messages import Answer, Ask, Exited
from stageline.broker.control.queue_counts import Depth, Intake
from support.conversation import SNAPSHOTS, Conversation, finished, name, report, steps

PUT = Depth(1, 2, 5, 4096, 0.5, put=41, sent=40, arrived=38, granted=44, put_bytes=9000, resent=2)
TAKEN = Intake(received=39, taken=37, granted=45, duplicates=3, damaged=1, lost=2)


def joined(**terms: object) -> Conversation:
    talk = Conversation(**terms)  # type: ignore[arg-type]
    talk.join(0), talk.join(1)
    return talk


def asked(talk: Conversation, what: str) -> dict:
    ((_, answer),) = talk.send(b"me", Ask(what))
    assert isinstance(answer, Answer), answer
    return answer.facts


def measured(talk: Conversation) -> RunMeasures:
    facts = asked(talk, "measures")
    json.dumps(facts, allow_nan=False)
    return msgspec.convert(facts, RunMeasures)


def test_queues_are_as_the_answer_about_queues_has_them():
    talk = joined()
    talk.send(name(0), report(0, puts={"forward-1": PUT}))
    talk.send(name(1), report(1, takes={"forward-1": TAKEN}))
    rows = {row["queue"]: row for row in asked(talk, "queues")["queues"]}
    found = {each.queue: each for each in measured(talk).queues}
    assert found.keys() == rows.keys()
    one, row = found["forward-1"], rows["forward-1"]
    for field in ("put", "taken", "ready", "in_flight", "retained", "bytes", "credit_used", "credit_limit", "resent"):
        assert getattr(one, field) == row[field], field
    assert (one.put_bytes, one.duplicates, one.damaged, one.lost, one.oldest) == (9000, 3, 1, 2, 0.5)
    assert found["backward-0"].put is None


def test_steps_and_their_times_are_counted():
    talk = joined()
    talk.send(name(1), report(1, steps=steps(1, 0, 1, loss=0.5)))
    assert measured(talk).steps == 0
    talk.now += 3.0
    talk.send(name(0), report(0, steps=steps(0, 0, 1)))
    talk.now += 2.0
    found = measured(talk)
    assert (found.phase, found.steps, found.finished, found.loss, found.stalled) == ("running", 2, 2, 0.5, 2.0)
    assert sum(found.took) == 2
    assert len(found.took) == len(found.bounds) + 1
    assert [(each.stage, each.worker, each.steps) for each in found.stages] == [("0", 0, 2), ("1", 1, 2)]
    assert found.stages[0].computed == 2.0 * len(talk.core.run.config.schedule.workers[0])


def test_before_any_worker_has_come_all_is_unknown():
    found = measured(Conversation())
    assert (found.phase, found.steps, found.stalled, found.queues, found.stages) == ("waiting", 0, None, [], [])
    assert [(each.present, each.heard) for each in found.workers] == [(False, None), (False, None)]


def test_a_lost_worker_is_seen_and_its_recovery_counted():
    talk = joined(terms=SNAPSHOTS)
    talk.send(name(1), report(1, actions=1))
    talk.send(b"train", Exited(1, 101, -9))
    talk.after(1.0)
    lost = measured(talk)
    assert (lost.recovering, lost.recoveries) == (1, 0)
    assert [(each.present, each.losses) for each in lost.workers] == [(True, 0), (False, 1)]
    talk.join(1)
    talk.now += 2.0
    incarnation = talk.core.run.registry.members[1].incarnation
    talk.send(name(1), msgspec.structs.replace(report(1, actions=1), incarnation=incarnation))
    found = measured(talk)
    assert (found.recovering, found.recoveries) == (0, 1)
    assert found.recovery_seconds >= 2.0
    assert [(each.present, each.losses) for each in found.workers] == [(True, 0), (True, 1)]


def test_texts_of_workers_are_told_as_numbers():
    talk = joined()
    talk.send(name(0), report(0, fault="cannot write /home/eve/secret: disk full", memory=2**20))
    talk.send(name(1), report(1, trouble="the server at 10.0.0.4 does not answer", clock=(0.5, 0.1)))
    text = json.dumps(asked(talk, "measures"))
    first, second = measured(talk).workers
    assert (first.faulty, first.cut_off, first.memory) == (True, False, 2**20)
    assert (second.faulty, second.cut_off, second.ahead) == (False, True, 0.5)
    for secret in ("secret", "10.0.0.4", "desk", "worker-0", "ipc:"):
        assert secret not in text


def test_a_loss_that_is_no_number_is_no_number_in_json_either():
    talk = joined()
    talk.send(name(0), report(0, steps=steps(0, 0)))
    talk.send(name(1), report(1, steps=steps(1, 0, loss=float("nan"))))
    assert measured(talk).loss is None


@pytest.mark.parametrize("over", [True, False])
def test_a_run_that_is_over_does_not_stall(over: bool):
    talk = joined()
    for index in range(2):
        talk.send(name(index), report(index, steps=steps(index, 0), training_steps=1))
        if over:
            talk.send(name(index), finished(index))
    talk.after(0.5)
    assert (measured(talk).stalled is None) == over
