"""Run of a line whose model only a trace can cut: it begins with the first batch, whose inputs are the trace's example.

Line(model, ...)          the model is made; all arguments that do not need its layers are checked
step(x, y)                trace with the first microbatch of x -> cut -> fork the workers -> the first step
Line.resume(saved, ...)   trace with ones of the shapes in `example.json`: the run goes on at once
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from stageline.pipeline.data import rows, split_batch
from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.model.cut import demand_made
from stageline.pipeline.model.edges import must_be_traced
from stageline.pipeline.model.layered.layers import Layers
from stageline.pipeline.model.layered.refusal import demand_python
from stageline.pipeline.model.load import demand_features
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.refusals import refused_inline
from stageline.pipeline.tree import Tree, describe
from stageline.workers.checkpoint.saved import is_saved
from stageline.workers.runs import folder as runs

from .arguments import LineCall, in_arguments_words
from .begin import Begun, ModelWeights, begin_run, factory_of, plan_of, registered
from .calls.calls import copied
from .calls.example import NAME as EXAMPLE
from .calls.example import keep_example, kept_examples
from .calls.news import say
from .microbatches import microbatches_for, recorded_microbatches
from .waiting_run import WaitingRun


class _MustBeTraced(Exception):
    """Model that was made, and that only a trace can cut."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model


def begin_line(call: LineCall) -> Begun:
    """Begin the run of a line; of a model that only a trace can cut, return one that begins with its first batch.

    Raises as `begin_run` does.
    """
    try:
        return begin_run(call, _unless_traced)
    except _MustBeTraced as found:
        model = found.model
    with in_arguments_words():
        if call.broker is not None:
            raise ModelRefused(
                f"the model is an object of type {type(model).__name__}, whose layers are found by tracing it with the "
                f"first batch, which workers on other machines do not have: give a function that returns "
                f"stageline.traced({type(model).__name__}(...), example) (docs/guides/models.md)"
            )
        demand_python(model)
        demand_made(model, stored=call.loads_weights)
        stages = len(call.cut) + 1 if call.cut is not None else call.stages or 1
        plan = plan_of(recorded_microbatches(call), stages)
        with registered(model, call):
            demand_features(plan)
        plan.make_schedule()
        if call.workers == "inline":
            plan.demand_none(refused_inline(plan))
        if call.resume is not None:
            return _resumed(call, model, plan)
    waiting = WaitingRun(call, model, plan)
    begin = partial(_begin_at_first_batch, call, model, plan, waiting)
    return Begun(_weights_of(model), lambda inputs, times: None, waiting, begin=begin)


def _unless_traced(model: Any) -> Any:
    if must_be_traced(model):
        raise _MustBeTraced(model)
    return model


def _weights_of(model: torch.nn.Module) -> ModelWeights:
    state = {name: each for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, Tensor)}
    first: dict[int, str] = {}
    copies = {name: first.setdefault(id(each), name) for name, each in state.items()}
    return ModelWeights(
        {name: (each.shape, each.dtype) for name, each in state.items()},
        {name: of for name, of in copies.items() if name != of},
    )


def _resumed(call: LineCall, model: torch.nn.Module, plan: Plan) -> Begun:
    """Continue a run that was begun with a traced model, which is traced as then. Raises as `begin_run` does."""
    from .processes.saving import known_run

    saved = Path(str(call.resume))
    kept = saved if is_saved(saved) else runs.folder(plan, known_run(plan, saved))
    if examples := kept_examples(kept):
        return _begun_with(call, model, examples)
    raise ModelRefused(
        f"the run in {kept} was not begun with a model that its line traced: {kept / EXAMPLE} is missing or unusable. "
        f"Pass the model as it was given then, such as stageline.traced({type(model).__name__}(...), example)"
    )


def _begun_with(call: LineCall, model: torch.nn.Module, examples: Sequence[Tree], run: str = "") -> Begun:
    """Begin the run of the traced model.

    Args:
        call: Arguments of the line.
        model: Model that was made; one whose weights are in files is made once more.
        examples: Inputs of a microbatch to trace with; the next are for a model that does not take the ones before.
        run: Id of the run; "" for a new one, or one that is resumed.
    """
    seconds: list[float] = []

    def make() -> Layers:
        began = monotonic()
        if call.progress is not False:
            say(f"tracing the {type(model).__name__} with a microbatch of {describe(examples[0])}")
        made = factory_of(call.model)() if call.loads_weights else model
        layers = _traced(made, examples)
        seconds.append(monotonic() - began)
        return layers

    with in_arguments_words():
        layers = make if call.loads_weights else make()
    begun = begin_run(replace(call, model=layers), run=run)
    first = ", ".join(names[0] for names in begun.layers[1:])
    told = (
        f"traced the {type(model).__name__} in {seconds[0]:.1f} s: {sum(map(len, begun.layers))} layers, "
        f"{f'cut at {first}' if first else 'not cut'}"
    )
    return replace(begun, news=(told, *begun.news))


def _traced(model: torch.nn.Module, examples: Sequence[Tree]) -> Layers:
    from stageline.pipeline.model.layered.traced_layers import traced  # imports torch's compiler

    for example in examples[:-1]:
        with suppress(ModelRefused):
            return traced(model, example)
    return traced(model, examples[-1])


def _begin_at_first_batch(
    call: LineCall, model: torch.nn.Module, plan: Plan, waiting: WaitingRun, inputs: Tree, times: int
) -> Begun:
    """Trace the model with the first microbatch of `inputs`, and begin the run.

    Args:
        call: Arguments of the line.
        model: Model that was made.
        plan: Plan of the run, with the number of microbatches that it has for batches of many rows.
        waiting: Run until then.
        inputs: Inputs of the first batch.
        times: In how many times the line's microbatches the batch is cut.

    Raises:
        DataError: The batch has fewer rows than microbatches.
        ModelRefused: The model cannot be traced, or not be cut. Errors of `begin_run` are raised, too.
    """
    count = rows(inputs)
    microbatches = microbatches_for(call, plan.placement, count // times)
    if count < microbatches * times:
        raise DataError(
            f"the first batch has {count} rows, too few for {microbatches * times} microbatches, and the model is "
            f"traced with one of these: begin with a batch of more rows, or pass fewer microbatches"
        )
    example = copied(split_batch(inputs, microbatches * times)[0])
    begun = _begun_with(replace(call, microbatches=microbatches), model, [example], waiting.id)
    if begun.run.folder is not None:
        try:
            keep_example(begun.run.folder, example)
        except OSError as error:  # no process is left behind
            begun.run.abort(f"the example of its inputs cannot be kept: {error}")
            raise
    for fit in waiting.fits:
        begun.run.of_fit(fit)
    return begun
