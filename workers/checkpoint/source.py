"""Checkpoints that a folder holds, of a run or saved by a script, and the damages of their snapshots.

runs/digits-20260131-235959-1f0c/plan.json          which plan, and so how many stages
                                 checkpoints/...     their snapshots; on several machines some stages' only
                                 best.json           of a script's run: where `fit(best=...)` keeps its best checkpoint

The workers of a run that goes on delete old snapshots meanwhile: those are left out of lists.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from stageline.broker.ledger.evaluations import record_of
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.pipeline.evaluation import Standing
from stageline.pipeline.plan import Plan, PlanRefused, from_mapping
from stageline.pipeline.schedule.replicas import Shares, replicas_of
from stageline.workers.disk.atomic_file import write_json
from stageline.workers.runs import folder as runs

from .directory import FOLDER, SnapshotDirectory
from .saved import is_saved, read_saved
from .snapshot import SnapshotDamaged, read_manifest

BEST = "best.json"


class NoCheckpoint(StagelineError):
    """Error that a folder has no such checkpoint, or not all of it.

    Mend: Name a step that `stageline checkpoint ls` shows as complete, or bring the folders of the other machines
    together.

    Example: runs/a has no snapshot, and not the weights of a finished run: stage-1.safetensors is not there.
    """

    error_code = "SL404"
    exit_code = ExitCode.USAGE


@dataclass(frozen=True)
class CheckpointSource:
    """Checkpoints of the run `run` in `folder`, which were made under `plan`."""

    folder: Path
    run: str
    plan: Plan

    @cached_property
    def snapshots(self) -> SnapshotDirectory:
        """Directory of the run's snapshots."""
        return SnapshotDirectory.of(self.folder, self.run, self.plan)

    @property
    def stages(self) -> int:
        """Number of stages of the run on all machines, each replica counted."""
        return sum(map(len, self.plan.placement))

    @property
    def first_replicas(self) -> range:
        """Indexes of the snapshots that have the whole model: those of all stages, or of their first replicas."""
        return range(len(self._shares))

    def label(self, stage: int) -> str:
        """Return a stage's name for people: "1", or "1.0" for the first replica of several."""
        return replicas_of(self._shares, 1).label(stage)

    @property
    def _shares(self) -> Shares:
        return self.plan.shares or ((1,),) * self.stages

    @cached_property
    def present(self) -> Mapping[int, frozenset[int]]:
        """Stages that have a snapshot here, by step, ascending. Snapshots may be damaged. Raises `OSError`."""
        found: dict[int, set[int]] = {}
        for stage, step in self.snapshots.present():
            found.setdefault(step, set()).add(stage)
        return {step: frozenset(found[step]) for step in sorted(found)}

    @property
    def complete(self) -> list[int]:
        """Steps of which all stages' snapshots are here, the newest first."""
        every = set(range(self.stages))
        return [step for step, stages in self.present.items() if stages >= every][::-1]

    @property
    def best(self) -> int | None:
        """Step of the best evaluation whose checkpoint is kept; None if none is known. Raises `OSError`.

        It is that of a finished run, or the best before the newest checkpoint that all stages have here.
        """
        if not self.plan.keeps_best:
            return None
        if (result := runs.result_in(self.folder)) is not None:
            return None if result.best is None else int(result.best["step"])
        return self.best_before(self.complete[0]) if self.complete else None

    def best_before(self, step: int) -> int | None:
        """Return the step of the best evaluation before `step`; None if there was none or the plan has no criterion.

        The last stage's snapshot of `step` is read. Raises `SnapshotDamaged`.
        """
        if (criterion := self.plan.criterion) is None:
            return None
        manifest = read_manifest(self.snapshots.path(self.first_replicas[-1], step))
        found = ((each.step, each.values) for each in map(record_of, manifest.rounds))
        best = Standing(criterion).after_all(found).best
        return None if best is None else best.step

    def best_checkpoint(self) -> "tuple[CheckpointSource, int]":
        """Return the checkpoints among which that of the best evaluation is, and its step.

        Those of a plan's run are in its folder; that of a script's run is where its `fit(best=...)` keeps it. Raises
        `NoCheckpoint`, which names what keeps one, if none is known.
        """
        if (note := _read_best(self.folder)) is not None:
            return note.checkpoint_of(self)
        if is_saved(self.folder):
            raise NoCheckpoint(f"{self.folder} is one saved checkpoint: leave out --best (in Python: best=True)")
        if not self.plan.keeps_best:
            of_script, of_plan = ("script", 'line.fit(..., best="best")'), ("plan", "evaluation.keep_best = true")
            what, keeps = of_script if self.plan.scripted else of_plan
            raise NoCheckpoint(
                f"the {what} of {self.folder} keeps no best checkpoint: {keeps} "
                "does. Name a step with --step (in Python: step=)"
            )
        best = self.best
        if best is None:
            raise NoCheckpoint(
                f"no evaluation of {self.folder} has a best value yet, or not all stages' snapshots are here: copy "
                "them from the machines of their workers, or name a step with --step (in Python: step=)"
            )
        return self, best

    def verified(self, step: int) -> list[Path]:
        """Return the folders of the snapshots of `step` that have the whole model, every byte of which was read.

        Raises `NoCheckpoint`, or `SnapshotDamaged`.
        """
        self.demand_all(self.step_of(step))
        for stage in self.first_replicas:
            if wrong := self.snapshots.verify(stage, step):
                raise SnapshotDamaged(self.snapshots.path(stage, step), wrong)
        return [self.snapshots.path(stage, step) for stage in self.first_replicas]

    def step_of(self, wanted: int | None) -> int:
        """Return `wanted` if there is a snapshot of it; for None, the newest step that all stages have.

        Raises `NoCheckpoint`.
        """
        if wanted is not None and wanted in self.present:
            return wanted
        if wanted is None and self.complete:
            return self.complete[0]
        raise NoCheckpoint(self._absence(wanted))

    def demand_all(self, step: int) -> None:
        """Raise `NoCheckpoint`, which names the folders, if a stage has no snapshot of `step` here."""
        lacking = sorted(set(range(self.stages)) - self.present.get(step, frozenset()))
        if lacking:
            raise NoCheckpoint(
                f"the checkpoint of step {step} in {self.folder} lacks "
                f"{', '.join(str(self.snapshots.path(stage, step)) for stage in lacking)}: copy it from the machine "
                f"whose worker had that stage"
            )

    def _absence(self, step: int | None) -> str:
        if not self.present:
            return (
                f"{self.snapshots.folder} holds no snapshot, which are written every recovery.snapshot_every steps: "
                "begin another run"
            )
        there = "; ".join(f"step {each}: {self._stages(found)}" for each, found in [*self.present.items()][-3:])
        if step is not None:
            return f"there is no snapshot of step {step} in {self.snapshots.folder}; the newest there are {there}"
        return (
            f"{self.snapshots.folder} has no step of which all {self.stages} stages have a snapshot; the newest there "
            f"are {there}. Copy the others from the machines of their workers, or name the step with --step"
        )

    def _stages(self, found: frozenset[int]) -> str:
        return f"stage{'s' if len(found) > 1 else ''} {', '.join(map(self.label, sorted(found)))}"


