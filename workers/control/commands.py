"""An assigned worker's run of its loop, with the broker's commands carried out between turns: peers, trims, the end.

wait for the other workers -> run the program -> save the weights -> Finished -> serve the others until Stop
"""

from collections.abc import Callable

import structlog

from stageline.broker.control.checkpoints import Copying, Trim
from stageline.broker.control.messages import Assigned, Finished, Peers, Refused, ScheduleOrders, Stop
from stageline.broker.control.pauses import Hold
from stageline.broker.queues.base import Outbound, WorkerQueues
from stageline.broker.queues.secrets import secrets_of
from stageline.pipeline.digest import TensorDigest
from stageline.pipeline.errors import ExitCode, documented, failure_code
from stageline.pipeline.process.steady_clock import STEADY
from stageline.workers.checkpoint import copier
from stageline.workers.checkpoint.copier import Copier
from stageline.workers.checkpoint.hooks import Announced, CheckpointHooks
from stageline.workers.runtime.calls import LAST_REPLIES, Position
from stageline.workers.runtime.loop import PATIENCE, Clock, WorkerLoop

from .control_thread import ControlThread
from .joining import OwnStop, Stopped, WorkersMissing
from .leaving import HandOver, keep_here

STEP_END = 5.0  # seconds that finishing a step may take when the run is stopped
CONFIRMATION = 1.0  # seconds that the broker gets to confirm the last snapshot, and again to say that all have

SavedWeights = tuple[dict[str, TensorDigest], dict[str, str]]  # digests; names of shared ones, with their first names

log = structlog.get_logger()


