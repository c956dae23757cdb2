"""An archive of a run for a bug report: a zip file of texts, bounded in size, which is read without trust.

    bundle.json     what made it, when, of which run; each file with its size and what it is; what is not in it, and why
    plan.json       settings; of arguments of the user's code, numbers alone
    doctor.json     findings about the machine: versions, memory, sockets
    status.json     answers of the broker or of the records, as `stageline status --json` prints them;
    ...             likewise why, queues, microbatches, history, timetable, and the stacks of workers that run
    logs/*.log      ends of logs, as far as stageline has written them: `end_of`

A reader takes nothing for granted: names, numbers and sizes are checked before anything is unpacked, nothing is written
to the disk, and what is in a file is only ever read as JSON.
"""

import io
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.pipeline.plan.tables import is_deeper
from stageline.workers.disk.atomic_file import create_file

MANIFEST = "bundle.json"
SCHEMA = "bundle-contents/1"
MOST_FILES = 300
LARGEST = 4 * 2**20  # bytes of one file
MOST = 48 * 2**20  # bytes of all files, unpacked
DEEPEST = 64  # tables and lists in one another
_LATEST = 4e9  # seconds since the epoch: in the year 2096
_DIRECTORY = 100_000  # bytes of the list of files in an archive: zipfile reads all of it at once
_END = struct.Struct("<4s4H2LH")  # the record at the end of an archive, in front of a comment
_FAR_END = b"PK\x06\x07"  # begins a record that may say otherwise
Name = str
LONGEST = 256 * 1024  # bytes of a log's end
_EVENT = re.compile(r"\d\d:\d\d:\d\d [^\s].*|stageline: .*")
_PLACE = re.compile(r'\s*File "[^"]*", line \d+, in .*')
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Warning|Interrupt|Exit|Stop\w*)(: .*)?")
_TRACEBACK = re.compile(
    r"\s*(Traceback \(most recent call last\):|During handling of the above exception.*|The above exception was .*)"
)


class BundleUnreadable(StagelineError):
    """Error that a file is no bundle, or one that is damaged or made to do harm.

    Mend: Ask for the file again; `stageline bundle RUN -o FILE` makes one, and the same version of stageline reads it.

    Example: report.zip is no bundle of a run: it is no zip file
    """

    error_code = "SL415"
    exit_code = ExitCode.REFUSED


class BundledFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a bundle: its size in bytes, and what it is."""

    name: str
    bytes: int
    what: str


class BundleManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Origin of a bundle.

    Attributes:
        version: Version of stageline that made it.
        made: When, in seconds since the epoch.
        run: Id of the run.
        source: "broker", or "records" if no broker answered.
        state: State of the run according to its records; "" if its broker answered.
        files: The other files.
        left_out: What is not in it, and why.
    """

    schema: str = SCHEMA
    version: str
    made: Annotated[float, msgspec.Meta(ge=0, le=_LATEST)]
    run: str
    source: str
    state: str
    files: list[BundledFile]
    left_out: list[str]


class BundleFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bundle that was written into a file of so many bytes.

    Attributes:
        files: The files in it.
        left_out: What is not in it, and why.
    """

    run: str
    file: str
    bytes: int
    files: list[BundledFile]
    left_out: list[str]


def write_bundle(path: Path, manifest: BundleManifest, files: Mapping[Name, bytes]) -> int:
    """Write a bundle that is not there yet, for this user alone; return its size in bytes.

    Raises `FileExistsError`, `OSError`.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        for name, content in files.items():
            archive.writestr(name, content)
    create_file(path, packed.getvalue(), mode=0o600)
    return len(packed.getvalue())


