"""Thread at the script's end of its queues: puts calls, takes the workers' replies, and obeys the broker.

    script                   Driver                                  workers
    submit(call) ── deque ──> put ── CALL (retained until trimmed) ──> carried out in order
    Future       <─────────── take <─ LOSS, or a REPLY from each ──────

At most `UNDER_WAY` calls are under way; further calls wait in the deque. A script that leaves, or whose run is
stopped, makes no more calls; it takes the replies to those that it has made, since its workers save the state after
them. A call that was only run forward, and has all its replies, is forgotten but for its number and its checksums:
however much is evaluated between two checkpoints, its batches take no memory.

The thread serves the queues also while the script reads data or computes: a worker that is replaced gets its calls
again at once.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from itertools import chain
from time import monotonic

import msgspec
import structlog

from stageline.broker.codec.structure import is_emptied
from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import WAITS, Assigned, FromBroker, Peers, Refused, Stop
from stageline.broker.control.records import Wait, WorkerRecord
from stageline.broker.errors import BrokerError
from stageline.broker.queues.base import WorkerQueues
from stageline.broker.queues.secrets import secrets_of
from stageline.pipeline.errors import Bug, ExitCode
from stageline.pipeline.process.steady_clock import STEADY
from stageline.pipeline.program import Per, Program
from stageline.workers.control.joining import Stopped
from stageline.workers.errors import RunFailed
from stageline.workers.runtime.calls import LAST_REPLIES, UNDER_WAY, Call, CallKind, Position, answers, settled_call
from stageline.workers.runtime.idle import Doing
from stageline.workers.runtime.progress import Progress
from stageline.workers.runtime.queue_counter import QueueCounter

from .batch_record import BatchRecord
from .calls import CallLog, OpenCall, Replies, WeightNames, messages

log = structlog.get_logger()

_ANSWERS = {Per.STEP: "the loss of", Per.REPLY: "the replies to"}
_NO_ROOM = "has no room to keep its next call until another checkpoint is complete"
TURN = 0.25  # seconds that one wait lasts at most, before the broker's commands are carried out


class ScriptProgress(Progress):
    """Progress of a script: no stages, and own words for its activity."""

    leaves_before_its_end = True

    def __init__(self, program: Program, start: Position, queues: WorkerQueues) -> None:
        """Begin at the position `start`."""
        ends = program.ends_of(program.script)
        super().__init__(complete=start.step, waits=False, ends=ends, queues=queues, digests=queues.digests)
        self._activity = Doing("has not called yet")
        self._steps = start.step  # training steps that are called for

    def activity(self) -> Doing:
        """Return the script's present activity."""
        return self._activity

    def memory(self, run: str, index: int) -> WorkerRecord:
        """Return the script's record for the broker, with the number of steps called."""
        return msgspec.structs.replace(super().memory(run, index), step=self._steps)

    def calls_for(self, steps: int, *, ends: bool = False) -> None:
        """Note that `steps` training steps are called; with `ends`, that no more will follow."""
        self._steps = steps
        if ends:
            self.called = steps

    def does(self, said: str, calls: int) -> None:
        """Note that the script computes, after `calls` calls; `said` describes the activity."""
        self.since, self.actions, self.waits = STEADY.time(), calls, False
        self._activity = Doing(said, computing=(self.since, None))

    def awaits(self, said: str, calls: int, wanted: Callable[[float], Wait]) -> None:
        """Note that the script waits for a reply.

        Args:
            said: Activity in words.
            calls: Number of calls so far.
            wanted: Returns the wait for a reply, for the time at which it begins.
        """
        self.since, self.actions, self.waits = STEADY.time(), calls, True
        self._activity = Doing(said, (wanted(self.since),))

    def has_no_room(self) -> bool:
        """Note that the next call cannot be put. Returns True if it could until now."""
        before, self._activity = self._activity.said, Doing(_NO_ROOM, computing=(self.since, None))
        self.waits = False
        return before != _NO_ROOM


