"""Waits of a compute loop, with their causes, as they go into the records of its steps."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from stageline.broker.control.records import EvaluationRecord
from stageline.broker.control.sqlite_store import SqliteStore
from stageline.broker.ledger.times import TimedWait, WaitCause, timed_actions, timed_waits, totals
from stageline.broker.queues.memory import MemoryQueues
from stageline.pipeline.evaluation import Rounds
from stageline.pipeline.plan import read_plan
from stageline.pipeline.program import Instruction
from stageline.pipeline.schedule import make_schedule
from stageline.pipeline.tree import Tree
from stageline.workers.process.in_process import run_memory, take_turns
from stageline.workers.runs import folder as runs
from stageline.workers.runtime.idle import MOST_WAITS, CallWait
from stageline.workers.runtime.job import prepare
from stageline.workers.runtime.loop import WorkerLoop
from stageline.workers.runtime.machine import Take
from stageline.workers.runtime.progress import Progress
from support import reference
from support.programs import calls_of, with_windows
from support.shapes import line

MICROBATCHES = 3
FOLDER = Path(reference.__file__).parent


def test_each_wait_of_a_step_is_recorded_with_its_cause_and_the_stage_that_it_was_for() -> None:
    calls = calls_of(make_schedule("gpipe", line(2), 1), 1)
    progress = Progress.of(calls, 1, now=0.0)
    forward, backward, update = calls.instructions(1)
    progress.waiting_for_call(CallWait("call 0 of the script"), 0.0)
    progress.called_to(None, 1.0)
    progress.waiting(Take("forward-1", forward))
    progress.computing(forward, 3.0)
    progress.drew(0.5)
    progress.done(forward, 4.0)
    progress.computing(backward, 4.0)
    progress.lacks_room(Take("backward-0", backward), 6.0)
    progress.done(backward, 7.0)
    progress.computing(update, 7.00001)  # too short a wait
    progress.done(update, 8.0)
    progress.closed(1, 0, None)
    progress.saved(9.0)
    (record,) = progress.steps
    at = [instruction.op.action for instruction in (forward, backward, update)]
    assert timed_waits(record) == [
        TimedWait(WaitCause.SCRIPT, None, 0.0, 1.0, at[0]),
        TimedWait(WaitCause.MESSAGE, 0, 1.0, 3.0, at[0]),
        TimedWait(WaitCause.DATA, None, 3.0, 3.5, at[0]),
        TimedWait(WaitCause.ROOM, 0, 6.0, 7.0, at[2]),
    ]
    assert [each[1:] for each in timed_actions(record)] == [(3.0, 4.0), (4.0, 6.0), (7.00001, 8.0)]


def test_what_follows_a_step_is_recorded_with_the_next_one() -> None:
    calls = calls_of(make_schedule("gpipe", line(1), 1), 2)
    progress = Progress.of(calls, 0, now=0.0)
    now = 0.0
    for instruction in calls.instructions(0):
        progress.computing(instruction, now)
        progress.done(instruction, now := now + 1.0)
        if instruction.op.action.kind == "U":
            progress.closed(0, instruction.step, None)
            progress.saved(now := now + 0.25)
            progress.evaluated(now := now + 0.5)
            progress.evaluated(now := now + 0.5)
    first, second = progress.steps
    assert timed_waits(first) == []
    waits = [(each.cause, each.start, each.end) for each in timed_waits(second)]
    assert waits == [(WaitCause.DISK, 3.0, 3.25), (WaitCause.EVALUATION, 3.25, 4.25)]


@pytest.mark.usefixtures("one_thread")
def test_the_records_of_a_run_have_its_waits(tmp_path: Path) -> None:
    plan = read_plan(FOLDER / "tied" / "stageline.toml", environment={})
    outcome = run_memory(prepare(plan), "run", tmp_path)
    assert outcome.code == 0, outcome.reason
    store = SqliteStore(tmp_path / runs.STORE)
    records = [store.record(stage, step) for stage in range(plan.make_schedule().copies) for step in range(4)]
    store.close()
    causes = {wait.cause for record in records if record is not None for wait in timed_waits(record)}
    assert WaitCause.MESSAGE in causes


class Settable:
    """A clock that a test sets forward."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Still:
    """An executor that computes nothing, in no time."""

    loss = 0.5
    gradient_norm = None
    learning_rates = (0.1,)
    rows = 4

    def carry_out(self, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        return None

    def evaluated(self, step: int) -> EvaluationRecord:
        return EvaluationRecord(step, 7, 0.25, {})


def recorded_waits(loop: WorkerLoop, clock: Settable, saves: float) -> list[TimedWait]:
    """The waits in the records of a loop whose steps are each followed by so many seconds of saving."""
    loop.run(lambda: None, lambda stage, step, loss: clock.sleep(saves))
    return [wait for record in loop.progress.steps for wait in timed_waits(record)]


def test_the_time_in_which_a_step_is_saved_is_a_wait_for_the_disk() -> None:
    calls, clock = calls_of(make_schedule("gpipe", line(1), 1), 3), Settable()
    with closing(MemoryQueues("run")) as queues:
        measured = {"measured": lambda line: clock.sleep(5.0)}  # which is no wait
        loop = WorkerLoop(calls, 0, Still(), queues, run="run", incarnation=1, clock=clock, **measured)
        waits = recorded_waits(loop, clock, saves=2.0)
    assert [(each.cause, each.start, each.end) for each in waits] == [
        (WaitCause.DISK, 5.0, 7.0),
        (WaitCause.DISK, 12.0, 14.0),
    ]


def test_rows_drawn_for_an_evaluation_are_no_data_of_a_training_action() -> None:
    calls, clock = calls_of(make_schedule("gpipe", line(1), 1), 2, Rounds(2, batches=3, every=1)), Settable()
    with closing(MemoryQueues("run")) as queues:
        loop = WorkerLoop(calls, 0, Still(), queues, run="run", incarnation=1, clock=clock, drawn=lambda: 1.0)
        waits = recorded_waits(loop, clock, saves=0.0)
    actions = [timed for record in loop.progress.steps for timed in timed_actions(record)]
    assert [each.cause for each in waits] == [WaitCause.DATA] * len(actions)


def test_a_wait_for_credit_is_not_taken_for_the_wait_for_a_message_that_follows_it() -> None:
    schedule = make_schedule("gpipe", line(3), MICROBATCHES, first_trainable=2)
    program, clock = with_windows(calls_of(schedule, 1), lambda queue: 1), Settable()
    with closing(MemoryQueues("run")) as queues:
        names = {"run": "run", "incarnation": 1, "clock": clock}
        first, middle, last = (WorkerLoop(program, each, Still(), queues, **names) for each in range(3))
        assert first.poll(0)
        assert middle.poll(0)
        assert not middle.poll(0)
        assert "waits for credit in forward-2" in middle.doing
        clock.sleep(3.0)
        assert last.poll(0)
        assert not middle.poll(0)
        assert "waits for message" in middle.doing
        clock.sleep(4.0)
        take_turns([first, middle, last], lambda loop: loop.finished)
    (record,) = middle.progress.steps
    waits = [(each.cause, each.start, each.end) for each in timed_waits(record)]
    assert (WaitCause.CREDIT, 0.0, 3.0) in waits
    assert (WaitCause.MESSAGE, 3.0, 7.0) in waits


def test_any_number_of_predictions_between_two_actions_keeps_a_bounded_record_with_all_their_time() -> None:
    calls = calls_of(make_schedule("gpipe", line(1), 1), 1)
    progress = Progress.of(calls, 0, now=0.0)
    now = 0.0
    for number in range(1000):
        progress.waiting_for_call(CallWait(f"call {number}"), now)
        progress.called_to(None, now := now + 1.0)
        progress.evaluated(now := now + 2.0)
    for instruction in calls.instructions(0):
        progress.computing(instruction, now)
        progress.done(instruction, now := now + 1.0)
    progress.closed(0, 0, None)
    (record,) = progress.steps
    found = totals(record)
    assert found is not None
    assert (found.script, found.evaluation) == (1000.0, 2000.0)
    waits = timed_waits(record)
    assert len(waits) <= MOST_WAITS
    assert max(wait.end for wait in waits) <= 3000.0
