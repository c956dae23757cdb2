"""Who owns which stage, and at which step the run stands, when the broker's records are lost or older than the run.

Then the workers and the disks are the records. For a lease, everyone is listened to and nothing else is decided:

    owners      of each place, whoever works there under the highest incarnation
    checkpoint  the newest step of which snapshots of all stages are on disk; at least one that was announced before,
                or else what came before it is gone from the queues and every stage has to go back
    kept        the owners that have done at least the checkpoint's steps; all other places are empty

All get incarnations that nobody can have had before. Taking the maximum of an old record and of hearsay instead has
been tried: it hands out incarnations twice, and begins stages at steps that others have forgotten.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stageline.broker.control.protocol import Hello, Memory
from stageline.pipeline.schedule import Placement


@dataclass(frozen=True, slots=True)
class Contact:
    """What a process has said of itself."""

    hello: Hello
    sender: bytes


@dataclass(frozen=True, slots=True)
class ReconciledState:
    """The run stands at `step`; the workers `kept`, by index, go on with the state they have."""

    step: int
    kept: Mapping[int, Contact]


class Reconciliation:
    """Begun at `now`, in seconds since the epoch as all times here; it takes at least a `lease`.

    Or, if the run is `resumed` and nobody is at work, until everybody who is to be has said what there is on the disks.
    """

    def __init__(self, placement: Placement, lease: float, now: float, *, resumed: bool = False) -> None:
        self.resumed = resumed
        self._placement = placement
        self.began = now
        self._ends = now + lease
        self._voices: dict[tuple[str, str, int], Contact] = {}  # by process

    @property
    def incarnation(self) -> int:
        """The highest incarnation that was heard of."""
        return max((voice.hello.incarnation for voice in self._voices.values()), default=0)

    @property
    def unknown(self) -> list[int]:
        """The indexes of whose stages nobody can say which snapshots there are."""
        said = (voice.hello for voice in self._voices.values())
        looked = [hello for hello in said if hello.snapshots is not None and not (self.resumed and hello.spare)]
        places = {hello.memory.index if hello.memory is not None else hello.claim for hello in looked}
        anywhere = sum(hello.memory is None and hello.claim is None for hello in looked)
        silent = [index for index in range(len(self._placement)) if index not in places]
        return [index for index in silent if not self._is_on_disk(index)][anywhere:]

    def hear(self, hello: Hello, sender: bytes) -> None:
        """A process says who it is; the last that it says counts."""
        self._voices[(hello.name, hello.host, hello.pid)] = Contact(hello, sender)

    def verdict(self, now: float) -> ReconciledState | None:
        """The decision; None as long as somebody may still say something that matters."""
        if self.resumed and not self._owners:
            return None if self.unknown else ReconciledState(self._newest, {})
        if now < self._ends or (self.unknown and not self._at_the_beginning):
            return None
        step, owners = self._newest, self._owners
        if step < self._announced:
            return ReconciledState(step, {})
        kept = {index: voice for index, voice in owners.items() if _memory(voice).step >= step}
        return ReconciledState(step, kept)

    @property
    def _owners(self) -> dict[int, Contact]:
        """By index; the highest incarnation of a place is the last in this order."""
        remembering = [voice for voice in self._voices.values() if voice.hello.memory is not None]
        remembering.sort(key=lambda voice: voice.hello.incarnation)
        return {_memory(voice).index: voice for voice in remembering if _memory(voice).index < len(self._placement)}

    @property
    def _snapshots(self) -> set[tuple[int, int]]:
        return {snapshot for voice in self._voices.values() for snapshot in voice.hello.snapshots or ()}

    @property
    def _newest(self) -> int:
        return max(set.intersection(*({0, *self._steps_of(stage)} for each in self._placement for stage in each)))

    def _steps_of(self, stage: int) -> set[int]:
        """Of which there are snapshots of a stage. Its owner goes on while all this is said: what others have seen of
        it since may be newer than what it has said of itself, and it is not behind."""
        index = next(k for k, stages in enumerate(self._placement) if stage in stages)
        owner = self._owners.get(index)
        mine = None if owner is None else owner.hello.snapshots
        return {step for each, step in (self._snapshots if mine is None else mine) if each == stage}

    @property
    def _announced(self) -> int:
        return max((_memory(voice).complete for voice in self._owners.values()), default=0)

    @property
    def _at_the_beginning(self) -> bool:
        """Whether no snapshot can be missed, since there has been no step: everybody who is there has looked."""
        looked = all(voice.hello.snapshots is not None for voice in self._voices.values())
        return looked and not self._snapshots and not any(_memory(voice).step for voice in self._owners.values())

    def _is_on_disk(self, index: int) -> bool:
        known = {stage for stage, _ in self._snapshots}
        return known.issuperset(self._placement[index])


def _memory(voice: Contact) -> Memory:
    if voice.hello.memory is None:
        raise ValueError(f"{voice.hello.name} has no memory of the run")
    return voice.hello.memory
