"""The plan of a run: one frozen value, read from TOML, checked as a whole, the same for every process of the run.

May import `schedule`, `evaluation`, and the files of `pipeline` itself. Read the files of `keys` first: they have every
key with its type, default and meaning. Then read `reader.py`.

Names are imported when they are first used, because `tables` and `difference` work without the import of pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .difference import differences
    from .errors import PlanError, PlanRefused
    from .plan import Plan
    from .reader import from_mapping, read_plan

_MODULES = {
    "Plan": "plan",
    "PlanError": "errors",
    "PlanRefused": "errors",
    "differences": "difference",
    "from_mapping": "reader",
    "read_plan": "reader",
}

__all__ = ["Plan", "PlanError", "PlanRefused", "differences", "from_mapping", "read_plan"]


def __getattr__(name: str) -> Any:
    """Import the public name `name` from its module. Raises `AttributeError` if the package has no such name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
