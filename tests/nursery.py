"""Runs many small trainings of real processes quickly: a process that has imported torch once forks them all.

A test asks for a run; the nursery forks a trial, which supervises broker and workers as `stageline train` does, but
starts each of them by a fork. The processes, sockets, signals and files are those of any run.
"""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TextIO

TRIAL = 60  # seconds after which a trial is ended, and says so


Kill = tuple[str, int]  # "worker-1" and after how many actions, or "broker" and after how many sentences


class Nursery:
    """A test's handle on the nursery process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self.close)

    def train(self, config: Path, *sets: str, folder: Path, kills: Sequence[Kill] = ()) -> dict[str, Any]:
        """Runs `config` as `stageline train` would; returns code, reason, and the broker's last status as `facts`.

        Each of `kills` is carried out once.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"config": str(config), "sets": sets, "folder": str(folder), "kills": kills}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
            self._process.wait(timeout=10)
            if self._process.stdout is not None:
                self._process.stdout.close()


class Forked:
    """A forked process, as `workers.supervise.Process` wants it."""

    kills: ClassVar[dict[str, int]] = {}  # what is yet to be killed: each once, in its first life

    def __init__(self, arguments: Sequence[str], log: TextIO) -> None:
        self.returncode: int | None = None
        kill_after = self.kills.pop(_name(arguments), None)
        self.pid = os.fork()
        if not self.pid:
            if kill_after is not None:
                _die_after(arguments[0], kill_after)
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


def _die_after(command: str, count: int) -> None:
    """Lets this process kill itself with SIGKILL at a fixed place of its program, between two actions."""
    from broker.core import Core
    from workers.progress import Progress

    owner, method = (Progress, "done") if command == "worker" else (Core, "handle")
    original, left = getattr(owner, method), iter(range(count - 1, -1, -1))

    def counted(*arguments: Any) -> Any:
        result = original(*arguments)
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, method, counted)


def _be_command(arguments: Sequence[str], log: TextIO) -> None:
    """The child's whole life. Never returns: what the parent's frames still have to do is not the child's."""
    from workers.cli.program import run

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
    from pipeline.plan import read
    from workers.job import prepare
    from workers.supervise import Local, run

    sets = request["sets"]
    Forked.kills = dict(request["kills"])
    plan = prepare(read(Path(request["config"]), sets=sets, environment={})).plan
    words = [request["config"], *(word for each in sets for word in ("--set", each))]
    outcome = run(Local(words, len(plan.workers), Path(request["folder"]), plan.recovery.restarts > 0, Forked))
    pending = list(Forked.kills)
    return {"code": outcome.code, "reason": outcome.reason, "facts": outcome.facts, "not killed": pending}


def _answer(request: dict[str, Any], out: TextIO) -> None:
    """In the trial's own process: runs it and writes the answer as a line."""
    signal.alarm(TRIAL)
    try:
        answer = _trial(request)
    except Exception:  # noqa: BLE001  # goes back to the test, which fails with it
        answer = {"error": traceback.format_exc()}
    out.write(json.dumps(answer) + "\n")
    out.flush()


def main() -> None:
    import sklearn.datasets  # noqa: F401  # loaded once for all
    import torch

    import workers.cli.program
    import workers.process  # noqa: F401

    torch.set_num_threads(1)  # before any thread is started: a fork would not have it
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first optimizer loads the compiler, for a second
    for line in sys.stdin:
        trial = os.fork()
        if not trial:
            _answer(json.loads(line), sys.stdout)
            os._exit(0)
        _, status = os.waitpid(trial, 0)
        if status:
            sys.stdout.write(json.dumps({"error": f"the trial ended with {os.waitstatus_to_exitcode(status)}"}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
