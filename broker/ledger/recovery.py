"""The steps at which stages begin again: decisions about lost records and resumed runs.

`Reconciliation` decides when the broker's records are lost or stale. Then the workers and the disks are the records.
For a lease, Hellos are collected and nothing else is decided:

    owners      of each place: the worker with the highest incarnation
    checkpoint  the newest step of which snapshots of all stages are on disk. If a newer one was announced, its messages
                are gone from the queues, and every stage has to go back
    kept        owners that have finished at least the checkpoint's steps keep running; all other places are empty

The script of a scripted run is kept by the number of steps that it has asked for. It has no snapshots, and no stage to
begin with: what is known of it never delays the decision. All members get incarnations that cannot have been given out
before. Taking the maximum of the old records and of the Hellos instead is wrong: it gives out incarnations twice, and
begins stages at steps that others have forgotten (docs/project/decisions/lost-records.md).

`CheckpointPoll` decides at which checkpoint a run begins that is resumed as a whole: one of which all snapshots can be
read. All workers verify their snapshots of the newest complete checkpoint, for which the records are right too. If one
cannot be read, all verify those of the newest other step of which every stage has one, and so on:

    stage 0    20  40         40 is complete, and damaged at stage 1: every stage begins at 20
    stage 1    20  4?

    stage 0    20  40  60     the same damage; but checkpoint 60 was about to be complete, or the records are older than
    stage 1    20  4?  60     it: every stage begins at 60

Once a stage has computed something it is too late: the others do not go back for one that is replaced.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from stageline.broker.control.messages import Hello
from stageline.broker.control.records import WorkerRecord
from stageline.broker.ledger.ledger import Ledger, MicrobatchPosition, MicrobatchState
from stageline.broker.ledger.member import Member, stages_label
from stageline.broker.ledger.registry import Contact, ProcessKey, process_key
from stageline.pipeline.program import Neighbours
from stageline.pipeline.schedule import Placement


def is_gone(step: int, stages: Iterable[int], snapshots: Collection[tuple[int, int]]) -> bool:
    """Return True if a stage's snapshot of `step` is missing and a newer one exists.

    A snapshot is deleted only after a newer checkpoint was announced. If none was ever there, that proves nothing: the
    disk may be another. `snapshots` are (stage, step) pairs.
    """
    kept = ({of for each, of in snapshots if each == stage} for stage in stages)
    return step > 0 and any(step not in steps and max(steps, default=0) > step for steps in kept)


class LostAttempt(msgspec.Struct, frozen=True):
    """A stage's work that was lost as it went back to step `start`, in the hands of worker `name` of its `generation`.

    The worker had finished the steps before `finished`, and `begun` (step, microbatch, state) of later steps, when it
    was lost at the time `at`, in seconds since the epoch. `why` ends a sentence about the worker.
    """

    stage: int
    start: int
    finished: int
    begun: list[tuple[int, int, str]]
    name: str
    generation: int
    at: float
    why: str

    def state(self, position: MicrobatchPosition) -> str | None:
        """Return how far a microbatch of the stage was; None if it had not begun, or if its work was kept."""
        if position.step < self.start:
            return None
        if position.step < self.finished:
            return str(MicrobatchState.DONE)
        begun = {(step, microbatch): state for step, microbatch, state in self.begun}
        return begun.get((position.step, position.microbatch))


def lost_attempts(member: Member, ledger: Ledger, start: int, why: str, now: float) -> list[LostAttempt]:
    """Return what `member` loses as its stages go back to step `start`; `ledger` must still have their progress."""
    at = member.exited[0] if member.exited else now
    return [
        LostAttempt(
            stage, start, ledger.finished[stage], _begun(ledger, stage), member.name, member.generation, at, why
        )
        for stage in member.stages
    ]


def attempts_on(position: MicrobatchPosition, lost: Iterable[LostAttempt]) -> list[dict[str, object]]:
    """Return the `lost` attempts on a microbatch at a stage, as JSON's own types."""
    found = ((each, each.state(position)) for each in lost if each.stage == position.stage)
    return [
        {"name": each.name, "generation": each.generation, "state": state, "ended": each.at, "why": each.why}
        for each, state in found
        if state is not None
    ]


