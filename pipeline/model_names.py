"""Search among the names in a model, with patterns or for names that are near.

"encoder.*.bias"      matches encoder.0.bias and encoder.layer.40.bias: as in a shell, but `*` matches dots too
"""

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

_SHOWN = 4  # names in an error


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return True if any of `patterns` matches `name`, by the rules of `fnmatch.fnmatchcase`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def unmatched(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the `patterns` that match none of `names`."""
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]


def hint(pattern: str, names: Sequence[str]) -> str:
    """Return a sentence for an error: what to write in place of `pattern`, which matches no parameter in `names`."""
    if any(name.startswith(f"{pattern}.") for name in names):
        return f'It names a module: write "{pattern}.*" for its parameters'
    return f"Parameters have names such as {near(pattern, names)}" if names else "The model has no parameters"


def near(name: str, names: Sequence[str]) -> str:
    """Return the nearest of `names` to `name` as text for an error, or the first few if none is near."""
    return ", ".join(difflib.get_close_matches(name, names, _SHOWN, cutoff=0.4) or names[:_SHOWN])
