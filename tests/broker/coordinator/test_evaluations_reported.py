"""The broker stores what rounds of evaluation found, once, before it confirms the report."""

from collections.abc import Sequence
from dataclasses import replace

from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import Answer, Ask, Confirmed, FromBroker
from stageline.broker.control.records import EvaluationRecord, Lack, RunLength, Wait
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.ledger.evaluations import stored_in
from stageline.pipeline.evaluation import Criterion
from support.conversation import SNAPSHOTS, Conversation, finished, name, report, steps

TERMS = replace(SNAPSHOTS, criterion=Criterion("loss"))
ROUNDS = [EvaluationRecord(step, 8, loss, {"accuracy": 0.5}) for step, loss in ((3, 0.9), (6, 0.4), (9, 0.7))]


def conversation() -> Conversation:
    talk = Conversation(terms=TERMS)
    talk.join(0), talk.join(1)
    return talk


def test_a_round_is_stored_before_its_report_is_confirmed_and_only_once():
    talk = conversation()
    for number in (1, 1, 2):  # the first confirmation was lost
        ((_, confirmed),) = talk.send(name(1), report(1, number=number, evaluations=ROUNDS[:2]))
        assert confirmed == Confirmed(number)
        assert list(stored_in(talk.store.load().facts)) == ROUNDS[:2]
    lines = [line for line in talk.core.run.events.infos if line.startswith("evaluation")]
    assert lines == [
        "evaluation after step 3: loss 0.9, accuracy 0.5, the best so far",
        "evaluation after step 6: loss 0.4, accuracy 0.5, the best so far",
    ]


def test_a_restarted_broker_knows_the_rounds_of_before():
    talk = conversation()
    talk.send(name(1), report(1, evaluations=ROUNDS))
    again = Coordinator(TERMS, talk.store, "run-1", talk.now)
    assert list(again.run.evaluations) == ROUNDS
    assert (again.run.evaluations.standing().best.step, again.run.evaluations.metrics) == (6, {"accuracy": 0.5})


def test_a_round_that_finds_something_else_the_second_time_ends_the_run():
    talk = conversation()
    talk.send(name(1), report(1, evaluations=ROUNDS))
    talk.send(name(1), report(1, evaluations=[EvaluationRecord(6, 8, 0.41, {"accuracy": 0.5})]))
    assert talk.status()["phase"] == "failed"
    assert "the evaluation after step 6 found loss 0.41" in talk.status()["reason"]


def test_what_no_worker_can_have_found_is_left_out_and_counted():
    talk = conversation()
    talk.core.run.evaluations.criterion = Criterion("accuracy")
    talk.send(name(0), report(0, evaluations=ROUNDS))
    talk.send(name(1), report(1, evaluations=[EvaluationRecord(3, 8, 0.9)]))
    assert talk.status()["evaluations"] == []
    assert talk.status()["oddities"] == {"illegal": 4}


def test_a_metric_that_is_no_number_is_a_warning():
    talk = conversation()
    talk.send(name(1), report(1, evaluations=[EvaluationRecord(3, 8, 0.9, {"accuracy": float("nan")})]))
    assert talk.core.run.events.warnings == [
        "evaluation after step 3: accuracy is nan, which is not better than any number"
    ]


KEEPS = replace(TERMS, keeps_best=True, evaluates_every=3, length=RunLength(12, 2))


def checkpoint(talk: Conversation, step: int, rounds: Sequence[EvaluationRecord] = ()) -> list[FromBroker]:
    """Both stages have come to `step` and have its snapshot; what the first is then told."""
    for index in range(2):
        done = steps(index, *range(step))
        found = list(rounds) if index else []
        talk.send(name(index), report(index, number=step, steps=done, snapshots=[(index, step)], evaluations=found))
    return [message for sender, message in talk.after(0.2) if sender == name(0)]