def _begun(ledger: Ledger, stage: int) -> list[tuple[int, int, str]]:
    return [(held.position.step, held.position.microbatch, str(held.entry.state)) for held in ledger.unfinished(stage)]


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """An earlier run, whose work a run continues in another layout from its checkpoint of `step`, and never below.

        runs/digits-1f0c               stopped after 120 steps
        runs/digits-1f0c-at120-5e1d03  the same work from step 120 on; its snapshots of step 120 are made of the other's

    `source` is the earlier run's folder, "" if not known here. `folder` is the run's own, where each machine has the
    snapshots of its stages. With `scripted`, a script began both.
    """

    step: int
    source: str
    folder: str
    scripted: bool = False

    def refusal(self, placement: Placement, lacking: Collection[int] = ()) -> str:
        """Return, for people, why the run cannot begin: the stages `lacking`, or else some, have no snapshot."""
        stages = sorted(lacking or [stage for each in placement for stage in each])
        paths = ", ".join(f"{self.folder}/checkpoints/stage-{stage}/step-{self.step:010d}" for stage in stages)
        return (
            f"the run goes on from step {self.step} of {self.source or 'another run'}, and does not begin below it. On "
            f"the machine of {'its worker' if len(stages) == 1 else 'their workers'}, {stages_label(stages)} must have "
            f"{paths}. {self.remedy(placement, lacking)}, and resume the run"
        )

    def below(self, placement: Placement) -> str:
        """Return, for people, that the run does not go back below its first step, and the way out."""
        return (
            f"goes on from step {self.step} of {self.source or 'another run'}, and does not go back below it. "
            f"{self.remedy(placement)}, and resume it again"
        )

    def remedy(self, placement: Placement, stages: Collection[int] = ()) -> str:
        """Return, for people, how the snapshots of `stages`, by default of all, are written again."""
        if self.scripted:
            return f'Write what is missing with Line.resume("{self.source or "RUN"}", ...), with this layout'
        command = f"stageline checkpoint split {self.source or 'RUN'} --step {self.step}"
        workers = [index for index, owned in enumerate(placement) if not set(stages).isdisjoint(owned)]
        each = " and ".join(f"`{command} --worker {index} --write`" for index in workers)
        found = each or f"`{command} --write` (of several machines on each, with its --worker)"
        return f"Write what is missing there with {found}, with this run's plan and --set"


@dataclass(frozen=True, slots=True)
class ReconciledState:
    """A reconciled run: it is at checkpoint `step`, and the workers `kept`, by index, continue with their state."""

    step: int
    kept: Mapping[int, Contact]


