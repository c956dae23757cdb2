"""Train one PyTorch model on machines that share nothing but message queues.

    from stageline import Line, LineClosed

`__all__` lists the public API; nothing else is public. docs/reference/api.md describes each name.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stageline.pipeline.data import Batch, Rows, Source, split_batch
    from stageline.pipeline.data.loader import Loader, StreamLoader
    from stageline.pipeline.errors import (
        DataError,
        GradientMismatch,
        LossNotScalar,
        ModelRefused,
        StageError,
        StagelineError,
    )
    from stageline.pipeline.feature import Feature, FeatureFailed, FeatureRefused
    from stageline.pipeline.model.layered.layers import Layer, Layers
    from stageline.pipeline.model.layered.traced_layers import traced
    from stageline.pipeline.model.own_schedule import read_plan
    from stageline.pipeline.plan import Plan, PlanError, PlanRefused
    from stageline.pipeline.program import Costs, UnsoundSchedule, Verdict, check_schedule
    from stageline.pipeline.schedule import Schedule, ScheduleRefused, make_schedule, schedule_names, window_for
    from stageline.pipeline.stage.settings import StageSettings
    from stageline.pipeline.stage.stage import Stage
    from stageline.workers.checkpoint.saved import NotSaved
    from stageline.workers.checkpoint.trained_weights import load_weights
    from stageline.workers.errors import LineClosed, RunFailed
    from stageline.workers.extras.audit.audited_model import AddNoise, ClipRows, EqualNormGradients
    from stageline.workers.extras.drawing import draw_svg, draw_text
    from stageline.workers.extras.exchange.load import load
    from stageline.workers.extras.exchange.stored_weights import WeightsUnusable
    from stageline.workers.extras.recording.reading import (
        NoTaps,
        TappedLayer,
        TappedMicrobatch,
        Taps,
        TapsUnusable,
        read_taps,
    )
    from stageline.workers.runs.folder import NoSuchRun, Result
    from stageline.workers.runtime.losses import ComputeFailed
    from stageline.workers.script.callbacks import Callback, Fitted, MLflow, TensorBoard, WandB
    from stageline.workers.script.calls.page import Timetable
    from stageline.workers.script.line import Line
    from stageline.workers.script.processes.launcher import CannotFork
    from stageline.workers.script.train import Trained, train

__all__ = [
    "AddNoise",
    "Batch",
    "Callback",
    "CannotFork",
    "ClipRows",
    "ComputeFailed",
    "Costs",
    "DataError",
    "EqualNormGradients",
    "Feature",
    "FeatureFailed",
    "FeatureRefused",
    "Fitted",
    "GradientMismatch",
    "Layer",
    "Layers",
    "Line",
    "LineClosed",
    "Loader",
    "LossNotScalar",
    "MLflow",
    "ModelRefused",
    "NoSuchRun",
    "NoTaps",
    "NotSaved",
    "Plan",
    "PlanError",
    "PlanRefused",
    "Result",
    "Rows",
    "RunFailed",
    "Schedule",
    "ScheduleRefused",
    "Source",
    "Stage",
    "StageError",
    "StageSettings",
    "StagelineError",
    "StreamLoader",
    "TappedLayer",
    "TappedMicrobatch",
    "Taps",
    "TapsUnusable",
    "TensorBoard",
    "Timetable",
    "Trained",
    "UnsoundSchedule",
    "Verdict",
    "WandB",
    "WeightsUnusable",
    "check_schedule",
    "draw_svg",
    "draw_text",
    "load",
    "load_weights",
    "make_schedule",
    "read_plan",
    "read_taps",
    "schedule_names",
    "split_batch",
    "traced",
    "train",
    "window_for",
]

_MODULES = {  # where each name is defined
    "stageline.pipeline.data": (
        "Batch",
        "Rows",
        "Source",
        "split_batch",
    ),
    "stageline.pipeline.data.loader": (
        "Loader",
        "StreamLoader",
    ),
    "stageline.pipeline.errors": (
        "DataError",
        "GradientMismatch",
        "LossNotScalar",
        "ModelRefused",
        "StageError",
        "StagelineError",
    ),
    "stageline.pipeline.feature": ("Feature", "FeatureFailed", "FeatureRefused"),
    "stageline.pipeline.model.layered.layers": (
        "Layer",
        "Layers",
    ),
    "stageline.pipeline.model.own_schedule": ("read_plan",),
    "stageline.pipeline.model.layered.traced_layers": ("traced",),
    "stageline.pipeline.plan": ("Plan", "PlanError", "PlanRefused"),
    "stageline.pipeline.schedule": (
        "Schedule",
        "ScheduleRefused",
        "make_schedule",
        "schedule_names",
        "window_for",
    ),
    "stageline.pipeline.program": (
        "Costs",
        "UnsoundSchedule",
        "Verdict",
        "check_schedule",
    ),
    "stageline.pipeline.stage.settings": ("StageSettings",),
    "stageline.pipeline.stage.stage": ("Stage",),
    "stageline.workers.checkpoint.saved": ("NotSaved",),
    "stageline.workers.checkpoint.trained_weights": ("load_weights",),
    "stageline.workers.errors": (
        "LineClosed",
        "RunFailed",
    ),
    "stageline.workers.extras.audit.audited_model": (
        "AddNoise",
        "ClipRows",
        "EqualNormGradients",
    ),
    "stageline.workers.extras.drawing": (
        "draw_svg",
        "draw_text",
    ),
    "stageline.workers.extras.exchange.load": ("load",),
    "stageline.workers.extras.exchange.stored_weights": ("WeightsUnusable",),
    "stageline.workers.extras.recording.reading": (
        "NoTaps",
        "TappedLayer",
        "TappedMicrobatch",
        "Taps",
        "TapsUnusable",
        "read_taps",
    ),
    "stageline.workers.runs.folder": ("NoSuchRun", "Result"),
    "stageline.workers.runtime.losses": ("ComputeFailed",),
    "stageline.workers.script.callbacks": (
        "Callback",
        "Fitted",
        "MLflow",
        "TensorBoard",
        "WandB",
    ),
    "stageline.workers.script.calls.page": ("Timetable",),
    "stageline.workers.script.line": ("Line",),
    "stageline.workers.script.processes.launcher": ("CannotFork",),
    "stageline.workers.script.train": (
        "Trained",
        "train",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that commands do not wait for torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
