"""One worker's loop over queues in memory, with an executor that computes nothing."""

from collections.abc import Callable, Sequence

import pytest

from stageline.broker.control.records import EvaluationRecord
from stageline.broker.queues.memory import MemoryQueues
from stageline.pipeline.evaluation import Criterion, Rounds
from stageline.pipeline.program import Instruction
from stageline.pipeline.schedule import Kind, make_schedule
from stageline.pipeline.tree import Tree
from stageline.workers.process.in_process import Stuck, take_turns
from stageline.workers.runtime.loop import WorkerLoop
from stageline.workers.runtime.machine import AwaitCredit
from stageline.workers.runtime.plan_calls import NO_ROUNDS
from support.programs import calls_of, queue_named, with_windows
from support.shapes import line

STEPS, MICROBATCHES = 3, 2


class Echo:
    """An executor: what it gives names the instruction."""

    def __init__(self) -> None:
        self.loss: float | None = 0.5
        self.gradient_norm: float | None = 2.0
        self.done: list[str] = []

    def carry_out(self, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        self.done.append(str(instruction))
        return None if instruction.action.kind is Kind.UPDATE else str(instruction)

    def evaluated(self, step: int) -> EvaluationRecord:
        return EvaluationRecord(step, 7, 0.25, {"accuracy": 1.0})


@pytest.fixture
def queues():
    queues = MemoryQueues("run")
    yield queues
    queues.close()


def loops(
    queues: MemoryQueues,
    start: int = 0,
    rounds: Rounds = NO_ROUNDS,
    criterion: Criterion | None = None,
    keep: Callable[[int], object] | None = None,
) -> list[WorkerLoop]:
    program = calls_of(make_schedule("1f1b", line(2), MICROBATCHES), STEPS, rounds, criterion=criterion)
    names = {"run": "run", "incarnation": 1, "start": start}
    keeps = [keep or (lambda step: None), lambda step: None]
    return [WorkerLoop(program, each, Echo(), queues, **names, keep=keeps[each]) for each in range(2)]


def test_two_workers_in_turn_run_their_programs_to_the_end(queues: MemoryQueues) -> None:
    first, last = loops(queues)
    take_turns([first, last], lambda loop: loop.finished)
    assert [record.step for record in last.progress.steps] == [0, 1, 2]
    assert [(record.loss, record.norm) for record in last.progress.steps] == [(0.5, 2.0)] * 3
    assert [(record.loss, record.norm) for record in first.progress.steps] == [(None, None)] * 3
    assert (first.doing, first.step) == ("finished", None)


def test_the_last_stage_tells_what_each_round_of_evaluation_found(queues: MemoryQueues) -> None:
    first, last = loops(queues, rounds=Rounds(STEPS, 2, every=2))
    take_turns([first, last], lambda loop: loop.finished)
    assert [record.step for record in last.progress.steps] == [0, 1, 2]
    assert [record.step for record in last.progress.evaluations] == [2, 3]
    assert first.progress.evaluations == []


def test_a_worker_in_a_round_of_evaluation_has_done_the_steps_before_it(queues: MemoryQueues) -> None:
    first, _ = loops(queues, start=2, rounds=Rounds(STEPS, 2, every=2))
    assert first.step == 2
    assert first.poll(0)
    assert (first.doing, first.step) == ("0F1 of evaluated batch 0 waits for credit in evaluation-1", 2)
    assert first.progress.is_after(2, 0)


def test_in_evaluation_a_stage_is_ahead_as_far_as_the_next_one_grants() -> None:
    program = calls_of(make_schedule("1f1b", line(2), 1), 1, Rounds(1, batches=9))
    queues = MemoryQueues("run")
    first, last = (WorkerLoop(program, each, Echo(), queues, run="run", incarnation=1, start=1) for each in range(2))
    while first.poll(0):
        pass
    assert first.doing == "0F0 of evaluated batch 4 waits for credit in evaluation-1"
    take_turns([first, last], lambda loop: loop.finished)
    queues.close()


def test_a_stage_that_runs_forward_only_is_ahead_as_far_as_the_next_one_grants() -> None:
    calls = calls_of(make_schedule("1f1b", line(2), MICROBATCHES, first_trainable=1), STEPS)
    program, queues = with_windows(calls, lambda queue: 3), MemoryQueues("run")
    first, last = (WorkerLoop(program, each, Echo(), queues, run="run", incarnation=1) for each in range(2))
    while first.poll(0):
        pass
    assert first.doing == "0F1 of step 1 waits for credit in forward-1"
    assert queues.outbound(queue_named("forward-1")).depth().ready == 3
    assert isinstance(first.progress.lacking, AwaitCredit)
    last.poll(0)
    assert first.poll(0)
    take_turns([first, last], lambda loop: loop.finished)
    assert [record.step for record in first.progress.steps] == list(range(STEPS))
    queues.close()


def test_no_worker_begins_a_step_before_the_verdict_on_the_evaluation_before_it(queues: MemoryQueues) -> None:
    kept: list[int] = []
    first, last = loops(queues, rounds=Rounds(STEPS, 1, every=1), criterion=Criterion(patience=1), keep=kept.append)
    take_turns([first, last], lambda loop: loop.step == 1)
    while first.poll(0):
        pass
    assert first.doing == "waits for the verdict on round 0 of evaluation"
    assert first.step == 1
    take_turns([first, last], lambda loop: loop.finished)
    assert [record.step for record in last.progress.evaluations] == [1, 2]  # the second is not better: 0.25 again
    assert [record.step for record in first.progress.steps] == [0, 1]
    assert kept == [2]


def test_workers_that_wait_for_each_other_are_stuck_and_say_for_what(queues: MemoryQueues) -> None:
    _, last = loops(queues)
    with pytest.raises(Stuck, match="1F0 of step 0 waits for message 0 of forward-1"):
        take_turns([last], lambda loop: loop.finished)


def test_a_loop_begins_at_the_step_of_its_checkpoint(queues: MemoryQueues) -> None:
    first, _ = loops(queues, start=2)
    assert first.step == 2
    assert (first.progress.complete, first.progress.finished) == (2, {0: 2})


def test_between_two_turns_it_is_attended_to_only_when_that_was_asked_for(queues: MemoryQueues) -> None:
    program = calls_of(make_schedule("gpipe", ((0, 1),), MICROBATCHES), STEPS)
    loop = WorkerLoop(program, 0, Echo(), queues, run="run", incarnation=1)
    attended: list[int | None] = []

    def on_step(stage: int, step: int, loss: float | None) -> None:
        if (stage, step) == (1, 1):
            loop.attend()  # as another thread, or a signal, would

    loop.run(lambda: attended.append(loop.step), on_step)
    assert attended == [0, 2]  # before the first turn in any case
    assert loop.progress.over


def test_what_is_carried_out_may_be_more_than_the_executor_does(queues: MemoryQueues) -> None:
    program, executor, seen = calls_of(make_schedule("gpipe", ((0, 1),), MICROBATCHES), 1), Echo(), []

    def carry_out(instruction: Instruction, received: Sequence[Tree]) -> Tree:
        seen.append(list(received))
        return executor.carry_out(instruction, received)

    loop = WorkerLoop(program, 0, executor, queues, carry_out=carry_out, run="run", incarnation=1)
    take_turns([loop], lambda loop: loop.finished)
    assert len(executor.done) == len(seen) == 4 * MICROBATCHES + 2
    assert ["0F1 of step 0"] in seen
