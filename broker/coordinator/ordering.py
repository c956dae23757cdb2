"""The choice of schedules in a run that leaves them open, and the order by which all workers change at one step.

reports of steps ──> ScheduleReview ──> another schedule is chosen
                                           │  propose: a step that none has begun is closed; stored, then told
reports: closed from step 12 on  <─────────┘
         all have answered ──> the last of those steps is the order's; stored, then told

Reads `config`, `registry`, `ledger`, `replacements`, `pauses`. Writes `orders`. A run that does not choose its schedule
uses nothing here.
"""

from collections.abc import Sequence
from math import ceil

from stageline.broker.control.messages import Report
from stageline.broker.control.records import StepRecord
from stageline.broker.ledger.member import Member
from stageline.broker.ledger.times import timed_actions
from stageline.pipeline.choice import ChosenSchedule, RankedSchedule, ScheduleReview, StageBytes
from stageline.pipeline.choice.measured import ActionTimes

from .state import RunState

LEAD = 1.0  # seconds until a step that is closed is begun, so that the order is known by then and no worker waits
AGAIN = 0.25  # seconds after which a worker that has not answered is told again


class Ordering:
    """The schedule review of one run, with the time of the last announcement to its workers.

    Times are seconds since the epoch.
    """

    def __init__(self) -> None:
        """Start without a review: it begins with the first report of a step."""
        self.review: ScheduleReview | None = None  # from the first report of a step on
        self._told = float("-inf")
        self._bytes: dict[int, StageBytes] = {}

    def note(self, run: RunState, member: Member, report: Report, steps: Sequence[StepRecord], now: float) -> None:
        """Note the steps that a worker has finished, and the orders that it knows.

        Args:
            run: The run that chooses its schedule.
            member: The sender of the report.
            report: The report, with the known orders and the bytes that the worker's stages take.
            steps: Records of finished steps that the report has added.
            now: Seconds since the epoch.
        """
        for stage, fixed, microbatch, halfway in report.stage_bytes:
            if stage in member.stages:
                self._bytes[stage] = StageBytes(fixed, microbatch, halfway)
        if report.closed is not None and report.orders == len(run.orders.orders) and run.orders.proposed is None:
            why = "workers had closed a step for an order that the records do not have"
            self._propose(run, *_present(run), report.closed, why, now)
        review = self._reviewing(run)
        for record in steps:
            if review.wants(record.step):
                review.note(record.step, record.stage, [ActionTimes(*each) for each in timed_actions(record)])

    def tick(self, run: RunState, now: float) -> None:
        """Do what is due by time: advance the review, agree on a proposed order, tell workers again."""
        if not run.registry.begun:
            return
        if run.orders.proposed is not None:
            self._agree(run, now)
        elif not run.lifecycle.over:
            self._turn(run, now)
        self._tell_again(run, now)

    def _turn(self, run: RunState, now: float) -> None:
        """Advance the review. Steps that a replacement repeats say nothing about how long messages take."""
        review, begun = self._reviewing(run), run.ledger.begun
        if run.registry.missing or run.replacements.pending or run.pauses.present is not None:
            review.interrupt(begun)
        elif (chosen := review.advance(now, begun, self._bytes)) is not None:
            self._go_by(run, chosen, begun, now)

    def _go_by(self, run: RunState, chosen: ChosenSchedule, begun: int, now: float) -> None:
        run.orders.note_review(chosen)
        closed = begun + max(1, ceil(LEAD / max(chosen.times.step, 1e-3)))
        ends = run.training_steps
        if chosen.changes and (ends is None or closed < ends):
            self._propose(run, chosen.name, chosen.window, closed, chosen.why, now)
        else:
            run.store.put(*run.orders.fact())
            kept = "too few steps are left to change the schedule" if chosen.changes else "the schedule stays"
            run.events.infos.append(f"{kept}: {chosen.why}")
        if lacking := _without_room(chosen.compared):
            run.events.warnings.append(lacking)

    def _propose(
        self, run: RunState, name: str, window: tuple[int, ...] | None, closed: int, why: str, now: float
    ) -> None:
        run.orders.propose(name, window, closed, why)
        run.store.put(*run.orders.fact())
        run.events.infos.append(f"another schedule from about step {closed} on: {why}")
        self._tell(run, now)

    def _agree(self, run: RunState, now: float) -> None:
        """Put the proposed order into effect once every worker has closed a step: from the last of those steps on."""
        known, workers = len(run.orders.orders), range(len(run.config.schedule.placement))
        closed = [_closed_by(run.registry.members.get(index), known) for index in workers]
        answers = [step for step in closed if step is not None]
        if len(answers) < len(closed):
            return
        run.orders.agreed(answers)
        run.store.put(*run.orders.fact())
        order = run.orders.orders[-1]
        window = "" if order.window is None else f" {','.join(map(str, order.window))}"
        run.events.infos.append(f"from step {order.step} on the schedule is {order.name}{window}")
        self._reviewing(run).changed(order.name, order.window, order.step, now)
        self._tell(run, now)

    def _tell(self, run: RunState, now: float) -> None:
        self._told = now
        run.broadcast(run.orders.message)

    def _tell_again(self, run: RunState, now: float) -> None:
        """Send the orders again to workers whose reports do not show them yet."""
        book = run.orders
        if now - self._told < AGAIN:
            return
        self._told = now
        for member in run.registry.reachable_workers():
            report = member.report
            if report is not None and member.sender:
                unheard = book.proposed is not None and report.closed is None
                if report.orders < len(book.orders) or (report.orders == len(book.orders) and unheard):
                    run.outgoing.append((member.sender, book.message))

    def _reviewing(self, run: RunState) -> ScheduleReview:
        """Return the review, which a restarted broker begins with the present schedule and the newest times."""
        if self.review is None:
            schedule, newest = run.config.schedule, run.orders.review
            self.review = ScheduleReview(
                schedule.placement,
                schedule.microbatches,
                run.config.schedule_memory or 0,
                _present(run),
                run.ledger.begun + 1,
                first=newest is None,
                times=None if newest is None else newest.times,
            )
        return self.review


def _closed_by(member: Member | None, known: int) -> int | None:
    report = None if member is None or not member.reachable else member.report
    return None if report is None or report.orders != known else report.closed


def _present(run: RunState) -> tuple[str, tuple[int, ...] | None]:
    orders = run.orders.orders
    return (orders[-1].name, orders[-1].window) if orders else (run.config.schedule.name, None)


def _without_room(compared: Sequence[RankedSchedule]) -> str:
    """Return a warning if no schedule has room within the memory limit, else ""."""
    simulated = [each for each in compared if each.in_flight]
    if not simulated or any(each.seconds is not None for each in simulated):
        return ""
    least = min(simulated, key=lambda each: each.bytes)
    return (
        "no schedule has room within schedule.memory: the workers take more than the plan allows. The least is "
        f'{least.bytes} bytes of a worker, by {least.title}: use schedule.memory = "{-(-least.bytes // 2**20)}MiB" or '
        "more, which --resume accepts, smaller microbatches, or more stages"
    )
