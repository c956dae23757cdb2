"""Checks of a plan's keys against each other, each key valid by itself: a table of checks and the keys they read.

Here are the checks of the schedule: its name, window, times, rows and memory, and whether it can run on the workers.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from stageline.pipeline import addresses, schedule
from stageline.pipeline.addresses import masked

from . import party_checks, stage_checks, staying, training_checks
from . import training_checks as script_checks
from .errors import PlanError, Setting
from .keys.models import PlanTables
from .keys.stages import MOST_LISTED
from .refusals import refused_pairs

MOST_SIMULATED = 10_000  # forwards of a step: the broker simulates one with every schedule, and must not be away for it

_SHOWN_FAULTS = 20  # faults of a schedule's rows that get an error each


def window(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error if `schedule.window` has not one number for each stage, or the schedule uses no window.

    Only the schedules in `schedule.WINDOWED` use a window: "window", which requires one, and "zb-h1".
    """
    named, window, stages = plan.schedule.name == "window", plan.schedule.window, plan.model.stages
    if named and window is None:
        yield PlanError(
            "schedule.window", (_named("window"), " requires it: one number for each stage, such as [4, 2]")
        )
    elif plan.schedule.name not in schedule.WINDOWED and window is not None:
        yield PlanError(
            "schedule.window",
            (_named(plan.schedule.name), " does not use it; use ", _named("window"), ", or leave it out"),
        )
    elif window is not None and stages is not None and len(window) != stages:
        yield PlanError("schedule.window", f"expected {stages} values, one for each stage, got {len(window)}")


def _named(name: str) -> Setting:
    return Setting("schedule.name", name)


