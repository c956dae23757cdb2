"""Records of a run in its folder, for commands that ask when no broker answers.

    process.json     which process the run belongs to: `owner.py`
    plan.json        its plan, resolved
    broker.sqlite    the broker's records; or at a Redis server, as `broker.store` says
    result.json      the result of a finished run
    recut.json       {"run": "digits-20260131-101500-1f0c", "step": 120}: which run it goes on from in another layout;
                     its id tells that, too, and is the same on all machines: digits-20260131-101500-1f0c-at120-5e1d03
    code.json        {"torch": "2.13.0", "files": {"model.py": "5fa0c1d2..."}}: read by the broker, which tells joiners

Reading changes nothing, and locks nothing out. The broker's store, which one broker at a time may use, also gives the
measured timetable of a run that is over: when each action began and ended.
"""

import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from time import time
from typing import Any

import msgspec

from stageline.broker.control.sqlite_store import SqliteReader, SqliteStore
from stageline.broker.control.store import MemoryStore, Store, StoredRun
from stageline.broker.coordinator.records import OBSERVED
from stageline.broker.coordinator.run import RunOutcome, RunPhase, ScriptCode
from stageline.broker.errors import BrokerError
from stageline.broker.ledger.pauses import PauseBook
from stageline.broker.ledger.recovery import EarlierRun
from stageline.broker.ledger.times import timed_actions
from stageline.broker.transports.base import backend_of
from stageline.pipeline import retry
from stageline.pipeline.addresses import masked, needs_keys
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.keys.models import SCRIPT_BATCHES
from stageline.pipeline.program import Timed
from stageline.pipeline.schedule import Schedule
from stageline.workers.keys.keyring import own_pair

from . import folder as runs
from .folder import Result
from .owner import RunOwner, read_owner

SNAPSHOTS = "checkpoints"  # the folder of the stages' snapshots
FRESH = 10.0  # seconds for which records count as those of a living run, if its process is on another machine
PATIENCE = 3.0  # seconds to wait for a Redis server that has the records
NOTE = "recut.json"
_SUFFIX = re.compile(r"-at(\d+)-[0-9a-f]{6}$")
CODE = "code.json"
WAITS = 600.0  # seconds that a broker waits for a Redis server that is away
TAIL = 3  # steps at the end that are not shown: in these the pipeline drains


class RecordsDamaged(StagelineError):
    """Error that a record of a run cannot be read.

    Mend: Resume the run: its snapshots are enough. The message names the damaged file.

    Example: runs/a/broker.sqlite holds no records, although the run has snapshots; resume it: they are enough
    """

    error_code = "SL412"


