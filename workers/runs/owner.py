"""Process that a run belongs to: `train`, a script's launcher, or a broker that was started alone.

Its file is the first in a run's folder:

    process.json    {"pid": 812, "host": "desk", "started": 1785.2, "began": 1786.0, "command": "train", ...}

As long as that process is there, the run is not over; a run without a recorded end whose process is gone was killed.
The system tells when a process was started by its present clock, and moves that time when its clock is set. The time of
the boot moves with it: so it is recorded as well, and tells by how much.

The broker records the end of a run, unless it is gone, or its records cannot be written: then `process.json` has it.
"""

import os
import shlex
import socket
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from time import time
from types import TracebackType
from typing import Literal

import msgspec
import psutil

from stageline.pipeline import plan as plans
from stageline.pipeline.addresses import masked
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.pipeline.printable import bounded
from stageline.workers.disk.atomic_file import persist_json, write_file

from .folder import OWNER, make_folder, name_of

RunCommand = Literal["train", "broker", "script"]

LONGEST_REASON = 2000  # characters of why a run has ended: its file stays within one block of the disk
_SAME = 1.0  # seconds by which two readings of a process's start may differ
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class RunOwner(msgspec.Struct, frozen=True, kw_only=True):
    """Process that runs a run. Times are in seconds since the epoch.

    Attributes:
        started: Time at which the process was started.
        booted: Time at which its machine was booted, by the same reading of the clock.
        boot: Id of that boot; "" if the system tells none.
        began: Time at which it began the run.
        plan: Plan as on the command line, without passwords; "" for one that is no file.
        sets: Overridden keys as on the command line, without passwords.
        ended: Why the process has ended the run without its broker, "" if it has not.
        code: Exit code of that end.
    """

    pid: int
    host: str
    started: float
    began: float
    command: RunCommand
    name: str
    plan: str = ""
    sets: list[str] = []
    ended: str = ""
    code: int = ExitCode.OK
    booted: float = 0.0
    boot: str = ""

    @property
    def alive(self) -> bool | None:
        """True if the process is there; None if it is on another machine."""
        if self.host != socket.gethostname():
            return None
        try:
            booted, process = psutil.boot_time(), psutil.Process(self.pid)
            moved = booted - self.booted if self.boot and self.boot == _boot() else 0.0
            same = abs(process.create_time() - moved - self.started) < _SAME
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    @property
    def begin(self) -> str:
        """Command that begins another run of the plan."""
        sets = (word for each in self.sets for word in ("--set", each))
        return shlex.join(["stageline", self.command, self.plan or "CONFIG", *sets])

    def resume(self, run: str) -> str:
        """Return the command that continues the run."""
        how = ("--resume", run) if self.command == "train" else ("--run", run, "--resume")
        return f"{self.begin} {shlex.join(how)}"


def _boot() -> str:
    """Return the id of this machine's boot, "" if the system tells none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def write_owner(folder: Path, plan: "plans.Plan", command: RunCommand) -> None:
    """Record that this process runs the run in `folder`. Raises `OSError`.

    Args:
        folder: Folder of the run.
        plan: Plan of the run.
        command: Command that this process carries out.
    """
    booted, process = psutil.boot_time(), psutil.Process()
    owner = RunOwner(
        pid=process.pid,
        host=socket.gethostname(),
        started=process.create_time(),
        booted=booted,
        boot=_boot(),
        began=time(),
        command=command,
        name=plan.run.name,
        plan=_shown(plan.file),
        sets=_sets(plan),
    )
    persist_json(folder / OWNER, owner)


def read_owner(folder: Path) -> RunOwner | None:
    """Return the process of the run in `folder`, None without a file. Raises `ValueError` if it is damaged."""
    try:
        return msgspec.json.decode((folder / OWNER).read_bytes(), type=RunOwner)
    except (FileNotFoundError, NotADirectoryError):
        return None


def record_end(folder: Path, code: int, reason: str) -> None:
    """Record that this process has ended its run, with an exit code and a reason.

    On a full disk the file is written in place: it keeps the block that it has. If that fails, the run counts as
    killed.

    Args:
        folder: Folder of the run.
        code: Exit code.
        reason: Reason in words.
    """
    with suppress(OSError, ValueError):
        if (owner := read_owner(folder)) is None:
            return
        ended = msgspec.json.encode(msgspec.structs.replace(owner, ended=bounded(reason, LONGEST_REASON), code=code))
        try:
            write_file(folder / OWNER, ended)
        except OSError:
            with (folder / OWNER).open("r+b") as file:
                file.write(ended)
                file.truncate()


class RunGoesOn(StagelineError):
    """Error that another process runs the run.

    Mend: Wait for its end, or stop the process that the message names.

    Example: run a is going on: stageline train, pid 812, runs it. Wait for its end or stop that process; `stageline
    status runs/a` shows it
    """

    error_code = "SL503"


class StartingRun(AbstractContextManager["StartingRun"]):
    """Run that `train` prepares: inside the context it shows as starting; on an error, nothing is left behind."""

    def __init__(self, plan: "plans.Plan", resume: str | None) -> None:
        """Name a new run of `plan`, or the run that `resume` names, and take its folder.

        Raises `NoSuchRun`, `FolderUnusable`, or `RunGoesOn`.
        """
        self._plan = plan
        self._take(make_folder(plan, name_of(plan, resume)))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Abandon the run after an error."""
        if kind is not None:
            self.abandon()

    def move_to(self, run: str) -> None:
        """Continue the preparation as `run`, whose folder is there. Raises `RunGoesOn`."""
        if run == self.id:
            return
        folder = self._folder.with_name(run)
        require_free(folder)
        self.abandon()
        self._take(folder)

    def _take(self, folder: Path) -> None:
        require_free(folder)
        file = folder / OWNER
        self.id, self._folder, self._before = folder.name, folder, file.read_bytes() if file.exists() else None
        write_owner(folder, self._plan, "train")

    def abandon(self) -> None:
        """Undo the naming of the run; a folder with other files in it stays."""
        with suppress(OSError):
            if self._before is not None:
                write_file(self._folder / OWNER, self._before)
            else:
                (self._folder / OWNER).unlink()
                self._folder.rmdir()


def require_free(folder: Path) -> None:
    """Raise `RunGoesOn` if another process runs the run in `folder`."""
    try:
        owner = read_owner(folder)
    except ValueError:  # damaged: of which process it tells is not known
        return
    if owner is not None and owner.pid != os.getpid() and owner.alive:
        who = "the launcher of a script" if owner.command == "script" else f"stageline {owner.command}"
        raise RunGoesOn(
            f"run {folder.name} is going on: {who}, pid {owner.pid}, runs it. Wait for its end or stop that "
            f"process; `stageline status {folder}` shows it"
        )


def _shown(file: Path | None) -> str:
    """Return the shortest name of the plan's file from here: a folder stands for the plan in it."""
    if file is None:
        return ""
    place = file.parent if file.name == "stageline.toml" else file
    try:
        return str(place.relative_to(Path.cwd()))
    except ValueError:
        return str(place)


def _sets(plan: "plans.Plan") -> list[str]:
    """Return the keys that --set and the environment gave, without addresses with a password."""
    from stageline.pipeline.plan.tables import flat

    values = flat(plan.as_mapping())
    addresses = {"queues.url": plan.queues.url, "broker.url": plan.broker.url, "broker.store": plan.broker.store}
    secret = {key for key, address in addresses.items() if masked(address) != address}
    given = [key for key, origin in plan.origins.items() if origin in ("--set", "environment")]
    return [f"{key}={_text(values[key])}" for key in given if key in values and key not in secret]


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
