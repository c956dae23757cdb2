"""Log of the messages that a producer retains of one queue, as frames, from the oldest needed to the newest.

  trimmed        retained: on the disk | in memory
------------- | ---------------------- | ---------- |
            first                                  end
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import msgspec
from torch import Tensor

from stageline.broker.codec.message import Frame, Header, Message, decode, encode, fingerprint, read_header
from stageline.broker.codec.structure import agree, emptied
from stageline.broker.errors import Disagreement, Overwritten, QueueFull, QueueGap
from stageline.pipeline.program import Per, Queue
from stageline.pipeline.tree import Tree, tensors

from .spill import LoggedFrames, Slot, Spill

UNLIMITED = 2**63
SPILL = 4  # the default of what may be retained on the disk, as a multiple of what may be in memory

_WAY_OUT = "See which stage is behind, or raise queues.retain_bytes"
_OF_REPLIES = (
    "Replies are kept until the next checkpoint: make room on that disk, lower recovery.snapshot_every, or predict "
    "fewer rows between two training steps"
)
_OF_CALLS = (
    "The batches of the steps between two checkpoints must have room: lower recovery.snapshot_every, or raise "
    "queues.retain_bytes"
)


class RetentionBudget:
    """Limits of all logs of one worker together: `memory` bytes, and `disk` bytes of what does not fit there."""

    def __init__(
        self,
        memory: int = UNLIMITED,
        disk: int = 0,
        folder: str | None = None,
        wait: Callable[[str, float], bool] = lambda reason, since: False,
    ) -> None:
        """Make a budget of which nothing is used.

        Args:
            memory: Bytes that may be retained in memory.
            disk: Bytes that may be retained on the disk.
            folder: Folder of the files; None: the system's for temporary files.
            wait: Called when both are full, with the reason and the time of the `put`; returns True to try again.
        """
        self.memory = memory
        self.used = 0
        self.spill = Spill(disk, folder)
        self.wait = wait

    def lacks(self, size: int) -> bool:
        """Return True if memory has no room for `size` more bytes."""
        return self.used + size > self.memory

    def take(self, size: int) -> None:
        """Count `size` more bytes in memory."""
        self.used += size

    def give_back(self, size: int) -> None:
        """Count `size` bytes less in memory."""
        self.used -= size


class Seal:
    """Detector of writes to a tensor after it was put: then its retained bytes are not what was sent.

    A seal keeps the tensors of `payload` that the retained message shares memory with, those on the CPU, and their
    current versions: torch counts every in-place write to a tensor and to its views.
    """

    __slots__ = ("_versions",)

    def __init__(self, payload: Tree) -> None:
        """Record the current versions of the CPU tensors of `payload`."""
        self._versions: list[tuple[Tensor, int]] = []
        for tensor in (payload,) if isinstance(payload, Tensor) else tensors(payload):
            if tensor.is_cpu and not tensor.is_inference():
                kept = tensor if tensor.grad_fn is None else tensor.detach()  # no graph is kept alive
                self._versions.append((kept, tensor._version))

    @property
    def is_broken(self) -> bool:
        """True if one of the tensors has been written to since."""
        for tensor, version in self._versions:  # noqa: SIM110  # any() takes three times as long
            if tensor._version != version:
                return True
        return False


class _RetainedMessage(msgspec.Struct):
    """Retained message: in memory it has frames and a seal, on the disk a slot. `since` is when it was put."""

    size: int
    since: float
    frames: list[Frame]
    seal: Seal | None
    slot: Slot | None = None

    def move_to(self, spill: Spill) -> None:
        """Write the frames to the disk. Raises `QueueFull`."""
        self.slot = spill.write(self.frames)
        self.frames, self.seal = [], None


class Log:
    """Retained messages of one queue of `run`; those before `first` were trimmed, number `end` comes next."""

    def __init__(self, run: str, queue: Queue, budget: RetentionBudget) -> None:
        """Make an empty log.

        Args:
            run: Id of the run.
            queue: Queue of the messages.
            budget: Limits that this log shares with the other logs of the worker.
        """
        self.run = run
        self.queue = queue
        self._of = run, queue.name
        self.first = 0
        self.end = 0
        self.bytes = 0
        self.put_bytes = 0  # of all messages that were ever put
        self._budget = budget
        self._kept: dict[int, _RetainedMessage] = {}
        self._in_memory = 0  # the lowest number that may still be in memory
        self._empty = True  # no message was ever put

    def __len__(self) -> int:
        """Return the number of retained messages."""
        return len(self._kept)

    def put(self, message: Message, now: float) -> list[Frame] | None:
        """Retain `message` and return its frames; None if it was put before, or was trimmed.

        Args:
            message: Message of this log's run and queue.
            now: Time of the call, in seconds on the monotonic clock.

        Raises:
            ValueError: The message is of another run or queue.
            Disagreement: The message was put before with other bits.
            QueueGap: The message skips a number.
            QueueFull: There is no room; the message is not retained.
            Unsendable: The payload cannot travel.
            Overwritten: A message that must move to the disk, to make room, was written to after it was put.
        """
        number = message.number
        if (message.run, message.queue) != self._of:
            raise ValueError(
                f"{message.identity} of {message.run!r} was put into {self.queue.name} of run {self.run!r}"
            )
        if number < self.first:
            return None
        frames = encode(message)
        if number in self._kept:
            self.check_same(number, read_header(frames[0]), "was put twice with different bits")
            return None
        self._check_order(number)
        self._keep(number, message, frames, now)
        return frames

    def frames(self, number: int) -> list[Frame]:
        """Return the frames of a retained message. Raises `Overwritten` if one of its tensors has been written to."""
        kept = self._kept[number]
        if kept.slot is not None:
            return self._budget.spill.read(kept.slot)
        if kept.seal is not None and kept.seal.is_broken:
            raise self._overwritten(number)
        return kept.frames

    def check_same(self, number: int, header: Header, how: str) -> None:
        """Raise `Disagreement` if retained message `number` has other bits than the message of `header`.

        Args:
            number: Number of a retained message.
            header: Header to compare with.
            how: Words of the error for how the other message came.
        """
        if not agree(fingerprint(header), fingerprint(self._header(number))):
            raise Disagreement(
                f"{self.name(number)} {how}: what computed it was not deterministic. See that all operations are, and "
                "that software, hardware type and thread count are the same wherever the stage runs"
            )

    def trim(self, step: int) -> None:
        """Forget the messages before `step`. Raises `Overwritten` if a tensor of one has been written to."""
        floor = self.queue.first(step)
        while self.first < min(floor, self.end):
            self._forget(self.first)
            self.first += 1
        self.first = max(self.first, floor)
        self.end = max(self.end, self.first)

    def empty(self, step: int, rest: Tree = None) -> None:
        """Drop the content of the messages of `step`, which is not needed again; `rest` becomes their content.

        Raises `Overwritten` if a tensor of one has been written to.
        """
        for number in self._retained(step):
            self._empty_message(number, rest)

    def checksums(self, step: int) -> tuple[int, ...]:
        """Return the CRC-32 of each tensor of the retained messages of `step`, in order."""
        return tuple(tensor.crc32 for number in self._retained(step) for tensor in self._header(number).tensors)

    def oldest(self, now: float) -> float:
        """Return the age of the oldest retained message in seconds; 0 if there is none."""
        return now - self._kept[self.first].since if self._kept else 0.0

    def peek(self, limit: int) -> list[Message]:
        """Return the first `limit` retained messages, decoded into memory of their own."""
        numbers = range(self.first, self.end)[: max(0, limit)] if self._kept else ()
        return [decode(self.frames(number)) for number in numbers]

    @property
    def held(self) -> range:
        """Numbers of the retained messages. Safe to read from any thread."""
        first = self.first
        return range(first, max(first, self.end))

    def look(self, number: int, room: int = UNLIMITED) -> LoggedFrames | None:
        """Return the frames of message `number`; None if it is not retained any more. Safe to call from any thread.

        Nothing is locked, and no seal is looked at: a message that was written to after it was put, or that was
        forgotten during the call, has frames whose checksums do not match.

        Args:
            number: Number of the message.
            room: Bytes of a message on the disk that is read whole, at most; of a larger one, the first frame is read.
        """
        if (kept := self._kept.get(number)) is None:
            return None
        frames, slot = kept.frames, kept.slot  # in this order: `move_to` writes the slot first
        if frames or slot is None:
            return LoggedFrames(frames, False, tuple(map(len, frames)))
        count = None if sum(slot.sizes) <= room else 1
        try:
            spill = self._budget.spill
            return LoggedFrames(spill.read(slot, count), True, slot.sizes, partial(spill.piece, slot))
        except (OSError, ValueError):  # its file was closed
            return None

    def name(self, number: int) -> str:
        """Return message `number` in words, for people."""
        unit, microbatch = self.queue.at(number)
        return f"message {number} of {self.queue.name} ({self.queue.unit} {unit}, microbatch {microbatch})"

    def close(self) -> None:
        """Forget everything, without checking the seals. The budget is not used any more."""
        self._kept.clear()

    def _retained(self, step: int) -> range:
        """Return the numbers of the messages of `step` that are retained."""
        return range(max(self.first, self.queue.first(step)), min(self.end, self.queue.first(step + 1)))

    @property
    def _way_out(self) -> str:
        if self.queue.per is Per.CALL:
            return _OF_CALLS
        return _OF_REPLIES if self.queue.answers else _WAY_OUT

    def _check_order(self, number: int) -> None:
        if self._empty and number % self.queue.count == 0:  # a replacement begins at the step it was placed at
            self.first = self.end = number
        if number != self.end:
            raise QueueGap(f"{self.name(number)} was put where number {self.end} comes next")
        self._empty = False

    def _keep(self, number: int, message: Message, frames: list[Frame], now: float) -> None:
        size = sum(map(len, frames))
        kept = _RetainedMessage(size, now, frames, Seal(message.payload))
        if self._budget.lacks(size):
            self._make_room(number, kept)
        if kept.slot is None:
            self._budget.take(size)
        self._kept[number] = kept
        self.end = number + 1
        self.bytes += size
        self.put_bytes += size

    def _make_room(self, number: int, new: _RetainedMessage) -> None:
        """Make room in memory, or on the disk for `new`. Raises `QueueFull` if waiting does not help."""
        while True:
            try:
                return self._move_out(number, new)
            except QueueFull as full:
                reason = (
                    f"{self.queue.name} retains {len(self)} messages, {self.bytes} bytes, until every stage is past "
                    f"{self.queue.unit} {self.queue.at(self.first)[0]}; memory for it is full, and {full}"
                )
                if not self._budget.wait(reason, new.since):
                    raise QueueFull(f"{reason}. {self._way_out}") from full

    def _move_out(self, number: int, new: _RetainedMessage) -> None:
        """Move messages to the disk: the oldest first, which are least likely to be resent, and `new` last."""
        self._in_memory = max(self._in_memory, self.first)
        while self._budget.lacks(new.size) and self._in_memory < self.end:
            oldest = self._kept[self._in_memory]
            if oldest.slot is None:  # one too large for memory went to the disk at once
                self._spill(self._in_memory, oldest)
                self._budget.give_back(oldest.size)
            self._in_memory += 1
        if self._budget.lacks(new.size):
            self._spill(number, new)

    def _spill(self, number: int, kept: _RetainedMessage) -> None:
        if kept.seal is not None and kept.seal.is_broken:
            raise self._overwritten(number)
        kept.move_to(self._budget.spill)

    def _header(self, number: int) -> Header:
        slot = self._kept[number].slot
        return read_header(self.frames(number)[0] if slot is None else self._budget.spill.read(slot, 1)[0])

    def _empty_message(self, number: int, rest: Tree) -> None:
        header, since = self._header(number), self._kept[number].since
        payload = emptied(fingerprint(header), rest)
        frames = encode(Message(header.run, header.queue, number, header.incarnation, payload))
        self._release(number)
        size = sum(map(len, frames))
        self._kept[number] = _RetainedMessage(size, since, frames, None)
        self._budget.take(size)
        self._in_memory = min(self._in_memory, number)
        self.bytes += size

    def _forget(self, number: int) -> None:
        self._release(number)
        del self._kept[number]

    def _release(self, number: int) -> None:
        """Give back the room of a message's content."""
        kept = self._kept[number]
        if kept.seal is not None and kept.seal.is_broken:
            raise self._overwritten(number)
        self.bytes -= kept.size
        if kept.slot is None:
            self._budget.give_back(kept.size)
        else:
            self._budget.spill.forget(kept.slot)

    def _overwritten(self, number: int) -> Overwritten:
        return Overwritten(
            f"a tensor of {self.name(number)} was written to in place after it was put, and its message may be "
            "needed again as it was: let the stage's output be a tensor of its own (.clone() it)"
        )


class LockedLog:
    """Log of a producer's end that several threads use: each method holds `lock`."""

    def __init__(self, log: Log, lock: AbstractContextManager[object]) -> None:
        """Guard `log`, which nothing else uses, with `lock`."""
        self.queue = log.queue
        self.look = log.look  # without the lock: a look at a message on the disk may take long
        self._log = log
        self._lock = lock

    @property
    def held(self) -> range:
        """Numbers of the retained messages. Safe to read from any thread."""
        return self._log.held

    def trim(self, step: int) -> None:
        """Forget the messages before `step`, as `Log.trim`."""
        with self._lock:
            self._log.trim(step)

    def empty(self, step: int, rest: Tree = None) -> None:
        """Drop the content of the messages of `step`, as `Log.empty`."""
        with self._lock:
            self._log.empty(step, rest)

    def checksums(self, step: int) -> tuple[int, ...]:
        """Return the CRC-32 of each tensor of the retained messages of `step`, in order."""
        with self._lock:
            return self._log.checksums(step)

    def peek(self, limit: int) -> list[Message]:
        """Return the first `limit` retained messages, decoded into memory of their own."""
        with self._lock:
            return self._log.peek(limit)
