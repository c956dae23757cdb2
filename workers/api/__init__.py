"""Train one PyTorch model on machines that share nothing but message queues.

    from stageline import Line

The public API: every name below, and nothing else. docs/api.md describes each.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stageline.pipeline.data.source import Batch, DataError, Rows, Source, split
    from stageline.pipeline.model.load import ModelRefused
    from stageline.pipeline.plan import Plan, PlanRefused, read
    from stageline.pipeline.schedule import Schedule, ScheduleRefused, make, window_for
    from stageline.pipeline.schedule.check import Costs, Verdict, check
    from stageline.pipeline.stage.stage import Stage
    from stageline.pipeline.timetable import svg, text
    from stageline.workers.script.line import Line
    from stageline.workers.script.train import RunFailed, Trained, train

_MODULES = {
    "Batch": "pipeline.data.source",
    "Costs": "pipeline.schedule.check",
    "DataError": "pipeline.data.source",
    "Line": "workers.script.line",
    "ModelRefused": "pipeline.model.load",
    "Plan": "pipeline.plan",
    "PlanRefused": "pipeline.plan",
    "Rows": "pipeline.data.source",
    "RunFailed": "workers.script.train",
    "Schedule": "pipeline.schedule",
    "ScheduleRefused": "pipeline.schedule",
    "Source": "pipeline.data.source",
    "Stage": "pipeline.stage.stage",
    "Trained": "workers.script.train",
    "Verdict": "pipeline.schedule.check",
    "check": "pipeline.schedule.check",
    "make": "pipeline.schedule",
    "read": "pipeline.plan",
    "split": "pipeline.data.source",
    "svg": "pipeline.timetable",
    "text": "pipeline.timetable",
    "train": "workers.script.train",
    "window_for": "pipeline.schedule",
}

__all__ = [
    "Batch",
    "Costs",
    "DataError",
    "Line",
    "ModelRefused",
    "Plan",
    "PlanRefused",
    "Rows",
    "RunFailed",
    "Schedule",
    "ScheduleRefused",
    "Source",
    "Stage",
    "Trained",
    "Verdict",
    "check",
    "make",
    "read",
    "split",
    "svg",
    "text",
    "train",
    "window_for",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that commands do not wait for torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"stageline.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
