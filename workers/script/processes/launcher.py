"""Launcher of a scripted run: a fork of the script that starts broker and workers, and outlives a killed script.

    script ──forks──> launcher ──forks──> template ──forks──> broker, worker 0, worker 1, ..., replacements
      │ <── report ─────┘
      └── lifeline: a pipe by whose end the launcher learns that the script is gone, and tells the broker

It is in a session of its own, so that Ctrl-C reaches the script alone. The first SIGTERM stops the run, the second
kills its processes. It ends with the run.

`LocalProcesses` is the script's view: the processes started, stopped, and how they ended. A script that uses a GPU, or
that has torch's threads for backwards on GPUs, cannot be forked: no fork can have these. Threads that a library's
parallel loops have left do no harm, since the thread that forks has none.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, sleep

from stageline.broker.coordinator.run import ScriptCode
from stageline.broker.ledger.member import describe_status
from stageline.pipeline.errors import ExitCode, StagelineError, failure_code
from stageline.pipeline.model.layered.apart import has_backward_threads, initialized_accelerator
from stageline.pipeline.model.object_names import OBJECTS
from stageline.pipeline.plan import Plan
from stageline.pipeline.process import last_line
from stageline.pipeline.process.child import Fork, above_stdio
from stageline.pipeline.process.lifeline import Lifeline, LifelineOwner
from stageline.workers.disk.atomic_file import persist_json
from stageline.workers.disk.owned_folder import demand_short_socket_paths
from stageline.workers.launch.children import ScriptProcess, broker_url
from stageline.workers.launch.launch import keep_result, local_run
from stageline.workers.launch.supervisor import supervise
from stageline.workers.launch.template import ForkedTemplate
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import Facts, LaunchOutcome
from stageline.workers.runs.owner import require_free, write_owner
from stageline.workers.runs.pauses import PauseNews
from stageline.workers.runs.records import CODE
from stageline.workers.script.calls.news import LostWorkers, command_there

from .launcher_report import LauncherReport, LaunchStarted

_ASKS_NO_GPU = "PYTORCH_NVML_BASED_CUDA_CHECK"
PLAN = "script:plan"  # names the plan on the command lines of its processes
LOG = "launcher.log"
START_TIMEOUT = 30.0  # seconds for the launcher to start its first process, which takes it milliseconds
STOP_TIMEOUT = 15.0  # seconds for a run to save a step and to end its processes, before they are killed
KILL_TIMEOUT = 10.0  # seconds for them to be killed, before the launcher itself is
_LOOK = 0.005  # seconds between two looks at what the launcher reports


@dataclass(frozen=True, slots=True)
class LauncherTask:
    """Task of a launcher.

    Attributes:
        plan: Plan that knows its stages and workers.
        folder: Folder of the run.
        resume: True if the run in `folder` is continued.
        script: Pid of the script.
        lifeline: Descriptor of a pipe whose other end the script has.
        code: Code of a run whose workers join from other machines.
    """

    plan: Plan
    folder: Path
    resume: bool
    script: int
    lifeline: int
    code: ScriptCode | None = None


def run_launcher(task: LauncherTask, report: LauncherReport) -> int:
    """Run the task to its end and return its exit code, in a single-threaded process that was forked for it."""
    last_line.install()
    here = task.plan.workers if task.code is None else ()
    obstacle = gpu_obstacle(worker.device for worker in here)
    try:
        outcome = LaunchOutcome(ExitCode.REFUSED, obstacle, {}) if obstacle else _outcome(task, report)
    except (StagelineError, OSError) as error:  # the script is told the cause, and not the last line of the log
        traceback.print_exc()
        outcome = LaunchOutcome(failure_code(getattr(error, "exit_code", ExitCode.FAILED)), str(error), {})
    report.write(outcome)
    return outcome.code


def _outcome(task: LauncherTask, report: LauncherReport) -> LaunchOutcome:
    started = monotonic()
    write_owner(task.folder, task.plan, "script")
    with ForkedTemplate() as template:
        template.warm()  # before this process starts a thread
        if not task.resume:  # a resumed run has its own plan there
            persist_json(task.folder / runs.PLAN, task.plan.as_mapping())
        remote, again = task.code is not None, f"Its process was started again; see its log in {task.folder}"
        if task.code is not None:
            persist_json(task.folder / CODE, task.code)
            again = f"On its machine, in the folder with your code: {command_there(task.plan, task.folder.name)}"
        own_place = ScriptProcess(len(task.plan.workers), task.script, Lifeline(task.lifeline))
        script = own_place if task.plan.scripted else None  # else the batches come from a data source
        local = local_run(task.plan, task.folder, [PLAN], template, task.resume, script=script, remote=remote)
        report.write(LaunchStarted(local.broker or broker_url(template.sockets), str(template.sockets)))
        lost, pauses = LostWorkers(again), PauseNews()

        def tell(facts: Facts) -> None:
            for line in (*lost.lines(facts), *pauses.lines(facts)):
                report.write(line)

        outcome = supervise(local, tell)
    if outcome.code == ExitCode.OK:
        keep_result(task.plan, task.folder, outcome.facts, monotonic() - started)
    return outcome


def gpu_obstacle(devices: Iterable[str]) -> str:
    """Return why a fork cannot compute on `devices`, "" if it can. torch is asked, and starts no GPU for that."""
    torch = sys.modules.get("torch")
    on_gpu = [device for device in devices if device.startswith("cuda")]
    if torch is None or not on_gpu or not torch.cuda._is_in_bad_fork():
        return ""
    return (
        f"no worker can use {on_gpu[0]}: the script has asked for GPUs, as torch.cuda.is_available() does, before it "
        f"was forked. Make the line before, or set {_ASKS_NO_GPU}=1 in the script's environment, with which torch asks "
        f"in a way that forks survive"
    )


class NotStarted(StagelineError):
    """Error that the processes of a script's run could not be started.

    Mend: See the logs in the run's folder; the machine may lack memory or processes.

    Example: the launcher (pid 812) has started no process within 60 s
    """

    error_code = "SL511"


class LocalProcesses(AbstractContextManager["LocalProcesses"]):
    """Launcher and the processes that it has started, made by `start_processes` for the script's process.

    `broker` is the broker's address, `sockets` a folder for sockets of the run, removed with the launcher; `folder` is
    the run's. Leaving the context ends the run, if it is not over.
    """

    def __init__(self, launcher: Fork, report: LauncherReport, lifeline: LifelineOwner, folder: Path) -> None:
        """Take the launcher and the files that it shares with this process; `folder` is the run's."""
        self.folder = folder
        self.broker = ""
        self.sockets = Path()
        self._launcher = launcher
        self._report = report
        self._lifeline = lifeline
        self._news: deque[str] = deque()
        self._told: LaunchOutcome | None = None  # by the launcher
        self._outcome: LaunchOutcome | None = None  # once that has ended
        self._polling = threading.RLock()  # the script's thread and the control thread both look

    def __exit__(self, *_: object) -> None:
        """End the run if it is not over."""
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        return self._launcher.pid

    def poll(self) -> LaunchOutcome | None:
        """Return the outcome of the run, None while its launcher exists. For any thread.

        After the launcher's end no process of the run is left, unless it was killed: they then end by themselves.
        """
        with self._polling:
            if self._outcome is None:
                self._look()
            return self._outcome

    @property
    def killed(self) -> str:
        """Description of the launcher's end if it was killed, else "". Its processes fail for that reason.

        For any thread.
        """
        outcome = self.poll()
        return "" if outcome is None or self._told is not None else outcome.reason

    def news(self) -> list[str]:
        """Return the news of the workers since the last call, as lines for people. For any thread."""
        with self._polling:
            self.poll()
            lines = list(self._news)
            self._news.clear()
            return lines

    def wait(self, seconds: float) -> LaunchOutcome | None:
        """Return the outcome once the run has ended; None if it has not within `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(seconds)
        return self.poll()

    def stop(self) -> None:
        """Stop the run, after it has saved a step where it can; called again, kill its processes."""
        self._launcher.send_signal(signal.SIGTERM)

    def close(self, stop_timeout: float = STOP_TIMEOUT, kill_timeout: float = KILL_TIMEOUT) -> None:
        """End the run, if it is not over, and wait for its end, at most for these times.

        Args:
            stop_timeout: Seconds for the run to stop.
            kill_timeout: Seconds for killed processes to end.
        """
        for seconds in (stop_timeout, kill_timeout):
            if self.poll() is None:
                self.stop()
                self.wait(seconds)
        self.abandon()

    def abandon(self) -> None:
        """Kill the launcher, if it is there: its processes then end by themselves."""
        self._launcher.end()

    def await_start(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until the broker's address is known. Raises `NotStarted` after `timeout` seconds."""
        deadline = monotonic() + timeout
        while not self.broker:
            if (outcome := self.poll()) is not None:
                raise NotStarted(outcome.reason)
            if monotonic() > deadline:
                raise NotStarted(f"the launcher (pid {self.pid}) has started no process within {timeout:g} s")
            sleep(_LOOK)

    def _look(self) -> None:
        status = self._launcher.poll()  # first: what it has reported until then is in the file
        for message in self._report.read():
            match message:
                case LaunchStarted():
                    self.broker, self.sockets = message.broker, Path(message.sockets)
                case LaunchOutcome():
                    self._told = message
                case line:
                    self._news.append(line)
        if status is not None:  # the launcher is there for a while after its last report
            self._outcome = self._told or LaunchOutcome(ExitCode.FAILED, self._killed(status), {})
            self._report.close()
            self._lifeline.close()

    def _killed(self, status: int) -> str:
        lines = (self.folder / LOG).read_bytes().decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "nothing"
        return f"the launcher of the run (pid {self.pid}) {describe_status(status)}; the last line of its log: {last}"