class Bundle:
    """A bundle whose list of files has been checked; a file is unpacked when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Open and check the archive at `path`. Raises `BundleUnreadable`, `OSError`."""
        self._path = path
        self._demand_small(path)
        try:
            with zipfile.ZipFile(path) as archive:
                self._files = {each.filename: each for each in self._checked(archive.infolist())}
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise BundleUnreadable(f"{path} is no bundle of a run: {error}") from error
        self.manifest: BundleManifest = self.read(MANIFEST, BundleManifest)
        if self.manifest.schema != SCHEMA:
            raise BundleUnreadable(f"{path} is a bundle of the form {self.manifest.schema!r}, and not {SCHEMA}")

    def __contains__(self, name: object) -> bool:
        """Return True if there is a file of this name."""
        return name in self._files

    def read(self, name: Name, kind: Any) -> Any:
        """Return the JSON in a file as a `kind`. Raises `BundleUnreadable`."""
        content = self._content(name)
        try:
            if is_deeper(msgspec.json.decode(content), DEEPEST):
                raise RecursionError(
                    f"its tables and lists are nested too deeply: {DEEPEST} in one another are the most"
                )
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BundleUnreadable(
                f"{name} in {self._path} cannot be read: {error}; the bundle may be of another version"
            ) from error

    def _content(self, name: Name) -> bytes:
        """Return a file, of which no more is unpacked than its size and one byte."""
        entry = self._files.get(name)
        if entry is None:
            raise BundleUnreadable(f"{self._path} is no bundle of a run: it has no {name}")
        try:
            with zipfile.ZipFile(self._path) as archive, archive.open(entry) as file:
                content = file.read(entry.file_size + 1)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            raise BundleUnreadable(f"{name} in {self._path} is damaged: {error}") from error
        if len(content) != entry.file_size:
            raise BundleUnreadable(f"{name} in {self._path} is not as large as it says")
        return content

    def _demand_small(self, path: Path) -> None:
        """Check how much would be read to list the files. Raises `BundleUnreadable`, `OSError`."""
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size > MOST:
                raise BundleUnreadable(f"{path} has {size} bytes; a bundle has {MOST} at most")
            file.seek(max(0, size - 2**16 - _END.size))
            end = file.read()
        at = end.rfind(b"PK\x05\x06")
        if at < 0 or len(end) - at < _END.size:
            raise BundleUnreadable(f"{path} is no bundle of a run: it is no zip file")
        *_, directory, _, _ = _END.unpack_from(end, at)
        if directory > _DIRECTORY or _FAR_END in end:
            raise BundleUnreadable(f"{path} is not to be trusted: its list of files has more than {_DIRECTORY} bytes")

    def _checked(self, entries: list[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
        """Return the entries, if all of them may be in a bundle. Raises `BundleUnreadable`."""
        if len(entries) > MOST_FILES:
            raise BundleUnreadable(f"{self._path} has {len(entries)} files; a bundle has {MOST_FILES} at most")
        for each in entries:
            if wrong := _wrong_with(each):
                raise BundleUnreadable(f"{self._path} is not to be trusted: {each.filename[:80]!r} {wrong}")
        if len({each.filename for each in entries}) < len(entries):
            raise BundleUnreadable(f"{self._path} is not to be trusted: two files in it have one name")
        if (size := sum(each.file_size for each in entries)) > MOST:
            raise BundleUnreadable(f"{self._path} would unpack to {size} bytes; a bundle has {MOST} at most")
        return entries


def is_name(name: str) -> bool:
    """Return True if a file of a bundle may have this name: one of its folder, or of the folder of logs."""
    folder, _, own = name.rpartition("/")
    plain = own.replace("-", "").replace("_", "").replace(".", "")
    return folder in ("", "logs") and plain.isascii() and plain.isalnum() and not own.startswith(".") and len(own) < 100


def _wrong_with(entry: zipfile.ZipInfo) -> str:
    if not is_name(entry.filename):
        return "is no name of a file in a bundle"
    if entry.file_size > LARGEST:
        return f"would unpack to {entry.file_size} bytes, and {LARGEST} are the most"
    if entry.flag_bits & 1:
        return "is encrypted"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "is packed in an unknown way"
    return ""


def end_of(path: Path, own_text: Callable[[str], str | None]) -> str:
    """Return the lines of stageline and of tracebacks in the last LONGEST bytes of a log; others are counted alone.

    A log has events of stageline, tracebacks, and what the user's code prints, which may be rows of data or secrets. Of
    a traceback, the places and the exception stay, and no line of code, which may have a literal in it.

    Args:
        path: The log.
        own_text: Returns a line without the time that stageline writes before it; None if it has none.

    Raises:
        OSError: The log cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LONGEST))
        content = file.read(LONGEST).decode("utf-8", "replace")
    lines = content.splitlines()
    begin = [f"[{size - LONGEST} bytes before]"] if size > LONGEST else []
    return "\n".join([*begin, *_kept(lines[1:] if size > LONGEST else lines, own_text)]) + "\n"


def _kept(lines: Iterable[str], own_text: Callable[[str], str | None]) -> Iterator[str]:
    left_out, within = 0, False  # a line that is indented goes with the event before it
    for line in lines:
        own = own_text(line)
        text = line if own is None else own
        error = any(each.fullmatch(text) for each in (_PLACE, _EXCEPTION, _TRACEBACK))  # code follows: no event
        event = not error and (own is not None or bool(_EVENT.fullmatch(text)))
        known = event or error
        if known or (within and line.startswith("    ")):
            if left_out:
                yield f"[{left_out} lines of other origin]"
            left_out, within = 0, event or (within and not known)
            yield line
        else:
            left_out, within = left_out + 1, False
    if left_out:
        yield f"[{left_out} lines of other origin]"
