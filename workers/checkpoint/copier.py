"""Transfers of snapshots that a worker takes part in: what it sends from its disk, and what it receives.

    broker    Copying(orders) ──> order ──> sends      a chunk is put when it is granted, when no activation or gradient
                                        │              waits to be sent, and when the bandwidth allows it
                                        └─> receives   chunks are taken as fast as the disk writes them

The compute loop calls `turn` between two actions while a transfer is under way. It never waits.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from stageline.broker.codec.message import Message
from stageline.broker.control.checkpoints import Copying, CopyOrder, CopyState
from stageline.broker.queues.base import Inbound, Outbound, WorkerQueues
from stageline.pipeline.program import CHUNKS, Program, Queue
from stageline.pipeline.tree import Tree, tensors
from stageline.workers.runtime.copy_progress import CopyProgress

from .copies import CopyStore, SnapshotToReceive, SnapshotToSend

PATIENCE = 0.02  # seconds that a wait of the loop lasts at most while a transfer is under way
AHEAD = 1.0  # seconds for which bandwidth that was not used may be used later: an action may take as long
REMEMBERED = 1000  # newest transfers that were over
TURN = 8  # chunks that are taken in one turn at most: an action is not to wait for long

Endpoints = Mapping[int, tuple[int, str]]  # of workers, by index, with their incarnations


class Bandwidth:
    """Limit of the bytes a second that copies may take."""

    def __init__(self, limit: float | None, now: Callable[[], float]) -> None:
        """Begin with nothing used.

        Args:
            limit: Bytes a second. None for no limit.
            now: Returns monotonic time, in seconds.
        """
        self._limit = limit
        self._now = now
        self._free_at = 0.0

    @property
    def is_free(self) -> bool:
        """True if another message may be sent now."""
        return self._limit is None or self._now() >= self._free_at

    def use(self, size: int) -> None:
        """Count `size` bytes that are sent."""
        if self._limit is not None:
            self._free_at = max(self._free_at, self._now() - AHEAD) + size / self._limit


class TransferEnd(Protocol):
    """Sending or receiving end of a transfer, with its state."""

    state: CopyState

    def turn(self) -> None:
        """Move what may move now."""

    def end(self) -> None:
        """Give the transfer up, if it is not done."""


class Copier:
    """A worker's ends of transfers. Only the thread that owns the queues may use it."""

    def __init__(
        self,
        program: Program,
        place: int,
        queues: WorkerQueues,
        store: CopyStore,
        progress: CopyProgress,
        *,
        run: str,
        incarnation: int,
        bandwidth: Bandwidth,
    ) -> None:
        """Make ends that are in no transfer.

        Args:
            program: Program of the run, with its queues.
            place: Place of the worker.
            queues: Its queues.
            store: Snapshots on its disk.
            progress: Is told how far each transfer is.
            run: Id of the run.
            incarnation: Incarnation of the worker.
            bandwidth: Limit of what it sends.
        """
        self.lost: frozenset[tuple[int, int]] = frozenset()  # snapshots that the broker knows to be nowhere
        self.store = store
        self._placement = program.schedule.placement
        self._own = self._placement[place]
        self._held: set[int] = set()  # stages whose copies are here
        self._puts = {queue.name: queue for queue in program.outbound(place) if queue.copies}
        self._takes = {queue.name: queue for queue in program.inbound(place) if queue.copies}
        self._first = [queue for queue in program.outbound(place) if not (queue.copies or queue.is_local)]
        self._queues = queues
        self._progress = progress
        self._identity = run, incarnation
        self._bandwidth = bandwidth
        self._transfers: dict[int, TransferEnd] = {}
        self._spent: deque[int] = deque(maxlen=REMEMBERED)
        self._attached: dict[str, Queue] = {}
        self._endpoints: Endpoints = {}

    @property
    def is_active(self) -> bool:
        """True if a transfer is under way, so that `turn` is to be called again soon."""
        return any(each.state in (CopyState.READY, CopyState.MOVING) for each in self._transfers.values())

    def order(self, told: Copying) -> None:
        """Take part in the transfers that the broker has told of, and in no others."""
        self.lost = frozenset(told.lost)
        wanted = {order.number: order for order in told.orders}
        for number in self._transfers.keys() - wanted.keys():
            self._transfers.pop(number).end()
            self._spent.append(number)
        for number in sorted(wanted.keys() - self._transfers.keys()):
            if (begun := self._begin(wanted[number])) is not None:
                self._transfers[number] = begun
        self._note()

    def meet(self, endpoints: Endpoints) -> None:
        """Take chunks from the workers at these endpoints from now on."""
        self._endpoints = endpoints
        self._connect(self._attached.values())

    def turn(self) -> bool:
        """Move what may move now. Returns True if a transfer is under way."""
        if self._transfers:
            self._queues.pump(0)
            for each in list(self._transfers.values()):
                each.turn()
            self._note()
        return self.is_active

    def forget(self, complete: int, best: int | None) -> None:
        """Delete copies that the announced checkpoint `complete` makes superfluous."""
        for stage in self._held:
            self.store.forget(stage, complete, best)

    def _note(self) -> None:
        self._progress.note({number: each.state for number, each in self._transfers.items()})

    def _begin(self, order: CopyOrder) -> TransferEnd | None:
        if order.number in self._spent:  # an older message about transfers came late; the chunks are gone
            return Spent()
        if order.queue in self._takes:
            queue = self._takes[order.queue]
            inbound = self._queues.inbound(queue)
            inbound.rewind(order.number * CHUNKS)
            self._attached[queue.name] = queue
            self._connect([queue])
            self._held |= {order.stage} - {*self._own}
            return Receiving(order, inbound, self.store, self._progress)
        if order.queue in self._puts:
            queue = self._puts[order.queue]
            restores = order.stage in self._placement[queue.consumer]
            put = self._put if restores else self._put_last
            return Sending(order, self._queues.outbound(queue), self.store, put, self._progress)
        return None

    def _connect(self, queues: Iterable[Queue]) -> None:
        known = {queue: self._endpoints[queue.producer][1] for queue in queues if queue.producer in self._endpoints}
        if known:
            self._queues.connect(known)

    def _put_last(self, outbound: Outbound, number: int, part: Tree) -> bool:
        """Put a chunk if nothing else waits to be sent, as `_put`.

        Not for a worker that has yet to be restored: what it has granted before its loss may wait for ever.
        """
        waits = any(map(_waits, map(self._queues.outbound, self._first)))
        return not waits and self._put(outbound, number, part)

    def _put(self, outbound: Outbound, number: int, part: Tree) -> bool:
        """Put a chunk if the bandwidth allows it. Returns True if that was done."""
        if not self._bandwidth.is_free:
            return False
        outbound.put(Message(self._identity[0], outbound.queue.name, number, self._identity[1], part))
        self._bandwidth.use(sum(each.nbytes for each in tensors(part)))
        return True