def test_an_announced_checkpoint_names_the_best_round_before_it():
    talk = Conversation(terms=KEEPS)
    talk.join(0), talk.join(1)
    assert checkpoint(talk, 3) == [Trim(3)]
    assert checkpoint(talk, 6, ROUNDS[:1]) == [Trim(6, best=3)]
    assert checkpoint(talk, 9, ROUNDS[1:]) == [Trim(9, best=6)]  # round 9 is known and does not count yet
    assert checkpoint(talk, 12) == [Trim(12, best=6)]


def test_nothing_is_announced_before_all_rounds_before_it_are_known():
    """A broker that had lost its records would let the best snapshots go."""
    talk = Conversation(terms=KEEPS)
    talk.join(0), talk.join(1)
    assert checkpoint(talk, 9) == []
    assert checkpoint(talk, 9, ROUNDS[:1]) == []
    assert checkpoint(talk, 9, ROUNDS[:2]) == [Trim(9, best=6)]


def test_a_snapshot_of_an_evaluated_step_is_due():
    for step, count in ((3, 0), (4, 1)):
        talk = Conversation(terms=replace(KEEPS, snapshot_every=10))
        talk.join(0), talk.join(1)
        talk.send(name(0), report(0, steps=steps(0, *range(step)), snapshots=[(0, step)], training_steps=12))
        assert talk.core.run.events.anomalies["illegal"] == count


STOPS = replace(KEEPS, keeps_best=False, criterion=Criterion("loss", patience=1))


def test_a_run_that_ends_early_has_finished_with_its_reason_and_its_last_step():
    talk = Conversation(terms=STOPS)
    talk.join(0), talk.join(1)
    checkpoint(talk, 9, ROUNDS)
    for index in range(2):
        talk.send(name(index), report(index, training_steps=12))
        talk.send(name(index), finished(index))
    status = talk.status()
    reason = "stopped early after step 9: loss was not better than 0.4 (step 6) in 1 evaluation"
    assert (status["phase"], status["reason"], status["code"]) == ("finished", reason, 0)
    assert (status["training_steps"], status["stopped_early"], status["best"]["step"]) == (9, reason, 6)


def test_a_run_whose_last_round_was_not_better_has_done_all_its_steps():
    talk = Conversation(terms=replace(STOPS, length=RunLength(9, 2)))
    talk.join(0), talk.join(1)
    checkpoint(talk, 9, ROUNDS)
    for index in range(2):
        talk.send(name(index), finished(index))
    assert (talk.status()["reason"], talk.status()["stopped_early"]) == ("all steps are done", None)


def test_a_snapshot_of_the_last_step_may_come_before_the_round_after_it():
    talk = Conversation(terms=replace(STOPS, snapshot_every=10))
    talk.join(0), talk.join(1)
    talk.send(name(0), report(0, steps=steps(0, *range(9)), snapshots=[(0, 9)], training_steps=12))
    assert talk.status()["oddities"] == {}


def why(talk: Conversation) -> str:
    ((_, answer),) = talk.send(b"me", Ask("why"))
    assert isinstance(answer, Answer)
    return str(answer.facts["text"])


def test_a_worker_that_waits_for_a_verdict_says_of_whom():
    talk = conversation()
    wait = Wait("verdict-0", 3, "0V", 3, since=talk.now)
    talk.send(name(0), report(0, now="waits for verdict-0 to run 0V of round 3 of evaluation", waits=[wait]))
    talk.send(name(1), report(1, now="1F0 of evaluated batch 7"))
    assert why(talk).startswith(
        "worker 0 (stage 0) waits for the verdict on round 3 of evaluation from stage 1 (worker-1, generation 1)"
    )


def test_a_worker_that_waits_for_credit_in_evaluation_says_of_whom():
    talk = conversation()
    wait = Wait("evaluation-1", 9, "0F1", 4, since=talk.now, lacks=Lack.CREDIT)
    talk.send(name(0), report(0, now="waits for credit in evaluation-1 to run 0F1", waits=[wait]))
    talk.send(name(1), report(1, now="1F0 of evaluated batch 1"))
    assert why(talk).startswith("stage 0 waits for room in evaluation-1 until stage 1 (worker-1, generation 1) makes")
