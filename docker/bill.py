"""Cuts a bill of materials (CycloneDX, JSON) down to a package and what it needs: `make sbom`.

cyclonedx-py lists all that is installed; the tools of the tests are not part of what users run. It is run in the
environment that the bill is of, with the package's name and the bill, and prints the result. Nothing is asked over a
network.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import requires
from pathlib import Path
from typing import Any

Bill = dict[str, Any]
_NAME = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?")
_OPTIONAL = re.compile(r"extra == ['\"]([^'\"]+)")


def of_package(bill: Bill, package: str, lines_of: Callable[[str], Sequence[str]]) -> Bill:
    """Return the bill of a package.

    Args:
        bill: Bill of an environment in which it is installed.
        package: Name of the package.
        lines_of: Returns what a package requires, as its metadata have it.
    """
    by_ref = {each["bom-ref"]: each for each in bill["components"]}
    needs = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
    root = next(ref for ref, each in by_ref.items() if normalized(each["name"]) == package)
    graph: dict[str, set[str]] = {}
    left, seen = [(root, frozenset[str]())], set()
    while left:
        ref, extras = place = left.pop()
        if place in seen:
            continue
        seen.add(place)
        wanted = required(lines_of(by_ref[ref]["name"]), extras)
        named = {each: wanted.get(normalized(by_ref[each]["name"])) for each in needs.get(ref, [])}
        found = {each: more for each, more in named.items() if more is not None}
        left += found.items()
        graph.setdefault(ref, set()).update(found)
    return bill | {
        "metadata": bill["metadata"] | {"component": by_ref[root]},
        "components": [by_ref[ref] for ref in sorted(graph) if ref != root],
        "dependencies": [{"ref": ref, "dependsOn": sorted(graph[ref])} for ref in sorted(graph)],
    }


def required(lines: Sequence[str], extras: frozenset[str]) -> dict[str, frozenset[str]]:
    """Return what a package with these extras requires: normalized names, each with the extras of its own."""
    wanted = {}
    for line in lines:
        optional = _OPTIONAL.search(line)
        if (optional is None or optional[1] in extras) and (found := _NAME.match(line)):
            wanted[normalized(found[1])] = frozenset(filter(None, (found[2] or "").replace(" ", "").split(",")))
    return wanted


def normalized(name: str) -> str:
    """Return a package's name in the form in which names are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    name, file = sys.argv[1:]
    print(json.dumps(of_package(json.loads(Path(file).read_text()), name, lambda each: requires(each) or []), indent=1))