class CommandHandler:
    """An assigned worker's runner, which drives its `loop` and carries out the broker's commands."""

    def __init__(
        self,
        assigned: Assigned,
        control: ControlThread,
        queues: WorkerQueues,
        hooks: CheckpointHooks,
        loop: WorkerLoop,
        copier: Copier,
        clock: Clock = STEADY,
        *,
        hand_over: HandOver = keep_here,
    ) -> None:
        """Open the worker's ends of its queues; no peer is admitted before the broker has named any.

        Args:
            assigned: The worker's place.
            control: The thread that receives commands and reports.
            queues: The worker's queues.
            hooks: The writer of snapshots.
            loop: The compute loop.
            copier: The worker's ends of transfers of snapshots.
            clock: Source of monotonic time, in seconds.
            hand_over: Called before this worker leaves on notice, with its snapshots on the disk.
        """
        self._assigned = assigned
        self._hand_over = hand_over
        self._control = control
        self._queues = queues
        self._hooks = hooks
        self._loop = loop
        self._copier = copier
        self._clock = clock
        self._stop: tuple[Stop, float] | None = None  # what ends the run after a step, and until when it may wait
        self._ends: float | None = None  # of a run that is to end: until when the disk is waited for
        self._joined = False
        self._refused = False  # an announced checkpoint, and said so
        self._finished = False  # nothing is left but to serve the others
        queues.admit(0)  # before the broker has told of any
        named, me = loop.program, assigned.index
        taken = (each for each in named.inbound(me) if each.producer != me and not each.copies)
        self._producers = {each: each.producer for each in taken}
        self._inbound = [(each, queues.inbound(each)) for each in named.inbound(me) if not each.copies]
        self._outbound = [(each, queues.outbound(each)) for each in named.outbound(me) if not each.copies]
        self._replies = [outbound for queue, outbound in self._outbound if queue.consumer == named.script]

    def run(self, save: Callable[[], SavedWeights], *, workers_timeout: float, lease: float) -> None:
        """Run the loop, save the weights and serve the other workers; return when the run has finished.

        Args:
            save: Writes the weights; returns their digests, and the names of shared ones with their first names.
            workers_timeout: Seconds to wait for the other workers.
            lease: Seconds that the broker may be away at the end.

        Raises:
            Stopped: The run ends before this worker's program is over. Errors of the computation, the queues and the
                snapshots pass through as they are.
        """
        self._begin_at(self._hooks.start or Position(self._assigned.step))
        self._wait_for_workers(workers_timeout)
        self._loop.run(self.handle, self._hooks.stepped)
        digests, copies = save()
        self._hooks.flush()
        self._finished = True
        self._control.send(Finished(self._assigned.incarnation, digests, copies))
        self._serve_until_stopped(lease)

    def handle(self) -> None:
        """Carry out the commands that have come. Raises `Stopped` if one ends this worker's work."""
        commands = self._control.commands
        while commands:
            match commands.popleft():
                case Assigned() as place:
                    self._queues.rekey(secrets_of(self._loop.program.queues.values(), place))
                    self._loop.learn(place.orders, place.closed)
                case Peers(workers):
                    there = {key: workers[index][1] for key, index in self._producers.items() if index in workers}
                    self._queues.admit(max(incarnation for incarnation, _ in workers.values()))
                    self._queues.connect(there)
                    self._copier.meet(workers)
                    self._joined = True
                case Trim(step) if not self._may_be_complete(step):
                    self._refuse(step)
                case Trim(step, best):
                    self._trim(self._loop.progress.position(step))
                    self._loop.progress.completed(step)
                    self._hooks.forget(step, best)
                    self._copier.forget(step, best)
                case Copying() as told:
                    self._copier.order(told)
                case ScheduleOrders(orders, closed):
                    self._loop.learn(orders, closed)
                case Hold() as order:
                    self._loop.hold(order)
                    if order.settled and order.step is not None:
                        self._hooks.stop_at(order.step)
                case Stop() as stop:
                    self._end(stop)
                case Refused(reason, code, over):
                    raise Stopped(reason, failure_code(code), broker_knows=True, over=over)
                case Stopped() as stopped:
                    raise stopped
        self._loop.attend_within(copier.PATIENCE if self._copier.turn() else PATIENCE)
        if self._stop is not None:
            self._end_with_the_step(*self._stop)
        elif self._control.notice.given:
            self._leave_if_saved()

    def _leave_if_saved(self) -> None:
        """Leave on notice once the checkpoint is complete before whose step the run pauses, or once the time is over.

        Raises:
            Left: The worker has nothing left to do here.
        """
        progress, notice = self._loop.progress, self._control.notice
        if not notice.allows(progress.held.known, progress.complete, joined=self._joined):
            return
        if not notice.over:
            self._hand_over(notice.patience)
            self._control.wait_until_confirmed(min(CONFIRMATION, notice.patience))
        raise notice.leave()

    def _may_be_complete(self, step: int) -> bool:
        """Return False if this worker's stages have not come to `step`, or have no snapshot of it."""
        finished = min(self._loop.progress.finished.values(), default=step)
        return step <= finished and self._hooks.may_be_complete(step)

    def _refuse(self, step: int) -> None:
        """Log, once, that this worker lacks checkpoint `step`, and keep all that the checkpoint would let go of."""
        if not self._refused:
            log.warning(
                "refused", reason=f"the broker says that checkpoint {step} is complete, which this worker lacks"
            )
        self._refused = True

    def announced(self) -> list[Announced]:
        """Return the announced checkpoints among the pending commands, for a loop that waits for the disk.

        Raises:
            Stopped: The run is to end, the disk refuses to write, and the time for the last step is over.
        """
        commands = list(self._control.commands)
        stops = [command for command in commands if isinstance(command, Stop)]
        if self._ends is None and (stops or self._stop):
            patient = self._stop is not None or stops[-1].at_step_end
            self._ends = self._clock.monotonic() + (STEP_END if patient else 0.0)
        if self._ends is not None and self._loop.progress.fault and self._clock.monotonic() >= self._ends:
            self._control.wait_until_confirmed(CONFIRMATION)
            raise self._stopped(stops[-1] if stops or self._stop is None else self._stop[0])
        return [(command.step, command.best) for command in commands if isinstance(command, Trim)]

    def _wait_for_workers(self, timeout: float) -> None:
        """Wait until every worker of the plan is there. Raises `Stopped` with code 69 after `timeout` seconds."""
        deadline = self._clock.monotonic() + timeout
        while not self._joined:
            if self._clock.monotonic() > deadline:
                raise WorkersMissing(f"the other workers did not come within {timeout:g} s: see `stageline status`")
            self._queues.pump(self._loop.patience)
            self.handle()

    def _serve_until_stopped(self, lease: float) -> None:
        """Send the other workers what they still need, until the broker reports that all have finished.

        If the broker is away, waits as long as other workers still have messages to take, and `lease` seconds longer.
        """
        deadline = self._clock.monotonic() + lease
        while True:
            self._queues.pump(self._loop.patience)
            self._loop.count_queues()
            self._loop.note_answered()
            try:
                self.handle()
            except Stopped as stop:
                if stop.exit_code:
                    raise
                self._hand_over_replies()
                return
            if self._control.silence < lease / 2 or any(_is_untaken(outbound) for _, outbound in self._outbound):
                deadline = self._clock.monotonic() + lease
            elif self._clock.monotonic() > deadline:
                log.warning("the broker is away: the weights are saved, the result could not be reported")
                return

    def _hand_over_replies(self) -> None:
        """Wait until the script has the replies to its last calls, which may be under way when the run is over.

        Waits LAST_REPLIES seconds at most. A command ends the wait: it can only be one to end.
        """
        deadline = self._clock.monotonic() + LAST_REPLIES
        commands = self._control.commands
        while not commands and any(map(_is_untaken, self._replies)) and self._clock.monotonic() < deadline:
            self._queues.pump(PATIENCE)

    def _begin_at(self, start: Position) -> None:
        self._loop.begin_at(start)
        begin = self._loop.progress.position(start.step)
        self._trim(begin)
        for queue, inbound in self._inbound:
            inbound.rewind(max(begin.of(queue.per), queue.begins))

    def _trim(self, position: Position) -> None:
        """Release messages before `position` in the queues that this worker puts into.

        Replies to the script are kept until they have arrived: without snapshots, a step may be over before they have.
        """
        self._loop.note_answered()
        for queue, outbound in self._outbound:
            floor = position.of(queue.per)
            if outbound in self._replies:
                floor = min(floor, self._loop.progress.answered.get(queue.per, floor))
            outbound.trim(queue.within(floor))

    def _end(self, stop: Stop) -> None:
        """End at once, unless a step is to be finished or snapshots are to be reported first.

        The step is finished if `stop` asks for it, the schedule flushes at step ends, and a step is under way;
        otherwise raises `Stopped`. A worker that is beyond the step to finish may have snapshots that make another
        checkpoint complete.
        """
        current, flushes = self._loop.step, self._loop.program.schedule.mode == "sync"
        if stop.step is None or current is None or not (stop.at_step_end and flushes and self._joined):
            raise self._stopped(stop)
        if self._stop is None:
            if current <= stop.step:
                self._hooks.stop_at(stop.step)
                self._loop.end_before(stop.step)  # it may not know to which step a pause has moved
            self._stop = stop, self._clock.monotonic() + STEP_END

    def _end_with_the_step(self, stop: Stop, deadline: float) -> None:
        done = self._loop.step is None or (stop.step is not None and self._loop.step >= stop.step)
        if not done and self._clock.monotonic() < deadline:
            self._loop.attend()  # to look again before the next turn
            return
        if done:
            self._hooks.flush()
            self._wait_for_replies(CONFIRMATION)
        self._loop.progress.forget_answers()
        self._control.wait_until_confirmed(CONFIRMATION)
        raise self._stopped(self._newest(stop, CONFIRMATION if done else 0.0))

    def _newest(self, stop: Stop, timeout: float) -> Stop:
        """Return the broker's newest Stop: the first that says that the state is saved, or the newest after `timeout`.

        The last snapshots of the other workers may complete a checkpoint, and the broker then says that a state is
        saved. `timeout` is in seconds.
        """
        deadline = self._clock.monotonic() + timeout
        while stop.code != ExitCode.SAVED and self._clock.monotonic() < deadline:
            self._queues.pump(PATIENCE)
            stops = [command for command in self._control.commands if isinstance(command, Stop)]
            stop = stops[-1] if stops else stop
        return stop

    def _wait_for_replies(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the script, if it is still there, to read the losses of the saved steps."""
        deadline = self._clock.monotonic() + timeout
        while self._loop.progress.held_back and self._clock.monotonic() < deadline:
            self._queues.pump(PATIENCE)
            self._loop.note_answered()

    def _stopped(self, stop: Stop) -> Stopped:
        """Return the `Stopped` for `stop`; its code is a failure's unless this worker has finished its steps."""
        code = documented(stop.code) if self._finished else failure_code(stop.code)
        return Stopped(stop.reason, code, broker_knows=True, over=not isinstance(stop, OwnStop))


def _is_untaken(outbound: Outbound) -> bool:
    """Return True if messages of `outbound` have not arrived yet."""
    depth = outbound.depth()
    return bool(depth.ready or depth.in_flight)