def source_in(folder: Path) -> CheckpointSource:
    """Return the checkpoints of the run in `folder`, or the one that was saved there.

    Raises `NoCheckpoint`, or `SnapshotDamaged` for a plan that cannot be read.
    """
    if not runs.is_run(folder):
        if (folder / FOLDER).exists():
            raise NoCheckpoint(
                f"{folder} has no {runs.PLAN}: copy that of the run's folder on the broker's machine there"
            )
        raise NoCheckpoint(runs.no_run(folder))
    run = read_saved(folder).run if is_saved(folder) else folder.resolve().name
    try:
        plan = from_mapping(msgspec.json.decode((folder / runs.PLAN).read_bytes(), type=dict[str, object]))
    except (msgspec.MsgspecError, UnicodeDecodeError, PlanRefused) as error:
        raise SnapshotDamaged(folder, [f"{runs.PLAN} is damaged: {error}"]) from error
    return CheckpointSource(folder, run, plan)


class BestNote(msgspec.Struct, frozen=True):
    """Place of the best checkpoint of a script's run, relative to the run's folder, and the run that has saved it.

    A run that goes on from a saved checkpoint may have that as its best.
    """

    folder: str
    run: str

    def checkpoint_of(self, source: CheckpointSource) -> tuple[CheckpointSource, int]:
        """Return the checkpoint of `source` that this tells of. Raises `NoCheckpoint` if it is not there any more."""
        kept = Path(os.path.normpath(source.folder.resolve() / self.folder))
        saved = read_saved(kept) if is_saved(kept) else None
        if saved is None or saved.run not in (self.run, source.run):
            there = "it is not there" if saved is None else f"that of run {saved.run} is there"
            raise NoCheckpoint(
                f"the best checkpoint of {source.folder} was kept at {kept}, and {there}: copy it back, take the best "
                "of a run that went on from this one, or name a step with --step (in Python: step=)"
            )
        return source_in(kept), saved.step


