"""Which libraries the user's files import before anything else: the template process imports them once, for all.

data.py     import torch
            from sklearn.datasets import load_digits       sklearn.datasets
            os.environ["..."] = "1"                        from here on, the file decides how
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from stageline.pipeline.plan import Plan

SAFE = frozenset({"numpy", "scipy", "sklearn"})  # they start no thread of their own that a fork would lack


def libraries_of(plan: Plan) -> list[str]:
    """The names of modules of `SAFE` libraries, each once. A file that cannot be read names none: the trial tells."""
    folder = plan.file.parent if plan.file else Path()
    references = (plan.model.factory, plan.data.source, plan.data.dataset)
    files = dict.fromkeys(folder / each.rpartition(":")[0] for each in references if each and ".py:" in each)
    return list(dict.fromkeys(name for file in files for name in imported_first(_text(file)) if _top(name) in SAFE))


def imported_first(text: str) -> Iterator[str]:
    """The modules that a file imports before its first statement of another kind."""
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError):
        return
    for statement in statements:
        match statement:
            case ast.Import(names):
                yield from (each.name for each in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.Expr(ast.Constant()):
                continue
            case _:
                return


def _top(module: str) -> str:
    return module.partition(".")[0]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
