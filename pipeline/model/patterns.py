"""Patterns of names in a model, as `fnmatch.fnmatchcase` has them: `*` matches dots too."""

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

_NEAR = 3  # names that a refusal gives


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of `patterns` matches."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def unmatched(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of `patterns` that match none of `names`."""
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]


def near_names(pattern: str, names: Sequence[str]) -> str:
    """The names that were probably meant, or the first ones; for people."""
    return ", ".join(difflib.get_close_matches(pattern, names, _NEAR, 0.4) or names[:_NEAR])
