"""Counters of a run never become less, whatever a replacement begins again."""

from stageline.broker.control.messages import Report
from stageline.broker.control.queue_counts import Depth, Intake
from stageline.broker.control.records import StepRecord
from stageline.broker.ledger.counters import BOUNDS, RunCounters
from stageline.broker.ledger.member import Flowing, Member
from stageline.broker.ledger.times import StepTotals, TimedWait, WaitCause, totals
from stageline.pipeline.schedule import Action
from support.packed import packed_times


def member(pid: int = 1, *, start: int = 0, generation: int = 1) -> Member:
    return Member(0, (0,), pid, "worker-0", "desk", pid, "", 0.0, start=start, generation=generation)


def having_put(count: int) -> Report:
    return Report(1, 0, "", 0.0, 0.0, puts={"forward-1": Depth(0, 0, 0, 0, 0.0, put=count)})


def put(counters: RunCounters) -> int | None:
    return counters.passed("forward-1", Flowing.PUT)


def test_messages_count_from_the_beginning_of_the_run():
    counters = RunCounters()
    assert put(counters) is None
    for count in (0, 5, 5, 9):
        counters.note_queues(member(), having_put(count))
    assert put(counters) == 9


def test_a_message_that_a_replacement_puts_again_counts_again():
    counters = RunCounters()
    counters.note_queues(member(), having_put(10))
    second = member(2, start=1, generation=2)
    for count in (4, 6, 12):  # its checkpoint is where 4 were put
        counters.note_queues(second, having_put(count))
    assert put(counters) == 10 + 8


def test_a_process_that_begins_again_at_a_checkpoint_takes_nothing_away():
    counters = RunCounters()
    for count in (10, 3, 4):
        counters.note_queues(member(), having_put(count))
    assert put(counters) == 10 + 1


def test_a_run_that_is_resumed_counts_what_is_put_from_there_on():
    counters = RunCounters()
    resumed = member(start=7)
    for count in (21, 24):
        counters.note_queues(resumed, having_put(count))
    assert put(counters) == 3


def test_both_ends_of_a_queue_are_counted_apart():
    counters = RunCounters()
    taken = Report(1, 0, "", 0.0, 0.0, takes={"forward-1": Intake(received=4, taken=3)})
    counters.note_queues(member(), having_put(5))
    counters.note_queues(member(2), taken)
    assert (put(counters), counters.passed("forward-1", Flowing.TAKEN)) == (5, 3)


def test_a_step_that_is_repeated_counts_once_as_a_step_and_again_as_work():
    counters = RunCounters()
    for before, floor in ((0, 3), (3, 3), (3, 1), (1, 2), (2, 4)):
        counters.reached(before, floor, 100.0 + floor)
    assert counters.steps == 4
    assert counters.stalled(110.0) == 6.0
    counters.note_steps([(0, sums(3, 0.0, 1.0)), (0, sums(3, 5.0, 6.0))], 1)
    assert counters.stages[0].steps == 2


def test_a_run_that_hangs_before_its_first_step_ages_from_the_first_report():
    counters = RunCounters()
    assert counters.stalled(10.0) is None
    counters.heard(20.0)
    counters.heard(30.0)
    assert counters.stalled(50.0) == 30.0


def test_steps_before_the_broker_began_are_not_counted():
    counters = RunCounters()
    counters.reached(500, 502, 0.0)
    assert counters.steps == 2


def test_the_time_of_a_step_is_from_the_end_of_the_one_before_at_the_last_stage():
    counters = RunCounters()
    ends = [(0, sums(0, 0.0, 1.0)), (1, sums(0, 0.5, 2.0)), (1, sums(1, 2.5, 5.0)), (1, sums(2, 6.0, 605.0))]
    counters.note_steps(ends, 1)
    found = dict(zip([*BOUNDS, "more"], counters.step_seconds.counts, strict=True))
    assert {bound: count for bound, count in found.items() if count} == {2.5: 1, 5.0: 1, "more": 1}
    assert counters.step_seconds.sum == 1.5 + 3.0 + 600.0


def test_a_clock_that_was_set_back_takes_no_time_away():
    counters = RunCounters()
    counters.note_steps([(0, sums(0, 10.0, 12.0)), (0, sums(1, 3.0, 4.0))], 0)
    assert counters.step_seconds.sum == 2.0
    assert sum(counters.step_seconds.counts) == 2


def test_every_cause_of_a_wait_is_summed_by_its_name():
    ran = [TimedWait(cause, None, 0.0, 0.25 * place) for place, cause in enumerate(WaitCause, start=1)]
    found = totals(StepRecord(0, 0, packed_times([*ran, (Action("F", 0, 0), 10.0, 14.0)])))
    assert found is not None
    counters = RunCounters()
    counters.note_steps([(0, found)], 0)
    waited = counters.stages[0].waited
    assert waited == {cause: 0.25 * place for place, cause in enumerate(WaitCause, start=1)}
    assert counters.stages[0].computed == 4.0 - waited[WaitCause.DATA] - waited[WaitCause.OFFLOAD]


def sums(step: int, start: float, end: float) -> StepTotals:
    return StepTotals(step, start, end, end - start, 0.0, 0.0, 0.0, 0.0, 0.0)
