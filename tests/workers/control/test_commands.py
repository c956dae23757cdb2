"""One worker under the broker's commands, over queues in memory, with an executor that computes nothing."""

from collections import deque
from collections.abc import Mapping, Sequence

import pytest

from stageline.broker.codec.message import Message
from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import Assigned, Finished, Peers, Refused, Stop
from stageline.broker.control.pauses import Hold
from stageline.broker.queues.memory import MemoryQueues
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.program import Instruction, Queue
from stageline.pipeline.retry import ResourceFault
from stageline.pipeline.schedule import make_schedule
from stageline.pipeline.tree import Tree
from stageline.workers.checkpoint.hooks import Announced, CheckpointHooks
from stageline.workers.control import commands
from stageline.workers.control.commands import CommandHandler
from stageline.workers.control.joining import Stopped
from stageline.workers.control.leaving import Left, Notice
from stageline.workers.runtime.calls import Call, CallFeed, CallKind, Position, encode_call
from stageline.workers.runtime.loop import WorkerLoop
from support.copies import copier_of
from support.programs import calls_of, queue_named, queued_calls

STEPS = 5
JOINED = Peers({0: (7, "ipc://0")})
OVER = Stop("all steps are done", 0)


class WiredQueues(MemoryQueues):
    """Those of a worker whose peers have endpoints."""

    connected: Mapping[Queue, str] | None = None

    def connect(self, peers: Mapping[Queue, str]) -> None:
        self.connected = peers

    def admit(self, newest: int) -> None:
        self.admitted = newest


class AnsweringBroker:
    """In place of a control thread: `commands` for the worker; answers Finished with the end of the run."""

    silence = 0.0

    def __init__(self, *commands: object) -> None:
        self.commands = deque(commands)
        self.notice = Notice(lambda: 0.0)
        self.sent: list[object] = []
        self.confirmed = 0

    def send(self, message: object) -> None:
        self.sent.append(message)
        self.commands.append(OVER)

    def wait_until_confirmed(self, timeout: float) -> None:
        self.confirmed += 1


def nothing_saved() -> tuple[dict, dict]:
    return {}, {}


