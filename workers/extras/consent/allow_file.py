"""The file in which the owner of data allows plans: each entry has a plan's digest, its code and its data sources.

    [[allow]]
    name = "scans"
    plan = "2f3a33c1..."                       # changes with each key of the plan
    asked_by = "Anna, at the lab"
    until = 2026-12-31                         # the last day
    sources = ["data.py:batches"]

    [allow.code]
    "data.py" = "5fa0c1d2..."                  # changes with each letter of the file

    [allow.keys]                               # what the plan sets, to be read
    "run.epochs" = 5

A plan is allowed if an entry has its digest and no line of the entry disagrees. A file that is missing or empty allows
nothing.
"""

import json
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stageline.pipeline.errors import ExitCode, ModelRefused, StagelineError
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.difference import counted
from stageline.pipeline.plan.errors import shown
from stageline.pipeline.plan.tables import LONGEST_PLAN, FileUnreadable, canonical, flat, read_text, tables_in

from .code_files import CodeFile, code_files

RECORD = "data-use.jsonl"
SHORT = 16  # digits of a digest in a message
_LISTED = 8  # differences that a message names
_ADDRESSES = frozenset({"broker.url", "broker.store", "queues.url"})

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class AllowFileWrong(StagelineError):
    """Error that a file of consent cannot be read. Nothing is allowed then.

    Mend: Correct what the message names; `stageline allow` prints entries in the right form.

    Example: allow.toml: entry 1: Object missing required field `plan`. Nothing is allowed until this is corrected
    """

    error_code = "SL610"
    exit_code = ExitCode.REFUSED


class NoConsent(StagelineError):
    """Error that the owner of the data on this machine has not allowed a plan, a file of its code, or a data source.

    Mend: Nothing was opened. Read what the message names. If you own the data and allow it, add the entry that
    `stageline allow` prints to the file; otherwise ask the owner.

    Example: plan scans is not allowed by allow.toml: model.py is not the file that was allowed (SHA-256
    5fa0c1d2aa1037fe here, 9b0e44d1c7f3b208 there). Nothing was opened. If you allow it, add what this prints to that
    file: stageline allow stageline.toml
    """

    error_code = "SL611"
    exit_code = ExitCode.REFUSED


class Allowance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Entry of the file.

    Attributes:
        name: Name of the plan.
        plan: Digest of the plan.
        sources: Names of the data sources that may be opened.
        code: SHA-256 (hex) of each file of code that may be imported, by its path from the plan's folder.
        keys: What the plan sets, by dotted key.
        asked_by: Name of who asked for it.
        until: Last day on which it holds. None for no end.
    """

    name: Text
    plan: Digest
    sources: tuple[Text, ...] = ()
    code: dict[str, Digest] = {}
    keys: dict[str, Any] = {}
    asked_by: str = ""
    until: date | None = None

    def faults(self, plan: Plan, code: Mapping[str, CodeFile], today: date) -> Iterator[str]:
        """Yield each way in which `plan` is another than the entry's.

        Args:
            plan: Plan to compare.
            code: Files that the plan imports, by their names in entries.
            today: Today's date here.
        """
        if self.ended(today):
            yield f"it was allowed until {self.until}"
        yield from self._other_keys(plan)
        for name, file in code.items():
            if name not in self.code:
                yield f"{name} is imported and not listed"
            elif file.sha256 != self.code[name]:
                found = "no file" if file.sha256 is None else f"SHA-256 {file.sha256[:SHORT]}"
                yield f"{name} is not the file that was allowed ({found} here, {self.code[name][:SHORT]} there)"

    def ended(self, today: date) -> bool:
        """Return True if the entry's last day is over."""
        return self.until is not None and today > self.until

    def _other_keys(self, plan: Plan) -> Iterator[str]:
        """Yield the keys in which `plan` is another; for an unknown difference, its digest."""
        settings, here, same = flat(plan.as_mapping()), keys_of(plan), plan.digest() == self.plan
        all_of_it = {**settings, **here}
        other = [key for key in self.keys if _differs(all_of_it.get(key), self.keys[key])]
        unlisted = [key for key in here if key not in self.keys]
        other += unlisted if self.keys and not same else [key for key in unlisted if key in _ADDRESSES]
        yield from (f"{key} is {_said(all_of_it.get(key))} here, {_said(self.keys.get(key))} there" for key in other)
        if not (same or other):
            yield f"its digest is {plan.digest()[:SHORT]} here, {self.plan[:SHORT]} there"


class AllowFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of the file: its entries, and the file of the record of use, from the folder of this one."""

    allow: tuple[Allowance, ...] = ()
    record: Text = RECORD

    def entry_for(self, plan: Plan, file: Path, today: date) -> Allowance:
        """Return the entry that allows `plan`.

        Args:
            plan: Plan to find.
            file: Path of the file, for errors.
            today: Today's date here.

        Raises:
            NoConsent: No entry does; the text names what differs from the nearest.
        """
        code = code_files(plan)
        compared = [(entry, [*entry.faults(plan, code, today)]) for entry in self._near(plan)]
        allowed = next((entry for entry, faults in compared if not faults), None)
        if allowed is not None:
            return allowed
        if compared:
            reason = _some(min((faults for _, faults in compared), key=len))
        elif not file.exists():
            reason = "there is no such file"
        else:
            reason = f"it lists {', '.join(sorted({each.name for each in self.allow})) or 'no plan'}"
        raise NoConsent(
            f"plan {plan.run.name} is not allowed by {file}: {reason}. Nothing was opened. {_way(plan, code)}"
        )

    def _near(self, plan: Plan) -> list[Allowance]:
        """Return the entries with the digest of `plan`; without any, those with its name."""
        same = [each for each in self.allow if each.plan == plan.digest()]
        return same or [each for each in self.allow if each.name == plan.run.name]


def read_allowed(file: Path) -> AllowFile:
    """Return the contents of `file`; a missing or empty file has no entries.

    Raises:
        AllowFileWrong: The file cannot be read, is no such file, or every user of this machine may write to it.
    """
    try:
        found = file.stat().st_mode
        if stat.S_ISREG(found) and found & stat.S_IWOTH:
            raise FileUnreadable(f"every user of this machine may write to it. Run: chmod o-w {shlex.quote(str(file))}")
        return msgspec.convert(tables_in(read_text(file, LONGEST_PLAN)), AllowFile)
    except FileNotFoundError:
        return AllowFile()
    except msgspec.ValidationError as error:
        raise _wrong(file, _placed(str(error))) from error
    except OSError as error:
        raise _wrong(file, f"it cannot be read: {error.strerror}") from error
    except FileUnreadable as error:
        raise _wrong(file, str(error)) from error


def keys_of(plan: Plan) -> dict[str, object]:
    """Return the settings of `plan` that an entry lists, by dotted key.

    They are those that the plan's digest counts and that are no defaults, and the addresses in the plan's file, to
    which activations would go. Addresses on the command line are the owner's own.
    """
    mapping = plan.as_mapping()
    found = {key: value for key, value in counted(mapping).items() if plan.origins.get(key, "default") != "default"}
    written = {key for key in _ADDRESSES if plan.origins.get(key) == "file"}
    return found | {key: value for key, value in flat(mapping).items() if key in written}


def sources_of(plan: Plan) -> list[str]:
    """Return the names of the data sources that a process may open for `plan`."""
    data = plan.data
    return [each for each in (data.source, data.dataset, data.held_out, data.targets) if each is not None]


def entry_text(plan: Plan, asked_by: str = "", until: date | None = None) -> str:
    """Return the entry that allows `plan` with the code that is here now, as text for the file.

    Args:
        plan: Plan to allow.
        asked_by: Name of who asked for it.
        until: Last day. None for no end.

    Raises:
        ModelRefused: A file of code that the plan names cannot be read.
    """
    code = code_files(plan)
    if missing := _missing(code):
        raise ModelRefused(f"{missing}, which plan {plan.run.name} names, is no file here that can be read")
    lines = [
        "[[allow]]",
        f"name = {_toml(plan.run.name)}",
        f'plan = "{plan.digest()}"',
        f"asked_by = {_toml(asked_by)}",
        *([] if until is None else [f"until = {until}"]),
        f"sources = {_toml(sources_of(plan))}",
        *_table("allow.code", {name: file.sha256 for name, file in code.items()}),
        *_table("allow.keys", keys_of(plan)),
    ]
    return "\n".join(lines)


def _missing(code: Mapping[str, CodeFile]) -> str:
    """Return the name of a file of code that is not here, "" if all are."""
    return next((name for name, file in code.items() if file.sha256 is None), "")


def _table(name: str, values: Mapping[str, object]) -> list[str]:
    return ["", f"[{name}]", *(f"{_toml(key)} = {_toml(value)}" for key, value in values.items())]


def _toml(value: object) -> str:
    """Return a value as TOML writes it: as JSON does, but for tables. What is not printable is escaped."""
    match value:
        case Mapping():
            return "{" + ", ".join(f"{_toml(str(key))} = {_toml(each)}" for key, each in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case _:
            return "".join(map(_escaped, json.dumps(value, ensure_ascii=False)))


def _escaped(sign: str) -> str:
    return sign if sign.isprintable() else f"\\U{ord(sign):08x}"


def _differs(here: object, there: object) -> bool:
    return canonical(here) != canonical(msgspec.to_builtins(there))


def _said(value: object) -> str:
    return "not set" if value is None else shown(value)


def _some(faults: Sequence[str]) -> str:
    more = [f"and {len(faults) - _LISTED} more differences"] if len(faults) > _LISTED else []
    return "; ".join([*faults[:_LISTED], *more])


def _way(plan: Plan, code: Mapping[str, CodeFile]) -> str:
    """Return what the owner can do, with the command that names `plan`; a plan without a file was printed."""
    if missing := _missing(code):
        return f"Its file {missing} is not here, either"
    if plan.file is None:
        return "If you allow it, add the entry to that file that this process has printed"
    set_by = {key: value for key, value in keys_of(plan).items() if plan.origins[key] in ("--set", "environment")}
    sets = [word for key, value in set_by.items() for word in ("--set", f"{key}={_toml(value)}")]
    command = shlex.join(["stageline", "allow", str(from_here(plan.file)), *sets])
    return f"If you allow it, add what this prints to that file: {command}"


def from_here(file: Path) -> Path:
    """Return a path as a command line has it: from the current folder, if it is in there."""
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file


def _wrong(file: Path, reason: str) -> AllowFileWrong:
    return AllowFileWrong(f"{file}: {reason.rstrip('.')}. Nothing is allowed until this is corrected")


def _placed(text: str) -> str:
    """Return msgspec's text with the number of the entry in front, in place of a path."""
    what, _, path = text.partition(" - at `$")
    number, _, key = path.rstrip("`").removeprefix(".allow[").partition("]")
    if not path.startswith(".allow["):
        return text
    return f"entry {int(number) + 1}: {what}{f' in {key.removeprefix(chr(46))}' if key else ''}"
