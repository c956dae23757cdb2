"""Export of retained messages: a running run's broker hands them over in pieces; they are written as records are."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from stageline.broker.codec.message import read_header
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.pipeline.errors import ExitCode
from stageline.workers.cli.output import CommandFailed
from stageline.workers.extras.recording.records import Direction, write_entry
from stageline.workers.runs.folder import Facts

LARGEST = 2**34  # bytes of one message that are taken from a broker


def export(ask: Callable[..., Facts], queue: str, numbers: Sequence[int], file: Path) -> list[int]:
    """Write messages of a queue into a file that is not there yet; return the numbers of those that are retained.

    Args:
        ask: Asks the broker.
        queue: Name of the queue.
        numbers: Numbers of the messages. Those that are forgotten before their turn are left out.
        file: File to write.

    Raises:
        CommandFailed: The file exists, or a message came damaged, or none is retained.
        OSError: The file cannot be written.
    """
    draft, written = file.with_name(f".{file.name}.part"), []
    try:
        with draft.open("wb") as opened:
            for number in numbers:
                if frames := _frames(ask, queue, number):
                    write_entry(opened, Direction.TAKEN, frames)
                    written.append(number)
        if not written:
            reason = f"none of these messages of {queue} is retained: see `stageline queue show {queue}`"
            raise CommandFailed(reason, ExitCode.USAGE)
        file.hardlink_to(draft)  # which fails if it is there
    except FileExistsError:
        raise CommandFailed(f"{file} is there already: remove it, or name another with -o", ExitCode.USAGE) from None
    finally:
        draft.unlink(missing_ok=True)
    return written


def _frames(ask: Callable[..., Facts], queue: str, number: int) -> list[bytes]:
    """Return the frames of a message; none if it is not retained. Raises `CommandFailed` if they are damaged."""
    content, sizes = bytearray(), [0]
    while len(content) < sum(sizes) or not content:
        found = ask("export", name=queue, at=str(number), offset=str(len(content)))
        sizes, piece = [int(size) for size in found["sizes"]], bytes(found["piece"])
        if not sizes:
            return []
        if not piece or sum(sizes) > LARGEST:
            raise CommandFailed(f"message {number} of {queue} came in pieces that do not fit", ExitCode.FAILED)
        content += piece
    frames = list(_cut(bytes(content), sizes))
    try:
        read_header(frames[0])
    except (BadMessage, ForeignMessage) as error:
        raise CommandFailed(f"message {number} of {queue} came damaged: {error}", ExitCode.FAILED) from error
    return frames


def _cut(content: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        yield content[end - size : end]
