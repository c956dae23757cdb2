"""Notes in a run's folder: the run that it goes on from in another layout, and the code of its script.

recut.json     {"run": "digits-20260131-101500-1f0c", "step": 120}, where its snapshots were made; its id tells it too,
               and is the same on all machines: digits-20260131-101500-1f0c-at120-5e1d03
code.json      {"torch": "2.13.0", "files": {"model.py": "5fa0c1d2..."}}      read by the broker, which tells joiners
"""

import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import msgspec

from stageline.broker.coordinator.run import ScriptCode
from stageline.broker.ledger.recovery import EarlierRun
from stageline.pipeline.plan import Plan
from stageline.workers.disk.atomic_file import persist_json

from . import folder as runs

NOTE = "recut.json"
_SUFFIX = re.compile(r"-at(\d+)-[0-9a-f]{6}$")
CODE = "code.json"


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


def write_code(folder: Path, code: ScriptCode) -> None:
    """Keep it in the run's `folder`."""
    persist_json(folder / CODE, code)


def read_code(folder: Path) -> ScriptCode | None:
    """Return what is kept in the run's `folder`; None if its workers are not to join by names."""
    try:
        return msgspec.json.decode((folder / CODE).read_bytes(), type=ScriptCode)
    except FileNotFoundError:
        return None


def hashes_of(root: Path, files: Iterable[str]) -> dict[str, str]:
    """The SHA-256 (hex) of each of `files`, given by their paths in `root`. Raises `OSError`."""
    return {file: sha256((root / file).read_bytes()).hexdigest() for file in sorted(files)}


def public_version(torch: str) -> str:
    """torch's version without its build: "2.13.0+cu126" computes with the same code as "2.13.0+cpu"."""
    return torch.partition("+")[0]