class NotedHooks(CheckpointHooks):
    """Requests to them."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []
        self.stops: list[int] = []
        self.flushed = 0

    def forget(self, complete: int, best: int | None = None) -> None:
        self.forgotten.append(complete)

    def stop_at(self, step: int) -> None:
        self.stops.append(step)

    def flush(self) -> None:
        self.flushed += 1


class WaitingHooks(NotedHooks):
    """The disk is waited for after step 1, which brings these commands, and refuses to write later."""

    def __init__(self, worker: "CommandedWorker", *commands: object) -> None:
        super().__init__()
        self.worker, self.commands = worker, commands
        self.seen: list[list[Announced]] = []

    def stepped(self, stage: int, step: int, loss: float | None) -> None:
        if (stage, step) == (0, 1):
            self.worker.broker.commands.extend(self.commands)
            self.seen.append([*self.worker.handler.announced()])
            self.worker.loop.progress.note_fault("snapshots", ResourceFault("write", "full", 0.0, 60.0))
            self.seen.append([*self.worker.handler.announced()])
            raise AssertionError("the disk is waited for")


class CommandedWorker:
    """Runs both stages. `at` gives the command that comes while a step is computed."""

    def __init__(self, *commands: object, at: Mapping[int, object] | None = None) -> None:
        self.broker, self.hooks, self.queues = AnsweringBroker(*commands), NotedHooks(), WiredQueues("run")
        self.loss: float | None = None
        self.gradient_norm: float | None = None
        self.steps: list[int] = []
        self._at = dict(at or {})
        program = calls_of(make_schedule("gpipe", ((0, 1),), 1), STEPS)
        self.loop = WorkerLoop(program, 0, self, self.queues, run="run", incarnation=7)

    def carry_out(self, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        self.steps.append(instruction.step)
        if (command := self._at.pop(instruction.step, None)) is not None:
            self.broker.commands.extend(command if isinstance(command, tuple) else (command,))
            self.loop.attend()
        return None

    def run(self, workers_timeout: float = 10.0) -> None:
        assigned = Assigned("run", 0, 7, 0)
        self.handler = CommandHandler(
            assigned, self.broker, self.queues, self.hooks, self.loop, copier_of(self.loop.program, self.queues)
        )
        try:
            self.handler.run(nothing_saved, workers_timeout=workers_timeout, lease=1.0)
        finally:
            self.queues.close()


def test_a_worker_runs_when_all_have_joined_and_leaves_when_the_run_is_over() -> None:
    worker = CommandedWorker(JOINED)
    worker.run()
    assert set(worker.steps) == set(range(STEPS))
    assert worker.broker.sent == [Finished(7, {})]
    assert worker.queues.connected == {}  # its queues begin and end at itself


def test_a_worker_whose_peers_do_not_come_says_where_to_look() -> None:
    with pytest.raises(Stopped, match="the other workers did not come within 0 s") as stopped:
        CommandedWorker().run(workers_timeout=0.0)
    assert stopped.value.exit_code == ExitCode.NO_WORKER


def test_a_trim_frees_messages_and_older_snapshots() -> None:
    worker = CommandedWorker(JOINED, at={3: Trim(2)})
    worker.run()
    assert worker.loop.progress.complete == 2
    assert worker.hooks.forgotten == [2]


def test_a_trim_beyond_what_the_worker_has_finished_frees_nothing() -> None:
    worker = CommandedWorker(JOINED, at={3: Trim(10**6)})
    worker.run()
    assert (worker.loop.progress.complete, worker.hooks.forgotten) == (0, [])


def test_a_trim_to_a_checkpoint_that_the_worker_has_no_snapshot_of_frees_nothing() -> None:
    worker = CommandedWorker(JOINED, at={3: Trim(2)})
    worker.hooks.may_be_complete = lambda step: False
    worker.run()
    assert (worker.loop.progress.complete, worker.hooks.forgotten) == (0, [])


def test_a_stop_ends_the_loop_before_the_next_action() -> None:
    worker = CommandedWorker(JOINED, at={1: Stop("enough", 1)})
    with pytest.raises(Stopped, match="enough") as stopped:
        worker.run()
    assert stopped.value.broker_knows
    assert worker.steps.count(1) == 1


@pytest.mark.parametrize(("code", "meant"), [(0, 1), (7, 1), (75, 75), (130, 130)])
@pytest.mark.parametrize("of", [Stop, Refused])
def test_a_worker_with_steps_left_never_exits_with_0_whatever_a_message_says(of: type, code: int, meant: int) -> None:
    worker = CommandedWorker(JOINED, at={1: of("all is done", code)})
    with pytest.raises(Stopped) as stopped:
        worker.run()
    assert stopped.value.exit_code == meant


def test_a_worker_stays_until_the_last_replies_have_arrived_though_the_run_is_over(called, monkeypatch) -> None:
    monkeypatch.setattr(commands, "LAST_REPLIES", 60.0)
    worker = called(CallKind.TRAIN, CallKind.STOP)
    taken: list[int] = []

    def pump(timeout: float) -> None:
        if not worker.broker.commands and worker.broker.sent:  # the end of the run has been heard of
            taken.extend(worker.queues.inbound(key).take(0).number for key in (queue_named("loss-0"), REPLIES))

    worker.queues.pump = pump
    worker.run()
    assert taken == [0, 0]


def test_a_stop_at_the_end_of_a_step_waits_for_that_and_for_its_snapshot() -> None:
    worker = CommandedWorker(JOINED, at={1: Stop("enough", 75, at_step_end=True, step=3)})
    with pytest.raises(Stopped, match="enough"):
        worker.run()
    assert max(worker.steps) == 2
    assert (worker.hooks.stops, worker.hooks.flushed, worker.broker.confirmed) == ([3], 1, 1)


def test_a_stop_ends_a_pause_that_holds_earlier_steps_back() -> None:
    """The order by which the pause moved to a later step was lost, and the worker saved nothing there."""
    worker = CommandedWorker(JOINED, at={0: (Hold(1, 1), Stop("enough", 75, at_step_end=True, step=3))})
    with pytest.raises(Stopped, match="enough"):
        worker.run()
    assert max(worker.steps) == 2
    assert (worker.hooks.stops, worker.hooks.flushed, worker.broker.confirmed) == ([3], 1, 1)


def test_a_stop_ends_a_worker_that_waits_for_a_full_disk_once_the_time_of_the_step_is_over(monkeypatch) -> None:
    """It heard of the stop when the disk had room: `train` killed it, ten seconds after SIGTERM."""
    monkeypatch.setattr(commands, "STEP_END", 0.0)
    worker = CommandedWorker(JOINED)
    worker.hooks = WaitingHooks(worker, Trim(1, 0), Stop("enough", 75, at_step_end=True, step=2))
    with pytest.raises(Stopped, match="enough") as stopped:
        worker.run()
    assert stopped.value.exit_code == 75
    assert (worker.hooks.seen, worker.broker.confirmed) == ([[(1, 0)]], 1)


def test_a_worker_that_has_gone_beyond_the_last_step_still_reports_the_snapshots_that_it_has() -> None:
    """It left at once, and with it a checkpoint that was on all disks was unknown to the broker."""
    worker = CommandedWorker(JOINED, at={3: Stop("enough", 75, at_step_end=True, step=2)})
    with pytest.raises(Stopped, match="enough"):
        worker.run()
    assert (worker.hooks.stops, worker.hooks.flushed, worker.broker.confirmed) == ([], 1, 1)


@pytest.mark.parametrize(
    ("command", "known"), [(Refused("another incarnation has this place", 1), True), (Stopped("SIGTERM", 130), False)]
)
def test_a_refusal_and_a_signal_end_the_loop_too(command, known: bool) -> None:
    worker = CommandedWorker(JOINED, at={1: command})
    with pytest.raises(Stopped) as stopped:
        worker.run()
    assert stopped.value.broker_knows is known
    assert max(worker.steps) == 1


class CalledWorker:
    """Runs both stages for a script that has put these calls, from a checkpoint at `start` on."""

    def __init__(self, *kinds: CallKind, start: Position, commands: Mapping[int, object]) -> None:
        self.queues = WiredQueues("run")
        self.hooks, self.broker = NotedHooks(), AnsweringBroker(JOINED)
        self.hooks.start = start
        calls = queued_calls(make_schedule("gpipe", ((0, 1),), 1))
        self.program = calls.program
        names = {"run": "run", "incarnation": 7, "start": start.step}
        self.loop = WorkerLoop(calls, 0, self, self.queues, **names, keep=lambda step: self.hooks.keep(step))
        self.feed, self.stages, self.sums = CallFeed(1), {}, None
        self.loss = self.gradient_norm = None
        self.retained: dict[int, list[int]] = {}
        self._commands = dict(commands)
        position = start
        for kind in kinds:
            key, number = queue_named("call-0"), position.calls
            call = Call(kind, number, position.step, position.evaluations)
            self.queues.outbound(key).put(Message("run", key.name, number, 1, encode_call(call)))
            position = position.after(kind)

    def begin_call(self, *, ema: bool, settled: bool, epoch: int) -> None:
        """Nothing is computed."""

    def carry_out(self, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        if instruction.counted and (command := self._commands.pop(instruction.step, None)) is not None:
            self.broker.commands.append(command)
            self.loop.attend()
        return None

    def run(self) -> None:
        handler = CommandHandler(Assigned("run", 0, 7, self.hooks.start.step), *self.parts)
        handler.run(nothing_saved, workers_timeout=10.0, lease=1.0)

    @property
    def parts(self):
        return self.broker, self.queues, self.hooks, self.loop, copier_of(self.loop.program, self.queues)

    def first_retained(self, key: Queue) -> int:
        return self.queues.outbound(key).peek(1)[0].number


EVALUATION, REPLIES = queue_named("evaluation-1"), queue_named("reply-0")
CALLS = [CallKind.EVALUATE, CallKind.TRAIN, CallKind.EVALUATE, CallKind.TRAIN, CallKind.STATE, CallKind.STOP]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(commands, "LAST_REPLIES", 0.0)  # the script takes nothing
    made: list[CalledWorker] = []

    def make(*kinds: CallKind, start: Position | None = None, at: Mapping[int, object] | None = None) -> CalledWorker:
        made.append(CalledWorker(*kinds, start=start or Position(), commands=at or {}))
        return made[-1]

    yield make
    for worker in made:
        worker.queues.close()


def test_a_script_that_stops_ends_the_program_as_its_last_step_would(called) -> None:
    worker = called(*CALLS)
    worker.run()
    assert worker.broker.sent == [Finished(7, {})]
    assert worker.queues.outbound(REPLIES).depth().retained == len(CALLS) - 2  # what trains has none


def test_a_replacement_takes_the_calls_and_the_evaluated_batches_from_its_checkpoint_on(called) -> None:
    worker = called(*CALLS, start=Position(10, 25, 14))
    worker.run()
    assert worker.first_retained(REPLIES) == 15
    assert worker.first_retained(EVALUATION) == 14
    assert worker.first_retained(queue_named("forward-1")) == 10


def test_the_states_before_a_script_sets_other_weights_and_at_its_end_are_kept(called) -> None:
    kept: list[int] = []
    worker = called(CallKind.TRAIN, CallKind.LOAD, CallKind.TRAIN, CallKind.STOP)
    worker.hooks.keep = kept.append
    worker.run()
    assert kept == [1, 2]


def test_a_trim_forgets_what_is_counted_by_calls_and_by_evaluated_batches_too(called) -> None:
    worker = called(*CALLS, at={1: Trim(1)})
    worker.run()
    assert worker.first_retained(EVALUATION) == 1
    assert worker.first_retained(queue_named("forward-1")) == 1
    assert worker.loop.progress.position(1) == Position(1, 2, 1)


def test_replies_are_kept_until_the_script_has_them(called) -> None:
    worker = called(*CALLS, at={1: Trim(1)})
    replies = worker.queues.inbound(REPLIES)
    worker.run()
    assert worker.first_retained(REPLIES) == 0
    assert [replies.take(0).number for _ in range(4)] == [0, 1, 2, 3]


def test_a_stop_at_the_end_of_a_step_waits_until_the_script_has_the_replies_before_its_snapshot(called) -> None:
    worker = called(*CALLS, at={0: Stop("enough", 75, at_step_end=True, step=1)})
    progress, taken = worker.loop.progress, []

    def pump(timeout: float) -> None:
        if progress.held_back:  # the script takes what has come meanwhile
            taken.append([worker.queues.inbound(key).take(0).number for key in (REPLIES, queue_named("loss-0"))])

    worker.queues.pump, worker.hooks.flush = pump, lambda: progress.durable(0, 1)
    with pytest.raises(Stopped, match="enough"):
        worker.run()
    assert taken == [[0, 0]]
    assert progress.reportable
    assert worker.broker.confirmed == 1


class CompletedHooks(NotedHooks):
    """The checkpoint after step 1 is complete as soon as the worker has finished that."""

    def __init__(self, worker: CommandedWorker) -> None:
        super().__init__()
        self.worker = worker

    def stepped(self, stage: int, step: int, loss: float | None) -> None:
        if min(self.worker.loop.progress.finished.values()) == 2:
            self.worker.broker.commands.append(Trim(2))
            self.worker.loop.attend()


def test_a_worker_with_notice_leaves_once_the_checkpoint_of_the_pause_is_complete() -> None:
    worker = CommandedWorker(JOINED, at={1: Hold(1, 2, settled=True, leaving=True)})
    worker.hooks = CompletedHooks(worker)
    worker.broker.notice.give(60.0, "SIGTERM")
    with pytest.raises(Left, match="SIGTERM") as left:
        worker.run()
    assert (left.value.exit_code, worker.broker.notice.left, worker.broker.sent) == (ExitCode.LEFT, True, [])
    assert set(worker.steps) == {0, 1}


def test_a_worker_with_notice_leaves_before_the_others_are_there_and_when_its_time_is_over() -> None:
    alone = CommandedWorker()
    alone.broker.notice.give(60.0, "SIGTERM")
    with pytest.raises(Left):
        alone.run()
    late = CommandedWorker(JOINED)
    late.broker.notice.give(0.0, "SIGTERM")
    with pytest.raises(Left):
        late.run()
    assert (alone.steps, late.steps) == ([], [])
