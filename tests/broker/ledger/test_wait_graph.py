"""Chains of waiting workers, from one that lacks a message to the root."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.broker.control.messages import Report
from stageline.broker.control.records import Event, Lack, StepRecord, Wait
from stageline.broker.coordinator.waiting import why_waiting
from stageline.broker.keys.access import OPEN, Access
from stageline.broker.keys.register import KeyRegister
from stageline.broker.ledger.wait_graph import LATE, QUIET
from stageline.pipeline.program import Evaluation, NormClipping, Per, Program, Queue, TiedStages
from stageline.pipeline.schedule import make_schedule
from support.conversation import TERMS, Conversation
from support.worker_line import M, WorkerLine, computing, hang


@pytest.fixture
def line() -> WorkerLine:
    return WorkerLine()


class Noise:
    """A feature of the user's, with two queues that nothing in the broker knows."""

    def lower(self, program: Program) -> Program:
        return program.with_queues(
            [
                Queue(name="noise-0", producer=3, consumer=0, source=3, target=0, per=Per.STEP),
                Queue(name="scale-1", producer=2, consumer=1, source=2, target=1, count=M),
            ]
        )


def test_a_queue_of_a_feature_that_the_broker_does_not_know_is_explained_to_the_root() -> None:
    line = WorkerLine([Noise()])
    line.says(0, "waits for noise-0 to run 0U of step 7", Wait("noise-0", 7, "0U", 7, 0.0))
    line.says(3, "3B5 of step 7", events=(computing(3, 7, 5, "backward"),), layer="layers.9")
    line.passes(3.0)
    assert line.why(stage="0")["text"] == (
        "stage 0 waits for the message of noise-0 of step 7 from stage 3 (worker w3, generation 1), "
        "which began 3B5 of step 7 3 s ago and has made no progress since; it is in layers.9"
    )
    line.has_finished(3, 0)
    line.says(0, "waits for noise-0 to run 0U of step 0", Wait("noise-0", 0, "0U", 0, 0.0))
    line.passes(3.0)
    assert line.why(stage="0")["root"]["cause"] == "on its way"  # type: ignore[index]


def test_room_and_messages_of_each_microbatch_of_a_queue_that_the_broker_does_not_know_are_explained() -> None:
    line = WorkerLine([Noise()])
    line.waits(1, "scale-1", 7, 5)
    line.lacks_room(2, "scale-1", 7, 6)
    line.says(0, "0F5 of step 7")
    line.passes(3.0)
    assert line.why(stage="1")["text"] == (
        "stage 1 waits for the message of scale-1 of step 7 microbatch 5 from stage 2 (worker w2, generation 1), "
        "which waits for room in scale-1 until stage 0 (worker w0, generation 1) makes progress, "
        "which began 0F5 of step 7 3 s ago and has made no progress since"
    )


def test_what_another_action_holds_up_is_named_by_that_action(line: WorkerLine):
    line.waits(1, "backward-1", 7, 5)
    line.says(2, "2F7 of step 7", events=(computing(2, 7, 7, "forward"),))
    line.passes(2.0)
    text = str(line.why(stage="1")["text"])
    assert text.endswith("(worker w2, generation 1), which began 2F7 of step 7 2 s ago and has made no progress since")


def test_between_replicas_it_is_the_step_and_the_microbatch_of_the_run_that_are_told():
    # The number was divided by how many messages of a step the queue carries: step 15 was told for step 7.
    line = WorkerLine(schedule=make_schedule("1f1b", ((0,), (1,), (2,), (3,)), M, shares=((1,), (1, 1), (1,))))
    line.waits(3, "forward-1.1", 7, 5, action="1.1F5")
    line.says(0, "0F5 of step 7", events=(computing(0, 7, 5, "forward"),))
    line.passes(2.0)
    text = "stage 1.1 waits for the activation of step 7 microbatch 5 from stage 0 (worker w0, generation 1), which"
    assert str(line.why(stage="3")["text"]).startswith(text)


