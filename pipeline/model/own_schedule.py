"""Schedules that a user's function lists: `schedule.name = "mine.py:reverse"`.

    def reverse(placement, microbatches):      the stages of each worker, and how many microbatches a step has
        return [["0F0", ...], ["1F0", ...]]    for each worker its actions, in order

The function is called where a plan is read, and has `LONGEST` seconds. Its rows are then part of the plan, as those of
a CSV file are.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any

from stageline.pipeline import plan as plans  # pydantic is imported when a plan is read
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.schedule import Action, Placement

from .consent import demand_consent

ScheduleFunction = Callable[[Placement, int], Sequence[Sequence[str | Action]]]

LONGEST = 60.0  # seconds that the function may take: every process that reads the plan calls it
_WANTED = 'expected a list with one list of actions for each worker, such as [["0F0", "0B0"], ["1F0", "1B0"]]'
_UNKNOWN = (
    "it is called when the plan is read, and the number of stages is not known then; set model.stages, or model.cut to "
    "a list"
)


def read_plan(
    path: str | Path, *, sets: Sequence[str] = (), environment: Mapping[str, str] = MappingProxyType({})
) -> "plans.Plan":
    """Read and check a plan. A function that lists its schedule is called.

    `sets` overrule `environment`, which overrules the file, which overrules defaults; `origins` of the plan tells which
    of them has set each key.

    Args:
        path: The TOML file, or a folder that has a stageline.toml.
        sets: Arguments of `--set`, `section.key=value`.
        environment: Variables STAGELINE_SECTION__KEY.

    Returns:
        The plan, which cannot be changed.

    Raises:
        PlanRefused: The plan is wrong; the text names every error with its line. Or the rows of the function are no
            sound schedule.
        ModelRefused: The function is missing, raises, or returns something else than lists of actions.
    """
    plan = plans.read_plan(path, sets=sets, environment=environment, rows_of_function=loaded_rows)
    demand_consent(plan)
    return plan


def loaded_rows(plan: "plans.Plan") -> list[str]:
    """Load the function that `schedule.name` names, and return its rows.

    Raises:
        ModelRefused: The function is missing, raises, takes too long, or returns something else than lists of actions.
        PlanRefused: The number of stages is not known yet.
    """
    from .load import base_folder, load_object  # imports torch

    return rows_by(load_object(plan.schedule.name, base_folder(plan), "schedule.name"), plan)


def rows_by(function: Any, plan: "plans.Plan") -> list[str]:
    """Return the rows that `function` lists for the workers of `plan`, each worker's row as text.

    Raises:
        ModelRefused: The function cannot be called, raises, takes longer than `LONGEST`, or returns something else than
            a list of actions for each worker.
        PlanRefused: The number of stages is not known yet.
    """
    from .load import call

    if not callable(function):
        raise _refused(plan, f"it is of type {type(function).__name__}, which cannot be called")
    placement, microbatches = plan.placement, plan.schedule.in_step
    if not placement:
        raise plan.refused("schedule.name", _UNKNOWN)
    try:
        returned = _within_time(
            partial(call, partial(function, placement, microbatches), f"called for {placement} and {microbatches}")
        )
    except TimeoutError:
        raise _refused(
            plan,
            f"called for {placement} and {microbatches}, it has not returned for {LONGEST:g} s, and every process that "
            "reads the plan calls it: make it faster, or write its rows into a CSV file",
        ) from None
    except ModelRefused as error:
        raise _refused(plan, str(error)) from error.__cause__
    if not isinstance(returned, list | tuple):
        raise _refused(plan, f"it returned an object of type {type(returned).__name__}; {_WANTED}")
    if len(returned) != len(placement):
        raise _refused(plan, f"it returned {len(returned)} lists for {len(placement)} workers; {_WANTED}")
    return [_row(plan, worker, actions) for worker, actions in enumerate(returned)]


def _within_time(function: Callable[[], Any]) -> Any:
    """Return what `function` returns, or raise what it raises; raise `TimeoutError` after `LONGEST`."""
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(function())
        except BaseException as error:  # noqa: BLE001  # told to the caller
            made.set_exception(error)

    thread = Thread(target=run, name="schedule", daemon=True)
    thread.start()
    thread.join(LONGEST)
    return made.result(0)


def _row(plan: "plans.Plan", worker: int, actions: object) -> str:
    if not isinstance(actions, list | tuple):
        raise _refused(plan, f"for worker {worker} it returned an object of type {type(actions).__name__}; {_WANTED}")
    for place, action in enumerate(actions):
        if not isinstance(action, str | Action):
            what = f"action {place} of worker {worker} is {repr(action)[:60]}, of type {type(action).__name__}"
            raise _refused(plan, f'{what}; expected text such as "{worker}F0", or an Action')
    return ",".join(map(str, actions))


def _refused(plan: "plans.Plan", reason: str) -> ModelRefused:
    from stageline.pipeline.plan.errors import Setting

    return ModelRefused(Setting("schedule.name", plan.schedule.name), f": {reason}")
