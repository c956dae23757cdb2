"""Kills snapshot writers again and again, and checks what they leave. Runs in a process of its own, which forks:

    main(folder, "boundaries")    before each call to the file system: mkdir, open, ...
    main(folder, "40")            40 times, at a random moment: also within a write

Prints a JSON object for each kill: what was found, and what was wrong with it.
"""

import json
import os
import random
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from stageline.pipeline.stage.stage_state import StageState
from stageline.workers.checkpoint.directory import SnapshotDirectory
from stageline.workers.checkpoint.snapshot import Origin, Snapshot
from support.states import make_state

ORIGIN = Origin("run", "0" * 64)
CALLS = ("open", "os.", "shutil.")  # of the audit events
STATES = [make_state(0), make_state(1)]
LARGE = StageState({"0.weight": torch.randn(2**20)})


def write_all(folder: Path, newest: StageState) -> None:
    """Everything a writer does: new snapshots, one that is there already, one in place of a damaged one, deletions."""
    snapshots = SnapshotDirectory(folder, ORIGIN)
    for stage in (0, 1):
        snapshots.delete_drafts(stage)
    for step, state in zip((0, 20, 40), (STATES[0], newest, STATES[0]), strict=True):
        snapshots.write(Snapshot(0, step, 1, state))
    snapshots.write(Snapshot(0, 20, 2, newest))
    snapshots.delete_before(0, 40)  # the newest two stay
    snapshots.write(Snapshot(1, 20, 1, STATES[0]))
    (snapshots.path(1, 20) / "manifest.json").unlink()
    snapshots.write(Snapshot(1, 20, 2, STATES[0]))


def in_a_child(work: Callable[[], None]) -> int:
    """The pid of a fork that does `work`."""
    pid = os.fork()
    if not pid:
        work()
        os._exit(0)
    return pid


def killed_at(instant: int, folder: Path) -> None:
    seen = 0

    def count(event: str, _: tuple[object, ...]) -> None:
        nonlocal seen
        if event.startswith(CALLS):
            seen += 1
            if seen == instant:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    write_all(folder, STATES[1])


def writing_on(folder: Path) -> None:
    while True:
        write_all(folder, LARGE)


def report(folder: Path, status: int) -> dict[str, object]:
    """Files that a killed writer has left, and files after the next writer has begun."""
    snapshots = SnapshotDirectory(folder, ORIGIN)
    steps = snapshots.steps(0)
    found = {
        "killed": os.WIFSIGNALED(status),
        "steps": steps,
        "wrong": [problem for step in steps for problem in snapshots.verify(0, step)],
        "unfinished": [path.name for path in folder.glob("stage-0/.*")],
    }
    snapshots.delete_drafts(0)
    snapshots.write(Snapshot(0, 60, 3, STATES[0]))
    return found | {"afterwards": sorted(path.name for path in folder.glob("stage-0/*"))}


def at_every_boundary(folder: Path) -> None:
    status, instant = 1, 0
    while status:
        instant += 1
        here = folder / str(instant)
        _, status = os.waitpid(in_a_child(lambda: killed_at(instant, here)), 0)  # noqa: B023  # runs in the fork only
        print(json.dumps(report(here, status)))


def at_random_moments(folder: Path, times: int) -> None:
    chance = random.Random(5)
    for number in range(times):
        here = folder / str(number)
        pid = in_a_child(lambda: writing_on(here))  # noqa: B023  # likewise
        select.select([], [], [], chance.uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        print(json.dumps(report(here, status)))


def main(folder: str, kills: str) -> None:
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # slow, and not needed: a kill leaves the page cache as it is
    if kills == "boundaries":
        at_every_boundary(Path(folder))
    else:
        at_random_moments(Path(folder), int(kills))