@pytest.mark.parametrize("ahead", ["waits for them, too", "has made the update"])
def test_the_sums_of_a_replica_are_on_their_way_once_it_waits_for_those_of_the_others(ahead: str):
    # Two replicas between which the network fails were called a circle, which is a bug to report.
    line = WorkerLine(schedule=make_schedule("1f1b", ((0,), (1,), (2,), (3,)), M, shares=((1,), (1, 1), (1,))))
    line.says(1, "waits", Wait("sum-1.0-from-1.1", 0, "1.0U", 0, 0.0))
    if ahead == "has made the update":
        line.has_finished(3, 0)
        line.says(3, "1.1F1 of step 1")
    else:
        line.says(3, "waits", Wait("sum-1.1-from-1.0", 0, "1.1U", 0, 0.0))
    line.passes(3.0)
    facts = line.why(stage="1.0")
    assert facts["root"]["cause"] == "on its way"  # type: ignore[index]
    assert facts["text"] == (
        "stage 1.0 waits for the sum of the gradients of step 0 from stage 1.1 (worker w3, generation 1), "
        "which has put it; it has not arrived for 3.0 s"
    )


def test_the_sums_of_a_replica_that_waits_for_an_activation_are_not_on_their_way() -> None:
    line = WorkerLine(schedule=make_schedule("1f1b", ((0,), (1,), (2,), (3,)), M, shares=((1,), (1, 1), (1,))))
    line.says(1, "waits", Wait("sum-1.0-from-1.1", 7, "1.0U", 7, 0.0))
    line.waits(3, "forward-1.1", 7, 5, action="1.1F5")
    line.says(0, "0F5 of step 7", events=(computing(0, 7, 5, "forward"),))
    line.passes(2.0)
    text = "which waits for the activation of step 7 microbatch 5 from stage 0 (worker w0, generation 1), which took it"
    assert text in str(line.why(stage="1")["text"])


def test_a_message_that_was_put_and_does_not_arrive_is_on_its_way(line: WorkerLine):
    line.waits(1, "forward-1", 7, 5, action="1F5")
    line.says(0, "0F7 of step 7", events=(computing(0, 7, 5, "stashed"),))
    line.passes(3.0)
    facts = line.why(stage="1")
    assert facts["text"] == (
        "stage 1 waits for the activation of step 7 microbatch 5 from stage 0 (worker w0, generation 1), "
        "which has put it; it has not arrived for 3.0 s"
    )
    assert facts["root"]["cause"] == "on its way"  # type: ignore[index]


def test_gradients_of_shared_parameters_are_waited_for_across_the_stages_between() -> None:
    line = WorkerLine([TiedStages(((0, 3),))])
    wait = Wait("tied-0", 7 * M + 5, "0B5", 7, 0.0)
    line.says(0, "waits for backward-0 and tied-0 to run 0B5 of step 7", wait)
    line.says(3, "3B5 of step 7", events=(computing(3, 7, 5, "backward"),))
    line.passes(2.0)
    text = "stage 0 waits for the gradient of shared parameters of step 7 microbatch 5 from stage 3 (worker w3"
    assert str(line.why(stage="0")["text"]).startswith(text)


def test_the_total_of_shared_parameters_is_on_its_way_once_the_step_is_finished() -> None:
    line = WorkerLine([TiedStages(((0, 3),))])
    line.has_finished(0, 0)
    line.says(3, "waits for total-3 to run 3U of step 0", Wait("total-3", 0, "3U", 0, 0.0))
    line.says(0, "0F0 of step 1")
    line.passes(2.0)
    facts = line.why(stage="3")
    assert facts["root"]["cause"] == "on its way"  # type: ignore[index]
    text = "stage 3 waits for the gradient of shared parameters of step 0 from stage 0 (worker w0"
    assert str(facts["text"]).startswith(text)


