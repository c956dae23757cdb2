"""Continuation of a checkpoint on other stages, workers, schedule or transport, or with more steps: its snapshots.

runs/digits-...-1f0c/            stopped: 4 stages. Nothing in it changes
runs/digits-...-1f0c-at120-5e1d/ the same after 120 steps as 2 stages: a run of its own, resumed like any other
    recut.json                   which run, and which step of it
    checkpoints/stage-0/...      made of the old stages' snapshots of its layers

The result is a run of its own, so that no election ever sees snapshots of two layouts. Its id follows from the old run,
the step and the new plan: machines that write their workers' snapshots each for itself give it the same id.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path

from stageline.broker.coordinator.run import Resumption
from stageline.pipeline.addresses import masked
from stageline.pipeline.errors import ForeignState, ModelRefused
from stageline.pipeline.model.stage_layout import StageLayout
from stageline.pipeline.model.tensor_files import listed
from stageline.pipeline.plan import Plan, PlanError, PlanRefused
from stageline.pipeline.schedule.replicas import replicas_of
from stageline.workers.disk.atomic_file import write_json
from stageline.workers.disk.tensor_file import forms_in
from stageline.workers.runs import folder as runs
from stageline.workers.runs.metrics import EVALUATIONS, METRICS, carry_lines
from stageline.workers.runs.records import NOTE, RecordsDamaged, RecutNote, earlier_run, recorded_run, recut_id

from .continuable import keeps_layout, renews_rates, with_rates_of
from .directory import SnapshotDirectory
from .regroup import Contents, Share, faults_of, regrouped, shares_of
from .saved import is_saved
from .snapshot import WEIGHTS, Snapshot, SnapshotDamaged, read_manifest
from .source import CheckpointSource, NoCheckpoint


def continued(
    plan: Plan, source: CheckpointSource, layouts: Sequence[StageLayout], tell: Callable[[str], None], run: str = ""
) -> str:
    """Return the id of the run that continues `source` under `plan`, from its newest whole checkpoint.

    If the continuation exists, its missing or damaged files are written again. A run that was ended before its first
    checkpoint was complete begins again, as in the same layout. A continuation does not go back below its first step.

    Args:
        plan: New plan.
        source: Checkpoints of the old run.
        layouts: Layouts of the new stages.
        tell: Called with damages of newer checkpoints, and if the run begins again.
        run: Id of a new continuation; "" derives one.

    Raises:
        NoCheckpoint, SnapshotDamaged, ModelRefused, PlanRefused, OSError: The checkpoint cannot be continued.
        StoreUnusable: The run's records cannot be read.
        NoSuchRun: The continuation has finished.
    """
    kind = SameStages if keeps_layout(plan, source.plan) else Recut
    earlier = earlier_run(plan, source.run)
    if not source.complete and earlier is None and _never_had_checkpoint(source, plan):
        return _begun_again(Recut(source, 0, plan, layouts, recut_id(source.run, 0, plan)), tell)
    problems: list[str] = []
    for step in _steps_to_try(source, 0 if earlier is None else earlier.step):
        recut = kind(source, step, plan, layouts, run or recut_id(source.run, step, plan))
        folder = runs.folder(plan, recut.run)
        stages: list[int] | None = None
        if runs.is_run(folder):
            runs.run_to_resume(plan, recut.run)
            if not (stages := recut.missing_in(folder)):
                return recut.run
        try:
            recut.check(stages)
        except SnapshotDamaged as damage:
            problems += damage.problems
            tell(str(damage))
            continue
        recut.write(runs.make_folder(plan, recut.run), tell, stages)
        return recut.run
    if earlier is not None:
        problems.append(f"run {source.run} {earlier.below(source.plan.placement)}")
    raise SnapshotDamaged(source.snapshots.folder, problems)


def _steps_to_try(source: CheckpointSource, floor: int) -> list[int]:
    """Return the steps, newest first, whose snapshots may be used: none before `floor`, where the run began.

    The checkpoint of the best evaluation may be older. Raises `NoCheckpoint`.
    """
    complete = [step for step in source.complete if step >= floor]
    newest = source.step_of([*source.present][-1] if source.present else None)
    return complete or [step for step in [newest] if step >= floor]


def _never_had_checkpoint(source: CheckpointSource, plan: Plan) -> bool:
    """Return True if the run's records show that none of its checkpoints was ever complete.

    Returns False without records: snapshots may be on other machines. Raises `StoreUnusable` if the store in which the
    run was recorded cannot be read.
    """
    if is_saved(source.folder):
        return False
    # A recorded address has no password; that of the new plan is taken if it is the same address.
    same = masked(plan.broker.store) == masked(source.plan.broker.store)
    try:
        with recorded_run(source.folder, plan.broker.store if same else None) as recorded:
            facts = recorded.stored.facts
            known = bool(facts) and Resumption.stored_in(facts) is not Resumption.FROM_SNAPSHOTS
            return known and recorded.complete == 0
    except RecordsDamaged:
        return False


def _begun_again(recut: "Recut", tell: Callable[[str], None]) -> str:
    """Return the id of the run that repeats `recut.source` from step 0; make that run unless it exists."""
    if runs.is_run(runs.folder(recut.plan, recut.run)):
        return runs.run_to_resume(recut.plan, recut.run)
    recut.write(runs.make_folder(recut.plan, recut.run), tell, ())
    tell(f"run {recut.source.run} has no complete checkpoint: {recut.run} begins again at step 0")
    return recut.run


@dataclass(frozen=True)
class Recut:
    """Checkpoint of `step` in `source`, to be laid out for the stages `layouts` of `plan` as the new run `run`.

    `absent` are the contents of stages whose snapshots are on other machines, as far as they are known.
    """

    source: CheckpointSource
    step: int
    plan: Plan
    layouts: Sequence[StageLayout]
    run: str
    absent: Mapping[int, Contents] = field(default_factory=dict)

    @cached_property
    def shares(self) -> list[Share]:
        """Shares that the new stages take of the old ones, as far as contents are known. Raises `SnapshotDamaged`."""
        return shares_of(self.layouts, self._contents, self.source.stages)

    @cached_property
    def present(self) -> frozenset[int]:
        """Old stages whose snapshots are here."""
        return self.source.present.get(self.step, frozenset())

    def check(self, stages: Iterable[int] | None = None) -> None:
        """Raise an error if the new `stages` cannot be made of the snapshots here. Reads every byte that they need.

        `stages` defaults to all. Raises `NoCheckpoint`, `SnapshotDamaged`, `ModelRefused` or `PlanRefused`.
        """
        wanted = self._wanted(stages)
        self._demand_known(wanted)
        if lacking := sorted({old for share in wanted for old in share.sources} - self.present):
            raise NoCheckpoint(self._absence(wanted, lacking))
        self._demand_same_kind(wanted)
        for old in sorted({old for share in wanted for old in share.sources}):
            if found := self.source.snapshots.verify(old, self.step):
                raise SnapshotDamaged(self.source.snapshots.path(old, self.step), found)

    def missing_in(self, folder: Path) -> list[int]:
        """Return the new stages that the run in `folder` lacks a whole snapshot of and cannot begin without.

        The list is empty if the run has a whole checkpoint, this one or a later. Reads every byte of it. Raises
        `OSError` for a fault that may pass.
        """
        there, stages = CheckpointSource(folder, self.run, self.plan), self._stages
        for step in there.complete:
            if step >= self.step and not any(there.snapshots.verify(stage, step) for stage in stages):
                return []
        return [stage for stage in stages if there.snapshots.verify(stage, self.step)]

    @cached_property
    def best(self) -> "Recut | None":
        """Checkpoint of the best evaluation before this one, which moves along if the plan keeps it.

        None if there is none, or if the last stage's snapshot, which tells its step, is not here. Raises
        `SnapshotDamaged`.
        """
        if not self.plan.keeps_best or self._last not in self.present:
            return None
        step = self.source.best_before(self.step)
        return None if step is None else replace(self, step=step)

    def write(self, folder: Path, tell: Callable[[str], None], stages: Iterable[int] | None = None) -> None:
        """Write the new run: snapshots, the metrics so far, and last the plan.

        Existing files have the same bits and stay.

        Args:
            folder: Folder of the new run.
            tell: Called with the reason if the checkpoint of the best evaluation does not move along.
            stages: New stages to write; by default all.

        Raises:
            ModelRefused, SnapshotFailed, SnapshotDamaged, OSError: A snapshot cannot be made or written.
        """
        target = SnapshotDirectory.of(folder, self.run, self.plan)
        self._write_best(target, tell, stages)
        self._write_snapshots(target, stages)
        carry_lines(self.source.folder, self.step, folder, METRICS, EVALUATIONS)
        write_json(folder / NOTE, RecutNote(self.source.run, self.step))
        if not (folder / runs.PLAN).exists():  # from here on it is a run
            write_json(folder / runs.PLAN, self.plan.as_mapping())

    def _write_best(self, target: SnapshotDirectory, tell: Callable[[str], None], stages: Iterable[int] | None) -> None:
        stays = f"the checkpoint of the best evaluation stays in {self.source.folder}"
        if self.plan.keeps_best and self.present and self._last not in self.present:
            told_by = self.source.snapshots.path(self._last, self.step)
            tell(f"{stays}: {told_by} is missing; it names the step of the best evaluation. Copy it first")
        if self.best is None:
            return
        try:
            self.best.check(stages)
            self.best._write_snapshots(target, stages)
        except (NoCheckpoint, SnapshotDamaged) as error:
            tell(f"{stays}: {error}")

    def _write_snapshots(self, target: SnapshotDirectory, stages: Iterable[int] | None) -> None:
        load = lru_cache(maxsize=2)(lambda old: self.source.snapshots.load(old, self.step))
        for share in self._wanted(stages):
            target.write(self._snapshot(share, load))

    def _snapshot(self, share: Share, load: Callable[[int], Snapshot]) -> Snapshot:
        parts = [load(old) for old in share.sources]
        losses = {step: loss for part in parts for step, loss in part.losses.items()}
        rounds = tuple(each for part in parts for each in part.rounds)
        last = share.layout is self.layouts[-1]
        try:
            state = regrouped(share, [part.state for part in parts])
        except ForeignState as error:
            raise ModelRefused(str(error)) from error
        if renews_rates(self.plan, self.source.plan):
            state = with_rates_of(self.plan, share.layout, state)
        return Snapshot(share.layout.stage, self.step, 0, state, losses if last else {}, rounds=rounds if last else ())

    @property
    def _stages(self) -> list[int]:
        """New stages."""
        return [layout.stage for layout in self.layouts]

    @property
    def _last(self) -> int:
        """Old last stage, whose snapshots have the evaluations."""
        return self.source.first_replicas[-1]

    def _wanted(self, stages: Iterable[int] | None) -> list[Share]:
        chosen = None if stages is None else set(stages)
        return [share for share in self.shares if chosen is None or share.layout.stage in chosen]

    @cached_property
    def _contents(self) -> dict[int, Contents]:
        here = {stage: _contents_of(self.source.snapshots.path(stage, self.step)) for stage in sorted(self.present)}
        return {**self.absent, **here}

    def _demand_known(self, wanted: Sequence[Share]) -> None:
        """Raise an error unless the old stages hold exactly the model's names."""
        unknown = sorted(set(range(self.source.stages)) - self._contents.keys())
        if unknown and any(share.missing for share in wanted):
            raise NoCheckpoint(self._absence(wanted, unknown))
        if not unknown and (faults := faults_of(self.shares, self._contents)):
            raise ModelRefused(
                f"the checkpoint of step {self.step} in {self.source.folder} is not of this model: {listed(faults)}"
            )

    def _absence(self, wanted: Sequence[Share], lacking: Sequence[int]) -> str:
        """Return a message with the lacking snapshots and their layers."""
        names = {name for old in lacking if old in self.absent for name in self.absent[old].weights}
        lost = [(share.layout, [*share.missing, *filter(names.__contains__, share.names)]) for share in wanted]
        layers = [layer for layout, missing in lost if missing for layer in layout.layers_of(missing)]
        files = [str(self.source.snapshots.path(stage, self.step)) for stage in lacking]
        return (
            f"the checkpoint of step {self.step} is not complete in {self.source.folder}: {', '.join(files)} "
            f"{'is' if len(files) == 1 else 'are'} not there, with the layers {', '.join(dict.fromkeys(layers))}. Copy "
            f"{'it' if len(files) == 1 else 'them'} from the machine whose worker had "
            f"{'that stage' if len(files) == 1 else 'those stages'}"
        )

    def _demand_same_kind(self, wanted: Sequence[Share]) -> None:
        """Raise `PlanRefused` for another kind of device, or number of threads, which may give other bits."""
        before, now = _kinds(self.source.plan), _kinds(self.plan)
        for share in wanted:
            if odd := [old for old in share.sources if before[old] != now[share.layout.stage]]:
                (device, threads), (other, more) = before[odd[0]], now[share.layout.stage]
                why = (
                    f"stage {share.layout.stage} would compute on {other} with threads = {more}, and its layers did on "
                    f"{device} with threads = {threads}: that may give other bits. Set workers.N.device and "
                    "workers.N.threads as they were"
                )
                raise PlanRefused([PlanError("", why)])


