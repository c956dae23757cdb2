"""`python -m benchmarks.shape [ROOT]`: the table of the checkout at ROOT (this one if not given)."""

import sys
from pathlib import Path

from . import counts
from .ways import ways


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    passed, modules, tested = ways(root), counts.modules(root), counts.modules_with_tests(root)
    ambiguous, (folder, most) = counts.ambiguous_classes(root), counts.largest_folder(root)
    rows = [
        ("lines of the product", counts.lines(root)),
        ("statements of the product, without docstrings", counts.statements(root)),
        ("files on a microbatch's way through one worker", len(passed["microbatch"])),
        ("files on a heartbeat's way", len(passed["heartbeat"])),
        ("class names with two meanings", len(ambiguous)),
        ("modules with a test of the same name", f"{len(tested)} of {len(modules)}, {len(tested) / len(modules):.0%}"),
        ("modules in the fullest folder", f"{most}, {folder}"),
    ]
    for name, value in rows:
        print(f"{name:50} {value}")
    for kind, found in passed.items():
        print(f"\nway of a {kind}:\n    " + "\n    ".join(found))
    if ambiguous:
        print("\nclass names with two meanings:")
        for name, places in ambiguous.items():
            print(f"    {name}: {', '.join(places)}")


if __name__ == "__main__":
    main()
