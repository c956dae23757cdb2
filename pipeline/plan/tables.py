"""Nested tables, as TOML and JSON have them, seen as one list of keys."""

import json
from collections.abc import Iterable, Iterator, Mapping

Key = tuple[str, ...]  # ("schedule", "microbatches")


def leaves(tables: Mapping[str, object]) -> Iterator[tuple[Key, object]]:
    """Every value of nested tables, with its key. An empty table is a value."""
    for name, value in tables.items():
        if isinstance(value, Mapping) and value:
            yield from (((str(name), *key), leaf) for key, leaf in leaves(value))
        else:
            yield (str(name),), value


def flat(tables: Mapping[str, object]) -> dict[str, object]:
    """Nested tables as one, by dotted key."""
    return {dotted(key): value for key, value in leaves(tables)}


def dotted(key: Iterable[str]) -> str:
    """A key as TOML writes it: names that hold a dot are quoted, so that no two keys look alike."""
    return ".".join(f'"{name}"' if "." in name else name for name in key)


def canonical(value: object) -> str:
    """JSON of `value` in its one spelling: sorted keys, no spaces, `1` apart from `1.0`."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