class SameStages(Recut):
    """Checkpoint that goes on in the layout that it has: each stage, or replica, has the state of its own snapshot."""

    def check(self, stages: Iterable[int] | None = None) -> None:
        """Raise `NoCheckpoint` or `SnapshotDamaged` if a snapshot of `stages`, by default all, is not whole."""
        self.source.demand_all(self.step)
        for stage in self._stages if stages is None else stages:
            if found := self.source.snapshots.verify(stage, self.step):
                raise SnapshotDamaged(self.source.snapshots.path(stage, self.step), found)

    def _write_snapshots(self, target: SnapshotDirectory, stages: Iterable[int] | None) -> None:
        for stage in self._stages if stages is None else stages:
            kept = self.source.snapshots.load(stage, self.step)
            state = kept.state
            if renews_rates(self.plan, self.source.plan):
                layout = self.layouts[replicas_of(self.plan.shares, 1).stage(stage) if self.plan.shares else stage]
                state = with_rates_of(self.plan, layout, state)
            target.write(replace(kept, incarnation=0, state=state, calls=0, evaluations=0))

    @property
    def _stages(self) -> list[int]:
        return list(range(self.source.stages))


def _kinds(plan: Plan) -> dict[int, tuple[str, int]]:
    """Return the kind of device and the number of threads of each stage."""
    return {
        stage: (worker.device.partition(":")[0], worker.threads) for worker in plan.workers for stage in worker.stages
    }


def _contents_of(snapshot: Path) -> Contents:
    """Return the contents of a snapshot. Raises `SnapshotDamaged`."""
    buffers = read_manifest(snapshot).training.get("buffers")
    try:
        forms = forms_in(snapshot / WEIGHTS)
    except (OSError, ValueError) as error:
        raise SnapshotDamaged(snapshot, [f"{WEIGHTS} cannot be read: {error}"]) from error
    weights = {name: (str(dtype).removeprefix("torch."), shape) for name, (dtype, shape) in forms.items()}
    return Contents(weights, frozenset(buffers if isinstance(buffers, dict) else ()))
