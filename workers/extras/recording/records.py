"""The records of a run on disk: what its stages took and gave, so that one microbatch can be run again alone.

recorded/stage-2/about.json            the run, its plan, and where the plan file is
recorded/stage-2/step-0000000100.3     messages of the steps from 100 on, up to the next snapshot
                                       (3: the incarnation that wrote it; the bits are the same for all)
recorded/stage-2/bad-0000000118-5/     microbatch 5 of step 118, which stopped the run: its messages, the state of
                                       the stage, which is a snapshot, and the reason

A file of messages holds those that the stage took in full, and those that it gave as headers only:

    entry: "SLRE" | direction, u8 | number of frames, u24 | CRC-32 | bytes of each frame, u64 ... | CRC-32 | the frames
                                                                                       (little-endian)
The frames are a message's as they travel: its header has a checksum of its own and one for each tensor, so a header
alone tells whether another message has the same bits. A killed writer leaves a last entry that is cut off.
Queues are named as if stages had no replicas: "forward-2" brings the inputs of stage 2, each with the number
`step * microbatches + microbatch`.
"""

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
from zlib_ng.zlib_ng import crc32

from stageline.broker.codec.message import Frame, Header, Message, decode, read_header
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.pipeline.plan import Plan
from stageline.workers.disk.atomic_file import write_json

FOLDER = "recorded"
ABOUT = "about.json"
MESSAGES = "messages"  # in the folder of a bad microbatch
REASON = "reason.json"  # likewise
FORMAT = "record/2"
MAGIC = b"SLRE"

_NAME = re.compile(r"step-(\d{10,})\.(\d+)")
_START = struct.Struct("<4sB3s")
_SIZE = struct.Struct("<Q")
_CRC = struct.Struct("<I")

Description = TypeVar("Description", bound=msgspec.Struct)


class NotRecorded(StagelineError):
    """Error that the microbatch to replay is not recorded.

    Mend: Name one that the message lists, or run with `recovery.record = "bad"` or `"all"`.

    Example: run a has recorded nothing. recovery.record = "bad" records what stops a run, "all" every microbatch since
    the last but one checkpoint
    """

    error_code = "SL409"
    exit_code = ExitCode.USAGE


class RecordDamaged(StagelineError):
    """Error that a file of recorded messages is damaged.

    Mend: Replay another microbatch, or record again: the file cannot be repaired.

    Example: runs/a/recorded/stage-1/reason is damaged: JSON is malformed
    """

    error_code = "SL410"


class Direction(IntEnum):
    """Direction of a message: taken or given by the stage."""

    TAKEN = 0  # an input: the message in full
    GIVEN = 1  # a result: the header alone


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """Place of one message in `file`: its frames begin at byte `offset` and have these `sizes`, in bytes."""

    direction: Direction
    header: Header
    file: Path
    offset: int
    sizes: tuple[int, ...]

    def load(self) -> Message:
        """Return the message with its tensors.

        Raises:
            RecordDamaged: The file cannot be read, or does not contain the message.
        """
        try:
            with self.file.open("rb") as file:
                file.seek(self.offset)
                return decode([file.read(size) for size in self.sizes])
        except (OSError, BadMessage, ForeignMessage) as error:
            raise RecordDamaged(f"{self.file}, byte {self.offset}: {error}") from error


Place = tuple[Direction, str, int]  # of a message: direction, queue, number


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Description of a recorded run: `plan` is `Plan.as_mapping()`, `file` the plan file's path, "" without one."""

    format: str = FORMAT
    run: str
    plan: dict[str, object]
    file: str


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Reason why a microbatch is bad, in words, and the action that failed: it `raised`, or gave a bad result."""

    format: str = FORMAT
    action: str
    raised: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RecordDirectory:
    """Records of one stage in the folder of a run."""

    run: Path
    stage: int

    @property
    def folder(self) -> Path:
        """Folder of the stage's records."""
        return self.run / FOLDER / f"stage-{self.stage}"

    def segment(self, step: int, incarnation: int) -> Path:
        """Return the file for the messages from `step` up to the next snapshot, written by `incarnation`."""
        return self.folder / f"step-{step:010d}.{incarnation}"

    def bad(self, step: int, microbatch: int) -> Path:
        """Return the folder of a bad microbatch."""
        return self.folder / f"bad-{step:010d}-{microbatch}"

    def describe(self, run: str, plan: Plan) -> None:
        """Write which run the records are of. Raises `OSError`."""
        file = "" if plan.file is None else str(plan.file.absolute())
        write_json(self.folder / ABOUT, About(run=run, plan=plan.as_mapping(), file=file))

    def about(self) -> About:
        """Return the description of the recorded run, from this stage's records or else from those of another stage.

        Raises:
            NotRecorded: No stage has recorded anything.
            RecordDamaged: The description cannot be read.
        """
        files = sorted(self.folder.parent.glob(f"stage-*/{ABOUT}"), key=lambda file: file.parent != self.folder)
        if not files:
            raise NotRecorded(
                f'run {self.run.resolve().name} has recorded nothing. recovery.record = "bad" records what stops a '
                'run, "all" every microbatch since the last but one checkpoint'
            )
        return _read(files[0], About)

    def reason(self, step: int, microbatch: int) -> Reason | None:
        """Return why the microbatch is bad; None if it did not stop the run. Raises `RecordDamaged`."""
        path = self.bad(step, microbatch) / REASON
        return _read(path, Reason) if path.exists() else None

    def segments(self) -> list[tuple[int, Path]]:
        """Return the files of messages, each with its first step, ascending; of one step, the newest writer's last."""
        names = [(_NAME.fullmatch(path.name), path) for path in self.folder.glob("step-*")]
        found = sorted((int(name[1]), int(name[2]), path) for name, path in names if name)
        return [(begin, path) for begin, _, path in found]

    def messages(self) -> dict[Place, RecordedMessage]:
        """Return the recorded messages of all steps. Raises `RecordDamaged`."""
        return messages_in(path for _, path in self.segments())


