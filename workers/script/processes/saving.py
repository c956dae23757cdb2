"""Checkpoints of a script's run: saved into a folder of the user's choice, and begun from.

A killed script leaves its launcher, broker and workers for a lease, as in a pause. A run is resumed once they have
ended.
"""

import os
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, sleep

import psutil

from stageline.pipeline.model.stage_layout import StageLayout
from stageline.pipeline.plan import Plan
from stageline.workers.checkpoint.continuable import needs_recut
from stageline.workers.checkpoint.recut import continued
from stageline.workers.checkpoint.saved import (
    NOTHING_TRAINED,
    NotSaved,
    SavedRun,
    begin_from,
    begin_from_saved,
    complete_draft,
    draft_folder,
    is_saved,
)
from stageline.workers.checkpoint.snapshot import SnapshotDamaged
from stageline.workers.checkpoint.source import BEST, source_in
from stageline.workers.keys.keyring import pair_towards
from stageline.workers.runs import folder as runs
from stageline.workers.runs.metrics import EVALUATIONS, carry_lines
from stageline.workers.runs.owner import RunGoesOn, require_free
from stageline.workers.script.calls.batch_record import NAME as BATCHES
from stageline.workers.script.calls.batch_record import keep_batches
from stageline.workers.script.calls.calls import Replies
from stageline.workers.script.calls.example import NAME as EXAMPLE
from stageline.workers.script.calls.example import carry_example
from stageline.workers.script.calls.news import ask, say

LOOK = 0.1  # seconds between two looks
ENDS = 30.0  # seconds for the processes of a run to end, after the lease


def await_former_processes(folder: Path, lease: float) -> None:
    """Return once no process runs the run in `folder`.

    Raises `RunGoesOn` at once if its script exists, otherwise after `lease` and `ENDS` seconds.
    """
    deadline = monotonic() + lease + ENDS
    while True:
        try:
            require_free(folder)
        except RunGoesOn:
            if monotonic() > deadline or _script_is_there(folder):
                raise
            sleep(LOOK)
        else:
            return


def _script_is_there(folder: Path) -> bool:
    """Return True if the broker reports the script as present and, on this machine, its process exists."""
    url = runs.read_broker_url(folder)
    if url is None:
        return False
    script = (ask(url, "status", pair_towards(url, os.environ)) or {}).get("script") or {}
    here = script.get("host") == socket.gethostname()
    return script.get("standing") == "present" and (not here or psutil.pid_exists(script["pid"]))


def save_checkpoint(
    folder: Path, plan: Plan, run: str, position: Callable[[], int], call: Callable[[str], Replies]
) -> None:
    """Save a checkpoint of the run in `folder`. A failed attempt leaves nothing of it.

    Args:
        folder: Folder of the checkpoint.
        plan: Plan of the run.
        run: Id of the run.
        position: Returns the number of steps done.
        call: Has all workers write their stages' snapshots into a folder; its errors are raised.

    Raises:
        NotSaved: No step was trained yet, or the folder cannot be used.
    """
    if not position():
        raise NotSaved(NOTHING_TRAINED)
    draft = draft_folder(folder.absolute())
    try:
        call(str(draft))
        carry_lines(runs.folder(plan, run), position(), draft, EVALUATIONS)
        keep_batches(runs.folder(plan, run), position(), draft)
        carry_example(runs.folder(plan, run), draft)
        complete_draft(draft, folder.absolute(), plan, SavedRun(run, position(), sum(map(len, plan.placement))))
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # once complete, it has another name


def run_to_resume(plan: Plan, folder: Path, layouts: Callable[[], Sequence[StageLayout]]) -> str:
    """Return the id of the run to continue.

    It is the run in `folder`; a new run if that has finished, if a checkpoint was saved there, or if `plan` cuts or
    places the stages differently. The new run begins with the old one's state.

    Args:
        plan: Plan of the script.
        folder: Folder of a run, or of a saved checkpoint.
        layouts: Returns the layouts of the stages under `plan`.

    Raises:
        NoSuchRun: Neither is in `folder`. Errors of `begin_from_saved` and `continued` are raised, too.
    """
    saved = is_saved(folder)
    kept = folder if saved else runs.folder(plan, known_run(plan, folder))
    over = not saved and (kept / runs.RESULT).exists()
    if over:
        _demand_checkpoint(folder, kept)
    if not runs.differences_from(plan, kept):
        run = begin_from_saved(plan, folder) if saved else _begin_from_end(plan, kept) if over else kept.name
        _carry_records(kept, runs.folder(plan, run))
        return run
    source = source_in(kept)
    if not needs_recut(plan, source):
        return kept.name
    if not saved:
        await_former_processes(kept, plan.recovery.lease)
    run = continued(plan, source, layouts(), say, runs.new_id(plan) if saved or over else "")
    _carry_records(kept, runs.folder(plan, run))
    return run


def _demand_checkpoint(named: Path, kept: Path) -> None:
    """Raise `NoSuchRun` if the finished run in `kept`, which the script calls `named`, has no checkpoint."""
    if not source_in(kept).complete:
        raise runs.NoSuchRun(
            f'resume = "{named}": that run has finished, and has no checkpoint to go on from; load_weights("{kept}") '
            "has its weights. Line(...) begins another"
        )


def _begin_from_end(plan: Plan, kept: Path) -> str:
    """Begin a new run from the newest whole checkpoint of the finished run in `kept`, and return its id.

    Raises `SnapshotDamaged` if all are damaged.
    """
    source, problems = source_in(kept), list[str]()
    for step in source.complete:
        try:
            return begin_from(plan, kept, SavedRun(kept.name, step, source.stages))
        except SnapshotDamaged as damage:
            problems += damage.problems
            say(str(damage))
    raise SnapshotDamaged(source.snapshots.folder, problems)


def _carry_records(before: Path, now: Path) -> None:
    """Copy to the new run the record of batches, with which its own are compared, the best, and a trace's example."""
    for name in (BATCHES, BEST, EXAMPLE):
        if (before / name).exists() and not (now / name).exists():
            shutil.copyfile(before / name, now / name)


def begun_run(plan: Plan, folder: Path) -> str:
    """Return the id of the unfinished run in `folder`, whose workers are on other machines. Raises `NoSuchRun`.

    `folder` is a run's folder in the plan's folder of runs, or only its name.
    """
    if is_saved(folder):
        raise runs.NoSuchRun(
            f'resume = "{folder}": a checkpoint was saved there, which workers on other machines do not have. Leave '
            "out broker= to go on from it with processes of this machine"
        )
    run = known_run(plan, folder)
    kept = runs.folder(plan, run)
    if (kept / runs.RESULT).exists():
        raise runs.NoSuchRun(
            f'resume = "{folder}": that run has finished; load_weights("{kept}") has its weights. Line(...) begins '
            "another, and without broker=, processes of this machine go on with it from their own checkpoints"
        )
    return run


def known_run(plan: Plan, folder: Path) -> str:
    """Return the id of the run in `folder`, which may have finished. Raises `NoSuchRun`."""
    kept = runs.folder(plan, folder.name)
    here = len(folder.parts) == 1 or folder.resolve() == kept.resolve()
    if not here and runs.is_run(folder):
        raise runs.NoSuchRun(
            f'resume = "{folder}": this line has its runs in folder = "{plan.run.dir}". Pass '
            f'folder="{folder.parent}" to go on with that one'
        )
    if not here or not runs.is_run(kept):
        raise runs.NoSuchRun(
            f'resume = "{folder}": there is no run of that name in folder = "{plan.run.dir}", and no saved checkpoint. '
            "Line(...) begins a run"
        )
    return folder.name
