"""Which worker owns which stage, and at which step the run is, when the broker's records are lost or stale.

Then the workers and the disks are the records. For a lease, their Hellos are collected and nothing else is decided:

    owners      of each place: the worker with the highest incarnation
    checkpoint  the newest step of which snapshots of all stages are on disk. If a newer one was announced, its messages
                are gone from the queues, and every stage has to go back
    kept        owners that have finished at least the checkpoint's steps keep running; all other places are empty

The script of a scripted run is kept likewise, by the number of steps that it has asked for. It has no snapshots, and no
stage to begin with: what is known of it never delays the decision.

All get incarnations that cannot have been given out before. Taking the maximum of the old records and of the Hellos
instead is wrong: it gives out incarnations twice, and begins stages at steps that others have forgotten
(docs/decisions/lost-records.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stageline.broker.control.messages import Hello
from stageline.broker.control.records import WorkerRecord
from stageline.broker.membership.registry import Contact, ProcessKey, process_key
from stageline.pipeline.schedule import Placement


@dataclass(frozen=True, slots=True)
class ReconciledState:
    """The run is at checkpoint `step`; the workers `kept`, by index, continue with the state they have."""

    step: int
    kept: Mapping[int, Contact]


class Reconciliation:
    """Collects Hellos from `now` on, for a `lease` at least. Times are seconds since the epoch.

    If the run is `resumed` and no worker is running, it takes until all snapshots on the disks are known.
    """

    def __init__(self, placement: Placement, lease: float, now: float, *, resumed: bool = False) -> None:
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
        """The indexes of whose stages it is not known which snapshots exist."""
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
        """The newest Hello of a process counts."""
        self._contacts[process_key(hello)] = Contact(hello, sender, now)

    def result(self, now: float) -> ReconciledState | None:
        """The decision; None while Hellos that matter may still arrive."""
        owners = self._owners
        if self.resumed and not owners:
            return None if self.unknown else ReconciledState(self._newest, {})
        if now < self._ends or (self.unknown and not self._at_the_beginning):
            return None
        step = self._newest
        announced = max((memory.complete for _, memory in owners.values()), default=0)
        if step < announced:
            return ReconciledState(step, {})
        kept = {index: owner for index, (owner, memory) in owners.items() if memory.step >= step}
        return ReconciledState(step, kept)

    def lacking(self, step: int) -> list[int]:
        """The stages of which no snapshot of `step` is known."""
        return [stage for stages in self._placement for stage in stages if step not in self._steps_of(stage)]

    @property
    def _hellos(self) -> list[Hello]:
        return [contact.hello for contact in self._contacts.values()]

    @property
    def _owners(self) -> dict[int, tuple[Contact, WorkerRecord]]:
        """By index; the highest incarnation of a place is the last in this order."""
        ordered = sorted(self._contacts.values(), key=lambda contact: contact.hello.incarnation)
        placed = [(contact, contact.hello.memory) for contact in ordered if contact.hello.memory is not None]
        return {memory.index: (owner, memory) for owner, memory in placed if memory.index < len(self._placement)}

    @property
    def _snapshots(self) -> set[tuple[int, int]]:
        return {snapshot for hello in self._hellos for snapshot in hello.snapshots or ()}

    @property
    def _newest(self) -> int:
        return max(set.intersection(*({0, *self._steps_of(stage)} for each in self._placement for stage in each)))

    def _steps_of(self, stage: int) -> set[int]:
        """Steps of which there are snapshots of a stage. Its owner's own list counts if there is one: the owner keeps
        training meanwhile, so others may have seen a newer snapshot, and the owner would look behind."""
        index = next(k for k, stages in enumerate(self._placement) if stage in stages)
        owner = self._owners.get(index)
        own = None if owner is None else owner[0].hello.snapshots
        return {step for each, step in (self._snapshots if own is None else own) if each == stage}

    @property
    def _at_the_beginning(self) -> bool:
        """Whether no step was finished, so that no snapshot can be missed: there is an owner, none has finished a step,
        and every process here has looked. Without an owner, nothing is known."""
        workers = [hello for hello in self._hellos if not self._is_script(hello)]
        looked = all(hello.snapshots is not None for hello in workers)
        owned = [memory for index, (_, memory) in self._owners.items() if self._placement[index]]
        return bool(owned) and looked and not self._snapshots and not any(memory.step for memory in owned)

    def _is_script(self, hello: Hello) -> bool:
        index = hello.memory.index if hello.memory is not None else hello.claim
        return index is not None and index < len(self._placement) and not self._placement[index]