class RecordedState(StrEnum):
    """State of a run according to its records."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"  # by a person, before a step that workers have agreed on
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"  # on request
    KILLED = "killed"  # no end is recorded, and its process is gone

    @property
    def goes_on(self) -> bool:
        """True if the run is not over."""
        return self in (RecordedState.STARTING, RecordedState.RUNNING, RecordedState.PAUSED)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Contents of the files in a run's folder; None and empty for missing files.

    `now` is in seconds since the epoch.
    """

    folder: Path
    now: float
    owner: RunOwner | None
    alive: bool | None  # the owner's process; None if that is not known
    plan: Mapping[str, Any] | None
    result: Result | None
    store: Store = field(default_factory=MemoryStore)
    stored: StoredRun = field(default_factory=StoredRun)

    @property
    def id(self) -> str:
        """Id of the run: the name of its folder."""
        return self.folder.resolve().name

    @property
    def as_of(self) -> float:
        """Time at which the records were last written, in seconds since the epoch by the system's clock."""
        if observed := self.stored.facts.get(OBSERVED):
            return float(str(observed["at"])) + float(str(observed.get("behind", 0.0)))
        found = (self.folder / name for name in (runs.RESULT, runs.STORE, runs.PLAN, runs.OWNER))
        return max((file.stat().st_mtime for file in found if file.exists()), default=self.now)

    @property
    def observed_at(self) -> float:
        """Time at which the records were last written, by the run's own clock, as all other times in them."""
        observed = self.stored.facts.get(OBSERVED)
        return self.as_of if observed is None else float(str(observed["at"]))

    @property
    def outcome(self) -> RunOutcome | None:
        """End of the run; None if no end is recorded, or if the run has been resumed since."""
        if self.result is not None:
            early, digest = self.result.stopped_early, self.result.weights_sha256
            return RunOutcome(RunPhase.FINISHED, early or "all steps are done", ExitCode.OK, digest, early=bool(early))
        kept = self.stored.facts.get("outcome")
        resumed = self.alive and self.owner is not None and self.owner.began > self.as_of
        if kept and not resumed:
            return msgspec.convert(kept, RunOutcome)
        ended = self.owner is not None and not self.alive and self.owner.ended
        return RunOutcome(RunPhase.FAILED, self.owner.ended, self.owner.code) if self.owner and ended else None

    @property
    def state(self) -> RecordedState:
        """State of the run: killed if its process is gone without a recorded end."""
        outcome = self.outcome
        if outcome is not None and outcome.phase is RunPhase.FINISHED:
            return RecordedState.FINISHED
        if outcome is not None:
            asked = outcome.code in (ExitCode.SAVED, ExitCode.INTERRUPTED)
            return RecordedState.STOPPED if asked else RecordedState.FAILED
        if not (self.alive or (self.alive is None and abs(self.now - self.as_of) < FRESH)):
            return RecordedState.KILLED
        if not self.progress.get("begun"):
            return RecordedState.STARTING
        rests = (found := self.pauses.present) is not None and found.step is not None
        return RecordedState.PAUSED if rests else RecordedState.RUNNING

    @property
    def pauses(self) -> PauseBook:
        """Pauses of the run."""
        return PauseBook.stored_in(self.stored.facts)

    @property
    def progress(self) -> Mapping[str, Any]:
        """Records of places and checkpoints; empty before the first worker."""
        return self.stored.facts.get("registry", {})

    @property
    def complete(self) -> int:
        """Step of the newest complete checkpoint, 0 if there is none."""
        return int(self.progress["checkpoints"]["complete"]) if self.progress else 0

    @property
    def training_steps(self) -> int | None:
        """Number of steps that the run trains, None if unknown."""
        if self.result is not None:
            return self.result.steps
        observed = self.stored.facts.get(OBSERVED, {}).get("training_steps")
        planned = (self.plan or {}).get("run", {}).get("steps")
        return next((int(str(steps)) for steps in (observed, planned) if steps is not None), None)

    @property
    def scripted(self) -> bool:
        """True if a script calls the workers: the number of its steps is known only at its end."""
        source = (self.plan or {}).get("data", {}).get("source")
        return source == SCRIPT_BATCHES or (self.owner is not None and self.owner.command == "script")

    @property
    def steps(self) -> int:
        """Number of training steps that every stage has finished."""
        if self.result is not None:
            return self.result.steps
        stages = len(self.progress["checkpoints"]["newer"]) if self.progress else 0
        finished = min((max(self.stored.finished.get(stage, 0), self.complete) for stage in range(stages)), default=0)
        return finished if self.training_steps is None else min(finished, self.training_steps)


@contextmanager
def recorded_run(folder: Path, store: str | None = None) -> Iterator[RecordedRun]:
    """Return a context whose value is the records in `folder`.

    `store` is an address in place of the plan's `broker.store`, which is recorded without its password.
    Raises `RecordsDamaged`, in the context too if the records that it reads are damaged, or `StoreUnusable`, or
    `KeyUnusable`.
    """
    with explained(str(folder / runs.OWNER)):
        owner = read_owner(folder)
    alive, file = owner.alive if owner is not None else None, folder / runs.PLAN
    result = runs.result_in(folder)
    with explained(str(file)):
        plan = msgspec.json.decode(file.read_bytes(), type=dict[str, Any]) if file.exists() else None
        kept_at = str((plan or {}).get("broker", {}).get("store", runs.IN_FOLDER))
        insecure = bool((plan or {}).get("broker", {}).get("insecure"))
        opened = _open_store(folder, store or kept_at, insecure=insecure)
    place = str(folder / runs.STORE) if kept_at == runs.IN_FOLDER else f"the broker's store at {masked(kept_at)}"
    with closing(opened), explained(place):
        stored = opened.load()
        if not (stored.facts or alive or result) and (folder / SNAPSHOTS).exists():
            raise RecordsDamaged(
                f"{place} holds no records, although the run has snapshots; resume it: they are enough"
            )
        yield RecordedRun(folder, time(), owner, alive, plan, result, opened, stored)


