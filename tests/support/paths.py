"""Where the project's folders are."""

import os
from pathlib import Path

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"


def importing_tests() -> dict[str, str]:
    """The environment of a process that imports `support`, `simulation` or `faults`."""
    others = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *([others] if others else [])])}
