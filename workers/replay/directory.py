"""The folder in which a run records what its stages take and give, so that one microbatch can be run again alone.

recorded/stage-2/about.json            the run, its plan, and where the plan file is
recorded/stage-2/step-0000000100.3     messages of the steps from 100 on, up to the next snapshot: see record_file
                                       (3: the incarnation that wrote it; the bits are the same for all)
recorded/stage-2/bad-0000000118-5/     microbatch 5 of step 118, which stopped the run: its messages, the state of
                                       the stage, which is a snapshot, and the reason
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from stageline.broker.queues.base import QueueKey
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.pipeline.plan import Plan
from stageline.workers.disk.atomic_file import write_json

from .record_file import Direction, RecordDamaged, RecordedMessage, read_entries

FOLDER = "recorded"
ABOUT = "about.json"
MESSAGES = "messages"  # in the folder of a bad microbatch
REASON = "reason.json"  # likewise
FORMAT = "record/1"

_NAME = re.compile(r"step-(\d{10,})\.(\d+)")

Kind = TypeVar("Kind", bound=msgspec.Struct)
Place = tuple[Direction, QueueKey, int, int]  # of a message: direction, queue, step, microbatch


class NotRecorded(StagelineError):
    """The microbatch is not recorded; the text says what is, or how to have it recorded."""

    exit_code = ExitCode.USAGE


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The run that was recorded: `plan` is `Plan.as_mapping()`, `file` the plan file's path ("" if there was none)."""

    format: str = FORMAT
    run: str
    plan: dict[str, object]
    file: str


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Why a microbatch is bad, in words, the action that failed, and whether it `raised`."""

    format: str = FORMAT
    action: str
    raised: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RecordDirectory:
    """The record of one stage in the folder of a run."""

    run: Path
    stage: int

    @property
    def folder(self) -> Path:
        return self.run / FOLDER / f"stage-{self.stage}"

    def segment(self, step: int, incarnation: int) -> Path:
        """The file for the messages of `step` and the steps that follow it, up to the next snapshot."""
        return self.folder / f"step-{step:010d}.{incarnation}"

    def bad(self, step: int, microbatch: int) -> Path:
        """The folder of a bad microbatch."""
        return self.folder / f"bad-{step:010d}-{microbatch}"

    def describe(self, run: str, plan: Plan) -> None:
        """Writes which run this is a record of. Raises `OSError`."""
        file = "" if plan.file is None else str(plan.file.absolute())
        write_json(self.folder / ABOUT, About(run=run, plan=plan.as_mapping(), file=file))

    def about(self) -> About:
        """The run that was recorded. Raises `NotRecorded` or `RecordDamaged`."""
        return _read(self.folder / ABOUT, About, f"nothing of stage {self.stage} is recorded in {self.run}")

    def reason(self, step: int, microbatch: int) -> Reason | None:
        """Why the microbatch is bad, None if it did not stop the run. Raises `RecordDamaged`."""
        path = self.bad(step, microbatch) / REASON
        return _read(path, Reason, "") if path.exists() else None

    def segments(self) -> list[tuple[int, Path]]:
        """The files of the steps, ascending, each with the step that it begins with; the newest writer's last."""
        names = [(_NAME.fullmatch(path.name), path) for path in self.folder.glob("step-*")]
        found = sorted((int(name[1]), int(name[2]), path) for name, path in names if name)
        return [(begin, path) for begin, _, path in found]

    def messages(self) -> dict[Place, RecordedMessage]:
        """The recorded messages of all steps. Raises `RecordDamaged`."""
        return by_place(entry for _, path in self.segments() for entry in read_entries(path))

    def messages_of_bad(self, step: int, microbatch: int) -> dict[Place, RecordedMessage]:
        """The recorded messages of a bad microbatch. Raises `RecordDamaged`."""
        return by_place(read_entries(self.bad(step, microbatch) / MESSAGES))


def by_place(entries: Iterator[RecordedMessage]) -> dict[Place, RecordedMessage]:
    """Entries by the message that they hold. Of a message that was recorded twice the later entry counts: a run may
    have been resumed with other software, and bits."""
    headers = ((entry, entry.header) for entry in entries)
    return {(e.direction, QueueKey(h.flow, h.stage), h.step, h.microbatch): e for e, h in headers}


def _read(path: Path, kind: type[Kind], absent: str) -> Kind:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError as error:
        raise NotRecorded(absent) from error
    except (OSError, ValueError) as error:
        raise RecordDamaged(f"{path} is damaged: {error}") from error