class LauncherLifeline(Lifeline):
    """Lifeline of the script, cut once the launcher has ended without a good end of the run.

    The broker, which could report that, may be gone then.
    """

    def __init__(self, processes: LocalProcesses) -> None:
        """Watch the launcher of `processes`."""
        super().__init__()
        self._processes = processes

    @property
    def cut(self) -> bool:
        """True if the launcher has ended and the run did not end well."""
        outcome = self._processes.poll()
        return outcome is not None and outcome.code != ExitCode.OK

    @property
    def reason(self) -> str:
        """Reason of the run's end, as its launcher gave it."""
        outcome = self._processes.poll()
        return super().reason if outcome is None else outcome.reason


def start_processes(plan: Plan, run: str, *, resume: bool = False, code: ScriptCode | None = None) -> LocalProcesses:
    """Fork a launcher that starts broker and workers; return within milliseconds, while they are still starting.

    The processes have all objects of this one, and load the plan's `script:...` names from `OBJECTS`. Call it before
    this process starts threads, which forks lack. It installs no signal handler here. No child is left once the run has
    ended and `poll`, `wait` or `close` has seen it.

    Args:
        plan: Plan that knows its stages and workers.
        run: Id of the run, and name of its folder in `run.dir`.
        resume: Continue the run in that folder.
        code: Start only the broker, at `broker.url`; workers on other machines join, with files that have this code.

    Raises `CannotFork`, `NotStarted`, `RunGoesOn`, `FolderUnusable`, or `TooDeep`.
    """
    if code is None:  # the broker computes nothing
        demand_forkable()
    demand_short_socket_paths()
    folder = runs.make_folder(plan, run).absolute()
    require_free(folder)
    processes = _fork_launcher(plan, folder, resume, code)
    try:
        processes.await_start()
    except BaseException:
        processes.abandon()
        if not resume:
            _remove(folder)
        raise
    return processes