def test_what_a_dead_worker_had_put_it_has_to_put_again(line: WorkerLine):
    line.waits(1, "forward-1", 7, 5, action="1F5")
    line.says(0, "0F7 of step 7", events=(computing(0, 7, 5, "stashed"),))
    line.passes(0.5)
    line.passes(QUIET + 1, 0)
    assert line.why(stage="1")["root"]["cause"] == "silent"  # type: ignore[index]


def test_a_circle_is_named(line: WorkerLine):
    line.waits(1, "forward-1", 7, 5), line.waits(0, "backward-0", 7, 1)
    line.passes(2.0)
    facts = line.why(stage="1")
    assert facts["root"]["cause"] == "circle"  # type: ignore[index]
    assert "a checked schedule cannot deadlock" in str(facts["action"])


def test_a_message_that_does_not_arrive_makes_no_circle(line: WorkerLine):
    """When a Redis server was gone, each of two workers waited for the other: that was called a circle."""
    line.says(0, "0F5 of step 7", events=(computing(0, 7, 5, "stashed"),))
    line.passes(0.5)
    line.waits(1, "forward-1", 7, 5), line.waits(0, "backward-0", 7, 5)
    line.passes(3.0)
    for stage in ("0", "1"):
        assert line.why(stage=stage)["root"]["cause"] == "on its way"  # type: ignore[index]


def test_reports_of_different_moments_make_no_circle(line: WorkerLine):
    """In a run of quick steps each of two workers was seen waiting for what the other had put a moment before: it was
    called a circle, to be reported."""
    line.waits(1, "forward-1", 7, 5), line.waits(0, "backward-0", 7, 1)
    line.passes(0.5)
    facts = line.why(stage="1")
    assert "circle" not in str(facts["text"])
    assert facts["action"] == "nothing: the run makes progress"


def test_without_any_reports_the_broker_is_the_cause(line: WorkerLine):
    hang(line, 0, 1, 2, 3)
    facts = line.why()
    assert facts["text"] == "the broker has received no report for 4 s"
    assert "the workers keep training without it" in str(facts["action"])


def test_a_message_may_be_on_its_way_for_a_moment(line: WorkerLine):
    line.waits(1, "forward-1", 7, 5, action="1F5")
    line.says(0, "0F7 of step 7", events=(computing(0, 7, 5, "stashed"),))
    line.passes(0.5)
    assert why_waiting(line.core.run, line.now, 1).chain.harmless
    line.passes(LATE)
    assert not why_waiting(line.core.run, line.now, 1).chain.harmless


def test_a_worker_with_several_stages_may_need_another_one_first():
    talk = Conversation(terms=replace(TERMS, schedule=make_schedule("1f1b", ((0, 2), (1,)), M)))
    for index in (0, 1):
        talk.join(index)
    wait = Wait("backward-0", 7 * M + 1, "0B1", 7, 0.0)
    talk.send(b"a", Report(1, 5, "waits for backward-0", 0.0, 0.0, waits=[wait]))
    talk.send(b"b", Report(2, 5, "waits", 0.0, 0.0, waits=[Wait("backward-1", 7 * M + 3, "1B3", 7, 0.0)]))
    text = why_waiting(talk.core.run, talk.now, 1).text
    assert text.startswith(
        "stage 1 waits for the gradient of step 7 microbatch 3 from stage 2 (worker-0, generation 1), "
        "whose worker first runs 0B1 of stage 0, which waits for the gradient of step 7 microbatch 1 from stage 1"
    )


