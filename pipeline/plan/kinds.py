"""The kinds of value a key of the plan may hold: what each takes, what it makes of it, and how it words its wants."""

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Generic, Literal, TypeVar

from . import urls

T = TypeVar("T")

_LARGEST = 2**63 - 1  # TOML's integers have 64 bits
_MOST_STAGES = 1024  # a slip of the finger shall not make a billion workers, nor a list of a billion actions
_MOST_MICROBATCHES = 65536
_SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_TIMES = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)")
_DEVICE = re.compile(r"[a-z]+(:\d+)?")
_REFERENCE = re.compile(r".+\.py:\w+|\w+(\.\w+)+")


class Unfit(ValueError):
    """A value is not of the kind that its key wants: the text says what is wanted."""


@dataclass(frozen=True, slots=True)
class KeyKind(Generic[T]):
    """`read` takes a value of one of `types` and gives what the plan keeps of it, or raises `Unfit` with a hint."""

    wanted: str
    types: tuple[type, ...]
    read: Callable[..., T]

    def fit(self, value: object) -> T:
        """What the plan keeps of `value`. Raises `Unfit`, saying what is wanted and, for a wrong type, what this is."""
        if not self._takes(value):
            raise Unfit(f"{self.wanted} is wanted, this is {name_of(value)}")
        try:
            return self.read(value)
        except Unfit as hint:
            raise Unfit("; ".join(part for part in (f"{self.wanted} is wanted", str(hint)) if part)) from None

    def _takes(self, value: object) -> bool:
        # `True` is an int to Python, though to nobody who writes a plan.
        return bool in self.types if isinstance(value, bool) else isinstance(value, self.types)


def name_of(value: object) -> str:
    """The type of `value` in the words of a plan file."""
    match value:
        case None:
            return "None"
        case bool():
            return "true or false"
        case int():
            return "a whole number"
        case float():
            return "a number"
        case str():
            return "text"
        case Mapping():
            return "a table"
        case list() | tuple():
            return "a list"
        case _:
            return f"a {type(value).__name__}"


def nearest(name: str, names: Collection[str]) -> str:
    """A question naming the one of `names` that was probably meant; "" if none is near."""
    near = difflib.get_close_matches(name, names, 1)
    return f'did you mean "{near[0]}"?' if near else ""


def whole(least: int, most: int = _LARGEST) -> KeyKind[int]:
    """A whole number, at least `least` and at most `most`."""

    def read(value: int) -> int:
        _want(least <= value <= most)
        return value

    return KeyKind(f"a whole number from {least} {'on' if most == _LARGEST else f'to {most}'}", (int,), read)


def choice(names: Collection[str]) -> KeyKind[str]:
    """One of `names`."""

    def read(value: str) -> str:
        _want(value in names, nearest(value, names))
        return value

    return KeyKind(either([f'"{name}"' for name in names]), (str,), read)


def either(names: Sequence[str]) -> str:
    """`names` in a row, the last after "or"."""
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def url(schemes: Mapping[str, str], *names: str) -> KeyKind[str]:
    """An address of one of `schemes`, each given with an example; or one of `names`."""

    def read(value: str) -> str:
        fault = None if value in names else urls.fault(value, schemes)
        _want(fault is None, fault or "")
        return value

    return KeyKind(either([f'"{example}"' for example in (*names, *schemes.values())]), (str,), read)


def several(each: KeyKind[T], wanted: str, *, least: int = 0) -> KeyKind[tuple[T, ...]]:
    """A list of `each`, with at least `least` entries."""

    def read(values: Sequence[object]) -> tuple[T, ...]:
        _want(len(values) >= least)
        return tuple(each.fit(value) for value in values)

    return KeyKind(wanted, (list, tuple), read)


def matching(pattern: re.Pattern[str], wanted: str) -> KeyKind[str]:
    """Text in which all of `pattern` is found."""

    def read(value: str) -> str:
        _want(pattern.fullmatch(value) is not None)
        return value

    return KeyKind(wanted, (str,), read)


def _want(true: bool, hint: str = "") -> None:
    if not true:
        raise Unfit(hint)


def _read_cut(value: str | Sequence[object]) -> tuple[int, ...] | Literal["auto"]:
    if isinstance(value, str):
        _want(value == "auto")
        return "auto"
    layers = tuple(_LAYER.fit(layer) for layer in value)
    _want(bool(layers) and all(before < after for before, after in pairwise(layers)))
    return layers


def _read_size(value: int | str) -> int:
    size = value if isinstance(value, int) else int(_quantity(value, _SIZES))
    _want(1 <= size <= _LARGEST)
    return size


def _read_seconds(value: float | str) -> float:
    seconds = _quantity(value, _TIMES) if isinstance(value, str) else float(value)
    _want(0 < seconds < math.inf)
    return seconds


def _quantity(text: str, units: Mapping[str, float]) -> float:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None or found[2] not in units:
        raise Unfit(f"units are {', '.join(units)}")
    return float(found[1]) * units[found[2]]


def _read_options(table: Mapping[object, object]) -> dict[str, object]:
    return {str(name): _read_named(str(name), value) for name, value in table.items()}


def _read_named(name: str, value: object) -> object:
    try:
        return _read_option(value)
    except Unfit as hint:
        raise Unfit(f"{name}: {hint}") from None


def _read_option(value: object) -> object:
    match value:
        case bool() | str():
            return value
        case int():
            _want(abs(value) <= _LARGEST, "a whole number has at most 64 bits")
            return value
        case float():
            _want(math.isfinite(value), f"{value} is not a finite number")
            return value
        case list() | tuple():
            return [_read_option(each) for each in value]
        case Mapping():
            return _read_options(value)
        case _:
            raise Unfit(f"{name_of(value)} does not travel: write it as text, and read it in the factory")


_LAYER = whole(1)

NAME = matching(re.compile(r"\w[\w.-]*"), "a name of letters, digits and - _ .")
NUMBER_OF_STAGES = whole(1, _MOST_STAGES)
MICROBATCHES = whole(1, _MOST_MICROBATCHES)
REFERENCE = matching(_REFERENCE, 'a name in a file or a package, such as "model.py:build" or "torch.optim.SGD",')
REFERENCES = several(REFERENCE, 'a list such as ["metrics.py:accuracy"]')
DEVICE = matching(_DEVICE, 'a device such as "cpu" or "cuda:0"')
FOLDER = KeyKind("a folder", (str, Path), Path)
SIZE = KeyKind('a size in bytes, such as 1048576 or "512MiB",', (int, str), _read_size)
SECONDS = KeyKind('a time in seconds, such as 10, "10s" or "250ms",', (int, float, str), _read_seconds)
CUT = KeyKind('"auto" or a list of ascending layer numbers from 1 on, such as [2, 4],', (str, list, tuple), _read_cut)
STAGES = several(whole(0, _MOST_STAGES - 1), "a list of stages such as [0, 2]", least=1)
WINDOW = several(whole(1), "a list with one whole number from 1 on for each stage, such as [4, 2],", least=1)
OPTIONS = KeyKind("a table of arguments", (Mapping,), _read_options)
OPTION = KeyKind("an argument that TOML can write", (bool, object), _read_option)