class Reconciliation:
    """A collection of Hellos from which a run's state is decided after its records are lost."""

    def __init__(self, placement: Placement, lease: float, now: float, *, resumed: bool = False) -> None:
        """Collect Hellos from `now` on, in seconds since the epoch, for `lease` seconds at least.

        If the run is `resumed` and no worker is running, this takes until all snapshots on the disks are known.
        """
        self.resumed = resumed
        self.began = now
        self._placement = placement
        self._ends = now + lease
        self._contacts: dict[ProcessKey, Contact] = {}

    @property
    def incarnation(self) -> int:
        """The highest incarnation among the Hellos."""
        return max((hello.incarnation for hello in self._hellos), default=0)

    @property
    def unknown(self) -> list[int]:
        """The indexes of the places for whose stages it is not known which snapshots exist."""
        looked = [hello for hello in self._hellos if hello.snapshots is not None and not (self.resumed and hello.spare)]
        places = {hello.memory.index if hello.memory is not None else hello.claim for hello in looked}
        anywhere = sum(hello.memory is None and hello.claim is None for hello in looked)
        on_disk = {stage for stage, _ in self._snapshots}
        return [
            index
            for index, stages in enumerate(self._placement)
            if index not in places and not on_disk.issuperset(stages)
        ][anywhere:]

    def add(self, hello: Hello, sender: bytes, now: float) -> None:
        """Note a Hello; the newest of a process counts."""
        self._contacts[process_key(hello)] = Contact(hello, sender, now)

    def result(self, now: float) -> ReconciledState | None:
        """Return the decision; None while Hellos that matter may still arrive."""
        owners = self._owners
        if self.resumed and not owners:
            return None if self.unknown else ReconciledState(self._newest, {})
        if now < self._ends or (self.unknown and not self._at_the_beginning):
            return None
        announced = max((memory.complete for _, memory in owners.values()), default=0)
        step = self._safest(announced) if self._copies else self._newest
        if step < announced:
            return ReconciledState(step, {})
        kept = {index: owner for index, (owner, memory) in owners.items() if memory.step >= step}
        return ReconciledState(step, kept)

    def lacking(self, step: int) -> list[int]:
        """Return the stages of which no snapshot of `step` is known."""
        return [stage for stages in self._placement for stage in stages if step not in self._steps_of(stage)]

    @property
    def _hellos(self) -> list[Hello]:
        return [contact.hello for contact in self._contacts.values()]

    @property
    def _owners(self) -> dict[int, tuple[Contact, WorkerRecord]]:
        """The owners by index; of several for one place, the highest incarnation counts."""
        ordered = sorted(self._contacts.values(), key=lambda contact: contact.hello.incarnation)
        placed = [(contact, contact.hello.memory) for contact in ordered if contact.hello.memory is not None]
        return {memory.index: (owner, memory) for owner, memory in placed if memory.index < len(self._placement)}

    @property
    def _snapshots(self) -> set[tuple[int, int]]:
        return {snapshot for hello in self._hellos for snapshot in hello.snapshots or ()}

    @property
    def _copies(self) -> bool:
        """True if owners make copies for each other, on disks of their own."""
        owners = [owner.hello for owner, _ in self._owners.values()]
        disks = {hello.disk for hello in owners if any(queue.copies for queue in hello.queues)}
        return len(disks - {""}) > 1

    def _safest(self, announced: int) -> int:
        """Return the newest step, from the `announced` one on, of which all snapshots are on two disks.

        If there is none, the announced one has been copied before, unless a holder is lost. Owners that run go on
        whatever the step; and a disk may be lost now.
        """
        stages = [stage for each in self._placement for stage in each]
        twice = [step for step in self._common if step >= announced and all(self._is_copied(at, step) for at in stages)]
        return max(twice, default=announced if announced in self._common else self._newest)

    def _is_copied(self, stage: int, step: int) -> bool:
        return len({hello.disk for hello in self._hellos if (stage, step) in (hello.snapshots or ())} - {""}) > 1

    @property
    def _common(self) -> set[int]:
        return set.intersection(*({0, *self._steps_of(stage)} for each in self._placement for stage in each))

    @property
    def _newest(self) -> int:
        return max(self._common)

    def _steps_of(self, stage: int) -> set[int]:
        """Return the steps of which a stage has snapshots.

        The list of its owner counts if there is one: the owner keeps training meanwhile, so others may have seen a
        newer snapshot, and the owner would look behind. Of steps that the owner has finished, it may be another
        worker that has the snapshot: a copy, if the owner began with an empty disk.
        """
        index = next(k for k, stages in enumerate(self._placement) if stage in stages)
        owner, everywhere = self._owners.get(index), {step for each, step in self._snapshots if each == stage}
        own = None if owner is None else owner[0].hello.snapshots
        if owner is None or own is None:
            return everywhere
        return {step for each, step in own if each == stage} | {each for each in everywhere if each <= owner[1].step}

    @property
    def _at_the_beginning(self) -> bool:
        """True if an owner exists, none has finished a step, and all have looked, so that no snapshot can be missed."""
        workers = [hello for hello in self._hellos if not self._is_script(hello)]
        looked = all(hello.snapshots is not None for hello in workers)
        owned = [memory for index, (_, memory) in self._owners.items() if self._placement[index]]
        return bool(owned) and looked and not self._snapshots and not any(memory.step for memory in owned)

    def _is_script(self, hello: Hello) -> bool:
        index = hello.memory.index if hello.memory is not None else hello.claim
        return index is not None and index < len(self._placement) and not self._placement[index]


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A step at which the run begins (None: no checkpoint can be used), and the damages found in steps tried first."""

    step: int | None
    damages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointPoll:
    """A verification of all snapshots of `step`, with the `damages` found in those of the steps `tried`.

    The run does not begin below `floor`, although it may keep an older checkpoint, that of the best evaluation. A copy
    counts that is on the disk of one of the `neighbours`, which are given for each place.
    """

    placement: Placement
    step: int
    damages: tuple[str, ...] = ()
    tried: frozenset[int] = frozenset()
    floor: int = 0
    neighbours: Neighbours = ()

    def absent(self, hellos: Iterable[Hello]) -> list[int]:
        """Return the indexes for which no worker has verified its snapshots yet."""
        read = [hello for hello in hellos if self._has_read(hello)]
        claims, anywhere = {hello.claim for hello in read}, sum(hello.claim is None for hello in read)
        return [index for index, stages in enumerate(self.placement) if stages and index not in claims][anywhere:]

    def result(self, hellos: Iterable[Hello]) -> "ResumePoint | CheckpointPoll | None":
        """Return the decision, or the next step's poll; None while a worker is absent. `hellos`: of all on standby."""
        read = [hello for hello in hellos if self._has_read(hello)]
        if self.absent(read):
            return None
        unusable = self._unusable(read)
        if not unusable:
            return ResumePoint(self.step, self.damages)
        found = [damage for hello in read if hello.inspection is not None for damage in hello.inspection.damages]
        absent = f"no worker has a snapshot of step {self.step} of {stages_label(unusable)}"
        damages = (*self.damages, *dict.fromkeys(found or [absent]))
        other = max(self._others(read), default=None)
        if other is None:
            return ResumePoint(None, damages)
        return replace(self, step=other, damages=damages, tried=self.tried | {self.step})

    def _has_read(self, hello: Hello) -> bool:
        return hello.inspection is not None and hello.inspection.step == self.step

    def _unusable(self, read: list[Hello]) -> list[int]:
        """Return the stages whose snapshot no worker can read that may have their place, or may hold copies for it."""
        return [
            stage
            for index, stages in enumerate(self.placement)
            for stage in stages
            if not any(hello.inspection and stage in hello.inspection.stages for hello in self._able(index, read))
        ]

    def _others(self, read: list[Hello]) -> set[int]:
        """Return the steps that were not tried, and of which there are snapshots of all stages."""
        seen = [
            {step for hello in self._able(index, read) for of, step in hello.snapshots or () if of == stage}
            for index, stages in enumerate(self.placement)
            for stage in stages
        ]
        found = set.intersection(*seen) - self.tried - {0, self.step}
        return {step for step in found if step >= self.floor}

    def _able(self, index: int, read: list[Hello]) -> list[Hello]:
        """Return the Hellos of workers that may have the place, or may hold copies for it."""
        places = (index, *(self.neighbours[index] if index < len(self.neighbours) else ()))
        return [hello for hello in read if hello.claim is None or hello.claim in places]


