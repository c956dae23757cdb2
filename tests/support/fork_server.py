"""Runs many small trainings of real processes quickly: a process that has imported torch once forks them all.

A test asks for a run; the nursery forks a trial, which supervises broker and workers as `stageline train` does, but
starts each of them by a fork. The processes, sockets, signals and files are those of any run.
"""

import atexit
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TextIO

from support import action_log as diary
from support.paths import importing_tests

TRIAL = 60  # seconds after which a trial is ended, and says so

Kill = tuple[str, int]  # "worker-1" and after how many actions, or "broker" and after how many sentences

_SUBREAPER = 36  # of prctl(2): processes that lose their parent become children of this one


class ForkServer:
    """A test's handle on the nursery process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=importing_tests(),
        )
        self._temporary = Path(tempfile.mkdtemp(prefix="nursery-", dir="/tmp"))  # short: sockets go there
        atexit.register(self.close)

    def train(
        self,
        config: Path,
        *sets: str,
        folder: Path,
        kills: Sequence[Kill] = (),
        resume: bool = False,
        spares: int = 0,
    ) -> dict[str, Any]:
        """Runs `config` as `stageline train` would; returns code, reason, and the broker's last status as `facts`.

        Each of `kills` is carried out once: the first of a name in its first life, the second in its second. What it
        must not leave behind: `orphans` (processes) and `left` (files in the folder for temporary ones). A diary of
        the run is in `folder`.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        places = {"config": str(config), "folder": str(folder), "temporary": str(self._temporary)}
        request = {**places, "sets": sets, "kills": kills, "resume": resume, "spares": spares}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        left = sorted(str(path.relative_to(self._temporary)) for path in self._temporary.rglob("*"))
        for path in self._temporary.iterdir():
            shutil.rmtree(path)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return {**answer, "left": left}

    def close(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
            self._process.wait(timeout=10)
            if self._process.stdout is not None:
                self._process.stdout.close()
            shutil.rmtree(self._temporary)


class Forked:
    """A forked process, as `children.Process` wants it."""

    kills: ClassVar[dict[str, list[int]]] = {}  # what is yet to be killed, and when: one for each life
    lives: ClassVar[Counter[str]] = Counter()
    folder: ClassVar[Path]

    def __init__(self, arguments: Sequence[str], log: TextIO) -> None:
        self.returncode: int | None = None
        name = _name(arguments)
        life, self.lives[name] = self.lives[name], self.lives[name] + 1
        kill_after = self.kills[name].pop(0) if self.kills.get(name) else 0
        self.pid = os.fork()
        if not self.pid:
            _keep_diary(self.folder, name, life, kill_after)
            _be_command(arguments, log)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def _name(arguments: Sequence[str]) -> str:
    return f"worker-{arguments[arguments.index('--index') + 1]}" if "--index" in arguments else arguments[0]


def _keep_diary(folder: Path, name: str, life: int, kill_after: int) -> None:
    """Lets this process kill itself with SIGKILL at a fixed place of its program, between two actions. 0: never."""
    left = iter(range(kill_after - 1, -1, -1))

    def count() -> None:
        if next(left, -1) == 0:
            write(diary.KILLED)
            os.kill(os.getpid(), signal.SIGKILL)

    write = diary.keep(folder, name, life, count)


def _be_command(arguments: Sequence[str], log: TextIO) -> None:
    """The child's whole life. Never returns: what the parent's frames still have to do is not the child's."""
    from stageline.workers.cli.app import run

    code = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(0)
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        code = run(arguments)
    except BaseException:  # noqa: BLE001  # the child must end here whatever happens, and say why
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def _trial(request: dict[str, Any]) -> dict[str, Any]:
    from stageline.pipeline.plan import read_plan
    from stageline.workers.launch.children import LocalRun
    from stageline.workers.launch.supervisor import run
    from stageline.workers.runtime.job import prepare

    tempfile.tempdir = request["temporary"]
    Forked.kills = defaultdict(list)
    for name, count in request["kills"]:
        Forked.kills[name].append(count)
    Forked.folder = Path(request["folder"])
    Forked.folder.mkdir(parents=True, exist_ok=True)
    sets = request["sets"]
    plan = prepare(read_plan(Path(request["config"]), sets=sets, environment={})).plan
    words = [request["config"], *(word for each in sets for word in ("--set", each))]
    recovers, resume, spares = plan.recovery.restarts > 0, request["resume"], request["spares"]
    outcome = run(LocalRun(words, len(plan.workers), Forked.folder, recovers, Forked, resume=resume, spares=spares))
    pending = [name for name, left in Forked.kills.items() if left]
    return {"code": outcome.code, "reason": outcome.reason, "facts": outcome.facts, "not killed": pending}


def _answer(request: dict[str, Any], out: TextIO) -> None:
    """In the trial's own process: runs it and writes the answer."""
    signal.alarm(TRIAL)
    try:
        answer = _trial(request)
    except Exception:  # noqa: BLE001  # goes back to the test, which fails with it
        answer = {"error": traceback.format_exc()}
    json.dump(answer, out)
    out.flush()


def _carry_out(request: dict[str, Any]) -> dict[str, Any]:
    """Forks a trial; returns its answer once it is gone, with whom it left behind."""
    with tempfile.TemporaryFile("w+") as paper:
        trial = os.fork()
        if not trial:
            _answer(request, paper)
            os._exit(0)
        _, status = os.waitpid(trial, 0)
        orphans = _orphans()
        if status:
            return {"error": f"the trial ended with {os.waitstatus_to_exitcode(status)}"}
        paper.seek(0)
        return {**json.load(paper), "orphans": orphans}


def _orphans() -> list[int]:
    """The processes that a trial has left running. They are killed."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    found = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    for pid in found:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found


def main() -> None:
    import sklearn.datasets  # noqa: F401  # loaded once for all
    import torch

    import stageline.workers.cli.app
    import stageline.workers.process.worker_process  # noqa: F401

    torch.set_num_threads(1)  # before any thread is started: a fork would not have it
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first optimizer loads the compiler, for a second
    if ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError("this system does not tell which processes a trial has left behind")
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_carry_out(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
