"""A worker's process: the product's loop, commands, control thread and checkpoint hooks, with what they stand on
simulated: the channel to the broker, the queues' connections, the disk, and the time that computing takes.
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from simulation.chain import ChainExecutor, ChainFeed, digest, named
from simulation.copies import SimulatedStore
from simulation.disk import Disk, SimulatedWriter, SnapshotView, Torn
from simulation.environment import LOG_EVERY, PLAN, RUN, Environment
from simulation.network import Connection
from simulation.orders import orders_of
from simulation.process import SimulatedMember, VirtualWakeup
from simulation.queues import SimulatedQueues
from simulation.scenario import Scenario
from stageline.broker.control.messages import CONTROL_VERSION, Assigned, FromBroker, Hello, Refused
from stageline.broker.errors import BrokerError
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.secrets import secrets_of
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.program import Instruction, Per, Program, check_schedule
from stageline.workers.checkpoint.copier import Bandwidth, Copier
from stageline.workers.checkpoint.directory import SnapshotFailed
from stageline.workers.checkpoint.hooks import Announced, Rhythm, SnapshotHooks, restore
from stageline.workers.control.commands import CommandHandler, SavedWeights
from stageline.workers.control.control_thread import ControlThread
from stageline.workers.control.joining import Stopped, WorkerIdentity
from stageline.workers.control.leaving import Left
from stageline.workers.control.restoring import await_snapshots
from stageline.workers.process.worker import failures_reported
from stageline.workers.runtime.call_sequence import QueuedCalls
from stageline.workers.runtime.calls import Position
from stageline.workers.runtime.loop import WorkerLoop
from stageline.workers.runtime.orders import FixedSchedule
from stageline.workers.runtime.plan_calls import ENDLESS, PlanCalls
from stageline.workers.runtime.progress import Progress
from support.programs import calls_of, queued_calls, with_windows

STARTING = 0.1  # seconds, on the average
LOADING = 0.1  # likewise, the snapshots that a worker begins with
ACTION = 0.02  # likewise, an action
FOREVER = float("inf")
LOST = "no other worker holds a copy"
LEFT_SAVED, LEFT_LATE = "a worker leaves with a checkpoint", "a worker leaves at the end of its notice"


@dataclass(frozen=True, slots=True)
class Name:
    """How a process introduces itself; its queues will be at `endpoint`. `claim`: None for a spare. `token`: no two
    processes have the same."""

    name: str
    host: str
    pid: int
    claim: int | None
    endpoint: str
    token: int


class SimulatedWorker(SimulatedMember):
    """One process of a worker."""

    def __init__(self, environment: Environment, name: Name, ended: Callable[[int], None]) -> None:
        super().__init__(environment.clock, name.host, ended)
        self.name = name
        self.place: int | None = None
        self.hang = 0.0  # seconds by which the next action takes longer
        self.loop: WorkerLoop | None = None
        self.control: ControlThread | None = None
        self.queues: SimulatedQueues | None = None
        self._environment = environment
        self.spawn(self._main)

    def __str__(self) -> str:
        how = "paused" if self.paused else self.loop.doing if self.loop else "has no place"
        return f"{self.name.name} (pid {self.name.pid}, incarnation {self.incarnation or '-'}): {how}"

    def _main(self) -> None:
        self.sleep(self._environment.soon(STARTING))
        view = SnapshotView(self._environment.disks.of(self.host), self._environment.scenario.sees(self.name.claim))
        name, spare = self.name, self.name.claim is None
        token = f"{name.token:032x}"
        base = Hello(CONTROL_VERSION, PLAN, name.name, name.host, name.pid, "", name.claim, spare=spare, token=token)
        identity = WorkerIdentity(base, view)
        open_channel = partial(SimulatedChannel, self, self._environment)
        self.control = control = ControlThread(
            "simulated", identity, open_channel=open_channel, clock=self, spawn=self.spawn, exit_process=self.end
        )
        self.end(self._run(control))

    def _run(self, control: ControlThread) -> int:
        try:
            assigned = control.join(FOREVER)
            self._environment.fired["a spare takes a place"] += self.name.claim is None
            self.incarnation, self.place = assigned.incarnation, assigned.index
            self._work(control, assigned)
        except Left:
            self._environment.fired[LEFT_LATE if control.notice.over else LEFT_SAVED] += 1
            return ExitCode.LEFT
        except Stopped as stop:
            return stop.exit_code
        except (BrokerError, SnapshotFailed):
            return 1
        finally:
            control.close()
            # A Hello that came late may have got a replaced worker a place: what goes with that is not for this one.
            if control.ignored and "Assigned" not in control.ignored:
                self._environment.report(f"messages of the broker were not believed: {control.ignored}")
        return 0

    def _work(self, control: ControlThread, assigned: Assigned) -> None:
        environment, scenario = self._environment, self._environment.scenario
        calls = calls_in(scenario, orders_of(environment, assigned))
        feed = ChainFeed() if scenario.calls else None
        executor = ChainExecutor(scenario.schedule, assigned.index, self._compute, feed)
        options = QueueOptions(secrets=secrets_of(calls.program.queues.values(), assigned))
        self.queues = queues = SimulatedQueues(self, environment, self.name.endpoint, assigned.incarnation, options)
        where = assigned.index, assigned.step
        progress = Progress.of(calls, where[0], start=where[1], queues=queues, now=self.time())
        handler: CommandHandler | None = None

        def wake() -> None:
            if self.loop is not None:
                self.loop.attend()
            queues.ring()

        def announced() -> Iterable[Announced]:
            return () if handler is None else handler.announced()

        reported = failures_reported(control, assigned.incarnation, str, replaced=True)
        with closing(queues), reported:
            steps = None if scenario.calls else scenario.steps
            disk = environment.disks.of(self.host)
            copier = self._copier(calls.program, assigned, queues, disk, progress)
            missing = [
                (stage, assigned.step)
                for stage in executor.stages
                if scenario.copies and assigned.step and not disk.is_whole(stage, assigned.step)
            ]
            progress.copies.lack(missing)
            control.start(assigned, queues.endpoint, progress, steps=steps, wake=wake)
            self.sleep(environment.soon(LOADING))
            await_snapshots(missing, copier, control, queues, calls.program, progress, _lost)
            environment.fired["a snapshot comes back from its holder"] += len(missing)
            start = restore(executor.stages, progress, disk.load, assigned.step)
            with self._hooks(calls, assigned, start, executor, progress, queues, announced) as hooks:
                self.loop = loop = WorkerLoop(
                    calls,
                    where[0],
                    executor,
                    queues,
                    run=RUN,
                    incarnation=assigned.incarnation,
                    start=where[1],
                    clock=self,
                    progress=progress,
                    keep=hooks.keep,
                )
                handler = CommandHandler(assigned, control, queues, hooks, loop, copier, self)
                handler.run(partial(_digests, executor), workers_timeout=FOREVER, lease=scenario.lease)

    def _copier(
        self, program: Program, assigned: Assigned, queues: SimulatedQueues, disk: Disk, progress: Progress
    ) -> Copier:
        environment = self._environment
        return Copier(
            program,
            assigned.index,
            queues,
            SimulatedStore(self, disk, environment.disks.sent, environment.rng, environment.scenario.disk),
            progress.copies,
            run=RUN,
            incarnation=assigned.incarnation,
            bandwidth=Bandwidth(None, self.monotonic),
        )

    def _hooks(
        self,
        calls: PlanCalls | QueuedCalls,
        assigned: Assigned,
        start: Position,
        executor: ChainExecutor,
        progress: Progress,
        queues: SimulatedQueues,
        announced: Callable[[], Iterable[Announced]],
    ) -> "CheckedHooks":
        environment, scenario = self._environment, self._environment.scenario
        due = scenario.rounds.due if scenario.keeps_best else lambda step: False
        hooks = CheckedHooks(
            executor.stages,
            progress,
            environment.disks.of(self.host),
            SimulatedWriter(self, environment.rng, scenario.disk),
            Rhythm(ENDLESS if scenario.calls else scenario.steps, scenario.every, LOG_EVERY, due),
            incarnation=assigned.incarnation,
            start=start,
            announced=announced,
        )
        hooks.watch(environment, calls.program, assigned.index, queues)
        return hooks

    def _compute(self, instruction: Instruction) -> None:
        seconds, self.hang = self._environment.soon(ACTION) + self.hang, 0.0
        self.sleep(seconds)
        self._environment.worked()


def calls_in(scenario: Scenario, orders: FixedSchedule | None = None) -> PlanCalls | QueuedCalls:
    """Work of all that take part in the run."""
    calls: PlanCalls | QueuedCalls
    if scenario.calls:
        calls = queued_calls(scenario.schedule, scenario.passes)
    else:
        calls = calls_of(
            scenario.schedule,
            scenario.steps,
            scenario.rounds,
            passes=scenario.all_passes,
            criterion=scenario.criterion,
            replayed_from=scenario.replayed_from,
            orders=orders,
        )
    bounds, ahead = check_schedule(calls.program).queue_bound, calls.program.ahead
    # credit is renewed when half of it is used up
    return with_windows(calls, lambda queue: max(scenario.window, 2 * bounds[queue.name] if queue.name in ahead else 0))


def _lost(snapshot: tuple[int, int]) -> Exception:
    return Torn(f"stage {snapshot[0]}, step {snapshot[1]}: {LOST}")


def _digests(executor: ChainExecutor) -> SavedWeights:
    return named({index: digest(stage) for index, stage in executor.stages.items()}), {}


class CheckedHooks(SnapshotHooks):
    """The product's, and what must hold when it is called."""

    def watch(self, environment: Environment, program: Program, worker: int, queues: SimulatedQueues) -> None:
        self._environment = environment
        self._program = program
        self._outbound = program.outbound(worker)
        self._queues = queues

    def stepped(self, stage: int, step: int, loss: float | None) -> None:
        self._check_bounds(stage)
        super().stepped(stage, step, loss)

    def forget(self, complete: int, best: int | None = None) -> None:
        if complete > min(self._progress.finished.values()):
            self._environment.report(
                f"told of checkpoint {complete}, having done {self._progress.finished} steps, by stage"
            )
        super().forget(complete, best)

    def _check_bounds(self, stage: int) -> None:
        """A producer keeps its lead over the checkpoint it was told of, and without flush what is in flight."""
        schedule = self._program.schedule
        in_flight = schedule.stages - 1 if schedule.mode == "async" else 0
        lead = self._progress.finished[stage] - self._progress.complete
        for queue in self._outbound:
            bound = lead * queue.count + in_flight
            retained = self._queues.outbound(queue).depth().retained
            bounded = queue.per in (Per.MICROBATCH, Per.STEP) and queue.source == stage
            if bounded and retained > bound:
                self._environment.report(f"{queue.name} retains {retained} messages, and {bound} may still be needed")


