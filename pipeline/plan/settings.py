"""Which origin sets a key: `--set` over the environment over the file over the default."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .lines import place
from .plan import Origin
from .tables import Key, leaves

PREFIX = "STAGELINE_"

# Two keys for one thing: a higher origin that sets one overrules a lower origin that set the other.
_RIVALS: dict[Key, Key] = {
    ("run", "steps"): ("run", "epochs"),
    ("run", "epochs"): ("run", "steps"),
    ("model", "cut"): ("model", "stages"),
    ("model", "stages"): ("model", "cut"),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One key's value as given, by whom, and where. `text` is the value as typed, None if it came as TOML."""

    key: Key
    value: object
    origin: Origin
    where: str = ""
    text: str | None = None


class NotASetting(ValueError):
    """What came after `--set` names no key and value."""


def from_tables(tables: Mapping[str, object], file: str, lines: Mapping[Key, int]) -> Iterator[Setting]:
    """The settings of a plan file's tables."""
    for key, value in leaves(tables):
        yield Setting(key, value, "file", place(file, lines, key))


def from_environment(environment: Mapping[str, str]) -> Iterator[Setting]:
    """The settings among environment variables: STAGELINE_SECTION__KEY sets section.key, in lower case."""
    for name, text in sorted(environment.items()):
        key = tuple(name.removeprefix(PREFIX).lower().split("__"))
        if name.startswith(PREFIX) and len(key) > 1:
            yield Setting(key, _toml(text), "environment", name, text)


def from_set(argument: str) -> Setting:
    """The setting that `--set section.key=value` makes. Raises `NotASetting` if it makes none."""
    name, equals, text = argument.partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if not equals or not all(key):
        raise NotASetting(argument)
    return Setting(key, _toml(text.strip()), "--set", "--set", text.strip())


def merged(settings: Iterable[Setting]) -> dict[Key, Setting]:
    """What holds after `settings`, each over the ones before it."""
    held: dict[Key, Setting] = {}
    for setting in settings:
        held = {key: earlier for key, earlier in held.items() if not _overrules(setting, earlier)}
        held[setting.key] = setting
    return held


def nested(settings: Iterable[Setting]) -> dict[str, Any]:
    """The values of `settings` as tables."""
    tables: dict[str, Any] = {}
    for setting in settings:
        *path, last = setting.key
        table = tables
        for name in path:
            table = table.setdefault(name, {})
        table[last] = setting.value
    return tables


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
