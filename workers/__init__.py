"""The processes that do it, and what a script of one's own needs of them.

    from workers import Line, train

`Line` trains stages step by step with a loader of one's own; `train` runs a plan as `stageline train` does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import RunFailed, Trained, train
    from .line import Line

__all__ = ["Line", "RunFailed", "Trained", "train"]

_PLACES = {"Line": "line", "RunFailed": "api", "Trained": "api", "train": "api"}


def __getattr__(name: str) -> Any:
    """Loads what is asked for: the commands import this package too, and must not wait for torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(f".{_PLACES[name]}", __name__), name)
