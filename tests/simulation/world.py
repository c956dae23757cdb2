"""One seed's run from its beginning to its end: the processes, and who starts them again when they are gone.

It must end as the undisturbed run does, whatever happens: every stage's digest, every loss, and every process ended.
"""

import copy
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial

from structlog.testing import capture_logs

from simulation.broker import FragileStore, SimulatedBroker
from simulation.chain import ChainResult, named, undisturbed, undisturbed_script
from simulation.clock import Callback, VirtualClock
from simulation.disk import Disks
from simulation.environment import LOG_EVERY, PLAN, RUN, Environment, Wrong
from simulation.faults import strike
from simulation.network import Network
from simulation.orders import CHANGED, MEMORY, restless
from simulation.pauses import Person
from simulation.scenario import Injection, PlannedFault, Scenario
from simulation.script import SimulatedScript
from simulation.worker import Name, SimulatedWorker
from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import Assigned, Exited
from stageline.broker.control.records import RunLength
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.run import RunConfig, RunPhase, run_of
from stageline.broker.coordinator.state import Outgoing
from stageline.broker.ledger.evaluations import stored_in
from stageline.broker.ledger.losses import Leases
from stageline.pipeline.digest import weights_sha256

LONGEST = 200.0  # seconds that a run may last after the last injection
LOADING = 60.0  # seconds that a worker may load
DOWN = 0.5  # seconds until the broker is started again, on the average
RESTART = 0.2  # likewise a worker
TELL = 0.1  # seconds until the broker is told that a worker's process is gone, likewise
UNHEARD = 0.3  # the share of such news that gets lost
PORT = 5600
TAKEN = "was taken by the process that called before"
STOPPED = re.compile(f"^the script (is gone|did not reconnect|has ended)|{TAKEN}")
SCRIPT_GONE = "the script is gone for longer than a lease, and the run is resumed"
NOWHERE = "a snapshot is on no disk any more, and the run ends with its name"
REPLY_GONE = "a reply is gone with its script and its worker, and the run is resumed"


