"""The script's process: the product's driver, call log and control thread, under a script that calls by a list.

It compares each reply with that of the undisturbed run, and begins, when it is started again, where its checkpoint is.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path

from simulation.chain import made_call, undisturbed_script
from simulation.disk import SnapshotView, Torn
from simulation.environment import PLAN, RUN, Environment
from simulation.process import SimulatedMember
from simulation.queues import SimulatedQueues
from simulation.worker import FOREVER, STARTING, Name, SimulatedChannel, calls_in
from stageline.broker.control.messages import CONTROL_VERSION, Assigned, Goodbye, Hello
from stageline.broker.errors import BrokerError
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.secrets import secrets_of
from stageline.pipeline.errors import ExitCode
from stageline.workers.control.control_thread import ControlThread
from stageline.workers.control.joining import Stopped, WorkerIdentity
from stageline.workers.errors import RunFailed
from stageline.workers.runtime.calls import Call, Position
from stageline.workers.script.calls.calls import Replies
from stageline.workers.script.calls.driver import Driver

OWN_CODE = 0.02  # seconds between two calls, on the average
LOOK = 0.02  # seconds between two looks whether the replies have come
AHEAD = 2  # calls that are made before the replies to the first of them are looked at, at most


class SimulatedScript(SimulatedMember):
    """One process of the script."""

    def __init__(self, environment: Environment, name: Name, ended: Callable[[int], None]) -> None:
        super().__init__(environment.clock, name.host, ended)
        self.name = name
        self.queues: SimulatedQueues | None = None
        self._environment = environment
        self._driver: Driver | None = None
        self.spawn(self._main)

    def __str__(self) -> str:
        driver, who = self._driver, f"script (pid {self.name.pid}, incarnation {self.incarnation or '-'})"
        return f"{who}: {'has no place' if driver is None else (driver.position, driver.progress.activity().said)}"

    def _main(self) -> None:
        environment, name = self._environment, self.name
        self.sleep(environment.soon(STARTING))
        view = SnapshotView(environment.disks.of(name.host), range(environment.scenario.schedule.stages))
        token = f"{name.token:032x}"
        base = Hello(CONTROL_VERSION, PLAN, name.name, name.host, name.pid, "", name.claim, token=token)
        control = ControlThread(
            "simulated",
            WorkerIdentity(base, view),
            open_channel=partial(SimulatedChannel, self, environment),
            clock=self,
            spawn=self.spawn,
            exit_process=self.end,
        )
        self.end(self._run(control))

    def _run(self, control: ControlThread) -> int:
        try:
            assigned = control.join(FOREVER)
            self.incarnation = assigned.incarnation
            self._drive(control, assigned)
        except Stopped as stop:
            return stop.exit_code
        except RunFailed as failure:
            if failure.exit_code == ExitCode.SAVED:
                control.send(Goodbye(self.incarnation, str(failure)))
            return failure.exit_code
        except (BrokerError, Torn):
            return 1
        finally:
            control.close()
        return 0

    def _drive(self, control: ControlThread, assigned: Assigned) -> None:
        environment, name = self._environment, self.name
        program = calls_in(environment.scenario).program
        start = environment.disks.of(self.host).load(0, assigned.step).position if assigned.step else Position()
        options = QueueOptions(secrets=secrets_of(program.queues.values(), assigned))
        self.queues = queues = SimulatedQueues(self, environment, name.endpoint, assigned.incarnation, options)
        names = [frozenset[str]()] * program.script
        fail = partial(_failed, folder=Path(RUN))
        self._driver = driver = Driver(program, names, assigned, start, queues, control.commands, fail)
        with closing(queues):
            control.start(assigned, queues.endpoint, driver.progress, steps=None, wake=queues.ring)
            self.spawn(driver._serve)
            self._call(driver)

    def _call(self, driver: Driver) -> None:
        """The script itself."""
        environment, scenario = self._environment, self._environment.scenario
        opened: deque[tuple[int, Future[Replies]]] = deque()
        while (number := driver.position.calls) < len(scenario.calls):
            self.sleep(environment.soon(OWN_CODE))
            call = made_call(scenario.calls[number], driver.position)
            opened.append((number, driver.submit(Call(call.kind, inputs=call.inputs, targets=call.targets))))
            if len(opened) == AHEAD:
                self._check(*opened.popleft())
        driver.leave()
        while opened:
            self._check(*opened.popleft())
        while not driver.ended.is_set():
            self.sleep(LOOK)
        driver.raise_failure()

    def _check(self, number: int, done: "Future[Replies]") -> None:
        while not done.done():
            self.sleep(LOOK)
        scenario, found = self._environment.scenario, done.result()
        expected = undisturbed_script(scenario.schedule, scenario.calls, scenario.passes).replies[number]
        if dict(found) != dict(expected):
            self._environment.report(f"the replies to call {number} are {found}, and {expected} undisturbed")
        self._environment.fired["an evaluation is answered"] += scenario.calls[number].runs_forward_only


def _failed(reason: str, code: int, folder: Path) -> RunFailed:
    return RunFailed(reason, code, folder)
