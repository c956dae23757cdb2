"""The launcher of a scripted run: a fork of the script that starts broker and workers, and outlives a killed script.

    script ──forks──> launcher ──forks──> template ──forks──> broker, worker 0, worker 1, ..., replacements
      │ <── report ─────┘
      └── lifeline: a pipe by whose end the launcher learns that the script is gone, and tells the broker

It is in a session of its own, so that Ctrl-C reaches the script alone. The first SIGTERM stops the run, the second
kills its processes. It ends with the run.
"""

import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import msgspec

from stageline.broker.coordinator.run import ScriptCode
from stageline.pipeline.errors import ExitCode, StagelineError, failure_code
from stageline.pipeline.plan import Plan
from stageline.pipeline.process import last_line
from stageline.pipeline.process.lifeline import Lifeline
from stageline.workers.disk.atomic_file import persist_json
from stageline.workers.launch.children import ScriptProcess, broker_url
from stageline.workers.launch.launch import keep_result, local_run
from stageline.workers.launch.supervisor import supervise
from stageline.workers.launch.template import ForkedTemplate
from stageline.workers.runs import folder as runs
from stageline.workers.runs.notes import write_code
from stageline.workers.runs.owner import write_owner
from stageline.workers.runs.result import Facts, LaunchOutcome
from stageline.workers.script.arguments.checks import command_there
from stageline.workers.script.calls.news import LostWorkers

_ASKS_NO_GPU = "PYTORCH_NVML_BASED_CUDA_CHECK"
PLAN = "script:plan"  # names the plan on the command lines of its processes


class LaunchStarted(msgspec.Struct, frozen=True, tag=True):
    """Broker and workers are starting: the broker's address, and the folder for sockets, removed at the end."""

    broker: str
    sockets: str


LaunchMessage = LaunchStarted | LaunchOutcome | str
"""The beginning of a run, its end, and in between a line for people for each worker that was lost."""


class LauncherReport:
    """Messages of the launcher to the script, in a file without a name that both have open."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._read = 0  # bytes
        self._decoder = msgspec.json.Decoder(LaunchMessage)

    def write(self, message: LaunchMessage) -> None:
        os.write(self.fd, msgspec.json.encode(message) + b"\n")

    def read(self) -> Iterator[LaunchMessage]:
        """Yield the messages since the last call."""
        text = os.pread(self.fd, os.fstat(self.fd).st_size - self._read, self._read)
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        yield from map(self._decoder.decode, whole.splitlines())

    def close(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class LauncherTask:
    """Task of a launcher: `plan` knows its stages and workers; `resume`: the run in `folder` is continued; `lifeline`
    is the descriptor of a pipe of which the script, process `script`, has the other end. `code`: that of a run whose
    workers join from other machines."""

    plan: Plan
    folder: Path
    resume: bool
    script: int
    lifeline: int
    code: ScriptCode | None = None


def run_launcher(task: LauncherTask, report: LauncherReport) -> int:
    """Run it to its end, in a process that was forked for it and has no thread but one; return its exit code."""
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
        remote = task.code is not None
        if task.code is not None:
            write_code(task.folder, task.code)
        local = local_run(task.plan, task.folder, [PLAN], template, task.resume, script=_script_of(task), remote=remote)
        report.write(LaunchStarted(local.broker or broker_url(template.sockets), str(template.sockets)))
        lost = LostWorkers(_start_of(task))

        def tell(facts: Facts) -> None:
            for line in lost.lines(facts):
                report.write(line)

        outcome = supervise(local, tell)
    if outcome.code == ExitCode.OK:
        keep_result(task.plan, task.folder, outcome.facts, monotonic() - started)
    return outcome


def _start_of(task: LauncherTask) -> str:
    """Return the way to replace a worker that nothing has replaced."""
    if task.code is None:
        return f"Its process was started again; see its log in {task.folder}"
    return f"On its machine, in the folder with your code: {command_there(task.plan.broker.url)}"


def _script_of(task: LauncherTask) -> ScriptProcess | None:
    """Return the script's place; None if it takes no part, since the batches come from a data source."""
    if not task.plan.scripted:
        return None
    return ScriptProcess(len(task.plan.workers), task.script, Lifeline(task.lifeline))


def gpu_obstacle(devices: Iterable[str]) -> str:
    """Return why a fork cannot compute on `devices`, "" if it can. torch knows, and starts no GPU for that."""
    torch = sys.modules.get("torch")
    on_gpu = [device for device in devices if device.startswith("cuda")]
    if torch is None or not on_gpu or not torch.cuda._is_in_bad_fork():
        return ""
    return (
        f"no worker can use {on_gpu[0]}: the script has asked for GPUs, as torch.cuda.is_available() does, before it "
        f"was forked. Make the line before, or set {_ASKS_NO_GPU}=1 in the script's environment, with which torch asks "
        f"in a way that forks survive"
    )