class Driver:
    """Thread that carries the script's calls to the workers of a program and their replies back.

    `progress` is for the control thread; `ended` is set when the run is over.
    """

    def __init__(
        self,
        program: Program,
        names: WeightNames,
        assigned: Assigned,
        start: Position,
        queues: WorkerQueues,
        commands: deque[FromBroker | Stopped],
        fail: Callable[[str, int], RunFailed],
        batches: BatchRecord | None = None,
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare the thread; `begin` starts it.

        Args:
            program: Program of the workers.
            names: Names of the weights that each worker has.
            assigned: The broker's assignment of the script's place.
            start: Position at which the run begins or resumes.
            queues: Queues of the script.
            commands: Commands of the broker, from the control thread.
            fail: Makes the error of a run that ended from its reason and exit code.
            batches: Record in which trained batches are noted.
            at_end: Called when no more calls are made, and when the run is over.
        """
        self.progress = ScriptProgress(program, start, queues)
        self.calls = CallLog(start)
        self.ended = threading.Event()  # the run is over, well or not
        self._program = program
        self._names = names
        self._run = assigned.run
        self._incarnation = assigned.incarnation
        self._start = start
        self._queues = queues
        self._commands = commands
        self._fail = fail
        self._batches = batches
        self._at_end = at_end
        self._error: RunFailed | None = None
        self._closing = False
        self._last: Position | None = None  # after the last call, once that is known
        self._submitted: deque[OpenCall] = deque()  # not numbered yet
        self._numbering = threading.Lock()
        self._open: deque[OpenCall] = deque()
        self._replied: deque[OpenCall] = deque()  # all replies are here, and the script does not know it yet
        owner = program.schedule.owner
        self._owners = list(dict.fromkeys([owner(0), owner(program.last)]))  # the workers that a batch goes to
        self._untold = False  # replies have come which the reports do not know of
        self._answers = program.inbound(program.script)
        self._inbound = {queue.name: queues.inbound(queue) for queue in self._answers}
        self._outbound = {queue.name: queues.outbound(queue) for queue in program.outbound(program.script)}
        self._counter = QueueCounter(queues, program.ends_of(program.script), program.script)
        self._thread = threading.Thread(target=self._serve, name="calls", daemon=True)

    def begin(self) -> None:
        """Start the thread, which owns the queues from now on."""
        self._thread.start()

    def submit(self, call: Call) -> "Future[Replies]":
        """Put `call` next and return the future of the workers' replies. Only for the script's thread.

        Raises:
            RunFailed: The run is over.
        """
        self.raise_failure()
        opened = OpenCall(call, deque(answers(self._program, call.kind)))
        self._submitted.append(opened)  # all at once, where Ctrl-C comes before or after: a number alone would be lost
        if len(self._open) < UNDER_WAY:  # else the thread looks for another once it has the replies to the oldest
            self._queues.ring()
        if self.ended.is_set():  # the thread may have ended before it saw the call
            self.raise_failure()
        return opened.done

    @property
    def position(self) -> Position:
        """Position after all submitted calls. For any thread."""
        with self._numbering:
            return self._after_submitted()

    def leave(self) -> int:
        """Make no calls but those submitted; return the number of training steps called. For any thread."""
        with self._numbering:
            self._last = self._last or self._after_submitted()
        self._at_end()
        self.progress.calls_for(self._last.step, ends=True)  # from now on it is reported
        return self._last.step

    def close(self, timeout: float) -> None:
        """End the thread and close the queues; wait at most `timeout` seconds."""
        self._closing = True
        self._queues.ring()
        self._thread.join(timeout)

    def lack_room(self, reason: str) -> None:
        """Log `reason` why a call cannot be put yet, once, and obey the broker's commands: a trim makes room."""
        if self.progress.has_no_room():
            log.warning("waiting", reason=reason)
        self._obey()

    def raise_failure(self) -> None:
        """Raise the `RunFailed` that has ended the run, if one has."""
        if self._error is not None:
            raise self._error

    def _after_submitted(self) -> Position:
        submitted = self._submitted.copy()  # at once: the script's thread may append meanwhile
        return reduce(Position.after, (each.call.kind for each in submitted), self.calls.position)

    def _serve(self) -> None:
        try:
            self._begin()
            while not self._closing:
                self._obey()
                self._put_calls()
                self._hand_out()
                self._count_queues()
                self._take_replies()
        except (BrokerError, Stopped) as error:
            self._end(str(error), error.exit_code)
        except Exception as bug:  # the script must not wait for a thread that is gone
            log.exception("the thread that calls the workers failed")
            self._end(str(Bug(bug)), ExitCode.FAILED)
        finally:
            self._queues.close()

    def _begin(self) -> None:
        self._queues.admit(0)  # before the broker has told of any
        for queue in self._answers:
            self._inbound[queue.name].rewind(self._start.of(queue.per))

    def _obey(self) -> None:
        """Carry out the broker's commands."""
        while self._commands:
            match self._commands.popleft():
                case Assigned() as place:
                    self._queues.rekey(secrets_of(self._program.queues.values(), place))
                case Peers(workers):
                    self._queues.admit(max(incarnation for incarnation, _ in workers.values()))
                    self._queues.connect({queue: workers[queue.producer][1] for queue in self._answers})
                case Trim(step):
                    self._trim(step)
                case Stop(at_step_end=True, step=None):
                    self.leave()
                case Stop(reason, 0):
                    self._take_last_replies()
                    self._end(reason, 0)
                case Stop(reason, code) | Refused(reason, code):
                    self._end(reason, code)
                case Stopped() as stopped if not self.ended.is_set():  # the launcher ends after its run, too
                    raise stopped

    def _trim(self, step: int) -> None:
        self.progress.completed(step)
        if self._batches is not None:
            self._batches.trim(step)
        if (position := self.calls.trim(step)) is not None:
            for outbound in self._outbound.values():
                outbound.trim(position.calls)

    def _put_calls(self) -> None:
        if not self._submitted and not self._untold:
            return
        while self._submitted and len(self._open) < UNDER_WAY and (opened := self._number_next()) is not None:
            self._open.append(opened)
            for message in messages(opened.call, self._program, self._names, self._run, self._incarnation):
                self._outbound[message.queue].put(message)
            if self._batches is not None and opened.call.kind is CallKind.TRAIN:
                sums = (self._outbound[f"call-{worker}"].checksums(opened.call.number) for worker in self._owners)
                self._batches.note(opened.call.step, tuple(chain.from_iterable(sums)))
        self._tell()

    def _number_next(self) -> OpenCall | None:
        with self._numbering:
            if self.calls.position == self._last:
                return None
            opened = self._submitted.popleft()
            return replace(opened, call=self.calls.numbered(opened.call))

    def _count_queues(self) -> None:
        """Count the script's queues, if the next report wants that."""
        if self.progress.counts_wanted:
            self.progress.counted(self._counter.count(STEADY.time()))

    def _take_replies(self) -> None:
        """Wait for the next reply, or for something to do."""
        if self._open:
            self._take_reply(TURN)
        else:
            self._queues.pump(TURN)

    def _take_last_replies(self) -> None:
        """Take outstanding replies for `LAST_REPLIES` seconds, as long as the workers stay to deliver them."""
        deadline = monotonic() + LAST_REPLIES
        with suppress(BrokerError):
            while self._open and not self._closing and monotonic() < deadline:
                self._take_reply(TURN)

    def _take_reply(self, timeout: float) -> None:
        """Take the next reply to the oldest call, if it comes in time."""
        opened = self._open[0]
        queue = opened.missing[0]
        reply = self._inbound[queue.name].take(timeout)
        if reply is None:
            return
        if is_emptied(reply.payload):
            self._end(_gone(queue.producer, opened.call), ExitCode.SAVED)
            return
        opened.missing.popleft()
        opened.replies[queue.producer] = reply.payload
        if not opened.missing:
            call = self._open.popleft().call
            for worker in self._owners if call.kind.runs_forward_only else ():  # a replacement needs none
                self._outbound[f"call-{worker}"].empty(call.number, settled_call(call, opened.replies[worker]))
            self._replied.append(opened)
        self._untold = True

    def _hand_out(self) -> None:
        """Resolve the futures of calls whose replies have come.

        This happens just before this thread sleeps: the script's thread, which it wakes, then finds the interpreter
        free.
        """
        while self._replied:
            opened = self._replied.popleft()
            if not opened.done.done():
                opened.done.set_result(opened.replies)

    def _tell(self) -> None:
        """Note the script's activity for the reports."""
        self._untold = False
        progress, position = self.progress, self.position
        calls = position.calls
        with self._numbering:
            if self._last is None:
                progress.calls_for(position.step)
        if not self._open:
            progress.does(f"runs its own code after call {calls - 1}", calls)
            return
        call, queue = self._open[0].call, self._open[0].missing[0]
        wanted = queue.name, call.position.of(queue.per), f"call {call.number}", call.number
        progress.awaits(
            f"{WAITS} for {_ANSWERS[queue.per]} call {call.number}", calls, lambda since: Wait(*wanted, since)
        )

    def _end(self, reason: str, code: int) -> None:
        """End the run: outstanding and submitted calls get the error, since their replies come no more."""
        self._hand_out()
        if code and self._error is None:
            self._error = self._fail(reason, code)
        self.ended.set()
        error = self._error or self._fail(f"the run is over: {reason}", code)
        for opened in (*self._open, *self._submitted):
            with suppress(Exception):  # it may be cancelled
                opened.done.set_exception(error)
        if self._last is None:  # else the workers save the state after these calls
            self._open.clear()
            self._submitted.clear()
        self._at_end()


def _gone(worker: int, call: Call) -> str:
    return (
        f"the reply of worker {worker} to call {call.number} ({call.kind}) was taken by the process that called before "
        "this one, and the worker that had kept it was lost since. Resume the run once its processes have ended: all "
        "workers begin at its newest checkpoint then, and compute it again"
    )
