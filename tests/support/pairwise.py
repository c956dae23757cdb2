"""Rows that have every pair of values of every two features, found greedily and the same each time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

Choice = tuple[str, str]  # a feature, and one of its values
Row = Mapping[str, str]
Pair = frozenset[Choice]


def pairs_of(features: Mapping[str, Sequence[str]]) -> Iterator[tuple[Choice, Choice]]:
    """Yield every pair of values of two features."""
    for one, other in combinations(features, 2):
        for first, second in product(features[one], features[other]):
            yield (one, first), (other, second)


def covering_rows(
    features: Mapping[str, Sequence[str]], is_refused: Callable[[Choice, Choice], bool]
) -> list[dict[str, str]]:
    """Return rows with a value of each feature, in which every pair occurs that is not refused.

    Args:
        features: The values of each feature; the first of each goes with all others.
        is_refused: Tells whether a pair cannot be in one row.
    """
    missing = dict.fromkeys(frozenset(pair) for pair in pairs_of(features) if not is_refused(*pair))
    rows = []
    while missing:
        row = dict(sorted(next(iter(missing))))
        for name in (name for name in features if name not in row):
            choices = [(name, value) for value in features[name]]
            allowed = [each for each in choices if not any(is_refused(*pair) for pair in _with(each, row))]
            row |= [max(allowed, key=lambda each: sum(frozenset(pair) in missing for pair in _with(each, row)))]
        for pair in combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        rows.append(row)
    return rows


def _with(choice: Choice, row: Row) -> list[tuple[Choice, Choice]]:
    return [(choice, other) for other in row.items()]
