"""What a worker does: every instruction with its queues and the number of its messages."""

from dataclasses import replace

import pytest

from stageline.pipeline.evaluation import Criterion, Rounds
from stageline.pipeline.schedule import Kind, make_schedule
from stageline.workers.runtime.calls import Call, CallKind, Position
from stageline.workers.runtime.program.program import Program
from stageline.workers.runtime.program.queue_keys import queue_key, verdict_key
from stageline.workers.runtime.program.replays import CacheUse
from support.shapes import line


def written(program: Program, worker: int, start: int = 0) -> list[str]:
    return [
        f"{each} #{each.number} {' '.join(map(str, each.takes)) or '-'} -> {each.gives or '-'}"
        for each in program.instructions(worker, start)
    ]


def test_an_instruction_names_its_queues_and_the_number_of_its_messages() -> None:
    program = Program(make_schedule("gpipe", line(3), 2), 2)
    assert written(program, 1, start=1) == [
        "1F0 of step 1 #2 forward-1 -> forward-2",
        "1F1 of step 1 #3 forward-1 -> forward-2",
        "1B0 of step 1 #2 backward-1 -> backward-0",
        "1B1 of step 1 #3 backward-1 -> backward-0",
        "1U of step 1 #2 - -> -",
    ]


def test_gradients_of_what_stages_share_are_numbered_by_microbatch_and_sums_by_step() -> None:
    program = Program(make_schedule("gpipe", line(2), 2, ties=((0, 1),)), 2)
    assert written(program, 0, start=1)[2:] == [
        "0B0 of step 1 #2 backward-0 tied-0 -> -",
        "0B1 of step 1 #3 backward-0 tied-0 -> -",
        "0U of step 1 #1 - -> total-1",
    ]
    assert written(program, 1, start=1)[4:] == [
        "1B1 of step 1 #3 - -> backward-0",
        "1T1 of step 1 #3 - -> tied-0",
        "1U of step 1 #1 total-1 -> -",
    ]
    assert program.queues.tied_sources == {queue_key("tied-0"): 1, queue_key("total-1"): 0}
    assert program.queues.producers(1) == {queue_key("forward-1"): 0, queue_key("total-1"): 0}
    program = Program(make_schedule("gpipe", line(2), 2, ties=((0, 1),), tied="step"), 2)
    assert [written(program, worker, start=1)[-2:] for worker in (0, 1)] == [
        ["0S of step 1 #1 subtotal-0 -> -", "0U of step 1 #1 - -> total-1"],
        ["1S of step 1 #1 - -> subtotal-0", "1U of step 1 #1 total-1 -> -"],
    ]


EVALUATES = Program(make_schedule("gpipe", line(2), 1), 3, Rounds(steps=3, batches=2, every=2))


def test_evaluation_runs_forward_only_after_the_steps_it_is_due() -> None:
    assert [f"{each} #{each.number}" for each in EVALUATES.instructions(1) if each.action.kind is Kind.FORWARD] == [
        *("1F0 of step 0 #0", "1F0 of step 1 #1"),
        *("1F0 of evaluated batch 0 #0", "1F0 of evaluated batch 1 #1"),
        "1F0 of step 2 #2",
        *("1F0 of evaluated batch 2 #2", "1F0 of evaluated batch 3 #3"),
    ]


def test_evaluation_has_queues_of_its_own_and_goes_as_far_ahead_as_the_next_stage_grants() -> None:
    assert [str(key) for key in EVALUATES.queues.all] == ["forward-1", "backward-0", "evaluation-1"]
    evaluates = [each for each in EVALUATES.instructions(0) if each.evaluates]
    assert all(str(each.gives) == "evaluation-1" and each.needs_credit and not each.counted for each in evaluates)
    assert EVALUATES.queues.table[queue_key("evaluation-1")].source == 0


