"""The code that a script's model and functions are in, as the run's folder keeps it for workers on other machines:

code.json    {"torch": "2.13.0", "files": {"model.py": "5fa0c1d2..."}}      read by the broker, which tells joiners
"""

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import msgspec

from stageline.broker.coordinator.run import ScriptCode
from stageline.workers.disk.atomic_file import persist_json

CODE = "code.json"


def write_code(folder: Path, code: ScriptCode) -> None:
    """Keeps it in the run's `folder`."""
    persist_json(folder / CODE, code)


def read_code(folder: Path) -> ScriptCode | None:
    """What is kept in the run's `folder`; None if its workers are not to join by names."""
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