def test_a_wait_for_room_leads_to_the_stage_that_does_not_get_on(line: WorkerLine):
    """It was taken for a hang: the worker that waited was the one to be given up."""
    line.lacks_room(1, "forward-2", 7, 5), line.waits(0, "backward-0", 7, 0)
    line.says(2, "2F1 of step 7", events=(computing(2, 7, 1, "forward"),), layer="layers.3")
    line.waits(3, "forward-3", 7, 1, action="3F1")
    line.passes(4.0)
    assert line.why(stage="0")["text"] == (
        "stage 0 waits for the gradient of step 7 microbatch 0 from stage 1 (worker w1, generation 1), "
        "which waits for room in forward-2 until stage 2 (worker w2, generation 1) makes progress, "
        "which began 2F1 of step 7 4 s ago and has made no progress since; it is in layers.3"
    )
    facts = line.why(stage="1")
    assert [(lack["stage"], lack["source"], lack["room"]) for lack in facts["chain"]] == [(1, 2, True)]  # type: ignore[attr-defined]
    assert facts["root"]["cause"] == "stuck"  # type: ignore[index]


def test_room_waits_for_the_stage_that_has_finished_least_not_for_the_consumer(line: WorkerLine):
    for stage in (0, 1, 2):
        line.has_finished(stage, 6)
    line.lacks_room(1, "forward-2", 7, 5), line.waits(2, "forward-2", 7, 5, action="2F5")
    line.says(3, "3B7 of step 6", events=(computing(3, 6, 7, "backward"),))
    line.passes(3.0)
    assert str(line.why(stage="2")["text"]).endswith(
        "from stage 1 (worker w1, generation 1), which waits for room in forward-2 until stage 3 (worker w3, "
        "generation 1) makes progress, which began 3B7 of step 6 3 s ago and has made no progress since"
    )


def test_a_circle_that_room_would_break_says_how_to_make_some(line: WorkerLine):
    line.lacks_room(1, "forward-2", 7, 5), line.waits(2, "forward-2", 7, 5, action="2F5")
    line.waits(0, "backward-0", 7, 0), line.waits(3, "forward-3", 7, 5, action="3F5")
    line.passes(3.0)
    facts = line.why(stage="1")
    assert facts["root"]["cause"] == "circle"  # type: ignore[index]
    assert "a larger queues.retain_bytes" in str(facts["action"])


_QUEUES = st.sampled_from(["forward-1", "forward-2", "backward-1", "evaluation-3", "norms-2", "backward-9", "x", "-1"])
_WAITS = st.builds(
    Wait, _QUEUES, st.integers(0, 99), st.just("1F3"), st.integers(0, 9), st.just(0.0), st.sampled_from(Lack)
)
_STATES = st.sampled_from(["forward", "stashed", "backward", "done"])


@given(st.data())
def test_whatever_is_reported_there_is_an_answer(data: st.DataObject):
    line = WorkerLine([Evaluation(), NormClipping()], restarts=1, snapshots=True)
    for index in range(4):
        waits = data.draw(st.lists(_WAITS, max_size=1))
        event = Event(index, data.draw(st.integers(0, 9)), data.draw(st.integers(0, 7)), data.draw(_STATES), 1000.0)
        trouble = data.draw(st.sampled_from(["", "Redis is away"]))
        line.says(index, data.draw(st.sampled_from(["1F3", "waits"])), *waits, events=(event,), trouble=trouble)
        if data.draw(st.booleans()):
            line.saying[index] = Report(index + 1, 9, "1U", 0.0, 0.0, [StepRecord(index, 3, b"")])
    line.passes(1.0)
    silent = data.draw(st.sets(st.integers(0, 3)))
    line.passes(data.draw(st.sampled_from([0.0, 2.0, 12.0])), *silent)
    facts = line.why()
    assert facts["text"]
    assert facts["action"]


@pytest.mark.parametrize(
    ("access", "said"),
    [(OPEN, "worker CONFIG --broker URL --index 0"), (Access(KeyRegister()), "worker CONFIG --join LINE --index 0")],
)
def test_an_empty_place_is_filled_by_the_line_of_a_broker_with_keys(access: Access, said: str) -> None:
    talk = Conversation(terms=replace(TERMS, access=access))
    assert said in why_waiting(talk.core.run, talk.now).action