class StartSearch:
    """A search for the step at which stages begin, before places are given. Times are seconds since the epoch."""

    def __init__(self, placement: Placement, damages: Iterable[str] = ()) -> None:
        """Start with `damages`, those of snapshots that could not be used; nothing is asked yet."""
        self.reconciliation = Reconciliation(placement, 0.0, 0.0)  # while the records are lost
        self.poll = CheckpointPoll(placement, 0)  # while a checkpoint is chosen
        self.damages = tuple(damages)  # what was wrong with the snapshots that could not be used

    def collect(self, lease: float, now: float, *, resumed: bool) -> None:
        """Begin to ask all workers and disks, for `lease` seconds at least."""
        self.reconciliation = Reconciliation(self.poll.placement, lease, now, resumed=resumed)

    def verify(self, step: int, floor: int, neighbours: Neighbours = ()) -> None:
        """Begin to ask all workers for their snapshots of `step`.

        Args:
            step: Step of the checkpoint that is tried first.
            floor: Step below which the run does not begin.
            neighbours: Places whose workers may hold copies, for each place.
        """
        self.poll = CheckpointPoll(self.poll.placement, step, floor=floor, neighbours=neighbours)

    def follow(self, found: ResumePoint | CheckpointPoll) -> list[str]:
        """Note the result of the poll, or continue with the next poll. Return the damages that were new."""
        new, self.damages = found.damages[len(self.damages) :], found.damages
        self.poll = found if isinstance(found, CheckpointPoll) else self.poll
        return list(new)

    def note_damage(self, damage: str) -> None:
        """Add a `damage`, or a consequence of the damages."""
        self.damages = (*self.damages, damage)
