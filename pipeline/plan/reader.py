"""Where a plan comes from: a file or a mapping, the environment and `--set`. The one place where a file is read.

text -> tables -> settings, the later over the earlier -> keys, one by one -> checks of the whole -> plan
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from .addresses import masked
from .errors import PlanError, PlanRefused
from .plan import Plan
from .tables import Key, leaves, lines_of, place
from .validation import Given, Setting

FILE_NAME = "stageline.toml"
PREFIX = "STAGELINE_"
_MISSING = f"there is no such file; name a plan, or a folder that holds a {FILE_NAME}; `stageline init` writes one"
_NOTHING: Mapping[str, str] = MappingProxyType({})

# Two keys for one thing: a higher origin that sets one overrules a lower origin that set the other.
_RIVALS: dict[Key, Key] = {
    ("run", "steps"): ("run", "epochs"),
    ("run", "epochs"): ("run", "steps"),
    ("model", "cut"): ("model", "stages"),
    ("model", "stages"): ("model", "cut"),
}


def read_plan(path: str | Path, *, sets: Sequence[str] = (), environment: Mapping[str, str] = _NOTHING) -> Plan:
    """The plan that the TOML file at `path` (or stageline.toml in that folder), `environment` and `sets` make.

    `sets` are the arguments of `--set`, `section.key=value`, and overrule `environment` (STAGELINE_SECTION__KEY),
    which overrules the file. Raises `PlanRefused`, which names all that is wrong.
    """
    file = Path(path)
    try:
        file = file / FILE_NAME if file.is_dir() else file
        text = file.read_text(encoding="utf-8-sig")
        tables = tomllib.loads(text)
    except FileNotFoundError:
        raise _refused(file, _MISSING) from None
    except OSError as error:
        raise _refused(file, f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _refused(file, f"byte {error.start} is not UTF-8, which a TOML file is written in") from error
    except tomllib.TOMLDecodeError as error:
        raise _refused(file, f"this is not TOML: {error}") from error
    return _plan(tables, file, lines_of(text), sets, environment)


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
    folder = "" if path is None else path.parent.name
    run_name = re.sub(r"\W+", "-", folder).strip("-") or "run"  # the folder's name, as far as it makes one
    default = Setting(("run", "name"), run_name, "default")
    written = [Setting(key, value, "file", place(name, lines, key)) for key, value in leaves(tables)]
    typed = [_from_set(argument) for argument in sets]
    chosen = [each for each in typed if isinstance(each, Setting)]
    errors = [each for each in typed if isinstance(each, PlanError)]
    settings = _merged([default, *written, *_from_environment(environment), *chosen])
    return Given(settings, name, lines).plan(path, errors)


def _from_environment(environment: Mapping[str, str]) -> Iterator[Setting]:
    """The settings among environment variables: STAGELINE_SECTION__KEY sets section.key, in lower case."""
    for name, text in sorted(environment.items()):
        key = tuple(name.removeprefix(PREFIX).lower().split("__"))
        if name.startswith(PREFIX) and len(key) > 1:
            yield Setting(key, _toml(text), "environment", name, text)


def _from_set(argument: str) -> Setting | PlanError:
    """The setting that `--set section.key=value` makes, or what is wrong with the argument."""
    name, equals, text = argument.partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if not equals or not all(key):
        return PlanError(masked(argument), "write section.key=value, such as run.steps=20", "--set")
    return Setting(key, _toml(text.strip()), "--set", "--set", text.strip())


def _merged(settings: Iterable[Setting]) -> dict[Key, Setting]:
    """What holds after `settings`, each over the ones before it."""
    held: dict[Key, Setting] = {}
    for setting in settings:
        held = {key: earlier for key, earlier in held.items() if not _overrules(setting, earlier)}
        held[setting.key] = setting
    return held


def _overrules(later: Setting, earlier: Setting) -> bool:
    shared = min(len(later.key), len(earlier.key))
    rivals = _RIVALS.get(later.key) == earlier.key and later.origin != earlier.origin
    return rivals or later.key[:shared] == earlier.key[:shared]


def _toml(text: str) -> object:
    """The value that `text` writes in TOML, or `text` itself if it writes none: text needs no quotes."""
    try:
        tables = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return tables["value"] if len(tables) == 1 else text


def _refused(file: Path, reason: str) -> PlanRefused:
    return PlanRefused([PlanError("", reason, str(file))])
