"""Begins the run of a `Line`: cuts the model, makes the plan and the schedule, and starts or makes the workers.

`ScriptRun` is what a `Line` needs of a run, wherever its workers are: calls go in, replies come out.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from stageline.pipeline.addresses import masked
from stageline.pipeline.model.cut import with_stored_weights
from stageline.pipeline.model.load import demand_features
from stageline.pipeline.model.patterns import demand_matched, demand_recomputable, groups_of, tapped_layers
from stageline.pipeline.model.segment import Segment, layouts_of
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.refusals import refused_inline
from stageline.pipeline.program import Program
from stageline.pipeline.schedule import Placement
from stageline.pipeline.stage.layers.layer import BatchCheck
from stageline.pipeline.tree import Tree
from stageline.workers.runtime.calls import CallKind
from stageline.workers.runtime.job import scripted_program
from stageline.workers.script.arguments.arguments import LineOptions, Model, in_arguments_words
from stageline.workers.script.arguments.script_plan import build_model, plan_of, registered
from stageline.workers.script.calls.batch_record import BatchRecord

from .arguments.checks import demand_default_device, demand_usable
from .arguments.script_plan import ModelWeights, weights_of
from .calls.calls import Replies, WeightNames
from .calls.page import Timetable
from .inline_run import InlineRun

if TYPE_CHECKING:
    from .processes.names import RemotePlan

InputsCheck = Callable[[Tree, int], object]  # of a batch, and in how many times `microbatches` it is cut


class ScriptRun(Protocol):
    """A run that a script drives. Its methods are for the script's thread alone."""

    size: int  # how many workers it has
    batches: BatchRecord | None  # what its steps were trained on; None if it cannot be resumed
    cannot_save: str  # why it saves no checkpoints; "" if it does

    @property
    def folder(self) -> Path | None:
        """Of its files; None if it has none."""

    @property
    def position(self) -> int:
        """The number of training steps that have been called."""

    def submit(
        self,
        kind: CallKind,
        inputs: Tree = None,
        targets: Tree = None,
        state: Mapping[str, Tensor] | None = None,
        *,
        ema: bool = False,
    ) -> "Future[Replies]":
        """Calls the workers, in order; what they reply. The tensors must not be written to afterwards. With `ema`,
        averages stand for weights.

        Raises `RunFailed` if the run is over.
        """

    def close(self) -> None:
        """Ends the run well: every call is carried out, the weights are kept. Raises `RunFailed` if that fails."""

    def save(self, folder: Path, call: Callable[[str], Replies]) -> None:
        """Saves a checkpoint; `call` has the workers write it into the folder that it is given. Raises `NotSaved`."""

    def waits_for(self) -> str:
        """What the run has waited for longer than a moment; "" for nothing. For any thread; it may take seconds."""

    def news(self) -> list[str]:
        """What has happened to the workers since the last call, as lines for people. For any thread."""

    def workers(self) -> list[str]:
        """What each worker is and does, one line for each; none once they have ended."""

    def timetable(self) -> Timetable:
        """Of the newest step whose times are known; as it is planned while there is none."""

    def weights(self, *, ema: bool = False) -> dict[str, Tensor]:
        """The weights of a run that was closed, or their averages, under the unsplit model's names."""

    def abort(self, reason: str, *, knows_failure: bool = False, interrupted: bool = False) -> None:
        """Ends the run as it is; what has been saved stays. If it has failed, that is said, unless the script knows.
        `interrupted`: by Ctrl-C, so that another one may come."""

    def discard(self) -> None:
        """Ends the run as it is; nothing of it is of use any more, and nothing is said of it."""


def begin_run(
    model: Model, options: LineOptions, resume: str | Path | None = None
) -> tuple[ModelWeights, InputsCheck, ScriptRun]:
    """The run, the model's weights, and a check of inputs. `resume`: the folder of the run to go on with.

    Raises `ModelRefused`, `PlanRefused`, `ScheduleRefused`, `NoSuchRun`, `RunFailed`, and `ValueError` for
    another `workers`, or one that cannot resume.
    """
    workers = options.workers
    if workers not in ("processes", "inline"):
        raise ValueError(f'workers = {workers!r}; expected "processes" or "inline"')
    if workers == "inline" and options.broker is not None:
        raise ValueError(f"broker = {masked(options.broker)!r}: inline workers are in this process; leave out workers")
    if workers == "inline" and resume is not None:
        raise ValueError(f"resume = {str(resume)!r}: an inline run saves nothing to go on from; leave out workers")
    demand_usable(model, options, inline=workers == "inline", resume=resume)
    with in_arguments_words():
        return _begin(model, options, None if resume is None else Path(resume))


def _begin(model: Model, options: LineOptions, resume: Path | None) -> tuple[ModelWeights, InputsCheck, ScriptRun]:
    whole, segments = build_model(model, options)
    demand_default_device()  # a function that makes the model may have changed it
    weights = weights_of(whole, segments)
    check = partial(_check_inputs, segments[0].check_inputs, options.microbatches)
    remote = None if options.broker is None else _remote_plan(model, options, options.broker)
    plan = plan_of(options, len(segments), None if remote is None else remote.tables)
    segments = with_stored_weights(plan, whole, segments, Path.cwd())
    if remote is None:  # other machines have paths of their own
        for part in segments:
            part.check()
    demand_matched(plan, segments)
    tapped_layers(plan, segments)
    demand_recomputable(plan, segments)
    with registered(model, options):
        demand_features(plan)
        program = scripted_program(plan, segments)
    names = _weight_names(segments, program.schedule.placement)
    if options.workers == "inline":
        plan.demand_none(refused_inline(plan))
        return weights, check, InlineRun(segments, program, names, options, plan)
    if remote is not None:
        return weights, check, _begin_remotely(plan, program, names, remote, resume)
    with registered(model, options):
        return weights, check, _begin_here(plan, program, names, segments, options, resume)


def _check_inputs(check: BatchCheck, microbatches: int, inputs: Tree, times: int) -> None:
    check(inputs, microbatches * times)


# An inline line does without sockets and processes, so what has those is imported where it is needed.


def _remote_plan(model: Model, options: LineOptions, broker: str) -> "RemotePlan":
    from .processes.names import remote_plan

    return remote_plan(model, options, broker)


def _begin_remotely(
    plan: Plan, program: Program, names: WeightNames, remote: "RemotePlan", resume: Path | None
) -> ScriptRun:
    from stageline.workers.script.processes.saving import begun_run

    from .processes.remote_run import RemoteRun

    return RemoteRun(plan, program, names, None if resume is None else begun_run(plan, resume), remote.code)


def _begin_here(
    plan: Plan,
    program: Program,
    names: WeightNames,
    segments: Sequence[Segment],
    options: LineOptions,
    resume: Path | None,
) -> ScriptRun:
    from stageline.workers.script.processes.process_run import ProcessRun
    from stageline.workers.script.processes.saving import run_to_resume

    known = (
        None
        if resume is None
        else run_to_resume(plan, resume, lambda: layouts_of(segments, options.optimizer, groups_of(plan)))
    )
    return ProcessRun(plan, program, names, known)


def _weight_names(segments: Sequence[Segment], placement: Placement) -> WeightNames:
    return [frozenset().union(*(segments[stage].weight_names for stage in owned)) for owned in placement]