def delayed(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error if a plan with "2bw" is not asynchronous, or has fewer microbatches than stages.

    "2bw" updates after several microbatches, with gradients at older weights, and keeps two versions of the weights.
    """
    choice, stages = plan.schedule, plan.model.stages
    if choice.name != schedule.DELAYED:
        return
    if choice.mode != "async":
        yield PlanError(
            "schedule.name",
            'its gradients are one update late; use mode = "async", or name = "1f1b"',
        )
    if stages is not None and choice.microbatches < stages:
        yield PlanError(
            "schedule.microbatches",
            f'name = "2bw" keeps two versions of the weights, too few for {choice.microbatches} microbatches a step on '
            f"{stages} stages; use {stages} or more",
        )


def timed(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error if a schedule other than "zb-v" is given times of F, I and W."""
    if plan.schedule.times is not None and plan.schedule.name != "zb-v":
        yield PlanError(
            "schedule.times",
            (_named(plan.schedule.name), " does not use them; use ", _named("zb-v"), ", or leave them out"),
        )


def listed(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error if rows, or a file of rows, and the schedule's name do not go together, or the rows are too long.

    Rows or a file belong to the schedule "csv"; rows alone also to a schedule that a function lists.
    """
    choice = plan.schedule
    given = (choice.file,) if choice.is_function else (choice.file, choice.rows)
    if choice.name != schedule.LISTED and any(each is not None for each in given):
        key = "schedule.rows" if choice.file is None else "schedule.file"
        yield PlanError(key, f'name = "{choice.name}" does not use it; use name = "csv", or leave it out')
    elif choice.is_function and choice.rows is None:
        yield PlanError("schedule.name", "it is called only where a plan file is read; pass its rows as schedule.rows")
    elif choice.name == schedule.LISTED and choice.rows is None:
        needs = 'name = "csv" requires it: a row of actions for each worker, such as file = "schedule.csv"'
        unread = "it is read only for a plan that is a file itself; pass its lines as schedule.rows"
        yield PlanError("schedule.file", needs if choice.file is None else unread)
    elif choice.rows is not None and sum(map(len, choice.rows)) > MOST_LISTED:
        yield PlanError(
            choice.rows_key,
            f"expected rows of at most {MOST_LISTED} characters together, got {sum(map(len, choice.rows))}; leave "
            "empty cells out, or use fewer microbatches",
        )


def auto(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error if a run that chooses its schedule lacks `schedule.memory`, or is too large to simulate.

    Also yields one if `schedule.memory` is set and the run does not choose its schedule.
    """
    choice, stages = plan.schedule, plan.model.stages or sum(map(len, plan.placement))
    if not choice.is_auto:
        if choice.memory is not None:
            yield PlanError(
                "schedule.memory", f'name = "{choice.name}" does not use it; use name = "auto", or leave it out'
            )
        return
    if choice.memory is None:
        yield PlanError(
            "schedule.memory",
            'name = "auto" requires it, since schedules hold different numbers of microbatches. Set what a worker may '
            'take for its stages, such as memory = "4GiB"',
        )
    if stages * choice.in_step > MOST_SIMULATED:
        yield PlanError(
            "schedule.name",
            f"{stages} stages of {choice.in_step} microbatches take too long to simulate with every schedule; use "
            f"numbers whose product is at most {MOST_SIMULATED}, or name a schedule",
        )


def shape(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error if the schedule cannot run on the plan's workers; nothing is checked before stages are known."""
    known = plan.model.stages is not None and any(plan.workers)
    if not known:
        return
    wanted, name = plan.schedule, plan.schedule.begins_with
    try:
        if wrong := list(_faults_of_rows(plan)):
            yield from wrong
            return
        schedule.make_schedule(
            name,
            plan.placement,
            wanted.in_step,
            mode=wanted.mode,
            window=wanted.window,
            times=wanted.times,
            rows=wanted.rows,
            shares=plan.shares,
        )
    except schedule.ScheduleRefused as refused:
        yield PlanError("schedule.name", str(refused))


def _faults_of_rows(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error for each fault in the rows of a schedule that is written down: the first 20, and how many more."""
    choice = plan.schedule
    if choice.rows is None:
        return
    found = schedule.faults(choice.rows, schedule.Shape(choice.begins_with, plan.placement, choice.in_step))
    shown = found[:_SHOWN_FAULTS] + ([f"and {len(found) - _SHOWN_FAULTS} more"] if len(found) > _SHOWN_FAULTS else [])
    for fault in shown:
        yield PlanError(choice.rows_key, f"in the rows that it returned, {fault}" if choice.is_function else fault)


def problems(plan: PlanTables, refused: Collection[str] = ()) -> list[PlanError]:
    """Return every disagreement between keys of a plan, each with its key and reason alone.

    Args:
        plan: The tables, each key valid by itself.
        refused: Keys that have no value to check. A check that reads one of them is left out.
    """
    found = list(refused_pairs(plan, lambda key: _is_among(key, refused)))
    paired = {problem.key for problem in found}  # refused once
    found += [problem for problem in _found_by(_CHECKS, plan, refused) if problem.key not in paired]
    return found + list(_found_by(_LAST, plan, [*refused, *(problem.key for problem in found)]))


def _found_by(
    checks: "Iterable[tuple[Sequence[str], Check]]", plan: PlanTables, refused: Collection[str]
) -> Iterator[PlanError]:
    for keys, check in checks:
        if not any(_is_among(key, refused) for key in keys):
            yield from check(plan)


def _is_among(key: str, refused: Collection[str]) -> bool:
    return any(overlap(key, bad) for bad in refused)


def overlap(one: str, other: str) -> bool:
    """Return True if two dotted keys are equal, or if one names a table that contains the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _codecs(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error for each name in `queues.codec` that is not a queue between two of the stages."""
    stages = plan.model.stages
    if stages is None:
        return
    there = [f"forward-{stage}" for stage in range(1, stages)] + [f"backward-{stage}" for stage in range(stages - 1)]
    known = f"use {', '.join(there)}" if there else "there is none, so leave it out"
    for name in plan.queues.codecs:
        if "-" in name and name not in there:
            yield PlanError("queues.codec", f'"{name}" is not a queue between {stages} stages; {known}')


def _padded(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error if messages are to be padded that are not sealed."""
    url, transport = plan.queues.url, addresses.transport_of(plan.queues.url)
    if plan.queues.padding == "none" or (transport.has_server and transport.crosses(url) and not plan.broker.insecure):
        return
    why = (
        "a run with broker.insecure = true"
        if transport.has_server and transport.crosses(url)
        else f"a queue at {masked(url)}"
    )
    yield PlanError(
        "queues.padding",
        f'only sealed messages are padded, and {why} has none; use queues.url = "redis://host:6379/0" beyond this '
        "machine, with keys, or leave it out",
    )


def _recovery(plan: PlanTables) -> Iterator[PlanError]:
    if "restarts" in plan.recovery.model_fields_set and plan.recovery.restarts and not plan.recovery.snapshot_every:
        yield PlanError(
            "recovery.restarts",
            "a replacement needs snapshots, and none are written; use snapshot_every = 20, or restarts = 0",
        )


Check = Callable[[PlanTables], Iterator[PlanError]]

_STAGES = ("model.cut", "model.stages")
_IN_STEP = ("schedule.microbatches", "schedule.accumulate")
_DATASET = tuple(f"data.{key}" for key in training_checks.WITH_DATASET)
_ORDER = ("schedule.name", "schedule.mode", "schedule.window", "schedule.times", "schedule.file", "schedule.rows")

_CHECKS: tuple[tuple[tuple[str, ...], Check], ...] = (
    (("run.steps", "run.epochs"), training_checks.length),
    (("data.source", "model.metrics"), script_checks.metrics),
    (("data.source", "data.dataset", *_DATASET), training_checks.data),
    (_STAGES, training_checks.number_of_stages),
    (("model.balance", "model.stage_memory", *_STAGES), training_checks.balance),
    (("data.batch_size", "schedule.microbatches"), training_checks.rows),
    (("schedule.name", "schedule.mode", "schedule.microbatches"), training_checks.asynchronous),
    (("schedule.name", "schedule.mode", "schedule.microbatches", *_STAGES), delayed),
    (_IN_STEP, training_checks.accumulated),
    (("evaluation", "model.metrics", "data.dataset", "data.held_out"), training_checks.evaluation),
    (("lr_scheduler", "evaluation", "data.source"), training_checks.by_evaluation),
    (("schedule.name", "schedule.window", *_STAGES), window),
    (("queues.codec", *_STAGES), _codecs),
    (("queues.url", "queues.padding", "broker.insecure"), _padded),
    (("schedule.name", "schedule.times"), timed),
    (("schedule.name", "schedule.file", "schedule.rows"), listed),
    (("schedule", "workers", *_STAGES), auto),
    (("recovery.restarts", "recovery.snapshot_every"), _recovery),
    (("workers", "stage", *_STAGES), stage_checks.owners),
    (("workers", "stage", *_STAGES, *_IN_STEP), stage_checks.replicated),
    (("workers", "stage", *_STAGES), stage_checks.groups),
    (("workers", "model.weights"), stage_checks.weights),
    (("workers", "parties", "broker.insecure", "data.source", *_STAGES), party_checks.parties),
    (("workers", "stage", "memory", *_STAGES), stage_checks.tight),
)

# Checks of keys that the others found sound, so that no error is given twice.
_LAST: tuple[tuple[tuple[str, ...], Check], ...] = (
    (("workers", "stage", *_STAGES, *_IN_STEP, *_ORDER), shape),
    (
        ("data.stays", "data.labels_stay", "data.targets", "data.source", "workers", "stage", *_STAGES),
        staying.staying,
    ),
)
