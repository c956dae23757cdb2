"""A script's arguments as a plan: what `Line` is given goes the way of every run, and is refused by the same rules.

Objects that have no name in a file, such as a module or a closure, are named "script:model": the processes that are
forked from the script have them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from stageline.pipeline.model.cut import make_segments
from stageline.pipeline.model.layers import Layers
from stageline.pipeline.model.object_names import OBJECTS
from stageline.pipeline.model.own_schedule import loaded_rows, rows_by
from stageline.pipeline.model.segment import Segment
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.keys.models import SCRIPT_BATCHES
from stageline.pipeline.plan.reader import from_mapping
from stageline.pipeline.plan.tables import Key, nested
from stageline.pipeline.stage.layers.seeded_layers import generators_kept

from .arguments import ARGUMENTS, LineOptions, Model


def build_model(model: Model, options: LineOptions) -> tuple[Any, list[Segment]]:
    """The model and its stages; a factory is called under the seed, and leaves the random state of this process as it
    was. Weights that are read from files are not there yet. Raises `ModelRefused`."""
    make, cut, stages = factory_of(model), options.cut, options.stages
    with generators_kept(torch.device("cpu")):
        return make_segments(
            make,
            options.seed,
            cut,
            stages,
            options.trainable,
            stored=options.loads_weights,
            accept_difference=options.accept_difference,
        )


def factory_of(model: Model) -> Callable[[], Any]:
    """What makes the model: `model` itself if it is a factory."""
    if isinstance(model, torch.nn.Module | Layers | list | tuple):
        return lambda: model
    return model  # type: ignore[return-value]  # a module is callable, too


@contextmanager
def registered(model: Model, options: LineOptions) -> Iterator[None]:
    """A context in which the script's objects have the names that the plan calls them by. A process that is forked in
    it keeps them; this one needs them no longer."""
    objects = {"model": factory_of(model), **options.objects}
    OBJECTS.update(objects)
    try:
        yield
    finally:
        for name in objects:
            OBJECTS.pop(name, None)


def plan_of(options: LineOptions, stages: int, remote: Mapping[str, object] | None = None) -> Plan:
    """The plan of a run of `stages` stages that a script drives; with `remote`, these keys are as given there. Raises
    `PlanRefused`, and `ModelRefused` for a function that lists the schedule."""
    pairs = list(_written(options, options.placement or [(stage,) for stage in range(stages)]))
    pairs += [(("model", "factory"), "script:model"), (("data", "source"), SCRIPT_BATCHES)]
    if options.cut is None:
        pairs.append((("model", "stages"), stages))
    tables = nested(pairs)
    for table, keys in (remote or {}).items():
        tables[table] = {**tables.get(table, {}), **keys} if isinstance(keys, Mapping) else keys
    sets = [f"{key}={_as_toml(value)}" for key, value in options.other_keys.items()]
    own = callable(options.schedule) and "schedule.name" not in options.other_keys
    rows = partial(rows_by, options.schedule) if own else loaded_rows
    return from_mapping(tables, sets=sets, rows_of_function=rows).resolved(stages)


def _written(options: LineOptions, placement: Sequence[Sequence[int]]) -> Iterator[tuple[Key, object]]:
    """Yield the keys of the plan that the arguments set, each with its value."""
    given = {name: row.write(getattr(options, name)) for name, row in ARGUMENTS.items() if hasattr(options, name)}
    given["placement"] = list(map(list, placement))
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
        own = value[worker] if name == "placement" else value
        yield tuple(str(worker) if part == "N" else part for part in parts), own


def _as_toml(value: object) -> object:
    """Python's True and False have other names in a plan."""
    return str(value).lower() if isinstance(value, bool) else value
