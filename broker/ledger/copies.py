"""Transfers of snapshots between workers: copies to their holders, and back to workers that have lost their disks.

    wanted ──begin──> the receiving end is told ──READY──> the sending end is told ──> DONE: the snapshot is there
                          ^                                         │
                          └── another transfer, with a new number <─┴── LACKING, FAILED, or an end is another process

The receiving end is told first: it then asks for the chunks of this transfer, and for none that the sending end has
forgotten. A transfer belongs to two incarnations, and its number to it alone, so nothing of a former one counts.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from stageline.broker.control.checkpoints import Copying, CopyOrder, CopyState
from stageline.pipeline.program import Queue

from .member import Member

AGAIN = 1.0  # seconds after which a worker that does not report what it was told is told again

Members = Mapping[int, Member]


@dataclass(slots=True)
class CopyTransfer:
    """A transfer of the snapshot of `stage` after `step` steps from worker to worker.

    Attributes:
        order: The order that both ends are told.
        ends: Places of the sending end and of the receiving end.
        incarnations: Incarnations of the sending end and of the receiving end.
        restores: True if the receiving end is the stage's owner, which has lost its disk.
        is_ready: True if the receiving end has told that it awaits the first chunk.
    """

    order: CopyOrder
    ends: tuple[int, int]
    incarnations: tuple[int, int]
    restores: bool
    is_ready: bool = False

    def gives_way(self, ends: tuple[int, int]) -> bool:
        """Return True if the transfer uses the queue between `ends`, and a worker that has to be restored goes first.

        Copies wait for activations, and those may wait for the worker that is to be restored.
        """
        return self.ends == ends and not self.restores

    def concerns(self, place: int) -> bool:
        """Return True if the worker of `place` is to know of the transfer now."""
        return place == self.ends[1] or (place == self.ends[0] and self.is_ready)


@dataclass(slots=True)
class CopyBook:
    """Transfers that are under way, by number. All is lost with the broker, and begun again."""

    transfers: dict[int, CopyTransfer] = field(default_factory=dict)
    _number: int = 0
    _lacking: set[tuple[int, int, int]] = field(default_factory=set)  # stage, step, incarnation that lacks it
    _told: dict[int, tuple[int, Copying, float]] = field(default_factory=dict)  # by place: incarnation, what, when

    def begin(self, stage: int, step: int, sender: Member, receiver: Member, now: float, *, restores: bool) -> None:
        """Begin a transfer.

        Args:
            stage: Stage of the snapshot.
            step: Step of the snapshot.
            sender: Worker that has it.
            receiver: Worker that is to have it.
            now: Seconds since the epoch.
            restores: True if the receiver owns the stage.
        """
        queue = link_between(sender, receiver.index)
        ends = sender.index, receiver.index
        for number in [number for number, each in self.transfers.items() if restores and each.gives_way(ends)]:
            del self.transfers[number]
        if queue is None or self.is_busy(*ends):
            return
        self._number = max(self._number + 1, int(now * 1000))  # above those of a former broker
        order = CopyOrder(self._number, stage, step, queue.name)
        incarnations = sender.incarnation, receiver.incarnation
        self.transfers[self._number] = CopyTransfer(order, ends, incarnations, restores)

    def is_busy(self, sender: int, receiver: int) -> bool:
        """Return True if a transfer between these places is under way, in this direction."""
        return any(each.ends == (sender, receiver) for each in self.transfers.values())

    def is_under_way(self, stage: int, *, restores: bool) -> bool:
        """Return True if a snapshot of the stage is being transferred, to its owner or to its holder."""
        return any(each.order.stage == stage and each.restores == restores for each in self.transfers.values())

    def drop_outdated(self, members: Members) -> None:
        """Drop the transfers of which one end is another process now."""
        for number, each in list(self.transfers.items()):
            if any(_incarnation(members, place) != of for place, of in zip(each.ends, each.incarnations, strict=True)):
                del self.transfers[number]

    def note(self, member: Member, number: int, state: CopyState) -> CopyTransfer | None:
        """Note how far a transfer is at one of its ends. Return the transfer if it is done, and thereby over."""
        transfer = self.transfers.get(number)
        if transfer is None or member.incarnation not in transfer.incarnations:
            return None
        receives = member.incarnation == transfer.incarnations[1]
        transfer.is_ready = transfer.is_ready or receives
        if (state is CopyState.LACKING) if not receives else (state is CopyState.FAILED):
            del self.transfers[number]
            self._lacking.add((transfer.order.stage, transfer.order.step, transfer.incarnations[0]))
            return None
        if state is CopyState.SPENT:
            del self.transfers[number]
        if not (receives and state is CopyState.DONE):
            return None
        del self.transfers[number]
        self._lacking.discard((transfer.order.stage, transfer.order.step, member.incarnation))
        return transfer

    def lacks(self, stage: int, step: int, incarnation: int) -> bool:
        """Return True if the worker of this incarnation was asked for the snapshot, and does not have it whole."""
        return (stage, step, incarnation) in self._lacking

    def due(self, members: Iterable[Member], lost: Mapping[int, tuple[tuple[int, int], ...]], now: float) -> "Told":
        """Return what workers are to be told now.

        Args:
            members: Workers that can be told.
            lost: By place, the snapshots that its worker lacks and that no other worker holds.
            now: Seconds since the epoch.
        """
        return list(self._due(members, lost, now))

    def _due(
        self, members: Iterable[Member], lost: Mapping[int, tuple[tuple[int, int], ...]], now: float
    ) -> Iterator[tuple[Member, Copying]]:
        for member in members:
            orders = tuple(each.order for each in self.transfers.values() if each.concerns(member.index))
            said = Copying(orders, lost.get(member.index, ()))
            known = {number for number, _ in member.report.copies.states} if member.report is not None else set()
            incarnation, before, at = self._told.get(member.index, (0, Copying(), 0.0))
            is_new = (incarnation, before) != (member.incarnation, said) and (incarnation or said != Copying())
            is_known = known == {order.number for order in orders} and not said.lost
            if is_new or (not is_known and now - at >= AGAIN):
                self._told[member.index] = member.incarnation, said, now
                yield member, said


Told = list[tuple[Member, Copying]]


def link_between(sender: Member, receiver: int) -> Queue | None:
    """Return the queue that carries snapshots from `sender` to the worker of a place; None if there is none."""
    found = (queue for queue in sender.queues if queue.copies)
    return next((queue for queue in found if (queue.producer, queue.consumer) == (sender.index, receiver)), None)


def neighbours(member: Member) -> list[int]:
    """Return the places whose workers `member` can send snapshots to, by preference."""
    return [queue.consumer for queue in member.queues if queue.copies and queue.producer == member.index]


def chosen_holder(owner: Member, present: int | None, members: Members) -> int | None:
    """Return the place whose worker is to hold the copies of the snapshots of `owner`; None if none can.

    Args:
        owner: Worker of the stages.
        present: Place that holds them so far; it keeps them as long as it can. None if there is none.
        members: All workers, by index.
    """
    fit = [place for place in neighbours(owner) if _may_hold(owner, place, members)]
    if present in fit:
        return present
    elsewhere = (place for place in fit if members[place].host != owner.host)
    return next(elsewhere, next(iter(fit), None))


def _may_hold(owner: Member, place: int, members: Members) -> bool:
    other = members.get(place)
    return (
        other is not None
        and link_between(other, owner.index) is not None
        and bool(owner.disk and other.disk)
        and owner.disk != other.disk
    )


def _incarnation(members: Members, place: int) -> int | None:
    member = members.get(place)
    return member.incarnation if member is not None and member.reachable else None
