"""What a run goes on from that lays another run out in a new way, as its folder and its id tell.

recut.json                       {"run": "digits-20260131-101500-1f0c", "step": 120}, where its snapshots were made
digits-20260131-101500-1f0c-at120-5e1d03      its id, the same on all machines
"""

import re
from hashlib import sha256
from pathlib import Path

import msgspec

from stageline.broker.ledger.recovery import EarlierRun
from stageline.pipeline.plan import Plan

from . import folder as runs

NOTE = "recut.json"
_SUFFIX = re.compile(r"-at(\d+)-[0-9a-f]{6}$")


class RecutNote(msgspec.Struct, frozen=True):
    """Of which run, and after how many of its steps, a run goes on in another layout."""

    run: str
    step: int


def read_note(folder: Path) -> RecutNote | None:
    """That of the run in `folder`; None without one, or with one that cannot be read."""
    try:
        return msgspec.json.decode((folder / NOTE).read_bytes(), type=RecutNote)
    except (OSError, msgspec.MsgspecError):
        return None


def recut_id(run: str, step: int, plan: Plan) -> str:
    """The id of the run that goes on from the checkpoint of `step` of `run` as `plan` has it."""
    identity = sha256(f"{run}/{step}/{plan.digest()}".encode()).hexdigest()
    return f"{_SUFFIX.sub('', run)}-at{step}-{identity[:6]}"


def earlier_run(plan: Plan, run: str) -> EarlierRun | None:
    """Return what the run `run` goes on from; None if it goes on from no other run, or repeats one from step 0. A
    broker's machine may have no note."""
    folder = runs.folder(plan, run)
    note, named = read_note(folder), _SUFFIX.search(run)
    source = "" if note is None else str(runs.folder(plan, note.run))
    step = note.step if note is not None else int(named[1]) if named is not None else 0
    return EarlierRun(step, source, str(folder), plan.scripted) if step else None
