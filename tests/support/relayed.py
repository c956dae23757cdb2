"""A relay, a broker and two workers, each started by its command, with keys of their own, on one machine or three."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, sleep

from support.paths import importing_tests

PATIENCE = 100.0  # seconds in which anything that is waited for has happened, also where much else runs
RUN = "together"
_LINE = re.compile(r"--join '?(relay://[^\s']+)'?")
_ADDRESS = re.compile(r"STAGELINE_QUEUES__URL=(\S+)")


class Site:
    """A folder for a plan, runs and keys, and what its commands begin with."""

    def __init__(self, folder: Path, plan: Path, enter: Sequence[str] = ()) -> None:
        self.folder = folder
        self.plan = plan
        self._enter = enter
        self._started: list[subprocess.Popen[bytes]] = []
        folder.mkdir()

    def start(self, log: str, *words: str, **environment: str) -> "subprocess.Popen[bytes]":
        """Starts a command of `stageline`, which writes to the file `log` in the folder."""
        with (self.folder / log).open("ab") as output:
            started = subprocess.Popen(
                [*self._enter, sys.executable, "-P", "-m", "stageline", *words],
                cwd=self.folder,
                env={
                    **importing_tests(),
                    "OMP_NUM_THREADS": "1",
                    "STAGELINE_KEY_FILE": str(self.folder / "own.key"),
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._started.append(started)
        return started

    def kill(self) -> None:
        """Ends all that was started here."""
        for process in self._started:
            process.kill()
            process.wait()

    def said(self, log: str, pattern: re.Pattern[str]) -> str:
        """Match of the pattern in a log, once there is one."""
        until = monotonic() + PATIENCE
        while (found := pattern.search(self.log(log))) is None:
            assert monotonic() < until, self.log(log)
            sleep(0.1)
        return found[1]

    def log(self, log: str) -> str:
        path = self.folder / log
        return path.read_text() if path.exists() else ""


class RelayedRun:
    """A run of the plan whose processes meet at a relay; they are killed, and started again by the same commands."""

    def __init__(
        self, relay: Site, desks: Sequence[Site], host: str, steps: int, way: Callable[[str], str] = str
    ) -> None:
        """Starts all. The broker and worker 0 are at the first of the desks, worker 1 at the last.

        `way` makes of the relay's address the one that all dial.
        """
        self._relay, self._desks, self._host = relay, desks, host
        self._port = "0"
        self.relay = self.start_relay()
        self.address = relay.said("relay.log", _ADDRESS)
        self._port = self.address.rpartition(":")[2]
        self._settings = {
            "STAGELINE_BROKER__URL": way(self.address),
            "STAGELINE_QUEUES__URL": way(self.address),
            "STAGELINE_RUN__STEPS": str(steps),
            "STAGELINE_RECOVERY__LEASE": "5s",
        }
        self.broker = self.start_broker()
        self.line = desks[0].said("broker.log", _LINE)
        self.workers = [self.start_worker(index) for index in range(2)]

    def start_relay(self) -> "subprocess.Popen[bytes]":
        return self._relay.start("relay.log", "relay", "--bind", f"tcp://{self._host}:{self._port}")

    def start_broker(self) -> "subprocess.Popen[bytes]":
        desk = self._desks[0]
        return desk.start("broker.log", "broker", str(desk.plan), "--run", RUN, **self._settings)

    def start_worker(self, index: int) -> "subprocess.Popen[bytes]":
        desk = self._desks[-index]
        words = "worker", str(desk.plan), "--index", str(index), "--join", self.line
        return desk.start(f"worker-{index}.log", *words, **self._settings)

    def until_step(self, step: int) -> None:
        until = monotonic() + PATIENCE
        while self.steps() < step:
            assert monotonic() < until, self.logs()
            self.demand_all_alive()
            sleep(0.05)

    def steps(self) -> int:
        """Steps whose loss is recorded, which the last stage's worker does."""
        metrics = self._desks[-1].folder / "runs" / RUN / "metrics.jsonl"
        rows = metrics.read_bytes().splitlines() if metrics.exists() else []
        return max([json.loads(row).get("step", 0) for row in rows if row.endswith(b"}")], default=0)

    def demand_all_alive(self) -> None:
        assert [each.poll() for each in (self.relay, self.broker, *self.workers)] == [None] * 4, self.logs()

    def end(self) -> str:
        """The digest, once all have exited; the relay is told to."""
        for worker in self.workers:
            assert worker.wait(PATIENCE) == 0, self.logs()
        self.broker.send_signal(signal.SIGTERM)  # it would stay for a while, to answer how the run ended
        assert self.broker.wait(PATIENCE) == 0, self.logs()
        self.relay.send_signal(signal.SIGTERM)
        assert self.relay.wait(PATIENCE) == 0, self.logs()
        result = json.loads((self._desks[0].folder / "runs" / RUN / "result.json").read_text())
        return str(result["weights_sha256"])

    def logs(self) -> str:
        return "\n".join(path.read_text() for each in (self._relay, *self._desks) for path in each.folder.glob("*.log"))


def killed(process: "subprocess.Popen[bytes]") -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