@pytest.mark.parametrize("start", range(4))
def test_a_worker_that_begins_at_a_checkpoint_evaluates_what_comes_after_it(start: int) -> None:
    every = list(EVALUATES.instructions(1))
    rest = list(EVALUATES.instructions(1, start))
    assert rest == [each for each in every if EVALUATES.step_at(each) >= start]
    first = next(each for each in rest if each.evaluates)
    assert EVALUATES.position(start) == Position(start, evaluations=first.step, rounds=first.step // 2)


def test_a_run_that_may_end_early_has_a_verdict_after_each_round_but_the_last() -> None:
    program = replace(EVALUATES, schedule=make_schedule("gpipe", line(3), 1), criterion=Criterion(patience=2))
    assert [str(key) for key in program.queues.all[-2:]] == ["verdict-0", "verdict-1"]
    assert [each for each in written(program, 1) if "V" in each] == ["1V of round 0 of evaluation #0 verdict-1 -> -"]
    assert [each for each in written(program, 2) if "V" in each] == [
        "2V of round 0 of evaluation #0 - -> verdict-0",
        "2V of round 0 of evaluation #0 - -> verdict-1",
        "2V of round 0 of evaluation #0 - -> -",
    ]
    assert written(program, 0).index("0V of round 0 of evaluation #0 verdict-0 -> -") == 2 * 3 + 2
    assert all(program.step_at(each) == 2 for each in program.instructions(2) if each.name == "2V")
    told = program.queues.table[verdict_key(1)]
    assert (told.producer, told.consumer) == (2, 1)
    assert [program.position(step).rounds for step in (2, 3)] == [0, 1]


def test_a_frozen_stage_sends_no_gradient_and_gets_none() -> None:
    program = Program(make_schedule("gpipe", line(3), 1, first_trainable=1), 1)
    assert [str(key) for key in program.queues.all] == ["forward-1", "forward-2", "backward-1"]
    assert written(program, 1)[1] == "1B0 of step 0 #0 backward-1 -> -"


def test_a_call_of_a_script_brings_the_instructions_of_a_step_or_of_an_evaluated_batch() -> None:
    program = Program(make_schedule("gpipe", line(2), 1), 1, scripted=True)
    assert written(program, 1) == []

    def called(kind: CallKind) -> list[str]:
        call = Call(kind, 9, step=4, evaluation=3)
        return [f"{each} #{each.number} -> {each.gives or '-'}" for each in program.instructions_of(call, 0)]

    assert called(CallKind.TRAIN) == [
        "0F0 of step 4 #4 -> forward-1",
        "0B0 of step 4 #4 -> -",
        "0U of step 4 #4 -> -",
    ]
    assert called(CallKind.EVALUATE) == called(CallKind.PREDICT) == ["0F0 of evaluated batch 3 #3 -> evaluation-1"]
    assert called(CallKind.STATE) == called(CallKind.LOAD) == called(CallKind.STOP) == []


def test_frozen_first_stages_only_end_their_steps_once_what_leaves_them_is_there() -> None:
    """Worker 0 has frozen stages alone: it learns from stage 2 how far the run is. Worker 1 has another one."""
    schedule = make_schedule("gpipe", ((0, 1), (2,)), 2, first_trainable=2)
    program = Program(schedule, 2, Rounds(2, 1), replayed_from=1)
    assert written(program, 0)[4:] == [
        "0U of step 0 #0 - -> -",
        "1U of step 0 #0 - -> -",
        "1U of step 1 #1 replayed-1 -> replayed-0",
        "0U of step 1 #1 replayed-0 -> -",
        "0F0 of evaluated batch 0 #0 - -> evaluation-1",
        "1F0 of evaluated batch 0 #0 evaluation-1 -> evaluation-2",
        "0F1 of evaluated batch 0 #1 - -> evaluation-1",
        "1F1 of evaluated batch 0 #1 evaluation-1 -> evaluation-2",
    ]
    assert written(program, 1, start=1)[:-2] == [
        "2F0 of step 1 #2 - -> -",
        "2F1 of step 1 #3 - -> -",
        "2B0 of step 1 #2 - -> -",
        "2B1 of step 1 #3 - -> replayed-1",
        "2U of step 1 #1 - -> -",
    ]


def test_a_worker_that_also_trains_ends_the_steps_of_its_frozen_stage_as_its_list_says() -> None:
    program = Program(make_schedule("gpipe", ((0, 2), (1,)), 1, first_trainable=1), 3, replayed_from=1)
    assert [str(key) for key in program.queues.all if key.flow == "replayed"] == []
    assert [str(each) for each in program.instructions(0, start=2)] == [
        "2F0 of step 2",
        "2B0 of step 2",
        "0U of step 2",
        "2U of step 2",
    ]


def test_a_forward_of_the_first_stage_that_trains_says_whether_its_input_is_kept_or_replayed() -> None:
    program = Program(make_schedule("gpipe", line(3), 1, first_trainable=1), 2, replayed_from=1)
    kept, replayed = (next(program.instructions(1, start=step)) for step in (0, 1))
    assert (kept.cache, replayed.cache) == (CacheUse.KEPT, CacheUse.REPLAYED)
    assert (kept.inputs, replayed.inputs) == (kept.takes, kept.takes)
    assert all(each.cache is None for worker in (0, 2) for each in program.instructions(worker))


def test_where_nothing_is_replayed_a_program_is_as_without() -> None:
    schedule = make_schedule("gpipe", line(3), 1, first_trainable=1)
    assert Program(schedule, 2, replayed_from=2).queues.all == Program(schedule, 2).queues.all


def test_rounds_between_steps_run_all_stages_whether_these_are_replayed_or_not() -> None:
    schedule = make_schedule("gpipe", line(2), 1, first_trainable=1)
    program = Program(schedule, 3, Rounds(3, 1, 1), replayed_from=1)
    assert [str(each) for each in program.instructions(0)] == [
        *("0F0 of step 0", "0U of step 0", "0F0 of evaluated batch 0"),
        *("0U of step 1", "0F0 of evaluated batch 1"),
        *("0U of step 2", "0F0 of evaluated batch 2"),
    ]
    evaluated = [each for each in program.instructions(1) if each.evaluates]
    assert [(each.number, each.takes, each.cache) for each in evaluated] == [
        (number, (queue_key("evaluation-1"),), None) for number in range(3)
    ]
