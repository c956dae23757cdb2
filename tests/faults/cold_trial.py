"""Runs one trial of `cold.py` as a user would run it, and compares it with the undisturbed run.

`stageline train` has its own interpreter, which imports torch. Processes are found by the log that their output goes
to. Recovery is what a user can see: the seconds from the kill to the line of the broker's log that says that the worker
computes again, that the next broker listens, or, of a run that was starting, that all workers have joined.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from faults.cold import ALL, BROKER, TEMPLATE, WORKERS, ColdTrial, Moment
from support.paths import TESTS

LIMIT = 90.0  # seconds, after which a run counts as hanging
GONE = 5.0  # seconds in which the processes of a run that is over have exited
LOOK = 0.005  # seconds between two looks at the processes and the log
SETS = {"run.steps": 180, "schedule.microbatches": 4, "data.batch_size": 12, "recovery.snapshot_every": 10}
SECONDS = 0.003  # that each layer of the small model takes: a step takes some 20 ms
JOINED, COMPUTES, LISTENS = "all workers have joined", "computes again", ": broker at "


@dataclass(frozen=True, slots=True)
class ColdVerdict:
    """The result of a trial. `wrong`: each broken promise. `fired`: the kills that were carried out.

    `workers` and `brokers`: seconds from each kill until a worker computed again, or the next broker listened.
    `seconds`: of the whole run.
    """

    trial: str
    wrong: list[str]
    fired: int
    workers: list[float]
    brokers: list[float]
    seconds: float

    def facts(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class ColdOutcome:
    """How a run ended, and what was seen of it meanwhile."""

    code: int
    facts: dict[str, Any]
    errors: str
    left: list[str]
    kills: dict[str, float]
    lines: list[tuple[float, str]]
    seconds: float


def run(trial: ColdTrial | None, home: Path, url: str, plan: Path | None = None) -> ColdOutcome:
    """Trains in the empty folder `home`, over `url`, the small plan or the one in the folder `plan`."""
    sets = _prepare(home, plan)
    temporary = Path(tempfile.mkdtemp(prefix="cold-", dir="/tmp"))  # short: it holds sockets
    spares = trial.spares if trial else 0
    words = ["train", ".", "--json", "--set", f"queues.url={url}", *sets, *(["--spares", "1"] if spares else [])]
    began = monotonic()
    try:
        with (home / "train.out").open("w") as out, (home / "train.err").open("w") as err:
            train = subprocess.Popen(
                [sys.executable, "-P", "-m", "stageline", *words],
                cwd=home,
                env={**os.environ, "OMP_NUM_THREADS": "1", **_folders(home, temporary)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            watch = _Watch(home, train.pid, trial)
            hung = not watch.to_the_end(train, began + LIMIT)
        seconds = monotonic() - began
        left = _left(watch, temporary)
    finally:
        shutil.rmtree(temporary)
    errors = (home / "train.err").read_text() + ("it did not end\n" if hung else "")
    said = (home / "train.out").read_text()
    facts = json.loads(said) if not train.returncode and said else {}
    return ColdOutcome(train.returncode, facts, errors, left, watch.kills, watch.lines, seconds)


def judge(trial: ColdTrial, outcome: ColdOutcome, undisturbed: ColdOutcome) -> ColdVerdict:
    """The verdict on the run of `trial`, given the outcome of one without kills."""
    wrong = _differences(outcome, undisturbed)
    if not outcome.kills:
        wrong.append("nothing was killed")
    workers, brokers = _recoveries(trial, outcome)
    return ColdVerdict(str(trial), wrong, len(outcome.kills), workers, brokers, round(outcome.seconds, 2))


def _folders(home: Path, temporary: Path) -> dict[str, str]:
    """torch makes a folder for all programs of a user: that one is not left behind."""
    return {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(home / "torch")}


def _prepare(home: Path, plan: Path | None) -> list[str]:
    shutil.copytree(plan or TESTS / "support" / "tiny", home, dirs_exist_ok=True)
    if plan is None:
        model = home / "model.py"
        model.write_text(re.sub(r"seconds = [\d.]+", f"seconds = {SECONDS}", model.read_text()))
    sets = SETS if plan is None else {"recovery.snapshot_every": 10}
    return [f"--set={key}={value}" for key, value in {**sets, "recovery.restarts": 5}.items()]


@dataclass(slots=True)
class _Watch:
    """Sees what a run logs, and kills when it is time."""

    home: Path
    train: int
    trial: ColdTrial | None
    kills: dict[str, float] = field(default_factory=dict)
    lines: list[tuple[float, str]] = field(default_factory=list)
    _begun: float | None = None
    _read: int = 0

    def to_the_end(self, train: "subprocess.Popen[bytes]", deadline: float) -> bool:
        """Until `train` has exited; False if that took too long, and it was killed."""
        while train.poll() is None and monotonic() < deadline:
            self._look()
            sleep(LOOK)
        self._look()
        in_time = train.poll() is not None
        train.kill()
        train.wait()
        return in_time

    def processes(self) -> dict[int, str]:
        """All processes of the run but `train`, by pid: each by the name of its log."""
        found = {}
        for path in Path("/proc").iterdir():
            if path.name.isdigit() and int(path.name) != self.train:
                try:
                    if (path / "cwd").readlink() == self.home:
                        found[int(path.name)] = _name(path)
                except OSError:  # it has exited, or belongs to another user
                    continue
        return found

    def _look(self) -> None:
        self._read_log()
        if self.trial is not None and not self.kills and self._is_time(self.trial):
            self._kill(self.trial.targets)

    def _read_log(self) -> None:
        for log in self.home.glob("runs/*/broker.log"):
            self._begun = self._begun or monotonic()
            with log.open("rb") as file:
                file.seek(self._read)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            self.lines += [(monotonic(), line) for line in whole.decode(errors="replace").splitlines()]

    def _is_time(self, trial: ColdTrial) -> bool:
        joined = (when for when, line in self.lines if JOINED in line)
        since = self._begun if trial.moment is Moment.START else next(joined, None)
        return since is not None and monotonic() - since >= trial.delay

    def _kill(self, targets: tuple[str, ...]) -> None:
        """Kills those of `targets` that are there; if none is, the next look tries again."""
        for pid, name in self.processes().items():
            if name in targets or targets == ALL:
                self.kills[name] = monotonic()
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    del self.kills[name]


def _name(process: Path) -> str:
    log = (process / "fd" / "1").readlink()
    return log.stem if log.suffix == ".log" else TEMPLATE


def _left(watch: _Watch, temporary: Path) -> list[str]:
    deadline = monotonic() + GONE
    while (processes := watch.processes()) and monotonic() < deadline:
        sleep(0.02)
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    files = [str(path.relative_to(temporary)) for path in temporary.rglob("*")]
    return [*(f"{name} (pid {pid})" for pid, name in processes.items()), *files]


def _differences(outcome: ColdOutcome, undisturbed: ColdOutcome) -> list[str]:
    wrong = [f"left behind: {each}" for each in outcome.left]
    if outcome.code or not outcome.facts:
        return [*wrong, f"it ended with {outcome.code}: {outcome.errors[-500:]}"]
    names = ("weights_sha256", "steps", "loss", "losses", "metrics")
    pairs = ((name, outcome.facts[name], undisturbed.facts[name]) for name in names)
    return wrong + [f"{name} {found}, expected {expected}" for name, found, expected in pairs if found != expected]


def _recoveries(trial: ColdTrial, outcome: ColdOutcome) -> tuple[list[float], list[float]]:
    """Of workers, and of the broker. A worker that finds nothing left to do does not compute again."""

    def first(when: float, *texts: str) -> list[float]:
        seen = (at for at, line in outcome.lines if at > when and all(text in line for text in texts))
        return [round(at - when, 3) for at in seen][:1]

    brokers = first(outcome.kills[BROKER], LISTENS) if BROKER in outcome.kills else []
    killed = {name: when for name, when in outcome.kills.items() if name in WORKERS}
    again = [first(when, f"worker {name[-1]} (", COMPUTES) for name, when in killed.items()]
    workers = [seconds for each in again for seconds in each]
    if not workers and killed and trial.moment is Moment.START:
        workers = first(min(killed.values()), JOINED)
    return workers, brokers