def note_best(folder: Path, kept: Path) -> None:
    """Note in the `folder` of a script's run that its best checkpoint is kept at `kept`. Raises `OSError`."""
    saved, place = read_saved(kept), kept.parent.resolve() / kept.name  # the name is a link that changes
    write_json(folder / BEST, BestNote(os.path.relpath(place, folder.resolve()), saved.run))


def _read_best(folder: Path) -> BestNote | None:
    try:
        return msgspec.json.decode((folder / BEST).read_bytes(), type=BestNote)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise SnapshotDamaged(folder, [f"{BEST} is damaged: {error}"]) from error


class CheckpointRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoint in schema checkpoint-ls/1.

    Attributes:
        step: Number of steps done.
        stages: Stages that have a snapshot here.
        complete: True if all stages have one.
        bytes: Size of its tensors.
        written: Time of its newest snapshot, in seconds since the epoch.
        damages: Damages of the manifests; no other file is read.
        best: True if it is kept as that of the best evaluation so far.
    """

    step: int
    stages: tuple[int, ...]
    complete: bool
    bytes: int
    written: float | None
    damages: tuple[str, ...] = ()
    best: bool = False


class SnapshotState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Snapshot in schema checkpoint-verify/1, every byte of which was read. `label` is the stage's name for people."""

    stage: int
    label: str
    step: int
    folder: str
    damages: tuple[str, ...]


def checkpoint_rows(source: CheckpointSource) -> list[CheckpointRow]:
    """Return rows of all checkpoints here, the oldest first. Raises `OSError`."""
    rows = [row for step, stages in source.present.items() if (row := _row(source, step, sorted(stages))).stages]
    try:
        best = source.best
    except SnapshotDamaged:  # its row says so
        best = None
    return [msgspec.structs.replace(row, best=True) if row.step == best else row for row in rows]


def snapshot_states(source: CheckpointSource, step: int | None) -> Iterator[SnapshotState]:
    """Yield the state of all snapshots here, or of those of `step`. Raises `OSError`."""
    for each, stages in source.present.items():
        for stage in sorted(stages) if step in (None, each) else ():
            wrong = tuple(source.snapshots.verify(stage, each))
            folder = source.snapshots.path(stage, each)
            if not wrong or folder.exists():
                yield SnapshotState(
                    stage=stage, label=source.label(stage), step=each, folder=str(folder), damages=wrong
                )


def _row(source: CheckpointSource, step: int, stages: list[int]) -> CheckpointRow:
    size, written, damages = 0, None, []
    there: list[int] = []
    for stage in stages:
        folder = source.snapshots.path(stage, step)
        try:
            manifest = read_manifest(folder)
        except SnapshotDamaged as damage:
            if folder.exists():
                there.append(stage)
                damages.append(str(damage))
            continue
        there.append(stage)
        size += sum(file.bytes for file in manifest.files.values())
        written = max(written or 0.0, manifest.written)
    complete = len(there) == source.stages and not damages
    return CheckpointRow(
        step=step, stages=tuple(there), complete=complete, bytes=size, written=written, damages=tuple(damages)
    )


class GoesOnFrom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run, and its step, that another one goes on from in another layout."""

    run: str
    step: int


class CheckpointList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoints that `stageline checkpoint ls` finds.

    Attributes:
        stages: Number of stages of the run, replicas counted one by one.
        goes_on_from: Run that this one goes on from in another layout; None if it began by itself.
        checkpoints: The oldest first.
    """

    run: str
    folder: str
    stages: int
    goes_on_from: GoesOnFrom | None
    checkpoints: list[CheckpointRow]


class CheckpointVerdicts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Findings of `stageline checkpoint verify`.

    Attributes:
        step: The checkpoint that was verified; None: all.
        snapshots: Snapshots, every byte of which was read.
    """

    run: str
    folder: str
    step: int | None
    snapshots: list[SnapshotState]