class World:
    """`run` it. `broker` and `workers` are the processes of now, `fired` counts what has befallen them."""

    def __init__(self, scenario: Scenario) -> None:
        schedule = scenario.schedule
        clock, rng, fired = VirtualClock(), random.Random(scenario.seed + 1), Counter[str]()
        network = Network(clock, rng, scenario.weather, fired)
        placement = (*schedule.placement, ()) if scenario.calls else schedule.placement
        self.scenario = scenario
        self.environment = Environment(
            scenario, clock, rng, network, Disks(placement, apart=scenario.copies), fired, worked=self._worked
        )
        self.store = FragileStore()
        self.workers: list[SimulatedWorker] = []
        self.scripts: list[SimulatedScript] = []  # while it is there; another, too, if it was paused
        self._terms = RunConfig(
            RUN,
            PLAN,
            {},
            schedule,
            Leases(scenario.lease, scenario.lease, LOADING),
            snapshot_every=scenario.every,
            log_every=LOG_EVERY,
            restarts=10**6,
            snapshots=True,
            scripted=bool(scenario.calls),
            length=None if scenario.calls else RunLength(scenario.steps, scenario.rounds.batches),
            criterion=scenario.criterion,
            evaluates_every=scenario.rounds.every,
            keeps_best=scenario.keeps_best,
            schedule_memory=MEMORY if scenario.chooses else None,
            neighbours=scenario.neighbours,
        )
        self._restless = random.Random(scenario.seed + 8 * 10**9)
        self._started = 0
        self._ends_early = False
        self._actions = 0
        self._injections = sorted(scenario.injections, key=lambda injection: injection.after)
        self._last_injection = clock.now
        self._complete = 0  # as announced by a broker with these records
        self._ever = 0  # likewise by any broker: older ones have been deleted since
        self._newest = 0  # incarnation
        self._resumes = False  # the next broker is started with --resume
        self._brokers = 0  # started so far
        self.pauses = Person(self)
        self._start_broker()

    @property
    def core(self) -> Coordinator:
        return self.broker.core

    @property
    def fired(self) -> Counter[str]:
        return self.environment.fired

    def run(self) -> None:
        """To the end. Raises `Wrong`."""
        for index in range(len(self.scenario.schedule.placement)):
            self._start_worker(index, f"host-{index}")
        for spare in range(self.scenario.spares):
            self._start_worker(None, f"spare-{spare}")
        if self.scenario.calls:
            self._start_script()
        with capture_logs():
            while not self._over():
                self.environment.clock.advance()
                self._check()
        if not self._ends_early:
            self._judge()

    def lose_records(self) -> None:
        """The broker dies, and the next one knows nothing: the run starts over if no worker is left either."""
        if self.broker.alive:
            self.broker.end(-9)
            self.store, self._complete = FragileStore(), 0

    def resume(self) -> None:
        """Everybody is gone, and the run is resumed as a whole, perhaps without records. What can be damaged of its
        newest checkpoint is, unless records are tampered with as well."""
        complete, disks = self.core.run.checkpoints.complete, self.environment.disks
        self._resumes, self._complete = True, 0
        for process in (*self.workers, *self.scripts):
            process.end(-9)
        if self.broker.alive:
            self.broker.end(-9)
        stages = range(self.scenario.schedule.stages)
        older = any(step < complete for step in disks.common()) and not self.scenario.copies
        if complete and older and not self.scenario.tampers and self.environment.rng.random() < 0.8:
            stage = self.environment.rng.choice(stages)
            for disk in disks.all():
                disk.damage(stage, complete)
            self.fired["a checkpoint is damaged"] += 1
        if self.environment.rng.random() < 0.3:
            self.store = FragileStore()
            self.fired["and it has no records any more"] += 1

    def kill_script(self) -> bool:
        """Whether it was there."""
        there = list(self.scripts)
        for script in there:
            script.end(-9)
        return bool(there)

    def pause_script(self, seconds: float) -> bool:
        """The user takes it for dead, and starts another. Whether it was there."""
        there = list(self.scripts)
        for script in there:
            script.pause(seconds)
            self.environment.clock.after(self.environment.soon(RESTART), partial(self._start_script, another=True))
        return bool(there)

    def keep_copy_of_records(self, seconds: float) -> None:
        """The broker dies after `seconds`, and the next one knows what is known now."""
        old = copy.deepcopy(self.store)
        old.fuse = 0
        self.environment.clock.after(seconds, partial(self._go_back_to, old, self._complete, lambda: None))

    def fail_power(self, seconds: float, then: Callable[[], object]) -> None:
        """Power fails after `seconds`: all die, and of the records only what is known now is on the broker's disk.

        Records that went back meanwhile, or were lost, have nothing of what this copy knew after that: they stay.
        """
        store, old, complete = self.store, copy.deepcopy(self.store), self._complete
        old.fuse = 0

        def fail() -> None:
            same = self.store is store
            self._go_back_to(old if same else self.store, complete if same else self._complete, then)

        self.environment.clock.after(seconds, fail)

    def _go_back_to(self, old: FragileStore, complete: int, then: Callable[[], object]) -> None:
        if self.broker.alive and self.core.run.outcome is None:
            self.broker.end(-9)
            self.store, self._complete = old, complete
            then()

    # who starts them

    def _start_broker(self) -> None:
        """In a container it always has the same words: they resume the run, whatever has become of its workers."""
        contained, environment = self.scenario.contained, self.environment
        whole, self._resumes = self._resumes, False
        self._brokers += 1
        self.broker = SimulatedBroker(
            environment.clock,
            environment.network,
            self.store,
            self._terms,
            self._watch,
            self._broker_ended,
            self.fired,
            key=b"key %d" % self._brokers,
            new=self._brokers == 1,
            resume=whole or contained,
            alone=whole and not contained,
        )
        environment.broker = self.broker
        if self.scenario.chooses:
            self.core.ordering.review = restless(self.scenario.schedule, self._restless)

    def _broker_ended(self, status: int) -> None:
        self.environment.broker = None
        self.environment.network.cut_all(self.broker)
        self.store.fuse = 0
        self.environment.clock.after(self.environment.soon(DOWN), self._start_broker)

    def _start_worker(self, index: int | None, host: str) -> None:
        """Of the plan's place `index`, or a spare."""
        if self._wait_for_resumption(partial(self._start_worker, index, host)):
            return
        self._started += 1
        unlike = 0 if self.scenario.contained else self._started
        name = host if index is None else f"worker-{index}"
        introduction = Name(name, host, 1 + unlike, index, f"tcp://{host}:{PORT + unlike}", self._started)
        worker = SimulatedWorker(self.environment, introduction, lambda status: self._worker_ended(worker, status))
        self.workers.append(worker)

    def _wait_for_resumption(self, start: Callback) -> bool:
        """Whether nothing is to be started now: the run is over, but perhaps only until a broker resumes it."""
        over = self.core.run.outcome is not None
        if over and self._resumes:
            self.environment.clock.after(self.environment.soon(RESTART), start)
        return over

    def _start_script(self, *, another: bool = False) -> None:
        """In a scripted run the user, or something else, starts it again within a lease; if `another` is there, too."""
        if (self.scripts and not another) or self._wait_for_resumption(self._start_script):
            return
        self._started += 1
        pid = 1 if self.scenario.contained else 1 + self._started
        place = len(self.scenario.schedule.placement)
        introduction = Name("script", "laptop", pid, place, f"tcp://laptop:{PORT + self._started}", self._started)
        script = SimulatedScript(self.environment, introduction, lambda status: self._script_ended(script, status))
        self.scripts.append(script)

    def _script_ended(self, script: SimulatedScript, status: int) -> None:
        self.scripts.remove(script)
        self.environment.network.cut_all(script)
        if script.queues is not None:
            self.environment.unbind(script.name.endpoint, script.queues)
        clock, environment = self.environment.clock, self.environment
        clock.after(min(environment.soon(RESTART), self.scenario.lease / 2), self._start_script)
        if not self.scenario.contained and script.name.claim is not None:
            gone = Exited(script.name.claim, script.name.pid, min(status, 0))
            clock.after(environment.soon(TELL), partial(self._tell, gone))

    def _worker_ended(self, worker: SimulatedWorker, status: int) -> None:
        self.workers.remove(worker)
        self.environment.network.cut_all(worker)
        if worker.queues is not None:
            self.environment.unbind(worker.name.endpoint, worker.queues)
        ordered = self.environment.ordered
        for index in [index for index, (incarnation, _) in ordered.items() if incarnation == worker.incarnation]:
            del ordered[index]
        clock, index, result = self.environment.clock, worker.name.claim, status if status >= 0 else None
        clock.after(self.environment.soon(RESTART), partial(self._start_worker, index, worker.name.host))
        if index is not None and not self.scenario.contained:
            clock.after(
                self.environment.soon(TELL), partial(self._tell, Exited(index, worker.name.pid, status, result))
            )

    def _tell(self, exited: Exited) -> None:
        if self.environment.rng.random() < UNHEARD or not self.broker.alive:
            self.fired["exit unheard"] += 1
        else:
            self.broker.note(exited)

    # what befalls them

    def _worked(self) -> None:
        self._actions += 1
        while self._injections and self._injections[0].after < self._actions:
            injection = self._injections.pop(0)
            self.environment.clock.after(injection.delay, partial(self._strike, injection))
            self._last_injection = self.environment.clock.now + injection.delay + injection.seconds

    def _strike(self, injection: Injection) -> None:
        if self.core.run.outcome is None:
            self.fired[injection.fault] += strike(self, injection)

    # what is found

    def _over(self) -> bool:
        outcome = self.core.run.outcome
        if outcome is not None and not self._resumes and (why := STOPPED.search(outcome.reason)):
            lost = why.group().startswith(TAKEN)
            self.fired[REPLY_GONE if lost else SCRIPT_GONE] += 1
            self.resume()
        elif outcome is not None and not self._resumes and outcome.phase is RunPhase.FAILED and self._is_lost():
            self.fired[NOWHERE] += 1
            self._ends_early = True
        elif outcome is not None and outcome.phase is not RunPhase.FINISHED and not self._resumes:
            raise Wrong(f"the run has {outcome.phase}: {outcome.reason}")
        return not self._resumes and outcome is not None and not self.workers and not self.scripts

    def _is_lost(self) -> bool:
        """Whether no disk has the snapshot of some stage any more to which the run would go back.

        Two were lost then, or one while the copies of a checkpoint that was found on the disks were to come.
        """
        lost, tracker = self.fired[PlannedFault.LOSE_DISK], self.core.run.checkpoints
        unsafe = lost + 2 * self.fired[PlannedFault.LOSE_DISKS] > 1 or (lost and tracker.settled < tracker.complete)
        return bool(unsafe) and tracker.complete not in self.environment.disks.common()

    def _check(self) -> None:
        if self.environment.wrong is not None:
            raise self.environment.wrong
        now = self.environment.clock.now
        if now - self._last_injection > LONGEST:
            workers = "\n".join(map(str, (*self.workers, *self.scripts)))
            raise Wrong(f"no end in sight: {self.broker.why()}\n{workers}")

    def _judge(self) -> None:
        expected = self._undisturbed()
        outcome = self.core.run.outcome
        if outcome is None or outcome.weights_sha256 != weights_sha256(named(dict(enumerate(expected.digests)))):
            raise Wrong("the weights are not those of the undisturbed run")
        losses = {step: loss for step, loss in enumerate(expected.losses) if step % LOG_EVERY == 0}
        stored = {step: loss for step, loss in self.store.load().losses.items() if step % LOG_EVERY == 0}
        for kept in (self.core.run.ledger.losses, stored):
            if kept != losses:
                raise Wrong(f"the losses are {kept}, and {losses} in the undisturbed run")
        last = len(expected.losses) - 1, expected.losses[-1]
        if self.core.run.ledger.last_loss != last:
            raise Wrong(f"the last loss is {self.core.run.ledger.last_loss}, and {last} in the undisturbed run")
        self._judge_evaluations(expected)
        self.store.fuse = 0
        run_of(self.store, PLAN, RUN, b"", resume=True)
        if Coordinator(self._terms, self.store, RUN, self.environment.clock.now).run.phase is not RunPhase.FINISHED:
            raise Wrong("the run has finished, and a resume begins it again")

    def _judge_evaluations(self, expected: ChainResult) -> None:
        """Each round has been found and stored, the run has ended where it must, and the best checkpoint is kept."""
        run, rounds = self.core.run, expected.evaluations
        stored = sorted(stored_in(self.store.load().facts), key=lambda record: record.step)
        for kept in (tuple(run.evaluations), tuple(stored)):
            if kept != rounds:
                raise Wrong(f"the evaluations are {kept}, and {rounds} in the undisturbed run")
        if not self.scenario.calls and run.training_steps != len(expected.losses):
            raise Wrong(f"the run has {run.training_steps} steps, and {len(expected.losses)} in the undisturbed run")
        standing = run.evaluations.standing()
        if self.scenario.keeps_best and standing is not None and standing.best is not None:
            best, disks = standing.best.step, self.environment.disks.all()
            stages = range(self.scenario.schedule.stages)
            if gone := [each for each in stages if not any(best in disk.steps(each) for disk in disks)]:
                raise Wrong(f"of the best checkpoint, {best}, the snapshots of stages {gone} are gone")
            self.fired["the best checkpoint is not among the newest"] += standing.best.step < run.checkpoints.complete
        self.fired[CHANGED] += len(run.orders.orders)
        self.fired["a run ends early"] += run.outcome is not None and run.outcome.early

    def _undisturbed(self) -> ChainResult:
        scenario = self.scenario
        if scenario.calls:
            return undisturbed_script(scenario.schedule, scenario.calls, scenario.passes)
        rounds, criterion = scenario.rounds, scenario.criterion
        return undisturbed(
            scenario.schedule, scenario.steps, rounds, criterion, scenario.replayed_from, scenario.passes
        )

    def _watch(self, sends: list[Outgoing]) -> None:
        """Announced checkpoints are on the disk, and never go back while the broker's records are not tampered with."""
        for _, message in sends:
            match message:
                case Trim(step):
                    self._check_announcement(step)
                case Assigned(incarnation=incarnation, step=step) if incarnation > self._newest:
                    self._newest = incarnation
                    self._check_announcement(step)
                case _:
                    continue

    def _check_announcement(self, step: int) -> None:
        if step < self._complete:
            raise Wrong(f"the complete checkpoint went back from {self._complete} to {step}")
        at_once = self.fired[PlannedFault.LOSE_DISKS]  # between a report of both copies and its arrival
        if step > self._ever and step not in self.environment.disks.common() and not at_once:
            raise Wrong(f"checkpoint {step} is announced, and not on the disk")
        self._complete, self._ever = step, max(step, self._ever)
