"""Where a plan comes from: a file or a mapping, the environment and `--set`. The one place where a file is read.

text -> tables -> settings, the later over the earlier -> keys, one by one -> checks of the whole -> plan
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .errors import PlanError, PlanRefused
from .lines import lines_of
from .passwords import masked
from .plan import Plan
from .settings import NotASetting, Setting, from_environment, from_set, from_tables, merged
from .tables import Key
from .validation import Given

FILE_NAME = "stageline.toml"
_MISSING = f"there is no such file; name a plan, or a folder that holds a {FILE_NAME}; `stageline init` writes one"
_NOTHING: Mapping[str, str] = MappingProxyType({})


def read_plan(path: str | Path, *, sets: Sequence[str] = (), environment: Mapping[str, str] = _NOTHING) -> Plan:
    """The plan that the TOML file at `path` (or stageline.toml in that folder), `environment` and `sets` make.

    `sets` are the arguments of `--set`, `section.key=value`, and overrule `environment` (STAGELINE_SECTION__KEY),
    which overrules the file. Raises `PlanRefused`, which names all that is wrong.
    """
    file = Path(path)
    try:
        text = _text(file)
    except IsADirectoryError:
        return read_plan(file / FILE_NAME, sets=sets, environment=environment)
    return _plan(_tables(text, file), file, lines_of(text), sets, environment)


def from_mapping(
    tables: Mapping[str, object],
    *,
    file: str | Path | None = None,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] = _NOTHING,
) -> Plan:
    """The plan that `tables`, shaped like a plan file, make; no file is read, `file` says what paths are relative to.

    Takes what `Plan.as_mapping` gives. Raises `PlanRefused`, which names all that is wrong.
    """
    return _plan(tables, None if file is None else Path(file), {}, sets, environment)


def _plan(
    tables: Mapping[str, object],
    file: Path | None,
    lines: Mapping[Key, int],
    sets: Sequence[str],
    environment: Mapping[str, str],
) -> Plan:
    name = str(file or "")
    path = None if file is None else file.absolute()
    typed, errors = _typed(sets)
    settings = merged([*from_tables(tables, name, lines), *from_environment(environment), *typed])
    return Given(settings, name, lines).plan(path, _name(path), errors)


def _name(path: Path | None) -> str:
    """The run's default name: that of the plan's folder, as far as it makes a name."""
    folder = "" if path is None else path.parent.name
    return re.sub(r"\W+", "-", folder).strip("-") or "run"


def _typed(sets: Sequence[str]) -> tuple[list[Setting], list[PlanError]]:
    settings, errors = [], []
    for argument in sets:
        try:
            settings.append(from_set(argument))
        except NotASetting:
            errors.append(PlanError(masked(argument), "write section.key=value, such as run.steps=20", "--set"))
    return settings, errors


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise _refused(file, _MISSING) from None
    except IsADirectoryError:
        raise
    except OSError as error:
        raise _refused(file, f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _refused(file, f"byte {error.start} is not UTF-8, which a TOML file is written in") from error


def _tables(text: str, file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _refused(file, f"this is not TOML: {error}") from error


def _refused(file: Path, reason: str) -> PlanRefused:
    return PlanRefused([PlanError("", reason, str(file))])
