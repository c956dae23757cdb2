"""Settings of a plan before they are merged: from a file, the environment and `--set`; and which overrules which."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stageline.pipeline.addresses import masked

from .errors import PlanError
from .keys.models import TABLES, section
from .plan import Origin
from .tables import FileUnreadable, Key, dotted, tables_in

PREFIX = "STAGELINE_"
_TABLES = [name for name in TABLES if name not in ("stage", "workers")]  # these two have a number
_SHORT: dict[Key, Key] = {("memory",): ("memory", "limit")}  # the key that is meant if a table is written as one value
# Two keys for one thing: a higher origin that sets one overrules a lower origin that set the other.
_RIVALS: dict[Key, Key] = {
    ("run", "steps"): ("run", "epochs"),
    ("run", "epochs"): ("run", "steps"),
    ("data", "source"): ("data", "dataset"),
    ("data", "dataset"): ("data", "source"),
    ("model", "cut"): ("model", "stages"),
    ("model", "stages"): ("model", "cut"),
    ("schedule", "file"): ("schedule", "rows"),
    ("schedule", "rows"): ("schedule", "file"),
}


@dataclass(frozen=True, slots=True)
class GivenValue:
    """The value that one source gives to one key.

    Attributes:
        key: The key.
        value: The value as given.
        origin: The kind of source that gave it.
        where: The place that gave it; "" if there is none.
        text: The value as typed; None if it came as TOML.
    """

    key: Key
    value: object
    origin: Origin
    where: str = ""
    text: str | None = None


def from_environment(environment: Mapping[str, str]) -> Iterator[GivenValue]:
    """Yield the settings among environment variables, sorted by name: STAGELINE_SECTION__KEY sets section.key.

    Names of keys are taken in lower case.
    """
    for name, text in sorted(environment.items()):
        key = tuple(name.removeprefix(PREFIX).lower().split("__"))
        if name.startswith(PREFIX) and len(key) > 1:
            yield GivenValue(key, _toml(text), "environment", name, text)


def almost_named(environment: Mapping[str, str]) -> Iterator[PlanError]:
    """Yield an error for each variable that names a key with one underscore in place of two: it would set nothing."""
    meant = {_joined(name, key, "_"): (name, key) for name in _TABLES for key in section(name).model_fields}
    for name in sorted(meant.keys() & environment.keys()):
        yield PlanError(dotted(meant[name]), f"expected two underscores: {_joined(*meant[name], '__')}", name)


def _joined(table: str, key: str, between: str) -> str:
    return f"{PREFIX}{table}{between}{key}".upper()


def from_set(argument: str) -> GivenValue | PlanError:
    """Return the setting that `--set section.key=value` makes, or the error of a malformed `argument`."""
    name, equals, text = argument.partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if not equals or not all(key):
        return PlanError(masked(argument), "write section.key=value, such as run.steps=20", "--set")
    value = _toml(text.strip())
    return GivenValue(long_key(key, value), value, "--set", "--set", text.strip())


def long_key(key: Key, value: object) -> Key:
    """Return the key that `key` stands for, if a table is written as one value: `memory = "2GiB"` sets memory.limit."""
    return key if isinstance(value, Mapping) else _SHORT.get(key, key)


def merged(default: GivenValue, written: Sequence[GivenValue], typed: Iterable[GivenValue]) -> dict[Key, GivenValue]:
    """Return the settings that hold, by key.

    Args:
        default: The default of the run's name.
        written: Settings of a file; none of them overrules another.
        typed: Settings of the environment and of `--set`, in order; each overrules those before it and those in
            `written`.
    """
    held = {} if any(overrules(each, default) for each in written) else {default.key: default}
    held |= {setting.key: setting for setting in written}
    for setting in typed:
        held = {key: earlier for key, earlier in held.items() if not overrules(setting, earlier)}
        held[setting.key] = setting
    return held


def overrules(later: GivenValue, earlier: GivenValue) -> bool:
    """Return True if `later` replaces `earlier`.

    A setting replaces another of the same key, of a table around it or of a key in it. A setting of another origin also
    replaces its rival, a second key for one thing, such as run.steps and run.epochs.
    """
    shared = min(len(later.key), len(earlier.key))
    rivals = _RIVALS.get(later.key) == earlier.key and later.origin != earlier.origin
    return rivals or later.key[:shared] == earlier.key[:shared]


def _toml(text: str) -> object:
    """Return the value that `text` writes in TOML, or `text` itself if it writes none: text needs no quotes."""
    try:
        tables = tables_in(f"value = {text}")
    except FileUnreadable:
        return text
    return tables["value"] if len(tables) == 1 else text
