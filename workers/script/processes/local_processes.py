"""The processes of a scripted run on this machine, as the script sees them: started, stopped, and how they ended.

A script that uses a GPU, or that has torch's threads for backwards on GPUs, cannot be forked: no fork can have these.
Threads that a library's parallel loops have left do no harm, since the thread that forks has none.
"""

import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep

from stageline.broker.coordinator.run import ScriptCode
from stageline.broker.ledger.losses import describe_status
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.pipeline.model.object_names import OBJECTS
from stageline.pipeline.model.traced.apart import has_backward_threads, initialized_accelerator
from stageline.pipeline.plan import Plan
from stageline.pipeline.process.child import Fork, above_stdio
from stageline.pipeline.process.lifeline import Lifeline, LifelineOwner
from stageline.workers.disk.owned_folder import demand_short_socket_paths
from stageline.workers.runs import folder as runs
from stageline.workers.runs.notes import CODE
from stageline.workers.runs.owner import require_free
from stageline.workers.runs.result import LaunchOutcome

from .launcher import LauncherReport, LauncherTask, LaunchStarted, run_launcher

LOG = "launcher.log"
START_TIMEOUT = 30.0  # seconds for the launcher to start its first process, which takes it milliseconds
STOP_TIMEOUT = 15.0  # seconds for a run to save a step and to end its processes, before they are killed
KILL_TIMEOUT = 10.0  # seconds for them to be killed, before the launcher itself is
_LOOK = 0.005  # seconds between two looks at what the launcher reports


class NotStarted(StagelineError):
    """The processes of a scripted run could not be started."""


class LocalProcesses(AbstractContextManager["LocalProcesses"]):
    """A launcher and the processes that it has started; made by `start_processes`, of use in the script's process.

    `broker` is the broker's address, `sockets` a folder for sockets of the run, which goes with the launcher; `folder`
    is the run's. Leaving the context ends the run, if it goes on.
    """

    def __init__(self, launcher: Fork, report: LauncherReport, lifeline: LifelineOwner, folder: Path) -> None:
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
        self.close()

    @property
    def run(self) -> str:
        """The run's id."""
        return self.folder.name

    @property
    def pid(self) -> int:
        """The launcher's."""
        return self._launcher.pid

    def poll(self) -> LaunchOutcome | None:
        """Return the outcome of the run, None as long as its launcher is there; then no process of it is left, unless
        the launcher was killed: then they end by themselves. For any thread.
        """
        with self._polling:
            if self._outcome is None:
                self._look()
            return self._outcome

    @property
    def killed(self) -> str:
        """End of the launcher if it was killed, else empty. Its processes fail for that reason. For any thread."""
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

    def close(self) -> None:
        """End the run, if it goes on, and wait for its end: never longer than `STOP_TIMEOUT` and `KILL_TIMEOUT`."""
        for seconds in (STOP_TIMEOUT, KILL_TIMEOUT):
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
        self._follow()
        if status is not None:
            self._outcome = self._told or LaunchOutcome(ExitCode.FAILED, self._killed(status), {})
            self._report.close()
            self._lifeline.close()

    def _follow(self) -> None:
        """Read what the launcher has reported; it is there for a while after its last report."""
        for message in self._report.read():
            match message:
                case LaunchStarted():
                    self.broker, self.sockets = message.broker, Path(message.sockets)
                case LaunchOutcome():
                    self._told = message
                case line:
                    self._news.append(line)

    def _killed(self, status: int) -> str:
        lines = (self.folder / LOG).read_bytes().decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "nothing"
        return f"the launcher of the run (pid {self.pid}) {describe_status(status)}; the last line of its log: {last}"


class LauncherLifeline(Lifeline):
    """In the script: cut once the launcher has ended without a good end of the run. Then no broker may be there that
    could say so."""

    def __init__(self, processes: LocalProcesses) -> None:
        super().__init__()
        self._processes = processes

    @property
    def cut(self) -> bool:
        outcome = self._processes.poll()
        return outcome is not None and outcome.code != ExitCode.OK

    @property
    def reason(self) -> str:
        outcome = self._processes.poll()
        return super().reason if outcome is None else outcome.reason


def start_processes(plan: Plan, run: str, *, resume: bool = False, code: ScriptCode | None = None) -> LocalProcesses:
    """Fork a launcher from this process, which starts broker and workers of `plan`; they have all objects of this
    process, and load what the plan names as `script:...` from `OBJECTS`.

    `plan` knows its stages and workers. `run` is the run's id, and the name of its folder in `run.dir`; with `resume`
    the run there is continued. With `code`, the broker alone is started, at `broker.url`: workers on other machines
    join it, and load what the plan names from files that have this code. Returns within milliseconds, while the
    processes are still starting. Call it before this process starts threads: those are not in the processes. No signal
    handler is installed here, and no child is left once the run has ended and `poll`, `wait` or `close` has seen it.
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
    """Nothing was run: the folder goes, unless other files are in it."""
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
    """An error: this process has something that its forks could not use."""


def demand_forkable() -> None:
    """Demand a process that can be forked. Raises `CannotFork`."""
    if reason := _obstacle():
        raise CannotFork(f"the processes of a line are forks of this one, and {reason}. {_WAY_OUT}")


def _obstacle() -> str:
    """Return why forks of this process could not compute, "" if they can."""
    if name := initialized_accelerator():
        return f"it has used torch.{name}, which a fork cannot use any more"
    if has_backward_threads():
        return "a backward has run in it on a machine with a GPU, and torch's threads for that are not in a fork"
    return ""
