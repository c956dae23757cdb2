"""The fork server's own process, and what the processes that it forks do: run one command, call one function, or
supervise one trial.

A trial supervises broker and workers as `stageline train` does, but forks them, records their actions, and kills them
where the test wants it. A forked `train` forks its broker and workers, too.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import stageline
from stageline.pipeline.process.child import Child
from stageline.pipeline.process.lifeline import LifelineOwner
from stageline.workers.disk.owned_folder import OwnedFolder
from stageline.workers.launch.forking import CommandToRun, end_group, parse_report
from support import action_log
from support.action_log import Arrival, Place
from support.fork_server import Kill, become_subreaper

_end_process = os._exit  # before a worker's own way of it, which tells of the user's line
LIMIT = 60  # seconds after which a trial is ended with SIGALRM
LARGEST = 2**18  # bytes of a request, which holds a whole environment
FILES = 3  # that come with a request: where the answer goes, and stdout and stderr of a command


class ForkedChild(Child):
    """A process that a supervisor forks. `prepare` is called in it first."""

    def __init__(self, arguments: Sequence[str], log: TextIO, prepare: Callable[[], None] = lambda: None) -> None:
        self._report, report = os.pipe()
        pid = os.fork()
        if not pid:
            prepare()
            _run(partial(_exit_code_of, arguments), log.fileno(), log.fileno(), arguments, report)
        os.close(report)
        super().__init__(pid)

    def _look(self) -> int | None:
        status = super()._look()
        if status is not None:
            end_group(self.pid)
            with open(self._report, "rb") as report:
                os.set_blocking(self._report, False)
                self.result = parse_report(report.read() or b"")[1]
        return status


class ForkingTemplate(AbstractContextManager["ForkingTemplate"]):
    """Counterpart of `Template` for a command that is itself a fork: it forks its processes from itself."""

    gone = ""

    def __init__(self) -> None:
        self._folder = OwnedFolder()
        self._lifeline = LifelineOwner()
        self.sockets = self._folder.path

    def __exit__(self, *_: object) -> None:
        self._lifeline.close()
        self._folder.__exit__()

    def __call__(self, arguments: Sequence[str], log: TextIO) -> ForkedChild:
        return ForkedChild(self.complete(arguments), log)

    def abandon(self) -> None:
        self._folder.__exit__()

    def warm(self) -> None:
        pass

    def preload(self, libraries: Sequence[str]) -> None:
        pass

    def complete(self, arguments: Sequence[str]) -> list[str]:
        return [*arguments, "--lifeline", str(self._lifeline.end)]


class TrialProcesses:
    """Forks the processes of a trial; each of `kills` is carried out in one generation of a process."""

    def __init__(self, folder: Path, kills: Sequence[Kill], template: ForkingTemplate) -> None:
        self.pending = list(kills)
        self._template = template
        self._folder = folder
        self._generations: Counter[str] = Counter()

    def spawn(self, arguments: Sequence[str], log: TextIO) -> ForkedChild:
        name = f"worker-{arguments[arguments.index('--index') + 1]}" if "--index" in arguments else arguments[0]
        generation, kill = self._generations[name], self._next_kill(name)
        self._generations[name] += 1
        record = partial(_record_and_kill, self._folder, name, generation, kill)
        return ForkedChild(self._template.complete(arguments), log, record)

    def _next_kill(self, name: str) -> int | Place:
        """After how many actions, or where, this generation of the process is killed; 0: it is not."""
        kill = next((kill for kill in self.pending if kill[0] == name), (name, 0))
        with contextlib.suppress(ValueError):
            self.pending.remove(kill)
        return kill[1]


def _record_and_kill(folder: Path, name: str, generation: int, kill: int | Place) -> None:
    """Lets this process record its actions, and kill itself with SIGKILL between two of them, or at a place."""
    left = iter(range(kill - 1 if isinstance(kill, int) else -1, -1, -1))

    def die() -> None:
        write(action_log.KILLED)
        os.kill(os.getpid(), signal.SIGKILL)

    def count() -> None:
        if next(left, -1) == 0:
            die()

    at = (lambda what, step, action: None) if isinstance(kill, int) else Arrival(kill, die).passes
    write = action_log.record(folder, name, generation, count, at)


def _run(
    work: Callable[[], int], stdout: int, stderr: int, arguments: Sequence[str] = (), report: int | None = None
) -> None:
    """The rest of a forked process: never returns, since the frames below belong to its parent. The result of the
    command with these arguments goes to `report`."""
    code = 1
    try:
        os.setsid()
        signal.alarm(0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        with open(os.devnull) as nothing:
            for target, source in enumerate((nothing.fileno(), stdout, stderr)):
                os.dup2(source, target)
        code = work()
        if report is not None:
            CommandToRun([*arguments], report, os.getpid()).finish(code)
    except BaseException:  # noqa: BLE001  # the process must end here, and show why
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # ValueError: the user's code has closed it
                stream.flush()
        _end_process(code)


def _exit_code_of(arguments: Sequence[str]) -> int:
    """Runs `stageline` with these arguments; or, after the word "script", a user's script with its own."""
    from stageline.workers import cli

    try:
        if arguments[0] == "script":
            sys.argv = list(arguments[1:])
            sys.path.insert(0, str(Path(arguments[1]).parent))  # as `python FILE` has it
            runpy.run_path(arguments[1], run_name="__main__")
        else:
            sys.argv = ["stageline", *arguments]
            cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def _call(function: str, arguments: Sequence[str]) -> int:
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*arguments)
    return 0