def write_entry(file: BinaryIO, direction: Direction, frames: Sequence[Frame]) -> None:
    """Append a message to `file` and flush it to the system, so that it survives the process. Raises `OSError`.

    Args:
        file: File of messages, at its end.
        direction: Direction of the message.
        frames: Frames of the message: all of them if it was taken, the header alone if it was given.
    """
    start = _START.pack(MAGIC, direction, len(frames).to_bytes(3, "little"))
    sizes = b"".join(_SIZE.pack(memoryview(frame).nbytes) for frame in frames)
    file.write(start + _crc(start) + sizes + _crc(sizes))
    file.writelines(frames)
    file.flush()


def read_entries(path: Path) -> Iterator[RecordedMessage]:
    """Yield all entries of a file in the order in which they were written, without their tensors.

    An entry that is cut off, as a killed writer leaves it, ends the list.

    Raises:
        RecordDamaged: The file cannot be read, or has something else than entries.
    """
    try:
        with path.open("rb") as file:
            length = path.stat().st_size
            while True:
                yield _entry(file, path, length)
    except EOFError:
        return
    except (OSError, BadMessage, ForeignMessage) as error:
        raise RecordDamaged(f"{path}: {error}") from error


def messages_in(files: Iterable[Path]) -> dict[Place, RecordedMessage]:
    """Return the entries of `files` by direction, queue and number.

    Of a message that was recorded twice, the later entry counts: a run may have been resumed with other software, which
    gives other bits.

    Raises:
        RecordDamaged: A file cannot be read.
    """
    entries = (entry for file in files for entry in read_entries(file))
    return {(entry.direction, entry.header.queue, entry.header.number): entry for entry in entries}


def _read(path: Path, kind: type[Description]) -> Description:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError) as error:
        raise RecordDamaged(f"{path} is damaged: {error}") from error


def _entry(file: BinaryIO, path: Path, length: int) -> RecordedMessage:
    """Return the entry that begins at the position of `file`.

    Raises:
        EOFError: The file, of `length` bytes, ends before the entry does.
        RecordDamaged: No entry begins there, or a checksum does not match.
    """
    place = file.tell()
    magic, direction, count = _START.unpack(_checked(file, path, _START.size))
    sizes = _checked(file, path, _SIZE.size * int.from_bytes(count, "little"))
    if magic != MAGIC or direction not in list(Direction) or not sizes:
        raise RecordDamaged(f"{path}, byte {place}: not an entry of recorded messages")
    each = tuple(size for (size,) in _SIZE.iter_unpack(sizes))
    offset = file.tell()
    if offset + sum(each) > length:
        raise EOFError
    header = read_header(file.read(each[0]))
    file.seek(offset + sum(each))
    return RecordedMessage(Direction(direction), header, path, offset, each)


def _checked(file: BinaryIO, path: Path, size: int) -> bytes:
    """Return the next `size` bytes, which are followed by their checksum.

    Raises:
        EOFError: The file ends before.
        RecordDamaged: The checksum does not match.
    """
    place, found = file.tell(), file.read(size + _CRC.size)
    if len(found) < size + _CRC.size:
        raise EOFError
    if _crc(found[:size]) != found[size:]:
        raise RecordDamaged(f"{path}, byte {place}: the file is damaged, a CRC-32 does not match")
    return found[:size]


def _crc(data: bytes) -> bytes:
    return _CRC.pack(crc32(data))
