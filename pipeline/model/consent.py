"""Consent of the owner of data: asked before code that a plan names is imported, and before its data are opened.

A process loads everything, unless a guard is installed: `--allow` installs one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from stageline.pipeline.data import Source
    from stageline.pipeline.plan import Plan


class Guard(Protocol):
    """Guard that knows what may be loaded in this process. What may not be is refused with a `StagelineError`."""

    def demand(self, plan: "Plan") -> None:
        """Raise an error unless code and data of `plan` may be loaded. Nothing of it has been imported yet."""

    def loader(self, name: str, file: Path) -> SourceFileLoader:
        """Return the loader that executes `file` as the module `name`. It raises an error if the file may not be."""

    def opened(self, plan: "Plan", references: Sequence[str], make: "Callable[[], Source]") -> "Source":
        """Return the source that `make` opens, from the objects that `references` name. Raises an error before that."""

    def joined(self, run: str, worker: int) -> None:
        """Note the run and the worker that this process works for from now on."""


_guards: list[Guard] = []


@contextmanager
def guarded_by(guard: Guard) -> Iterator[None]:
    """Return a context in which `guard` is asked."""
    _guards.append(guard)
    try:
        yield
    finally:
        _guards.remove(guard)


def demand_consent(plan: "Plan") -> None:
    """Raise what a guard raises unless `plan` may be loaded in this process."""
    for guard in _guards:
        guard.demand(plan)


def spec_of_file(name: str, file: Path) -> ModuleSpec | None:
    """Return the spec that imports `file` as the module `name`; None if it is no Python file."""
    return spec_from_file_location(name, file, loader=next((each.loader(name, file) for each in _guards), None))


def opened(plan: "Plan", references: Sequence[str | None], make: "Callable[[], Source]") -> "Source":
    """Return the source that `make` opens. Raises what a guard raises, before anything is opened.

    Args:
        plan: Plan of the run.
        references: Names of the objects that the source is made of; None stands for nothing.
        make: Opens the source.
    """
    for guard in _guards:
        make = partial(guard.opened, plan, [*filter(None, references)], make)
    return make()


def tell_joined(run: str, worker: int) -> None:
    """Tell guards for which run and worker this process works from now on."""
    for guard in _guards:
        guard.joined(run, worker)