def _become_command(request: dict[str, Any], answer: TextIO, stdout: int, stderr: int) -> None:
    """Forks the command, or the call of a function, and returns: once this process has exited, it is a child of the
    test's process."""
    from stageline.workers.launch import template

    pid = os.fork()
    if pid:
        json.dump({"pid": pid}, answer)
        return
    answer.close()
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # looked up again in the new environment: torch has made tempfile keep the old one
    os.chdir(request["folder"])
    tempfile.tempdir = None  # TMPDIR decides again
    arguments, function = request["arguments"], request.get("function")
    if arguments[:1] != ["script"]:  # a script has a template of its own, which is a fork
        template.Template = ForkingTemplate  # type: ignore[misc, assignment]
    _run(partial(_call, function, arguments) if function else partial(_exit_code_of, arguments), stdout, stderr)


def _supervise_trial(request: dict[str, Any], answer: TextIO) -> None:
    """Forks a trial, waits for it, and answers how it ended and which processes it left running."""
    become_subreaper()
    with tempfile.TemporaryFile("w+") as outcome:
        trial = os.fork()
        if not trial:
            signal.alarm(LIMIT)
            json.dump(_outcome_of_trial(request), outcome)
            outcome.flush()
            os._exit(0)
        _, status = os.waitpid(trial, 0)
        orphans = _kill_orphans()
        if status:
            json.dump({"error": f"the trial ended with {os.waitstatus_to_exitcode(status)}"}, answer)
            return
        outcome.seek(0)
        json.dump({**json.load(outcome), "orphans": orphans}, answer)


def _outcome_of_trial(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return _trial(request)
    except Exception:  # noqa: BLE001  # goes back to the test, which fails with it
        return {"error": traceback.format_exc()}


def _trial(request: dict[str, Any]) -> dict[str, Any]:
    from stageline.pipeline.model.own_schedule import read_plan
    from stageline.workers.launch.children import LocalRun
    from stageline.workers.launch.supervisor import supervise
    from stageline.workers.runtime.job import prepare

    tempfile.tempdir = request["temporary"]
    folder, sets = Path(request["folder"]), request["sets"]
    folder.mkdir(parents=True, exist_ok=True)
    plan = prepare(read_plan(Path(request["plan"]), sets=sets, environment={})).plan
    arguments = [request["plan"], *(argument for each in sets for argument in ("--set", each))]
    recovers, resume, spares = plan.recovery.restarts > 0, request["resume"], request["spares"]
    with ForkingTemplate() as template:
        kills = [(name, at if isinstance(at, int) else Place(*at)) for name, at in request["kills"]]
        processes = TrialProcesses(folder, kills, template)
        local = LocalRun(
            arguments,
            len(plan.workers),
            folder,
            processes.spawn,
            template.sockets,
            plan.recovery.loading,
            restarts=recovers,
            resume=resume,
            spares=spares,
        )
        outcome = supervise(local)
    pending = [name for name, _ in processes.pending]
    return {"code": outcome.code, "reason": outcome.reason, "facts": outcome.facts, "not killed": pending}


def _kill_orphans() -> list[int]:
    """Kills the processes that a trial has left running; returns their pids."""
    _reap_exited()
    found = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    for pid in found:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found


def _import_everything() -> None:
    """Imports that take long the first time, without starting a thread: a fork would lack it."""
    import sklearn.datasets  # noqa: F401
    import torch

    import support.workspace  # noqa: F401  # before a command has another template

    for module in pkgutil.walk_packages(stageline.__path__, "stageline."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first optimizer loads the compiler, for a second
    assert len(os.listdir("/proc/self/task")) == 1


def _reap_exited() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    _import_everything()
    gc.freeze()  # a collection in a fork would copy the memory of all that is shared
    while True:
        request, files, _, _ = socket.recv_fds(requests, LARGEST, FILES)
        if not request:
            return
        answer, *outputs = files
        pid = os.fork()
        if not pid:
            requests.close()
            _carry_out(json.loads(request), answer, *outputs)
        if outputs:
            os.waitpid(pid, 0)  # before the answer ends: then the command is the test's child
        for file in files:
            os.close(file)
        _reap_exited()


def _carry_out(request: dict[str, Any], answer_to: int, *outputs: int) -> None:
    """The rest of a forked process: never returns."""
    try:
        with open(answer_to, "w") as answer:
            if outputs:
                _become_command(request, answer, *outputs)
            else:
                _supervise_trial(request, answer)
    except BaseException:  # noqa: BLE001  # the process must end here, and show why
        traceback.print_exc()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
