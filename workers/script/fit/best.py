"""Keeps the checkpoint of the best evaluation so far under one name, in one instant for readers.

best -> .best-step-400-5fa0c1d2          a link, replaced by one rename once the new checkpoint is whole
        .best-step-400-5fa0c1d2/         as `Line.save` makes it; what the link has named before is removed then
"""

import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from stageline.workers.checkpoint.saved import is_saved, read_saved
from stageline.workers.disk.atomic_file import draft_of, publish


class BestCheckpoint:
    """At the path `link`; `save` writes a checkpoint into a folder. Raises `ValueError` if something else is there."""

    def __init__(self, link: Path, save: Callable[[Path], object]) -> None:
        self._link = link.absolute()
        self._save = save
        if os.path.lexists(self._link) and not self._link.is_symlink():
            raise ValueError(f'best = "{link}": something is there that no fit has made. Name a path that is free')

    @property
    def step(self) -> int | None:
        """After how many steps the checkpoint is; None if there is none."""
        return read_saved(self._link).step if is_saved(self._link) else None

    def keep(self, step: int) -> None:
        """The line has trained `step` steps: this is the best from now on. Raises `NotSaved`, or `OSError`."""
        folder = self._link.with_name(f"{self._prefix}{step}-{secrets.token_hex(4)}")
        self._save(folder)
        draft = draft_of(self._link)
        draft.symlink_to(folder.name)
        publish(draft, self._link)
        self._remove_others(folder)

    @property
    def _prefix(self) -> str:
        return f".{self._link.name}-step-"

    def _remove_others(self, kept: Path) -> None:
        """Also what a script that was killed has left."""
        own = re.compile(rf"{re.escape(self._prefix)}\d+-[0-9a-f]{{8}}")
        for folder in list(self._link.parent.iterdir()):
            if own.fullmatch(folder.name) and folder != kept and is_saved(folder):
                shutil.rmtree(folder, ignore_errors=True)
