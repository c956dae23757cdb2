"""Arguments of a `Line`: one row for each, from which a script's plan is made and its errors are worded.

    clip_norm: Annotated[float | None, Argument("optimizer.clip_norm")] = None

    name, type, default        Line(..., clip_norm=1.0), for people and for type checkers
    key of the plan            optimizer.clip_norm = 1.0: gives a stage its setting
    in errors                  optimizer.clip_norm = -1: ...  is told as  clip_norm = -1: ...
    kind                       a value of another kind is refused before anything is built: a later error would not
                               name the argument

Ranges of values, and how they go together, are checked by the plan.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar, get_type_hints

import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.feature import Feature
from stageline.pipeline.features.recompute import Recompute
from stageline.pipeline.model.layered.layers import Layers
from stageline.pipeline.model.own_schedule import ScheduleFunction
from stageline.pipeline.plan import PlanError, PlanRefused
from stageline.pipeline.plan.difference import is_weights_path
from stageline.pipeline.plan.errors import Wording, say, shown
from stageline.pipeline.plan.keys.models import numbered
from stageline.pipeline.plan.keys.names import hint
from stageline.pipeline.stage.layers.loss import Autocast, Loss
from stageline.pipeline.stage.stage_update import LrSchedulerFactory, OptimizerFactory

Model = torch.nn.Module | Layers | Sequence[torch.nn.Module] | Callable[[], Any]
Metric = Callable[[Any, Any], Any]
Device = str | torch.device
FeatureMaker = Feature | Callable[[], Feature]
Workers = Literal["processes", "inline"]
P = ParamSpec("P")
Owner = TypeVar("Owner")
Given = TypeVar("Given")


@dataclass(frozen=True, slots=True)
class ValueKind:
    """Kind of values: `has` returns True for a value of the kind, `wanted` describes the kind in errors."""

    has: Callable[[Any], bool]
    wanted: str


@dataclass(frozen=True, slots=True)
class Argument:
    """Row of the table of `Line`'s arguments: the keys of the plan that an argument sets.

    Attributes:
        key: Key of the plan that it sets, with N for each worker's number; "" for none.
        kind: Kind that values other than the default must have; None leaves the check to the plan.
        write: Returns the value of the key; None to leave it out.
        further: Keys that are given the same value.
        told: Further keys that it decides: their errors name this argument.
        needs: Argument without which it has no effect.
        alone: True if the script uses the value itself, so that the key cannot be one of `settings`.
    """

    key: str = ""
    kind: ValueKind | None = None
    write: Callable[[Any], object] = lambda value: value
    further: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    needs: str = ""
    alone: bool = False


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_place(value: object) -> bool:
    return _is_whole(value) or isinstance(value, str)


def _is_list_of(has: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: _is_list(value) and bool(value) and all(map(has, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_device(value: object) -> bool:
    return isinstance(value, str | torch.device)


def _patterns(example: str) -> ValueKind:
    return ValueKind(_is_list_of(_is_text), f"a list of patterns of names, such as {example}")


def _one_of(kind: Any, wanted: str) -> ValueKind:
    return ValueKind(lambda value: isinstance(value, kind), wanted)


def _listed(value: Iterable[Any] | str | None) -> object:
    return value if value is None or isinstance(value, str) else list(value)


def _object(name: str) -> Callable[[object], object]:
    """Return a function that gives a plan's name for an object of the script, under which forked processes have it."""
    return lambda value: None if value is None else f"script:{name}"


MEASURE = "a function of (outputs, targets)"
_PATH: Any = str | os.PathLike
_CUT = ValueKind(_is_list_of(_is_place), "a list of layers' numbers or names, such as [4]")
_COUNT = ValueKind(lambda value: _is_whole(value) and value > 0, "a whole number of at least 1")
_PLACEMENT = ValueKind(
    lambda value: _is_list(value) and all(_is_list(owned) and all(map(_is_whole, owned)) for owned in value),
    "a list with the stages of each worker, such as [[0, 2], [1, 3]]",
)
_DEVICE = ValueKind(
    lambda value: _is_device(value) or _is_list_of(_is_device)(value),
    'a device such as "cuda:0", or a list with one for each worker',
)
_SEED = ValueKind(
    lambda value: _is_whole(value) and value in range(1 << 64), "a whole number of at least 0, of at most 64 bits"
)
_RECOMPUTE = ValueKind(
    lambda value: isinstance(value, str) or _is_list_of(_is_text)(value),
    '"stage", "layers", or a list of patterns of names such as ["encoder.layer.*.mlp"]',
)


_FEATURES = ValueKind(
    lambda value: _is_list(value) and all(isinstance(each, Feature) or callable(each) for each in value),
    "a list of features, their classes or functions that make them, such as [GradientNoise()]; a text such as "
    '"noise.py:GradientNoise" names one in a plan only: import the class, and give that',
)


