"""`python -m benchmarks.shape [ROOT] [--hits]`: the table of the checkout at ROOT (this one if not given).

`--write` traces a run, too, and rewrites the tables of ARCHITECTURE.md there; `--sentences` rewrites them without one:
the ways keep their files.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from . import composition, counts, page
from .ways import ways

CORE_EXCEPT = ("workers/extras",)  # what is built on the public names and the feature protocol alone


def main() -> None:
    arguments = [word for word in sys.argv[1:] if not word.startswith("--")]
    root = Path(arguments[0] if arguments else ".").resolve()
    if "--sentences" in sys.argv:
        _write(root)
        return
    passed = ways(root)
    if "--write" in sys.argv:
        _write(root, passed)
    for name, value in (*_sizes(root), *_composition(root, passed)):
        print(f"{name:72} {value}")
    for kind, found in passed.items():
        _list(f"way of a {kind}", found)
    ambiguous = counts.ambiguous_classes(root)
    _list("class names with two meanings", [f"{name}: {', '.join(places)}" for name, places in ambiguous.items()])
    if "--hits" in sys.argv:
        _list("conditionals on a feature", composition.conditionals(root))
        _list("attributes of other objects assigned", composition.foreign_assignments(root))


def _write(root: Path, passed: Mapping[str, Sequence[str]] | None = None) -> None:
    """Rewrite the tables of ARCHITECTURE.md, with the files `passed` on each way, or with those that it lists."""
    path = root / page.PAGE
    text = path.read_text()
    path.write_text(page.written(text, root, page.listed(text) if passed is None else passed))


def _sizes(root: Path) -> list[tuple[str, object]]:
    product = list(counts.files(root, *counts.PRODUCT))
    sizes, (longest, most) = counts.function_lines(root), counts.longest_file(root)
    modules, tested = counts.modules(root), counts.modules_with_tests(root)
    folder, fullest = counts.largest_folder(root)
    return [
        ("lines of the product", counts.lines(root)),
        ("statements of the product, without docstrings", counts.statements(root)),
        ("statements of the core: without workers/extras", counts.statements(root, without=CORE_EXCEPT)),
        ("files / rooms (folders with Python files)", f"{len(product)} / {len(counts.rooms(root))}"),
        ("lines of the longest file", f"{most}, {longest}"),
        (
            "lines of a function: median / 90th percentile / longest",
            f"{median(sizes):g} / {sizes[int(0.9 * len(sizes))]} / {sizes[-1]}",
        ),
        ("modules with a test of the same name", f"{len(tested)} of {len(modules)}, {len(tested) / len(modules):.0%}"),
        ("modules in the fullest folder", f"{fullest}, {folder}"),
    ]


def _composition(root: Path, passed: Mapping[str, Sequence[str]]) -> list[tuple[str, object]]:
    return [
        ("class names with two meanings", len(counts.ambiguous_classes(root))),
        ("files on a microbatch's way through one worker (shm, traced)", len(passed["microbatch"])),
        ("files on a heartbeat's way", len(passed["heartbeat"])),
        ("conditionals on a feature, outside the feature's files (--hits)", len(composition.conditionals(root))),
        ("attributes of another object assigned (--hits)", len(composition.foreign_assignments(root))),
    ]


def _list(title: str, found: Sequence[object]) -> None:
    if found:
        print(f"\n{title}:\n    " + "\n    ".join(map(str, found)))


if __name__ == "__main__":
    main()
