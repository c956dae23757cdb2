"""Reading of plans: from a file or a mapping, the environment and `--set`.

text -> tables -> settings, the later over the earlier -> keys, one by one -> checks of the whole -> plan

The rows in `schedule.file` become part of the plan, as `schedule.rows`, so that all processes of a run have the same
rows. So do the rows that a user's function returns, once all else of the plan is found right.

All errors are found at once: first each key by its model, then the keys with each other.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from stageline.pipeline.printable import is_utf8
from stageline.pipeline.schedule import rows_of

from .checks import problems
from .errors import PlanError, PlanRefused, Reason, shown
from .keys.key_types import Accepts
from .keys.models import TABLES, PlanTables, by_number, section
from .keys.names import nearest
from .plan import GivenValue, Plan, almost_named, from_environment, from_set, long_key, merged
from .tables import (
    LONGEST_PLAN,
    LONGEST_SCHEDULE,
    Key,
    dotted,
    flat,
    leaves,
    lines_of,
    nested,
    place,
    read_text,
    tables_in,
)

FILE_NAME = "stageline.toml"
_MISSING = f"there is no such file; name a plan, or a folder that holds a {FILE_NAME}; `stageline init` writes one"
_REQUIRED = ("model", "data", "optimizer")  # an absent one is read as empty: each missing key is named
_NAME, _FILE, _ROWS = ("schedule", "name"), ("schedule", "file"), ("schedule", "rows")
_MOST_FAULTS = 100  # faults that an error names; it counts the others
RowsOf = Callable[[Plan], Sequence[str]]  # the rows of the schedule that a function of the user's lists
_NOTHING: Mapping[str, str] = MappingProxyType({})


def read_plan(
    path: str | Path,
    *,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] = _NOTHING,
    rows_of_function: RowsOf | None = None,
) -> Plan:
    """Return the plan that a TOML file, environment variables and `--set` arguments make.

    Args:
        path: The TOML file, or a folder that has a stageline.toml.
        sets: Arguments of `--set`, `section.key=value`; they overrule `environment`.
        environment: Variables STAGELINE_SECTION__KEY; they overrule the file.
        rows_of_function: Called for a schedule that a user's function lists, which is refused without it;
            `pipeline.model.own_schedule` has the one that loads the function.

    Raises:
        PlanRefused: The plan is wrong; the error names everything that is wrong.
    """
    file = Path(path)
    try:
        if not is_utf8(str(file.absolute())):
            raise _refused(ascii(str(file.absolute())), "this path is not UTF-8, as records are: rename its folders")
        file = file / FILE_NAME if file.is_dir() else file
        text = read_text(file, LONGEST_PLAN)
        tables = tables_in(text)
    except FileNotFoundError:
        raise _refused(file, _MISSING) from None
    except OSError as error:  # a name that is too long
        raise _refused(file, f"it cannot be read: {error.strerror}") from error
    except ValueError as error:  # also of a name that no file can have
        raise _refused(file, str(error)) from error
    return _plan(tables, file, lines_of(text), sets, environment, rows_of_function, reads=True)


def from_mapping(
    tables: Mapping[str, object],
    *,
    file: str | Path | None = None,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] = _NOTHING,
    rows_of_function: RowsOf | None = None,
) -> Plan:
    """Return the plan that `tables`, shaped like a plan file, make. No file is read.

    Args:
        tables: Nested tables, such as those that `Plan.as_mapping` returns.
        file: The file from whose folder the plan's paths start; the file need not exist.
        sets: Arguments of `--set`, `section.key=value`; they overrule `environment`.
        environment: Variables STAGELINE_SECTION__KEY; they overrule `tables`.
        rows_of_function: Called for a schedule that a user's function lists, which is refused without it.

    Raises:
        PlanRefused: The plan is wrong; the error names everything that is wrong.
    """
    return _plan(tables, None if file is None else Path(file), {}, sets, environment, rows_of_function)


def _plan(
    tables: Mapping[str, object],
    file: Path | None,
    lines: Mapping[Key, int],
    sets: Sequence[str],
    environment: Mapping[str, str],
    rows_of_function: RowsOf | None,
    *,
    reads: bool = False,
) -> Plan:
    """Return the plan of `tables` and the settings over them. With `reads`, the file in `schedule.file` is read."""
    name = str(file or "")
    path = None if file is None else file.absolute()
    folder = re.sub(r"\W+", "-", path.parent.name if path else "").strip("-")  # as far as it makes the run's name
    default = GivenValue(("run", "name"), folder or "run", "default")
    written = [
        GivenValue(long_key(key, value), value, "file", place(name, lines, key)) for key, value in leaves(tables)
    ]
    typed = [from_set(argument) for argument in sets]
    chosen = [each for each in typed if isinstance(each, GivenValue)]
    errors = [*(each for each in typed if isinstance(each, PlanError)), *almost_named(environment)]
    settings = merged(default, written, [*from_environment(environment), *chosen])
    if reads and path is not None:
        settings, unread = _with_rows(settings, path.parent)
        return _Given(settings, name, lines).plan(path, rows_of_function, errors, unread)
    return _Given(settings, name, lines).plan(path, rows_of_function, errors)


def _with_rows(settings: dict[Key, GivenValue], folder: Path) -> tuple[dict[Key, GivenValue], dict[Key, PlanError]]:
    """Return the settings with the rows in `schedule.file`, relative to `folder`, and why that file cannot be read."""
    given = settings.get(_FILE)
    if given is None or not isinstance(given.value, str):
        return settings, {}
    if _ROWS in settings:
        return settings, {_FILE: _unread(given, "schedule.rows is given too; keep one of the two")}
    try:
        rows = rows_of(read_text(folder / given.value, LONGEST_SCHEDULE))
    except OSError as error:
        return settings, {_FILE: _unread(given, f"{folder / given.value} cannot be read: {error.strerror}")}
    except ValueError as error:  # also of a name that no file can have
        return settings, {_FILE: _unread(given, f"{folder / given.value}: {error}")}
    return {**settings, _ROWS: GivenValue(_ROWS, list(rows), given.origin, given.where)}, {}


def _unread(given: GivenValue, reason: str) -> PlanError:
    return PlanError(dotted(given.key), reason, given.where, shown(given.value))


def _refused(file: Path | str, reason: str) -> PlanRefused:
    return PlanRefused([PlanError("", reason, str(file))])


@dataclass(frozen=True, slots=True)
class _Given:
    """The settings that hold, with the places that set them.

    Attributes:
        settings: The settings by key.
        name: The name of the plan file in errors; "" if there is none.
        lines: The line of each key in the plan file.
    """

    settings: Mapping[Key, GivenValue]
    name: str
    lines: Mapping[Key, int]

    def plan(
        self,
        file: Path | None,
        rows_of_function: RowsOf | None,
        errors: Iterable[PlanError] = (),
        unread: Mapping[Key, PlanError] = MappingProxyType({}),
    ) -> Plan:
        """Return the plan that the settings make, read from `file`.

        Raises `PlanRefused` with `errors`, the errors of the keys in `unread`, and all others. Raises what
        `rows_of_function` raises.
        """
        tables = {
            **{name: {} for name in _REQUIRED},
            **nested((key, setting.value) for key, setting in self.settings.items()),
        }
        faults = {**self._faults(tables), **unread}
        sound = self._sound_part(tables, faults).with_known_stages()
        plan = Plan.model_construct(**dict(sound), file=file)
        found, refused = [*errors, *faults.values()], [dotted(key) for key in faults]
        if rows_of_function and plan.schedule.is_function and plan.schedule.rows is None:
            self._demand_agreement(plan, [*refused, dotted(_ROWS)], found)
            rows = tuple(rows_of_function(plan))
            plan = plan.model_copy(update={"schedule": plan.schedule.model_copy(update={"rows": rows})})
        self._demand_agreement(plan, refused, found)
        values = flat(plan.as_mapping())
        set_by = {dotted(key): setting.origin for key, setting in self.settings.items()}
        if plan.schedule.is_function:
            set_by.setdefault(dotted(_ROWS), set_by[dotted(_NAME)])
        origins = {key: set_by.get(key, "default") for key in values}
        tables_at = {dotted(key): place(self.name, self.lines, key) for key in self.lines}
        set_at = {dotted(key): setting.where for key, setting in self.settings.items() if setting.where}
        return plan.model_copy(update={"origins": origins, "places": {**tables_at, **set_at}})

    def _demand_agreement(self, plan: Plan, refused: Sequence[str], found: Sequence[PlanError]) -> None:
        """Raise `PlanRefused` if `found` has errors, or if keys of `plan` that are not `refused` disagree."""
        values = flat(plan.as_mapping())
        wrong = [
            self._error(tuple(problem.key.split(".")), problem.told, values.get(problem.key))
            for problem in problems(plan, refused)
        ]
        if found or wrong:
            raise PlanRefused([*found, *wrong])

    def _faults(self, tables: dict[str, Any]) -> dict[Key, PlanError]:
        """Return an error for each refused key.

        Changes `tables` where a typed text only looked like something else, as in run.name=7.
        """
        faults = self._invalid(tables)
        texts = {key: text for key in faults if (text := self._as_text(key)) is not None}
        for key, text in texts.items():
            _table_around(tables, key)[key[-1]] = text
        still = self._invalid(tables) if texts else faults
        return (
            {key: fault for key, fault in faults.items() if key in still}
            | self._misnumbered(tables)
            | self._unnumbered(tables)
        )

    def _as_text(self, key: Key) -> str | None:
        if (setting := self.settings.get(key)) is None or len(key) == 1:
            return None
        # As an argument, nan or inf would be taken as text, which no factory knows what to do with.
        number = isinstance(setting.value, float) and not math.isfinite(setting.value)
        return None if number and key[-1] not in section(key[0]).model_fields else setting.text

    def _invalid(self, tables: Mapping[str, Any]) -> dict[Key, PlanError]:
        """Return the errors of the models, by key."""
        try:
            PlanTables.model_validate(tables)
        except ValidationError as error:
            every = error.errors(include_url=False)
            found = [(_key(each["loc"], tables), each) for each in every[:_MOST_FAULTS]]
            faults = {key: self._fault(key, each) for key, each in found}
            if len(every) > _MOST_FAULTS:
                more = PlanError("", f"{len(every) - _MOST_FAULTS} more keys are refused", self.name)
                raise PlanRefused([*faults.values(), more]) from None
            return faults
        return {}

    def _fault(self, key: Key, error: ErrorDetails) -> PlanError:
        match error["type"]:
            case "missing":
                what = next(each.what for each in _field(key).metadata if isinstance(each, Accepts))
                return self._error(key, f"missing; expected {what}")
            case "extra_forbidden" if len(key) == 1:
                hint = nearest(key[0], PlanTables.model_fields) or f"the tables are {', '.join(TABLES)}"
                return self._error(key, f"there is no such table; {hint}")
            case "extra_forbidden":
                return self._error(key, f"there is no such key; {_meant(key)}")
            case "string_pattern_mismatch":
                return self._error(key, f"stages are numbered from 0: write [{key[0]}.0], [{key[0]}.1]")
            case "value_error":
                return self._error(key, str(error["ctx"]["error"]), error["input"])
            case _:  # not a table
                header = "workers.0" if key == ("workers",) else dotted(key)
                return self._error(key, f"this is a table: write [{header}], and its keys below", error["input"])

    def _misnumbered(self, tables: Mapping[str, Any]) -> dict[Key, PlanError]:
        workers = tables.get("workers", {})
        if not isinstance(workers, Mapping):
            return {}
        numbers = [str(number) for number in range(len(workers))]
        if set(numbers) == set(workers):
            return {}
        wanted = ", ".join(f"[workers.{number}]" for number in numbers)
        return {("workers",): self._error(("workers",), f"workers are numbered from 0 without gaps: {wanted}")}

    def _unnumbered(self, tables: Mapping[str, Any]) -> dict[Key, PlanError]:
        """Return an error for each table [stage.NAME] whose name is not the number of a stage."""
        stages = tables.get("stage", {})
        names = [name for name in stages if not _STAGE.fullmatch(name)] if isinstance(stages, Mapping) else []
        reason = "stages are numbered from 0, as in [stage.1]"
        return {("stage", name): self._error(("stage", name), reason) for name in names}

    def _sound_part(self, tables: dict[str, Any], faults: Iterable[Key]) -> PlanTables:
        """Return the part of `tables` that is not refused.

        An example stands in for a required key that is refused; no check reads it.
        """
        for key in faults:
            _table_around(tables, key).pop(key[-1], None)
        tables = {**{name: {} for name in _REQUIRED}, **tables}
        for key in self._invalid(tables):
            _table_around(tables, key)[key[-1]] = next(iter(_field(key).examples or ()))
        return PlanTables.model_validate(tables)

    def _error(self, key: Key, reason: Reason, value: object = None) -> PlanError:
        """Return an error with the place that set `key`; `value` is None where the key itself is wrong."""
        exactly = [self.settings[key].where] if key in self.settings else []
        inside = (setting.where for name, setting in self.settings.items() if name[: len(key)] == key)
        where = next(chain(exactly, inside), place(self.name, self.lines, key))
        return PlanError(dotted(key), reason, where, "" if value is None else shown(value))


_STAGE = re.compile("0|[1-9][0-9]{0,3}")


def _key(loc: tuple[int | str, ...], tables: Mapping[str, Any]) -> Key:
    match loc:
        case "workers", int(place), *rest:
            return ("workers", by_number(tables["workers"])[place], *map(str, rest))
        case (*rest, "[key]"):  # a wrong number in a table of numbered tables
            return tuple(map(str, rest))
        case _:
            return tuple(map(str, loc))


def _field(key: Key) -> FieldInfo:
    fields = PlanTables.model_fields if len(key) == 1 else section(key[0]).model_fields
    return fields[key[-1]]


def _meant(key: Key) -> str:
    *path, name = key
    known = section(key[0]).model_fields
    if name in PlanTables.model_fields.keys() - TABLES:
        return f"write {name} before the first table of the plan, such as [run]"
    if near := nearest(name, known):
        return near
    for table in TABLES:
        if table != "workers" and name in section(table).model_fields:
            return f"did you mean {table}.{name}?"
    if "options" in known:
        return f"arguments for the factory go into [{dotted(path)}.options]"
    return f"there are {', '.join(known)}"


def _table_around(tables: dict[str, Any], key: Key) -> dict[str, Any]:
    for name in key[:-1]:
        tables = tables[name]
    return tables
