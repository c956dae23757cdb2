"""Chooses the schedule of a run that leaves it to be chosen, and sees to it that all workers change it at one step.

reports of steps ──> ScheduleReview ──> another schedule is chosen
                                           │  propose: a step that none has begun is closed; stored, then told
reports: closed from step 12 on  <─────────┘
         all have answered ──> the last of those steps is the order's; stored, then told
"""

from collections.abc import Sequence
from math import ceil

from stageline.broker.control.messages import Report
from stageline.broker.control.records import StepRecord
from stageline.broker.ledger.ledger import timed_actions
from stageline.broker.ledger.member import Member
from stageline.broker.ledger.orders import ComparedSchedule, ProposedOrder, ReviewRecord
from stageline.pipeline.choice import ChosenSchedule, MeasuredTimes, RankedSchedule, ScheduleReview, StageBytes
from stageline.pipeline.choice.measured import ActionTimes

from .records import RunRecords

LEAD = 1.0  # seconds until a step that is closed is begun, so that the order is known by then and no worker waits
AGAIN = 0.25  # seconds after which a worker that has not answered is told again


class Ordering:
    """Of a run whose workers may take `RunConfig.schedule_memory` bytes; of another, it does nothing."""

    def __init__(self, run: RunRecords) -> None:
        self._run = run
        self._told = float("-inf")
        self._bytes: dict[int, StageBytes] = {}
        self.review: ScheduleReview | None = None  # from the first report of a step on

    def note(self, member: Member, report: Report, steps: Sequence[StepRecord], now: float) -> None:
        """What a worker has reported: finished steps, and what it knows of orders."""
        book = self._run.orders
        if self._run.config.schedule_memory is None or member.is_script:
            return
        for stage, fixed, microbatch, halfway in report.stage_bytes:
            if stage in member.stages:
                self._bytes[stage] = StageBytes(fixed, microbatch, halfway)
        if report.closed is not None and report.orders == len(book.orders) and book.proposed is None:
            present = self._present
            why = "workers had closed a step for an order that the records do not have"
            self._propose(ProposedOrder(*present, report.closed, why), now)
        review = self._reviewing(now)
        for record in steps:
            if review.wants(record.step):
                review.note(record.step, record.stage, [ActionTimes(*each) for each in timed_actions(record)])

    def tick(self, now: float) -> None:
        """What is due by time: a turn of the review, the answers to a proposed order, another try to tell."""
        if self._run.config.schedule_memory is None or not self._run.registry.begun:
            return
        if self._run.orders.proposed is not None:
            self._agree(now)
        elif not self._run.lifecycle.over:
            self._turn(now)
        self._tell_again(now)

    def _turn(self, now: float) -> None:
        """A turn of the review. Steps that a replacement repeats say nothing about how long messages take."""
        review, begun = self._reviewing(now), self._run.ledger.begun
        if self._run.registry.missing or self._run.replacements.pending:
            review.interrupt(begun)
        elif (chosen := review.advance(now, begun, self._bytes)) is not None:
            self._go_by(chosen, begun, now)

    def _go_by(self, chosen: ChosenSchedule, begun: int, now: float) -> None:
        book, times = self._run.orders, chosen.times
        book.review = ReviewRecord(
            chosen.why,
            tuple(map(_compared, chosen.compared)),
            times.forward,
            times.backward,
            times.latency,
            times.transfer,
            times.step,
            times.input,
            times.weight,
            times.update,
        )
        closed = begun + max(1, ceil(LEAD / max(times.step, 1e-3)))
        ends = self._run.training_steps
        if chosen.changes and (ends is None or closed < ends):
            self._propose(ProposedOrder(chosen.name, chosen.window, closed, chosen.why), now)
        else:
            self._run.store.put(*book.fact())
            kept = "too few steps are left to change the schedule" if chosen.changes else "the schedule stays"
            self._run.events.infos.append(f"{kept}: {chosen.why}")
        if lacking := _without_room(chosen.compared):
            self._run.events.warnings.append(lacking)

    def _propose(self, proposed: ProposedOrder, now: float) -> None:
        book = self._run.orders
        book.proposed = proposed
        self._run.store.put(*book.fact())
        self._run.events.infos.append(f"another schedule from about step {proposed.closed} on: {proposed.why}")
        self._tell(now)

    def _agree(self, now: float) -> None:
        """Once every worker has closed a step, the order holds from the last of those on."""
        book = self._run.orders
        workers = range(len(self._run.config.schedule.placement))
        closed = [self._closed_by(self._run.registry.members.get(index), len(book.orders)) for index in workers]
        answers = [step for step in closed if step is not None]
        if len(answers) < len(closed):
            return
        book.agreed(answers)
        self._run.store.put(*book.fact())
        order = book.orders[-1]
        window = "" if order.window is None else f" {','.join(map(str, order.window))}"
        self._run.events.infos.append(f"from step {order.step} on the schedule is {order.name}{window}")
        self._reviewing(now).changed(order.name, order.window, order.step, now)
        self._tell(now)

    def _closed_by(self, member: Member | None, known: int) -> int | None:
        report = None if member is None or not member.reachable else member.report
        return None if report is None or report.orders != known else report.closed

    def _tell(self, now: float) -> None:
        self._told = now
        self._run.broadcast(self._run.orders.message)

    def _tell_again(self, now: float) -> None:
        """Those who do not know yet."""
        book = self._run.orders
        if now - self._told < AGAIN:
            return
        self._told = now
        for member in self._run.registry.reachable():
            report = member.report
            if report is not None and member.sender and not member.is_script:
                unheard = book.proposed is not None and report.closed is None
                if report.orders < len(book.orders) or (report.orders == len(book.orders) and unheard):
                    self._run.outgoing.append((member.sender, book.message))

    @property
    def _present(self) -> tuple[str, tuple[int, ...] | None]:
        orders = self._run.orders.orders
        return (orders[-1].name, orders[-1].window) if orders else (self._run.config.schedule.name, None)

    def _reviewing(self, now: float) -> ScheduleReview:
        """The review; of a broker that was restarted, it begins with the present schedule, and the newest times."""
        if self.review is None:
            schedule, limit = self._run.config.schedule, self._run.config.schedule_memory or 0
            newest = self._run.orders.review
            self.review = ScheduleReview(
                schedule.placement,
                schedule.microbatches,
                limit,
                self._present,
                self._run.ledger.begun + 1,
                first=newest is None,
                times=None if newest is None else _times(newest, schedule.stages),
            )
        return self.review


def _without_room(compared: Sequence[RankedSchedule]) -> str:
    """What is lacking if nothing has room; "" if something has."""
    simulated = [each for each in compared if each.in_flight]
    if not simulated or any(each.seconds is not None for each in simulated):
        return ""
    least = min(simulated, key=lambda each: each.bytes)
    return (
        "no schedule has room within schedule.memory: the workers take more than the plan allows. The least is "
        f'{least.bytes} bytes of a worker, by {least.title}: use schedule.memory = "{-(-least.bytes // 2**20)}MiB" or '
        "more, which --resume accepts, smaller microbatches, or more stages"
    )


def _compared(ranked: RankedSchedule) -> ComparedSchedule:
    return ComparedSchedule(ranked.name, ranked.window, ranked.seconds, ranked.in_flight, ranked.bytes, ranked.reason)


def _times(newest: ReviewRecord, stages: int) -> MeasuredTimes | None:
    """Those of a review in the records; None if they are of other stages, or of a version that kept fewer."""
    each = (newest.forward, newest.backward, newest.input, newest.weight, newest.update)
    if set(map(len, each)) != {stages}:
        return None
    return MeasuredTimes(*each, newest.latency, newest.transfer, newest.step)
