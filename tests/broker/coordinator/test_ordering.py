"""A run that chooses its schedule: what the broker tells its workers, and when an order holds."""

from dataclasses import replace

import pytest

from stageline.broker.control.messages import ScheduleOrders
from stageline.broker.control.records import ScheduleOrder, StepRecord
from stageline.broker.control.store import MemoryStore
from stageline.pipeline.program import Costs, check_schedule
from stageline.pipeline.schedule import make_schedule
from support.conversation import SNAPSHOTS, Conversation, Sends, hello, name, report
from support.packed import packed_times
from support.shapes import line

TERMS = replace(SNAPSHOTS, schedule=make_schedule("1f1b", line(2), 8), schedule_memory=10**6)
TIMED = check_schedule(TERMS.schedule, Costs.even(2, forward=0.01, backward=0.02, latency=0.06), steps=8).timed
BYTES = {0: [(0, 100, 10, None)], 1: [(1, 100, 10, None)]}


def records(stage: int, *steps: int) -> list[StepRecord]:
    """Of a run by 1F1B over slow links."""
    found = []
    for step in steps:
        own = [each for each in TIMED if each.step == step and each.action.stage == stage]
        times = packed_times((each.action, each.start, each.end) for each in own)
        found.append(StepRecord(stage, step, times, 0.5 if stage else None))
    return found


class ChoosingRun(Conversation):
    """Its workers have begun."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        super().__init__(store, terms=TERMS)
        if store is None:
            for index in (0, 1):
                self.join(index)
            self.after(0.1)

    def reported(self, index: int, *steps: int, **more: object) -> Sends:
        found = report(index, actions=1, steps=records(index, *steps), stage_bytes=BYTES[index], **more)
        return self.send(name(index), found)

    def measured(self) -> Sends:
        """Both stages have done five steps; the broker turns until it has ranked."""
        for index in (0, 1):
            self.reported(index, *range(5))
        return self.after(1.5)


def told(sends: Sends, index: int = 0) -> list[ScheduleOrders]:
    return [message for to, message in sends if to == name(index) and isinstance(message, ScheduleOrders)]


def test_another_schedule_is_proposed_stored_and_told_and_holds_from_the_last_step_that_a_worker_closes() -> None:
    run = ChoosingRun()
    first = told(run.measured())[0]
    assert first.orders == ()
    assert first.closed is not None
    assert first.closed >= 5
    assert not told(run.reported(0, closed=first.closed))
    run.after(1)
    assert run.core.run.orders.orders == []
    run.reported(1, closed=first.closed + 2)
    (order,) = told(run.after(0.1))[0].orders
    assert order.step == first.closed + 2
    assert order.name in ("eager-1f1b", "window")
    assert MemoryStore.load(run.store).facts["orders"]["orders"][0]["step"] == order.step
    facts = run.status()["orders"]
    assert facts["orders"][0]["why"].startswith("with the times of steps 1 to 4, a step takes ")


def test_who_has_not_answered_or_has_not_heard_is_told_again_and_nobody_else() -> None:
    run = ChoosingRun()
    closed = told(run.measured())[0].closed
    run.reported(0, closed=closed)
    again = run.after(1)
    assert not told(again, 0)
    assert len(told(again, 1)) >= 3
    run.reported(1, closed=closed)
    run.after(0.1)
    run.reported(0, orders=1)
    again = run.after(1)
    assert not told(again, 0)
    assert len(told(again, 1)) >= 3


def test_answers_of_an_earlier_order_do_not_count() -> None:
    run = ChoosingRun()
    closed = told(run.measured())[0].closed
    for index in (0, 1):
        run.reported(index, closed=closed)
    run.after(0.1)
    assert len(run.core.run.orders.orders) == 1
    for index in (0, 1):
        run.reported(index, closed=closed, orders=0)
    run.after(1)
    assert len(run.core.run.orders.orders) == 1
    assert run.core.run.orders.proposed is None


def test_a_broker_that_was_restarted_goes_on_with_what_it_had_proposed() -> None:
    run = ChoosingRun()
    closed = told(run.measured())[0].closed
    another = ChoosingRun(run.store)
    assert another.core.run.orders.closed == closed
    assert another.core.run.orders.orders == []


def test_a_broker_that_was_restarted_knows_the_times_of_the_newest_review() -> None:
    run = ChoosingRun()
    run.measured()
    known = run.core.run.orders.review
    assert known is not None
    another = ChoosingRun(run.store)
    another.join(0)
    another.reported(0, 5)
    review = another.core.ordering.review
    assert review is not None
    assert review.times is not None
    assert (review.times.forward, review.times.input) == (known.times.forward, (None, None))


def test_a_replacement_is_told_all_orders_and_the_closed_step_with_its_place() -> None:
    run = ChoosingRun()
    closed = told(run.measured())[0].closed
    run.core.run.orders.orders = [ScheduleOrder(2, "gpipe")]
    place = run.assigned(b"again", hello(0, incarnation=1, endpoint="ipc://0"))
    assert place.orders == (ScheduleOrder(2, "gpipe"),)
    assert place.closed == closed


def test_a_run_with_a_schedule_of_its_own_is_not_measured() -> None:
    run = Conversation(terms=replace(TERMS, schedule_memory=None))
    for index in (0, 1):
        run.join(index)
        run.send(name(index), report(index, steps=records(index, *range(5)), stage_bytes=BYTES[index]))
    assert not told(run.after(2))
    assert run.status()["orders"] is None


def test_workers_that_take_more_than_the_limit_whatever_the_schedule_are_told_of() -> None:
    run = ChoosingRun()
    for index in (0, 1):
        run.send(name(index), report(index, steps=records(index, *range(5)), stage_bytes=[(index, 10**7, 10, 0)]))
    run.after(1.5)
    (told,) = [each for each in run.core.run.events.warnings if "no schedule has room within schedule.memory" in each]
    assert 'The least is 10000010 bytes of a worker, by window 1,1: use schedule.memory = "10MiB" or more' in told


@pytest.mark.parametrize("known", [1, 2])
def test_a_worker_that_knows_more_orders_than_the_records_shows_that_they_are_stale(known: int) -> None:
    run = ChoosingRun()
    run.core.run.orders.orders = [ScheduleOrder(2, "gpipe")]
    run.reported(0, orders=known)
    asks = any("asking all workers" in each for each in run.core.run.events.warnings)
    assert asks == (known == 2)
