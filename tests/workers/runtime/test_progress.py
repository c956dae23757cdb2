"""Facts that the compute loop leaves for the reports."""

from stageline.broker.ledger.times import WaitCause, timed_actions, timed_waits
from stageline.pipeline.program import Per
from stageline.pipeline.schedule import Kind, make_schedule
from stageline.workers.runtime.calls import Position
from stageline.workers.runtime.idle import CallWait
from stageline.workers.runtime.progress import Progress
from support.programs import calls_of
from support.shapes import line


def test_a_finished_step_becomes_a_record_with_the_times_of_its_actions() -> None:
    progress = Progress(last=0)
    for begin, instruction in enumerate(calls_of(make_schedule("gpipe", line(1), 1), 1).instructions(0)):
        progress.computing(instruction, float(begin))
        progress.done(instruction, begin + 0.5)
    progress.closed(0, 0, 0.25)
    (record,) = progress.steps
    timed = [(str(action), start, end) for action, start, end in timed_actions(record)]
    assert timed == [("0F0", 0.0, 0.5), ("0B0", 1.0, 1.5), ("0U", 2.0, 2.5)]
    assert (record.loss, progress.newest, progress.finished) == (0.25, (0, 0.25), {0: 1})
    assert (progress.actions, progress.busy, progress.open[0]) == (3, 1.5, [])


def test_waits_for_offloaded_activations_lie_in_their_action_and_are_no_waits_of_the_next() -> None:
    progress = Progress(last=0)
    for begin, instruction in enumerate(calls_of(make_schedule("gpipe", line(1), 1), 1).instructions(0)):
        progress.computing(instruction, float(begin))
        if instruction.op.action.kind is Kind.BACKWARD:
            progress.offloaded(0.125)
            progress.offloaded(0.125)
        progress.done(instruction, begin + 0.5)
    progress.closed(0, 0, 0.25)
    (record,) = progress.steps
    (wait,) = timed_waits(record)
    assert (wait.cause, str(wait.before), wait.start, wait.end) == (WaitCause.OFFLOAD, "0B0", 1.0, 1.25)


def test_a_broker_without_records_receives_how_far_each_stage_is_and_the_losses() -> None:
    progress = Progress(complete=2, last=1, finished={0: 3, 1: 2})
    progress.restored({0: 0.5}, [])
    progress.closed(1, 2, 0.25)
    assert [(each.stage, each.step, each.loss) for each in progress.records(10)] == [
        (0, 2, None),
        (1, 0, 0.5),
        (1, 2, 0.25),
    ]
    memory = progress.memory("run-1", 1)
    assert (memory.complete, memory.step) == (2, 3)


def test_a_broker_without_records_receives_how_far_the_last_stage_is_if_its_newest_step_had_no_loss() -> None:
    """The scaler had skipped every microbatch: the broker waited for that step without end, and the run with it."""
    progress = Progress(last=1, finished={1: 0})
    progress.closed(1, 0, 0.25)
    progress.closed(1, 1, None)
    assert [(each.stage, each.step, each.loss) for each in progress.records(2)] == [(1, 1, None)]


def test_a_snapshot_on_disk_is_reported_and_remembered() -> None:
    progress = Progress()
    progress.durable(1, 4)
    assert list(progress.snapshots) == progress.written == [(1, 4)]


def test_a_snapshot_waits_for_the_replies_of_the_calls_before_it() -> None:
    progress = Progress(positions={4: Position(4, 7, 2)}, answered={Per.STEP: 4, Per.REPLY: 2})
    progress.durable(1, 4)
    assert progress.held_back
    progress.answered[Per.REPLY] = 3
    assert progress.reportable
    assert not progress.held_back


def test_only_a_snapshot_whose_calls_are_all_answered_may_be_reported() -> None:
    progress = Progress(positions={2: Position(2, 5, 0), 4: Position(4, 7, 2)}, answered={Per.STEP: 3, Per.REPLY: 3})
    assert [progress.may_report(step) for step in (2, 4)] == [True, False]
    assert Progress(answered={Per.STEP: 0}).may_report(4)  # no script has called


def test_positions_before_the_complete_checkpoint_are_forgotten() -> None:
    progress = Progress(positions={2: Position(2, 3, 0), 4: Position(4, 7, 2)})
    progress.completed(4)
    assert [progress.position(step) for step in (2, 4)] == [Position(2), Position(4, 7, 2)]


def test_a_worker_waits_for_one_call_of_the_script_since_one_moment() -> None:
    progress = Progress()
    for number, now in ((0, 1.0), (0, 2.0), (1, 3.0), (1, 4.0)):
        progress.waiting_for_call(CallWait(f"call {number} of the script", "call-0", number), now)
    assert progress.call is not None
    assert (progress.call.number, progress.since, progress.waits) == (1, 3.0, True)
