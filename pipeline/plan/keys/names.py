"""Names in refusals: the one that was probably meant, and the type of a value in the terms of a plan file."""

import difflib
from collections.abc import Collection, Mapping

_TYPES: tuple[tuple[type, str], ...] = (
    (type(None), "None"),
    (bool, "true or false"),  # before int: Python's bool is one
    (int, "a whole number"),
    (float, "a number"),
    (str, "text"),
    (Mapping, "a table"),
    (list, "a list"),
    (tuple, "a list"),
)


def nearest(name: str, names: Collection[str]) -> str:
    """Return a question that names the one of `names` that was probably meant by `name`; "" if none is near."""
    near = difflib.get_close_matches(name, names, 1)
    return f'did you mean "{near[0]}"?' if near else ""


def hint(name: str, names: Collection[str]) -> str:
    """Return `nearest` in parentheses after a blank, to go on with a sentence about `name`; "" if none is near."""
    near = nearest(name, names)
    return f" ({near})" if near else ""


def name_of(value: object) -> str:
    """Return the type of `value` in the terms of a plan file."""
    return next((name for kind, name in _TYPES if isinstance(value, kind)), f"an object of type {type(value).__name__}")