class SimulatedChannel:
    """A `ClientChannel` of a worker or a script, over a connection that is made again whenever it is broken."""

    trouble = refusal = ""

    def __init__(self, worker: SimulatedMember, environment: Environment, url: str, pair: object) -> None:
        self.process = worker
        self._environment = environment
        self._connection: Connection | None = None
        self._renewed = False
        self._frames: deque[bytes] = deque()
        self._came = VirtualWakeup(worker)

    def send(self, frame: bytes) -> bool:
        connection, broker = self._connected(), self._environment.broker
        if connection is None or broker is None:
            return False
        receive = partial(broker.receive, self, connection, frame)
        self._environment.network.carry(connection, broker.process, receive)
        return True

    def receive(self, timeout: float) -> bytes | None:
        if not self._frames:
            self._came.wait(timeout)
        return self._frames.popleft() if self._frames else None

    def renewed(self) -> bool:
        self._connected()
        renewed, self._renewed = self._renewed, False
        return renewed

    def close(self) -> None:
        return

    def deliver(self, connection: Connection, message: FromBroker, frame: bytes) -> None:
        if connection is self._connection:
            self._count(message)
            self._frames.append(frame)
            self._came.set()

    def _connected(self) -> Connection | None:
        """The connection to the broker that runs now."""
        if self._connection is None or self._connection.broken:
            broker = self._environment.broker
            self._connection = self._environment.network.connect(self.process, broker.process) if broker else None
            self._renewed = self._connection is not None
        return self._connection

    def _count(self, message: FromBroker) -> None:
        fired, incarnation = self._environment.fired, self.process.incarnation
        if incarnation:
            fired["a replaced worker is refused"] += isinstance(message, Refused)
            newer = isinstance(message, Assigned) and message.keep and message.incarnation > incarnation
            fired["a worker goes on though the records are lost"] += newer
