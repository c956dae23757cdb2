"""Work of one worker: every instruction with its queues and the numbers of its messages."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from msgspec import structs

from stageline.pipeline.evaluation import Criterion, Rounds
from stageline.pipeline.program import (
    CacheUse,
    Instruction,
    Op,
    Per,
    Program,
    Queue,
    TiedStages,
    check_schedule,
    compile_program,
)
from stageline.pipeline.schedule import Action, Kind, forward_only, make_schedule
from stageline.workers.runtime.calls import Call, CallKind, Position, answers, instructions_of
from stageline.workers.runtime.plan_calls import PlanCalls
from support.programs import calls_of, queued_calls
from support.shapes import line, looped


def written(calls: PlanCalls, worker: int, start: int = 0) -> list[str]:
    return [f"{each} {told(calls.program, each)}" for each in calls.instructions(worker, start)]


def told(program: Program, each: Instruction) -> str:
    """The messages of an instruction: "forward-1 #2 -> forward-2 #2"."""

    def numbered(names: Sequence[str]) -> str:
        place = each.step, each.action.microbatch
        return " ".join(f"{name} #{program.queues[name].number(*place)}" for name in names) or "-"

    return f"{numbered(each.takes)} -> {numbered(each.gives)}"


def test_an_instruction_names_its_queues_and_the_numbers_of_its_messages() -> None:
    assert written(calls_of(make_schedule("gpipe", line(3), 2), 2), 1, start=1) == [
        "1F0 of step 1 forward-1 #2 -> forward-2 #2",
        "1F1 of step 1 forward-1 #3 -> forward-2 #3",
        "1B0 of step 1 backward-1 #2 -> backward-0 #2",
        "1B1 of step 1 backward-1 #3 -> backward-0 #3",
        "1U of step 1 - -> -",
    ]


def test_gradients_of_what_stages_share_are_numbered_by_microbatch_and_sums_by_step() -> None:
    calls = calls_of(make_schedule("gpipe", line(2), 2), 2, passes=[TiedStages(((0, 1),))])
    assert written(calls, 0, start=1)[2:] == [
        "0B0 of step 1 backward-0 #2 tied-0 #2 -> -",
        "0B1 of step 1 backward-0 #3 tied-0 #3 -> -",
        "0U of step 1 - -> total-1 #1",
    ]
    assert written(calls, 1, start=1)[4:] == [
        "1B1 of step 1 - -> backward-0 #3",
        "1T1 of step 1 - -> tied-0 #3",
        "1U of step 1 total-1 #1 -> -",
    ]
    calls = calls_of(make_schedule("gpipe", line(2), 2), 2, passes=[TiedStages(((0, 1),), "step")])
    assert [written(calls, worker, start=1)[-2:] for worker in (0, 1)] == [
        ["0S of step 1 subtotal-0 #1 -> -", "0U of step 1 - -> total-1 #1"],
        ["1S of step 1 - -> subtotal-0 #1", "1U of step 1 total-1 #1 -> -"],
    ]


EVALUATES = calls_of(make_schedule("gpipe", line(2), 1), 3, Rounds(steps=3, batches=2, every=2))


def test_evaluation_runs_forward_only_after_the_steps_it_is_due() -> None:
    assert [str(each) for each in EVALUATES.instructions(1) if each.action.kind is Kind.FORWARD] == [
        *("1F0 of step 0", "1F0 of step 1"),
        *("1F0 of evaluated batch 0", "1F0 of evaluated batch 1"),
        "1F0 of step 2",
        *("1F0 of evaluated batch 2", "1F0 of evaluated batch 3"),
    ]


def test_evaluation_has_queues_of_its_own_and_goes_as_far_ahead_as_the_next_stage_grants() -> None:
    assert [*EVALUATES.program.queues] == ["forward-1", "backward-0", "evaluation-1"]
    evaluates = [each for each in EVALUATES.instructions(0) if each.evaluates]
    assert all(each.gives == ("evaluation-1",) == (each.op.awaits,) and not each.counted for each in evaluates)


@pytest.mark.parametrize("start", range(4))
def test_a_worker_that_begins_at_a_checkpoint_evaluates_what_comes_after_it(start: int) -> None:
    every = list(EVALUATES.instructions(1))
    rest = list(EVALUATES.instructions(1, start))
    assert rest == [each for each in every if EVALUATES.step_at(each) >= start]
    first = next(each for each in rest if each.evaluates)
    assert EVALUATES.position(start) == Position(start, evaluations=first.step, rounds=first.step // 2)


def test_a_run_that_may_end_early_has_a_queue_of_verdicts_to_each_worker_but_the_last() -> None:
    calls = calls_of(make_schedule("gpipe", line(3), 1), 3, EVALUATES.rounds, criterion=Criterion(patience=2))
    assert [*calls.program.queues][-2:] == ["verdict-0", "verdict-1"]
    assert [(each.producer, each.source, each.per) for each in calls.program.inbound(1)[-1:]] == [(2, 2, Per.ROUND)]
    assert [calls.position(step).rounds for step in (2, 3)] == [0, 1]


def test_every_hop_has_a_queue_for_activations_and_one_for_gradients_that_are_wanted() -> None:
    queues = compile_program(make_schedule("1f1b", line(3), 2, first_trainable=1)).queues
    assert {name: (queue.source, queue.target) for name, queue in queues.items()} == {
        "forward-1": (0, 1),
        "forward-2": (1, 2),
        "backward-1": (2, 1),
    }


def test_only_stages_that_run_forward_only_are_ahead_of_another_worker_without_bound() -> None:
    assert compile_program(make_schedule("1f1b", line(4), 2)).ahead == set()
    frozen = make_schedule("1f1b", line(4), 2, first_trainable=2)
    assert compile_program(frozen).ahead == {"forward-1", "forward-2"}
    together = make_schedule("1f1b", ((0, 1), (2,), (3,)), 2, first_trainable=2)
    assert compile_program(together).ahead == {"forward-2"}
    assert compile_program(forward_only(line(3), 2)).ahead == set()


def test_a_frozen_stage_sends_no_gradient_and_gets_none() -> None:
    calls = calls_of(make_schedule("gpipe", line(3), 1, first_trainable=1), 1)
    assert written(calls, 1)[1] == "1B0 of step 0 backward-1 #0 -> -"


def test_a_call_of_a_script_brings_the_instructions_of_a_step_or_of_an_evaluated_batch() -> None:
    calls = queued_calls(make_schedule("gpipe", line(2), 1))

    def called(kind: CallKind) -> list[str]:
        call = Call(kind, 9, step=4, evaluation=3)
        return [f"{each} {told(calls.program, each)}" for each in instructions_of(call, calls.program, 0)]

    assert called(CallKind.TRAIN) == [
        "0F0 of step 4 - -> forward-1 #4",
        "0B0 of step 4 backward-0 #4 -> -",
        "0U of step 4 - -> -",
    ]
    assert called(CallKind.EVALUATE) == called(CallKind.PREDICT) == ["0F0 of evaluated batch 3 - -> evaluation-1 #3"]
    assert called(CallKind.STATE) == called(CallKind.LOAD) == called(CallKind.STOP) == []


def test_the_script_is_one_more_place_that_calls_and_takes_replies() -> None:
    program = queued_calls(make_schedule("gpipe", line(2), 1)).program
    assert program.script == 2
    assert [queue.name for queue in program.inbound(2)] == ["reply-0", "reply-1", "loss-1"]
    assert [queue.name for queue in program.outbound(2)] == ["call-0", "call-1"]
    assert [queue.name for queue in program.outbound(1)] == ["backward-0", "reply-1", "loss-1"]
    assert [queue.name for queue in answers(program, CallKind.TRAIN)] == ["loss-1"]
    assert [queue.name for queue in answers(program, CallKind.STATE)] == ["reply-1", "reply-0"]


def test_frozen_first_stages_only_end_their_steps_once_what_leaves_them_is_there() -> None:
    """Worker 0 has frozen stages alone: it learns from stage 2 how far the run is. Worker 1 has another one."""
    schedule = make_schedule("gpipe", ((0, 1), (2,)), 2, first_trainable=2)
    calls = calls_of(schedule, 2, Rounds(2, 1), replayed_from=1)
    assert written(calls, 0)[4:8] == [
        "0U of step 0 - -> -",
        "1U of step 0 - -> -",
        "1U of step 1 replayed-1 #1 -> replayed-0 #1",
        "0U of step 1 replayed-0 #1 -> -",
    ]
    assert written(calls, 1, start=1)[:-2] == [
        "2F0 of step 1 - -> -",
        "2F1 of step 1 - -> -",
        "2B0 of step 1 - -> -",
        "2B1 of step 1 - -> replayed-1 #1",
        "2U of step 1 - -> -",
    ]


def test_a_worker_that_also_trains_ends_the_steps_of_its_frozen_stage_as_its_list_says() -> None:
    calls = calls_of(make_schedule("gpipe", ((0, 2), (1,)), 1, first_trainable=1), 3, replayed_from=1)
    assert not any(queue.flow == "replayed" for queue in calls.program.queues.values())
    assert [str(each) for each in calls.instructions(0, start=2)] == [
        "2F0 of step 2",
        "2B0 of step 2",
        "0U of step 2",
        "2U of step 2",
    ]


def test_a_forward_of_the_first_stage_that_trains_says_whether_its_input_is_kept_or_replayed() -> None:
    calls = calls_of(make_schedule("gpipe", line(3), 1, first_trainable=1), 2, replayed_from=1)
    kept, replayed = (next(calls.instructions(1, start=step)) for step in (0, 1))
    assert (kept.op.marks, replayed.op.marks) == ((CacheUse.KEPT,), (CacheUse.REPLAYED,))
    assert not any(each.op.marks for worker in (0, 2) for each in calls.instructions(worker))


@pytest.mark.parametrize(
    ("name", "first", "within"),
    [("evaluation-1", 0, [0, 2, 9]), ("replayed-0", 2, [2, 2, 9]), ("forward-1", 0, [0, 2, 2])],
)
def test_queues_are_trimmed_within_the_steps_that_use_them(name: str, first: int, within: list[int]) -> None:
    schedule = make_schedule("gpipe", line(2), 1, first_trainable=1)
    queue = calls_of(schedule, 12, Rounds(12, 2), replayed_from=2).program.queues[name]
    assert queue.begins == first
    assert [queue.within(floor) for floor in (0, 2, 9)] == within


def test_rounds_between_steps_run_all_stages_whether_these_are_replayed_or_not() -> None:
    calls = calls_of(make_schedule("gpipe", line(2), 1, first_trainable=1), 3, Rounds(3, 1, 1), replayed_from=1)
    assert [str(each) for each in calls.instructions(0)] == [
        *("0F0 of step 0", "0U of step 0", "0F0 of evaluated batch 0"),
        *("0U of step 1", "0F0 of evaluated batch 1"),
        *("0U of step 2", "0F0 of evaluated batch 2"),
    ]
    assert all(each.takes == ("evaluation-1",) for each in calls.instructions(1) if each.evaluates)


def test_a_schedule_that_runs_backwards_in_descending_order_numbers_its_gradients_so() -> None:
    ascending = make_schedule("gpipe", line(2), 3)

    def turned(actions: Sequence[Action]) -> tuple[Action, ...]:
        return (*actions[:3], *actions[5:2:-1], *actions[6:])

    schedule = replace(ascending, workers=tuple(map(turned, ascending.workers)), descends=True)
    check_schedule(schedule, steps=2)
    assert written(calls_of(schedule, 2), 0, start=1)[3:6] == [
        "0B2 of step 1 backward-0 #3 -> -",
        "0B1 of step 1 backward-0 #4 -> -",
        "0B0 of step 1 backward-0 #5 -> -",
    ]


def test_a_message_number_tells_its_step_and_its_microbatch() -> None:
    rng = Random(1)
    for queue in calls_of(make_schedule("1f1b", line(4), 5, shares=((1,), (1, 1), (1,))), 2).program.queues.values():
        step, microbatch = rng.randrange(100), rng.choice(queue.microbatches)
        assert queue.at(queue.number(step, microbatch)) == (step, microbatch)


def test_the_digest_follows_from_operations_and_queues() -> None:
    program = compile_program(make_schedule("gpipe", looped(2, 2), 2))
    assert program.digest == compile_program(make_schedule("gpipe", looped(2, 2), 2)).digest
    other = program.requeued(lambda queue: structs.replace(queue, window=7))
    assert other.digest != program.digest
    assert compile_program(make_schedule("1f1b", looped(2, 2), 2)).digest != program.digest


def test_a_kind_that_the_core_does_not_know_is_an_operation_like_any_other() -> None:
    def added(stages: tuple[int, ...]) -> list[Op]:
        return [program.made(Action("X", stage)) for stage in stages]

    program = compile_program(make_schedule("gpipe", line(2), 1))
    program = program.before_updates(added)
    assert [op.name for op in program.step[1]] == ["1F0", "1B0", "1X", "1U"]
    assert any(each.action.kind == "X" for each in check_schedule(program).timed)


@pytest.mark.parametrize("name", ["", "side ways", "forward-1\n", "vorwärts-1", 65 * "f"])
def test_a_queue_has_a_name_that_can_travel(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 64 printable ASCII characters"):
        Queue(name=name, producer=0, consumer=1)
