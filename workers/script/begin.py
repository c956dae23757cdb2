"""Begin of a `Line`'s run: cut the model, make the plan and the schedule, and start or make the workers.

The arguments of `Line` become a plan, which passes the same checks as every plan. Objects that have no name in a file,
such as a module or a closure, are named "script:model": the processes that are forked from the script have them.
Weights that a script loads are compared with the model's in the script's process: a worker that cannot use them would
end the run.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from stageline.pipeline.addresses import masked
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.cut import frozen_stages, make_segments, with_stored_weights
from stageline.pipeline.model.layered.layers import Layers
from stageline.pipeline.model.load import demand_features
from stageline.pipeline.model.object_names import OBJECTS
from stageline.pipeline.model.own_schedule import loaded_rows, rows_by
from stageline.pipeline.model.plan_stage import demand_matched, demand_recomputable, groups_of, tapped_layers
from stageline.pipeline.model.segment import Segment, layouts_of
from stageline.pipeline.model.side_effects import demand_replicable
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.keys.models import SCRIPT_BATCHES
from stageline.pipeline.plan.keys.names import hint
from stageline.pipeline.plan.reader import from_mapping
from stageline.pipeline.plan.refusals import refused_inline
from stageline.pipeline.plan.tables import Key, nested
from stageline.pipeline.stage.layers.layer import BatchCheck
from stageline.pipeline.stage.layers.passage import generators_kept
from stageline.pipeline.tree import Tree
from stageline.workers.runtime.job import scripted_program

from .arguments import ARGUMENTS, LineCall, LineOptions, Model, in_arguments_words
from .calls.news import Display, display_of, say
from .calls.page import Seen
from .checks import demand_default_device, demand_usable
from .inline_run import InlineRun
from .microbatches import idle_news, microbatches_for, recorded_microbatches

if TYPE_CHECKING:
    from .names import RemotePlan
    from .processes.process_run import ProcessRun
    from .waiting_run import WaitingRun

_SHOWN = 4  # faults that one error tells
ScriptRun: TypeAlias = "InlineRun | ProcessRun | WaitingRun"  # described at `ProcessRun`
InputsCheck = Callable[[Tree, int], object]  # of a batch, and in how many times `microbatches` it is cut


@dataclass(frozen=True, slots=True)
class Begun:
    """A line's run, with the facts about its model.

    Attributes:
        weights: Names, shapes and dtypes of the model's weights.
        check_inputs: Raises `DataError` for inputs of a batch that the model does not take.
        run: Carries the calls out.
        layers: Names of the layers of each stage.
        news: Lines for people.
        begin: Returns the run that begins with its first batch, from the batch's inputs, and in how many times the
            line's microbatches it is cut; None if the run has begun.
    """

    weights: "ModelWeights"
    check_inputs: InputsCheck
    run: ScriptRun
    layers: tuple[tuple[str, ...], ...] = ()
    news: tuple[str, ...] = ()
    begin: "Callable[[Tree, int], Begun] | None" = None


def build_model(options: LineCall, checked: Callable[[Any], Any]) -> tuple[Any, list[Segment]]:
    """Return the model and its stages, without the weights that are read from files.

    A factory is called under the seed, and leaves the random state of this process unchanged.

    Args:
        options: Arguments of the line.
        checked: Called with the model that was made, and returns it.

    Raises:
        ModelRefused: The model cannot be made or cut. Errors of `checked` are raised, too.
    """
    make = factory_of(options.model)
    with generators_kept(torch.device("cpu")):
        return make_segments(
            lambda: checked(make()),
            options.seed,
            options.cut,
            options.stages,
            options.trainable,
            stored=options.loads_weights,
            accept_difference=options.accept_difference,
        )


def factory_of(model: Model) -> Callable[[], Any]:
    """Return the function that makes the model: `model` itself if it is a factory."""
    if isinstance(model, torch.nn.Module | Layers | list | tuple):
        return lambda: model
    return model  # type: ignore[return-value]  # a module is callable, too


@contextmanager
def registered(model: Model, options: LineOptions) -> Iterator[None]:
    """Return a context in which `OBJECTS` has the script's objects under the names that the plan uses.

    A process that is forked inside the context keeps them; this process drops them at its end.
    """
    objects = {"model": factory_of(model), **options.objects}
    OBJECTS.update(objects)
    try:
        yield
    finally:
        for name in objects:
            OBJECTS.pop(name, None)


def plan_of(options: LineOptions, stages: int, remote: Mapping[str, object] = {}) -> Plan:
    """Return the plan of a run that a script drives.

    Args:
        options: Arguments of the line.
        stages: Number of stages.
        remote: Tables of keys that replace those of `options`.

    Raises:
        PlanRefused: The options make no valid plan.
        ModelRefused: A function that lists the schedule is unusable.
    """
    placement = options.placement or _one_stage_each(options, stages)
    if options.microbatches is None:
        options = replace(options, microbatches=microbatches_for(options, placement))
    pairs = list(_written(options, placement))
    pairs += [(("model", "factory"), "script:model"), (("data", "source"), SCRIPT_BATCHES)]
    if options.cut is None:
        pairs.append((("model", "stages"), stages))
    tables = nested(pairs)
    for table, keys in remote.items():
        tables[table] = {**tables.get(table, {}), **keys} if isinstance(keys, Mapping) else keys
    shown = {key: str(value).lower() if isinstance(value, bool) else value for key, value in options.other_keys.items()}
    sets = [f"{key}={value}" for key, value in shown.items()]
    own = callable(options.schedule) and "schedule.name" not in options.other_keys
    rows = partial(rows_by, options.schedule) if own else loaded_rows
    return from_mapping(tables, sets=sets, rows_of_function=rows).resolved(stages)


def _one_stage_each(options: LineOptions, stages: int) -> list[tuple[int]]:
    """Return a worker for each stage, and after those one for each further replica, as in a plan without workers."""
    given = [options.other_keys.get(f"stage.{stage}.replicas") for stage in range(stages)]
    further = [(stage,) for stage, count in enumerate(given) for _ in range(1, count if isinstance(count, int) else 1)]
    return [*((stage,) for stage in range(stages)), *further]


def _written(options: LineOptions, placement: Sequence[Sequence[int]]) -> Iterator[tuple[Key, object]]:
    """Yield the keys of the plan that the arguments set, each with its value."""
    given = {name: row.write(getattr(options, name)) for name, row in ARGUMENTS.items() if hasattr(options, name)}
    given["placement"] = list(map(list, placement))
    if isinstance(given["device"], list) and len(given["device"]) != len(placement):
        raise ModelRefused(
            f"device = {given['device']!r}: there are {len(placement)} workers; give one device for all, or a list "
            "with one for each"
        )
    for name, value in given.items():
        row = ARGUMENTS[name]
        if row.key and value is not None and not (row.needs and given[row.needs] is None):
            for key in (row.key, *row.further):
                yield from _of_each_worker(key, name, value, len(placement))


def _of_each_worker(key: str, name: str, value: Any, workers: int) -> Iterator[tuple[Key, object]]:
    parts = tuple(key.split("."))
    if "N" not in parts:
        yield parts, value
        return
    for worker in range(workers):
        own = value[worker] if name in ("placement", "device") and isinstance(value, list) else value
        yield tuple(str(worker) if part == "N" else part for part in parts), own


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Shapes and dtypes of a model's weights by name, in the order of the unsplit model's state dict.

    `copies` maps names of parameters that stages share to the parameter's name in the first stage.
    """

    entries: Mapping[str, tuple[torch.Size, torch.dtype]]
    copies: Mapping[str, str] = field(default_factory=dict)

    def in_order(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `state` in the model's order."""
        return {name: state[name] for name in (*self.entries, *(state.keys() - self.entries.keys())) if name in state}

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raise `ModelRefused` unless `state` has this model's weights; the error names the first `_SHOWN` faults."""
        if faults := list(self._faults(state)):
            more = f", and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            raise ModelRefused(f"these are not the model's weights: {'; '.join(faults[:_SHOWN])}{more}")

    def _faults(self, state: Mapping[str, Tensor]) -> Iterator[str]:
        for name in state:
            if name not in self.entries:
                yield f"{name} is not the model's{hint(name, [key for key in self.entries if key not in state])}"
        for name, (shape, dtype) in self.entries.items():
            if name not in state:
                yield f"{name} is missing"
            elif not isinstance(state[name], Tensor):
                yield f"{name} is of type {type(state[name]).__name__}, not a tensor"
            elif state[name].shape != shape:
                yield f"{name} has shape {tuple(state[name].shape)}, expected {tuple(shape)}"
            elif state[name].dtype != dtype:
                yield f"{name} has dtype {state[name].dtype}, expected {dtype}: pass it through .to({dtype})"
        for name, first in self.copies.items():
            one, other = state.get(name), state.get(first)
            if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one is other:
                continue
            if not torch.equal(one.cpu(), other.cpu()):
                yield f"{name} and {first} differ, and are one parameter"


def weights_of(model: Any, segments: Sequence[Segment]) -> ModelWeights:
    """Return the weights of `model`, which `segments` hold."""
    found = {name: (tensor.shape, tensor.dtype) for part in segments for name, tensor in part.weights.items()}
    order = model.state_dict() if isinstance(model, torch.nn.Module) else found
    copies = {name: first for part in segments for name, first in part.copies.items() if name != first}
    return ModelWeights({name: found[name] for name in (*order, *found) if name in found}, copies)


def begin_run(call: LineCall, checked: Callable[[Any], Any] = lambda model: model, run: str = "") -> Begun:
    """Begin the run of a line, or resume it.

    Args:
        call: Arguments of the line.
        checked: Called with the model before it is cut, and returns it.
        run: Id of a run of processes that is begun; "" for a new one.

    Raises:
        ModelRefused, PlanRefused, ScheduleRefused, NoSuchRun, RunFailed: An argument is unusable, or the run does not
            start. Errors of `checked` are raised, too.
        ValueError: `workers` is unknown, or inline with `broker` or `resume`.
    """
    workers, resume = call.workers, call.resume
    if workers not in ("processes", "inline"):
        raise ValueError(f'workers = {workers!r}; expected "processes" or "inline"')
    if workers == "inline" and call.broker is not None:
        raise ValueError(f"broker = {masked(call.broker)!r}: inline workers are in this process; leave out workers")
    if workers == "inline" and resume is not None:
        raise ValueError(f"resume = {str(resume)!r}: an inline run saves nothing to go on from; leave out workers")
    demand_usable(call)
    with in_arguments_words():
        return _begin(recorded_microbatches(call), checked, run)


def _begin(options: LineCall, checked: Callable[[Any], Any], begun: str) -> Begun:
    """Return the run of a line, whose model is made and cut.

    An inline line needs no sockets and processes, so the modules for these are imported only where they are needed.
    """
    model, resume = options.model, None if options.resume is None else Path(options.resume)
    whole, segments = build_model(options, checked)
    demand_default_device()  # a function that makes the model may have changed it
    remote: RemotePlan | None = None
    if options.broker is not None:
        from .names import remote_plan

        remote = remote_plan(model, options, options.broker)
    plan = plan_of(options, len(segments), {} if remote is None else remote.tables)
    segments = with_stored_weights(plan, whole, segments, Path.cwd())
    if remote is None:  # other machines have paths of their own
        for part in segments:
            part.check()
    demand_matched(plan, segments)
    tapped_layers(plan, segments)
    demand_recomputable(plan, segments)
    demand_replicable(plan, segments)
    with registered(model, options):
        demand_features(plan)
        program = scripted_program(plan, segments)
    placement, stage_of = program.schedule.placement, program.schedule.replicas.stage
    names = [frozenset().union(*(segments[stage_of(copy)].weight_names for copy in owned)) for owned in placement]
    made = partial(
        Begun,
        weights_of(whole, segments),
        partial(_check_inputs, segments[0].check_inputs, plan.schedule.microbatches),
        layers=tuple(part.names for part in segments),
    )
    if options.workers == "inline":
        plan.demand_none(refused_inline(plan))
        with registered(model, options):
            return made(InlineRun(segments, program, names, options, plan))
    from .processes import process_run, remote_run, saving

    run = None
    if remote is not None:
        run = None if resume is None else saving.begun_run(plan, resume)
        return made(remote_run.RemoteRun(plan, plan_of(options, len(segments)), program, names, run, remote.code))
    news = () if resume is not None else idle_news(plan, program.schedule, frozen_stages(segments))
    with registered(model, options):
        if resume is not None:
            layouts = partial(layouts_of, segments, options.optimizer, groups_of(plan))
            run = saving.run_to_resume(plan, resume, layouts)
        return made(process_run.ProcessRun(plan, program, names, run, begun), news=news)


def displayed(begun: Begun, options: LineOptions, seen: Seen) -> Display | None:
    """Tell the news of a run that has begun, and return a display of it, whose thread is in no fork; None for none.

    Args:
        begun: Run, which may wait for its first batch; then nothing is shown.
        options: Arguments of the line.
        seen: Losses that the script has seen.
    """
    if begun.begin is not None:
        return None
    if options.progress is not False and sys.stderr is not None:
        say(*begun.news)
    news = None if begun.run.folder is None else begun.run.news
    return display_of(options.name, seen, begun.run.waits_for, options.progress, news)


def _check_inputs(check: BatchCheck, microbatches: int, inputs: Tree, times: int) -> None:
    check(inputs, microbatches * times)