def _fork_launcher(plan: Plan, folder: Path, resume: bool, code: ScriptCode | None) -> LocalProcesses:
    OBJECTS["plan"] = plan
    lifeline = LifelineOwner()
    task = LauncherTask(plan, folder, resume, os.getpid(), lifeline.end, code)
    with tempfile.TemporaryFile() as file:
        report = LauncherReport(above_stdio(os.dup(file.fileno())))
    log = above_stdio(os.open(folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666))
    try:
        launcher = Fork(partial(run_launcher, task, report), log, [lifeline.end])
    except BaseException:
        report.close()
        lifeline.close()
        raise
    finally:
        os.close(log)
        del OBJECTS["plan"]  # the processes have it
    return LocalProcesses(launcher, report, lifeline, folder)


def _remove(folder: Path) -> None:
    """Remove the folder of a run that did not start, unless other files are in it."""
    with suppress(OSError):
        for name in (runs.OWNER, runs.PLAN, CODE, LOG):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


_WAY_OUT = (
    "Make the line before this process uses a GPU (in a notebook: restart the kernel first), or pass "
    'workers="inline" to compute in this process. If model and functions are in files of their own, broker= '
    '"tcp://127.0.0.1:7000" works too, with workers that `stageline worker --join` starts'
)


class CannotFork(StagelineError):
    """Error that this process holds a resource that its forks could not use.

    Mend: Make the `Line` before the script uses a GPU or runs a backward.

    Example: the processes of a line are forks of this one, and it has used torch.cuda, which a fork cannot use any
    more.
    """

    error_code = "SL510"


def demand_forkable() -> None:
    """Raise `CannotFork` if this process holds a resource that its forks could not use."""
    if reason := _obstacle():
        raise CannotFork(f"the processes of a line are forks of this one, and {reason}. {_WAY_OUT}")


def _obstacle() -> str:
    """Return why forks of this process could not compute, "" if they can."""
    if name := initialized_accelerator():
        return f"it has used torch.{name}, which a fork cannot use any more"
    if has_backward_threads():
        return "a backward has run in it on a machine with a GPU, and torch's threads for that are not in a fork"
    return ""
