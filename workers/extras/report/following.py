"""A run that is followed: its sections are asked for again and again, and those that have changed are handed on.

    every second at least      run, why, stores, faults
    every five seconds         curves, timetable, plan

What a look costs is measured: the next one comes after `PAUSE` times as long, so that a large run is asked more rarely.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from time import monotonic
from typing import Protocol

import msgspec

from .curves import MeasuredLosses
from .facts import Ask, Section, course_sections, empty_sections, plan_section, run_section, state_sections, why_section

LEAST, SELDOM = 1.0, 5.0  # seconds between two looks, and between two at what grows with the run
PAUSE = 20


class View(Protocol):
    """A run that can be asked, as `cli.asking.looking` has it."""

    @property
    def ask(self) -> Ask:
        """Asks a question by its name."""

    @property
    def folder(self) -> Path | None:
        """Folder of the run."""

    @property
    def source(self) -> str:
        """Source of the answers: "broker" or "records"."""

    @property
    def as_of(self) -> float:
        """Time at which the answers are true."""


class FollowedRun:
    """A run that is looked at; one thread at a time."""

    def __init__(self, view: Callable[[], AbstractContextManager[View]]) -> None:
        """Take the way to the run: a context for each look."""
        self._view = view
        self._measured: MeasuredLosses | None = None
        self._slow_at = -SELDOM
        self._kept: dict[str, bytes] = {}
        self.sections: dict[str, Section] = {}
        self.pause = LEAST

    def look(self) -> dict[str, Section]:
        """Ask; return the sections that have changed. Raises the errors of the questions; then nothing has changed."""
        begun = monotonic()
        with self._view() as run:
            found = self._asked(run, slowly=begun - self._slow_at >= SELDOM)
        if "curves" in found:
            self._slow_at = monotonic()
        self.pause = max(LEAST, PAUSE * (monotonic() - begun))
        self.sections |= found
        texts = {name: msgspec.json.encode(section) for name, section in found.items()}
        changed = {name: found[name] for name, text in texts.items() if self._kept.get(name) != text}
        self._kept |= texts
        return changed

    def _asked(self, run: View, *, slowly: bool) -> dict[str, Section]:
        status = run.ask("status")
        found = {"run": run_section(status, run.source, run.as_of), "why": why_section(run.ask("why"))}
        if status["plan"] is None:
            return {**found, **empty_sections(), "plan": plan_section(status, run.folder)}
        found |= state_sections(run.ask, status)
        if slowly:
            self._measured = self._measured or MeasuredLosses(run.folder)
            found |= {**course_sections(run.ask, status, self._measured), "plan": plan_section(status, run.folder)}
        return found