class Spent:
    """An end of a transfer that was given up before."""

    state = CopyState.SPENT

    def turn(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


class Sending:
    """The sending end of a transfer."""

    def __init__(
        self,
        order: CopyOrder,
        outbound: Outbound,
        store: CopyStore,
        put: Callable[[Outbound, int, Tree], bool],
        progress: CopyProgress,
    ) -> None:
        """Find the snapshot; nothing is sent yet.

        Args:
            order: Order of the transfer.
            outbound: Queue to the receiving end.
            store: Has the snapshot.
            put: Puts a chunk if it may be sent now; returns True if it did.
            progress: Counts chunks.
        """
        self._parts: SnapshotToSend | None = store.parts(order.stage, order.step)
        self.state = CopyState.LACKING if self._parts is None else CopyState.MOVING
        self._first = self._next = order.number * CHUNKS
        self._outbound = outbound
        self._put = put
        self._progress = progress
        outbound.trim(self._first)

    def turn(self) -> None:
        """Put the chunks that are granted, and forget those that have arrived."""
        parts, outbound = self._parts, self._outbound
        if parts is None or self.state is not CopyState.MOVING:
            return
        depth, end = outbound.depth(), self._first + parts.count
        outbound.trim(max(self._first, min(depth.arrived, self._next)))
        granted = end if depth.granted is None else min(end, depth.granted)
        while self._next < granted and self._put(outbound, self._next, parts.part(self._next - self._first)):
            self._next += 1
            self._progress.moved()
        if depth.arrived >= end:
            self.state = CopyState.DONE
            self._parts = None

    def end(self) -> None:
        """Let go of the files."""
        self._parts = None


class Receiving:
    """The receiving end of a transfer."""

    def __init__(self, order: CopyOrder, inbound: Inbound, store: CopyStore, progress: CopyProgress) -> None:
        """Await the first chunk.

        Args:
            order: Order of the transfer.
            inbound: Queue from the sending end, at the first chunk.
            store: Is to have the snapshot.
            progress: Counts chunks.
        """
        self.state = CopyState.READY
        self._order = order
        self._inbound = inbound
        self._store = store
        self._progress = progress
        self._draft: SnapshotToReceive | None = None
        self._taken = 0

    def turn(self) -> None:
        """Take the chunks that are here, as far as the disk has room."""
        for _ in range(TURN):
            if not self._may_take() or (message := self._inbound.take(0)) is None:
                break
            self._take(message.payload)
        if self._draft is not None and self._draft.outcome is not None:
            self.state = self._draft.outcome

    def end(self) -> None:
        """Give the draft up."""
        if self._draft is not None and self.state is not CopyState.DONE:
            self._draft.discard()

    def _may_take(self) -> bool:
        if self.state not in (CopyState.READY, CopyState.MOVING):
            return False
        return self._draft is None or (self._taken < self._draft.count and self._draft.has_room)

    def _take(self, part: Tree) -> None:
        self._taken += 1
        self._progress.moved()
        if self._draft is not None:
            self._draft.add(part)
            return
        self._draft = self._store.draft(self._order.stage, self._order.step, part)
        self.state = CopyState.FAILED if self._draft is None else CopyState.MOVING


def _waits(outbound: Outbound) -> bool:
    """Return True if messages wait to be sent that the consumer has granted."""
    depth = outbound.depth()
    return depth.sent < (depth.put if depth.granted is None else min(depth.put, depth.granted))
