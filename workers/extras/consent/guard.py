"""Guard of a process that keeps to the owner's file: a plan is compared first, then its files and sources are opened.

read plan ──> demand: digest, keys, files, last day ──> imports: these files alone ──> sources: recorded, then opened

A file or a source that is asked for before its plan was compared is refused.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from hashlib import sha256
from importlib.machinery import PathFinder
from pathlib import Path

from stageline.pipeline.data import Source
from stageline.pipeline.model.consent import guarded_by, tell_joined
from stageline.pipeline.model.load import base_folder
from stageline.pipeline.plan import Plan
from stageline.pipeline.printable import printable
from stageline.workers.runtime.worker_feature import WorkerPlace

from .allow_file import SHORT, Allowance, NoConsent, entry_text, from_here, read_allowed
from .code_files import ListedFinder, ListedLoader
from .data_use import DataUse, UsedSource


class ConsentGuard:
    """Guard that allows what the owner's file lists."""

    def __init__(self, file: Path, process: str) -> None:
        """Read the file.

        Args:
            file: Path of the owner's file.
            process: Name of the command, for the record.

        Raises:
            AllowFileWrong: The file cannot be read.
        """
        self._file, self._process = from_here(file), process
        self._allowed = read_allowed(self._file)
        self._record = file.absolute().parent / self._allowed.record
        self._listed: dict[Path, str] = {}
        self._plans: dict[str, tuple[Plan, Allowance]] = {}
        self._uses: list[DataUse] = []

    @property
    def folder(self) -> Path:
        """Folder of the plan that was compared last, the current one before."""
        return next((base_folder(plan).resolve() for plan, _ in reversed(self._plans.values())), Path.cwd())

    def demand(self, plan: Plan) -> None:
        """Raise `NoConsent` unless an entry of the file allows `plan`, and the code of it that is here.

        The entry of a script's plan, which has no file that `stageline allow` could read, is printed then.
        """
        try:
            entry = self._allowed.entry_for(plan, self._file, date.today())
        except NoConsent:
            if plan.file is None:
                print(f"{printable(entry_text(plan))}\n", file=sys.stderr)
            raise
        self._plans.pop(plan.digest(), None)  # the last one is that of the folder
        self._plans[plan.digest()] = plan, entry
        self._listed |= {(self.folder / name).resolve(): digest for name, digest in entry.code.items()}

    def loader(self, name: str, file: Path) -> ListedLoader:
        """Return the loader of `file`, which raises `NoConsent` for another content than the listed one."""
        return ListedLoader(name, str(file), self.demand_code)

    def demand_code(self, file: Path, content: bytes) -> None:
        """Raise `NoConsent` unless a plan that was allowed lists `file` with this `content`."""
        found, wanted = sha256(content).hexdigest(), self._listed.get(file.resolve())
        if not self._plans:
            raise NoConsent(
                f"{file} would be imported before its plan is compared with {self._file}, and was not. A function that "
                "lists a schedule is such a file: write its rows into a CSV file, and name that as schedule.file"
            )
        if wanted is None:
            known = file.resolve()
            name = known.relative_to(self.folder) if known.is_relative_to(self.folder) else known
            raise NoConsent(
                f"{file} is imported and not listed in {self._file}. If you allow it, add this line below "
                f'[allow.code]: "{name}" = "{found}"'
            )
        if found != wanted:
            raise NoConsent(
                f"{file} is not the file that {self._file} allows (SHA-256 {found[:SHORT]} here, {wanted[:SHORT]} "
                "there): it was changed after this process began"
            )

    def opened(self, plan: Plan, references: Sequence[str], make: Callable[[], Source]) -> Source:
        """Return the source that `make` opens, as recorded.

        Args:
            plan: Plan as the process works with it.
            references: Names of the objects that the source is made of.
            make: Opens the source.

        Raises:
            NoConsent: The entry does not list it.
            UseNotRecorded: The use cannot be recorded.
        """
        name = ", ".join(references)
        if not self._plans:
            raise NoConsent(f"{name} would be opened before its plan is compared with {self._file}, and was not")
        compared, entry = [*self._plans.values()][-1]
        if missing := [each for each in references if each not in entry.sources]:
            raise NoConsent(
                f"{missing[0]} would be opened, and is not among the sources of plan {entry.name} in {self._file}: "
                f"{', '.join(entry.sources) or 'none'}. Nothing of it was opened"
            )
        self._demand_in_time(entry)
        use = DataUse(
            self._record,
            process=self._process,
            source=tuple(references),
            plan=compared.digest(),
            name=compared.run.name,
            asked_by=entry.asked_by,
        )
        self._uses.append(use)
        return UsedSource(make(), use, lambda: self._demand_in_time(entry))

    def joined(self, run: str, worker: int) -> None:
        """Record the run and the worker of each use."""
        for use in self._uses:
            use.joined(run, worker)

    def end(self) -> None:
        """Record the end of each use."""
        for use in self._uses:
            use.end()

    def _demand_in_time(self, entry: Allowance) -> None:
        if entry.ended(date.today()):
            raise NoConsent(
                f"plan {entry.name} was allowed until {entry.until} by {self._file}. Its owner can write a later day"
            )


@contextmanager
def keep_to(file: Path, process: str) -> Iterator[None]:
    """Return a context in which this process opens and imports what `file` allows. Raises `AllowFileWrong`.

    Args:
        file: Path of the owner's file.
        process: Name of the command, for the record.
    """
    guard = ConsentGuard(file, process)
    finder = ListedFinder(lambda: guard.folder, guard.demand_code)
    sys.meta_path.insert(sys.meta_path.index(PathFinder), finder)
    try:
        with guarded_by(guard):
            yield
    finally:
        sys.meta_path.remove(finder)
        guard.end()


def data_use(place: WorkerPlace) -> None:
    """Tell the record of use for which run and worker the opened data are. Returns None: it watches no computation."""
    tell_joined(place.run, place.worker)
