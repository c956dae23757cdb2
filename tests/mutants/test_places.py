"""Mutations are found where they are, and change nothing else; what runs during an import is told apart."""

import ast
from typing import Any

import pytest

from mutants.places import mutated, noting, places_in

SOURCE = b'''"""Text of which nothing is mutated."""

LIMIT: int = 5


def f(a: int, b: int = 1) -> int:
    for each in range(a):
        if a < b and not each:
            continue
        a += 1  # a comment
    match a:
        case 7:
            raise ValueError(f"{a - 7}", b)
    return max(a, b)
'''


def becomes(operator: str) -> list[str]:
    return [place.becomes for place in places_in("f.py", SOURCE) if place.operator == operator]


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("comparison flipped", ["(a >= b)"]),
        ("off by one", ["(a <= b)"]),
        ("and/or", ["(a < b or not each)"]),
        ("not dropped", ["(each)"]),
        ("constant", ["(6)", "(2)", "(2)"]),
        ("arguments swapped", ["(ValueError(b, f'{a - 7}'))", "(max(b, a))"]),
        ("return None", ["return None"]),
        ("statement deleted", ["pass", "pass"]),
        ("continue/break", ["break"]),
        ("plus/minus", []),
    ],
)
def test_each_operator_is_found_outside_of_annotations_patterns_and_text(operator: str, expected: list[str]) -> None:
    assert becomes(operator) == expected


def test_a_mutant_differs_in_the_text_of_one_node() -> None:
    for place in places_in("f.py", SOURCE):
        mutant = mutated(SOURCE, place)
        assert mutant != SOURCE
        assert mutant.startswith(SOURCE[: place.start])
        assert mutant.endswith(SOURCE[place.end :])
        ast.parse(mutant)


def test_what_runs_during_an_import_is_told_apart() -> None:
    imported = [place.was for place in places_in("f.py", SOURCE) if place.imported]
    assert imported == ["5", "1"]  # a constant of the module, and a default


def test_places_that_note_what_passes_them_compute_what_they_did() -> None:
    found = list(places_in("f.py", SOURCE))
    passed: set[int] = set()
    namespace: dict[str, Any] = {"at": passed.add}
    exec(noting(SOURCE, list(enumerate(found)), "notes").replace(b'__import__("notes").at', b"at"), namespace)  # noqa: S102
    assert namespace["f"](0) == 1
    assert {found[number].was for number in passed} == {"5", "1", "return max(a, b)", "max(a, b)"}
    passed.clear()
    assert namespace["f"](2, 3) == 3
    assert {found[number].operator for number in passed} >= {"and/or", "off by one", "statement deleted"}