@contextmanager
def explained(place: str) -> Iterator[None]:
    """Return a context that turns errors from records of a wrong shape into `RecordsDamaged`.

    The error names `place`, the place of the records.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, struct.error) as error:
        raise RecordsDamaged(f"{place} is damaged: {type(error).__name__}: {error}") from error


def _open_store(folder: Path, address: str, *, insecure: bool) -> Store:
    if address == runs.IN_FOLDER:
        return SqliteReader(folder / runs.STORE) if (folder / runs.STORE).exists() else MemoryStore()
    secret, run = _secret_at(address, insecure=insecure), folder.resolve().name
    return backend_of(address).open_store(address, run, PATIENCE, lambda reason: None, secret=secret)


def _secret_at(address: str, *, insecure: bool) -> bytes:
    """Return the secret with which records at this address are sealed: that of the broker's key, which is this user's.

    Returns b"" if they do not leave this machine, or keys are renounced. Raises `KeyUnusable`.
    """
    return own_pair(os.environ).secret if needs_keys(address, insecure=insecure) else b""


class RecutNote(msgspec.Struct, frozen=True):
    """Earlier run, and number of its steps, that a run in another layout continues."""

    run: str
    step: int


def read_note(folder: Path) -> RecutNote | None:
    """Return the note of the run in `folder`; None without one, or if it cannot be read."""
    try:
        return msgspec.json.decode((folder / NOTE).read_bytes(), type=RecutNote)
    except (OSError, msgspec.MsgspecError):
        return None


def recut_id(run: str, step: int, plan: Plan) -> str:
    """Return the id of the run that continues the checkpoint of `step` of `run` under `plan`.

    Args:
        run: Id of the old run.
        step: Number of its steps done.
        plan: New plan.
    """
    identity = sha256(f"{run}/{step}/{plan.digest()}".encode()).hexdigest()
    return f"{_SUFFIX.sub('', run)}-at{step}-{identity[:6]}"


def earlier_run(plan: Plan, run: str) -> EarlierRun | None:
    """Return the run that `run` continues; None if there is none, or if `run` repeats one from step 0.

    A broker's machine may have no note.
    """
    folder = runs.folder(plan, run)
    note, named = read_note(folder), _SUFFIX.search(run)
    source = "" if note is None else str(runs.folder(plan, note.run))
    step = note.step if note is not None else int(named[1]) if named is not None else 0
    return EarlierRun(step, source, str(folder), plan.scripted) if step else None


def read_code(folder: Path) -> ScriptCode | None:
    """Return the recorded code of the run in `folder`; None if its workers are not to join by names."""
    try:
        return msgspec.json.decode((folder / CODE).read_bytes(), type=ScriptCode)
    except FileNotFoundError:
        return None


def hashes_of(root: Path, files: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 (hex) of each of `files`, given by their paths in `root`. Raises `OSError`."""
    return {file: sha256((root / file).read_bytes()).hexdigest() for file in sorted(files)}


def public_version(torch: str) -> str:
    """Return the version of `torch` without its build: "2.13.0+cu126" computes with the same code as "2.13.0+cpu"."""
    return torch.partition("+")[0]


def open_store(plan: Plan, run: str, waiting: Callable[[str], None] | None = None) -> Store:
    """Return the store of `run`.

    Args:
        plan: Plan of the run.
        run: Id of the run.
        waiting: Called with the reason while a fault that may pass is waited for; None does not wait.

    Raises:
        StoreUnusable: The store cannot be opened.
        KeyUnusable: The records are to be sealed, and this user's key cannot be made or read.
    """
    if plan.broker.store == runs.IN_FOLDER:
        file = runs.folder(plan, run) / runs.STORE
        return SqliteStore(file, patience=retry.BOUND, waiting=waiting) if waiting else SqliteStore(file)
    url = plan.broker.store
    secret = _secret_at(url, insecure=plan.broker.insecure)
    return backend_of(url).open_store(url, run, WAITS, waiting or (lambda reason: None), secret=secret)


def measured_timetable(plan: Plan, run: str, schedule: Schedule, steps: int) -> list[Timed]:
    """Return all actions of a few of the last `steps` training steps, in seconds since the epoch.

    Args:
        plan: Plan of the run.
        run: Id of the run.
        schedule: Schedule of the run.
        steps: Number of training steps.

    Returns:
        One synchronous step, or as many asynchronous ones as show how they overlap. Nothing if the store of the run is
        still in use, was deleted, or holds no times.
    """
    if plan.broker.store == runs.IN_FOLDER and not (runs.folder(plan, run) / runs.STORE).exists():
        return []
    shown = 1 if schedule.mode == "sync" else max(2, -(-2 * schedule.stages // schedule.microbatches))
    end = max(shown, steps - TAIL)
    try:
        store = open_store(plan, run)
    except BrokerError:
        return []
    with closing(store):
        return measured(store, schedule, range(max(0, end - shown), min(end, steps)))


def measured(store: Store, schedule: Schedule, steps: range) -> list[Timed]:
    """Return the actions of `steps` in `store`, as far as their times are recorded.

    Args:
        store: Store of the run.
        schedule: Schedule of the run.
        steps: Range of training steps.
    """
    found = ((stage, step, store.record(stage, step)) for step in steps for stage in range(schedule.copies))
    return [
        Timed(schedule.owner(stage), action, start, end, step)
        for stage, step, record in found
        if record is not None
        for action, start, end in timed_actions(record)
    ]