@dataclass(frozen=True, slots=True)
class LineOptions:
    """Arguments of a `Line` without its model. `Line` documents each; `docs/reference/api-line.md` has their keys."""

    _: KW_ONLY
    loss: Annotated[Loss, Argument("model.loss", ValueKind(callable, MEASURE), _object("loss"))]
    optimizer: Annotated[
        OptimizerFactory,
        Argument(
            "optimizer.factory",
            ValueKind(callable, "a function of a stage's parameters, such as partial(SGD, lr=0.1)"),
            _object("optimizer"),
        ),
    ]
    lr_scheduler: Annotated[
        LrSchedulerFactory | None,
        Argument("lr_scheduler.factory", ValueKind(callable, "a function of an optimizer"), _object("lr_scheduler")),
    ] = None
    lr_every: Annotated[
        int | Literal["epoch", "evaluation"],
        Argument(
            "lr_scheduler.every",
            ValueKind(_is_place, '"epoch", "evaluation" or a number of steps of at least 1'),
            needs="lr_scheduler",
        ),
    ] = 1
    clip_norm: Annotated[float | None, Argument("optimizer.clip_norm")] = None
    ema_decay: Annotated[float | None, Argument("optimizer.ema_decay", alone=True)] = None
    groups: Annotated[Sequence[Mapping[str, object]] | None, Argument("optimizer.groups")] = None
    cut: Annotated[Sequence[int | str] | None, Argument("model.cut", _CUT, _listed)] = None
    stages: Annotated[int | None, Argument("model.stages", _COUNT)] = None
    placement: Annotated[
        Sequence[Sequence[int]] | None, Argument("workers.N.stages", _PLACEMENT, _listed, told=("workers",))
    ] = None
    schedule: Annotated[
        str | ScheduleFunction,
        Argument("schedule.name", write=lambda given: f"script:{_own_name(given)}" if callable(given) else given),
    ] = "1f1b"
    microbatches: Annotated[
        int | None,  # None: two for each stage, as `microbatches.py` has it
        Argument("schedule.microbatches", further=("data.batch_size",)),
    ] = None
    accumulate: Annotated[int, Argument("schedule.accumulate")] = 1
    window: Annotated[
        Sequence[int] | None,
        Argument(
            "schedule.window",
            ValueKind(_is_list, "a list with one whole number for each stage, such as [4, 2]"),
            _listed,
        ),
    ] = None
    seed: Annotated[int, Argument("run.seed", _SEED)] = 0
    device: Annotated[
        Device | Sequence[Device],  # one for all workers, or one for each
        Argument("workers.N.device", _DEVICE, lambda given: list(map(str, given)) if _is_list(given) else str(given)),
    ] = "cpu"
    autocast: Annotated[Autocast | None, Argument("model.autocast")] = None
    recompute: Annotated[Recompute | None, Argument("memory.recompute", _RECOMPUTE, _listed)] = None
    threads: Annotated[int, Argument("workers.N.threads")] = 1
    metrics: Annotated[
        Sequence[Metric],
        Argument(
            "model.metrics",
            ValueKind(_is_list, "a list of functions of (outputs, targets), such as [accuracy]"),
            lambda metrics: [f"script:{name}" for name in _names_of(metrics)],
        ),
    ] = ()
    features: Annotated[
        Sequence[FeatureMaker],  # the outermost first
        Argument("features", _FEATURES, lambda each: [f"script:{name}" for name in _feature_names(each)] or None),
    ] = ()
    workers: Annotated[Workers, Argument()] = "processes"
    name: Annotated[str, Argument("run.name")] = "line"
    folder: Annotated[
        str | Path,
        Argument(
            "run.dir", ValueKind(lambda value: isinstance(value, _PATH) and value != "", "the path of a folder"), str
        ),
    ] = "runs"
    settings: Annotated[
        Mapping[str, object] | None,  # other keys of the plan
        Argument(kind=_one_of(Mapping, 'a dict of a plan\'s keys, such as {"recovery.lease": "30s"}')),
    ] = None
    broker: Annotated[
        str | None,  # where workers on other machines find it; None: there are none
        Argument("broker.url", _one_of(str, 'an address such as "tcp://0.0.0.0:7000"')),
    ] = None
    trainable: Annotated[
        Sequence[str] | None,  # None: what requires a gradient
        Argument("model.trainable", _patterns('["encoder.layer.40.*"]'), _listed, alone=True),
    ] = None
    taps: Annotated[Sequence[str] | None, Argument("taps.layers", _patterns('["encoder.layer.40"]'), _listed)] = None
    weights: Annotated[
        str | Path | None,  # where workers read theirs from; None: the model has them
        Argument(
            "model.weights",
            _one_of(_PATH, "the path of a file or folder of weights"),
            lambda path: None if path is None else str(Path(path).absolute()),
        ),
    ] = None
    accept_difference: Annotated[
        bool,  # whether a traced model may compute something other than its forward
        Argument("model.accept_difference", _one_of(bool, "True or False"), lambda wanted: wanted or None, alone=True),
    ] = False
    progress: Annotated[
        bool | None,  # whether it is drawn; None: if stderr is a terminal
        Argument(kind=_one_of(bool, "True, False or None")),
    ] = None

    def follows(self, every: str) -> bool:
        """Return True if a learning rate scheduler steps at the end of each "epoch", or "evaluation"."""
        return self.lr_scheduler is not None and self.lr_every == every

    @property
    def devices(self) -> Sequence[Device]:
        """The devices given: one for all workers, or one for each."""
        return [self.device] if isinstance(self.device, str | torch.device) else self.device

    @property
    def other_keys(self) -> Mapping[str, object]:
        """Keys of the plan that no argument sets."""
        return self.settings or {}

    @property
    def loads_weights(self) -> bool:
        """True if weights are read from files."""
        return self.weights is not None or any(map(is_weights_path, self.other_keys))

    @property
    def named_metrics(self) -> Mapping[str, Metric]:
        """Metrics by their own names, which workers on other machines use, too.

        Metrics without a name or with equal names are told apart by their places.
        """
        return dict(zip(_names_of(self.metrics), self.metrics, strict=True))

    @property
    def objects(self) -> Mapping[str, object]:
        """Objects of the script by the names that the plan uses, as in "script:loss"."""
        features = dict(zip(_feature_names(self.features), self.features, strict=True))
        single = {"loss": self.loss, "optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}
        return {**single, **self.named_metrics, **features}


@dataclass(frozen=True, slots=True)
class LineCall(LineOptions):
    """All arguments of a `Line`; `resume` is set by `Line.resume`: the folder of the run to continue."""

    model: Annotated[
        Model,
        Argument(
            kind=ValueKind(
                lambda value: callable(value) or isinstance(value, Layers | list | tuple),
                "a torch module, Layers, a list with one module for each stage, or a function that returns one",
            )
        ),
    ]
    resume: Annotated[
        str | Path | None, Argument(kind=_one_of(_PATH, "the folder of a run, or of what save has saved"))
    ] = field(default=None, kw_only=True)


def _names_of(metrics: Sequence[Metric]) -> list[str]:
    return numbered([_own_name(metric) for metric in metrics])


def _feature_names(features: Sequence[FeatureMaker]) -> list[str]:
    return [f"feature_{place}" for place in range(len(features))]


def _own_name(metric: Metric) -> str:
    """Return the name of the metric; of a partial, the name of the function that it calls."""
    while isinstance(metric, partial):
        metric = metric.func
    return str(getattr(metric, "__name__", type(metric).__name__)).strip("<>")


def _rows() -> Iterator[tuple[str, Argument]]:
    hints = get_type_hints(LineCall, include_extras=True)
    for each in fields(LineCall):
        for row in getattr(hints[each.name], "__metadata__", ()):
            yield each.name, row


ARGUMENTS: Mapping[str, Argument] = dict(_rows())
_NAMES = {key: name for name, row in ARGUMENTS.items() for key in (row.key, *row.further, *row.told) if key}


def argument_of(key: str) -> str:
    """Return the argument that sets a dotted key of the plan; the key itself if none does."""
    return _NAMES.get(".".join("N" if part.isdecimal() else part for part in key.split(".")), key)


IN_A_SCRIPT = Wording(
    argument_of,
    lambda value: str(value) if isinstance(value, bool) else shown(value),
    "begin another run with Line(...)",
    of_script=True,
)


@contextmanager
def in_arguments_words() -> Iterator[None]:
    """Return a context that rewords `PlanRefused` and `ModelRefused` to name arguments of `Line`."""
    try:
        yield
    except PlanRefused as refused:
        raise PlanRefused(list(_of_arguments(refused.errors))) from None
    except ModelRefused as refused:
        if (text := say(refused.parts, IN_A_SCRIPT)) == refused.args[0]:
            raise
        raise ModelRefused(text) from None


def _of_arguments(errors: Sequence[PlanError]) -> Iterator[PlanError]:
    """Yield each error once; a key that `settings` has given keeps its name."""
    refused = {error.key for error in errors}
    twice = {key for row in ARGUMENTS.values() if row.key in refused for key in row.further}
    told = (_of_argument(error) for error in errors if error.key not in twice)
    return iter(dict.fromkeys(told))


def _of_argument(error: PlanError) -> PlanError:
    given = error.where == "--set"
    key, where = (error.key, "settings") if given else (argument_of(error.key), error.where)
    return PlanError(key, say(error.told, IN_A_SCRIPT), where, error.value)


def given_as(
    made: Callable[P, Given],
) -> Callable[[Callable[[Owner, Given], None]], Callable[Concatenate[Owner, P], None]]:
    """Return a decorator for a method of one value, which `made` builds from the arguments that callers pass."""

    def decorated(method: Callable[[Owner, Given], None]) -> Callable[Concatenate[Owner, P], None]:
        @wraps(method)
        def called(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> None:
            try:
                given = made(*args, **kwargs)
            except TypeError as error:
                known = signature(made).parameters
                near = "".join(hint(name, known) for name in kwargs if name not in known)
                raise TypeError(str(error).replace(f"{made.__name__}.", "Line.", 1) + near) from None
            method(self, given)

        owner = Parameter("self", Parameter.POSITIONAL_ONLY)
        called.__signature__ = Signature([owner, *signature(made).parameters.values()])  # type: ignore[attr-defined]
        return called

    return decorated
