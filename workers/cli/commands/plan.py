"""`stageline plan`: the estimate of a plan before it runs.

`stageline train` also shows the choices for limits of memory.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan.errors import shown
from stageline.pipeline.plan.tables import flat
from stageline.workers.cli import options
from stageline.workers.cli.consent import allow
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import answer, counted, duration, say, share, show, size, span

if TYPE_CHECKING:
    from stageline.pipeline.plan import Plan
    from stageline.workers.extras.fitting import HostFit
    from stageline.workers.extras.preflight.trial_result import Estimate, StageMemory, WorkerEstimate


def show_fit(found: "HostFit") -> None:
    """Print the stages and their machines on stdout."""
    rows = [
        (
            each.stage,
            each.host,
            span(each.layers),
            f"{1000 * each.seconds:.3g} ms",
            each.in_flight,
            f"{size(each.bytes)} of {size(each.memory)}",
            size(each.message) if each.stage + 1 < len(found.stages) else "",
            f"{1000 * each.carrying:.3g} ms" if each.carrying else "",
        )
        for each in found.stages
    ]
    heads = ("stage", "host", "layers", "microbatch", "in flight", "memory", "hands on", "on its way")
    show("stages", heads, rows)
    ways = [
        (way.stages, way.schedule, "no room" if way.seconds is None else f"{1 / way.seconds:.3g}") for way in found.ways
    ]
    show("compared", ("stages", "schedule", "steps/s"), ways)
    say(
        f"a step of {counted(found.microbatches, 'microbatch', 'microbatches')} takes {1000 * found.seconds:.3g} ms as "
        "simulated, if a backward takes as long as two forwards. In the plan:"
    )
    say("\n".join(_lines(found)))


def _lines(found: "HostFit") -> list[str]:
    """Return the lines to write into the plan's file."""
    cut = [f"cut = {list(found.cut)}"] if found.cut else ["stages = 1"]
    window = [] if found.window is None else [f"window = {list(found.window)}"]
    workers = [
        line
        for each in found.stages
        for line in ("", f"[workers.{each.stage}]  # {each.host}", f"stages = [{each.stage}]")
    ]
    return ["", "[model]", *cut, "", "[schedule]", f'name = "{found.schedule}"', *window, *workers]


def chosen_lines(stages: Sequence["StageMemory"]) -> Iterator[str]:
    """Yield a line for each stage that acts on its limit, or one line if none does."""
    for each in stages:
        if each.acts:
            yield f"for its limit of memory, stage {each.stage} {_does(each)}; it takes {share(each.share)} longer"
    if stages and not any(each.acts for each in stages):
        yield "all stages fit their limit of memory as they are"


def tight_lines(stages: Sequence["StageMemory"], workers: Sequence["WorkerEstimate"]) -> Iterator[str]:
    """Yield a line for each worker whose limit is tight.

    If actions of `stages` were chosen, another limit may choose otherwise: only if they take none, the limit from which
    on it is not tight is known.
    """
    known = not any(each.acts for each in stages)
    for each in workers:
        if each.tight:
            enough = f'. With "{-(-(each.ample or 0) // 2**20)}MiB" it would do neither' if known else ""
            yield (
                f"worker {each.worker}: its limit of memory is tight, so it gives back what it frees and waits until "
                f"its snapshots are written, which takes time{enough}"
            )


def show_chosen(stages: Sequence["StageMemory"]) -> None:
    """Print a table, if something was chosen."""
    rows = [(each.stage, each.recompute, ", ".join(each.offload) or "nothing", share(each.share)) for each in stages]
    if rows:
        show("chosen for the limit of memory", ("stage", "recompute", "offload", "takes longer by about"), rows)


def _does(stage: "StageMemory") -> str:
    how = {"nothing": "", "stage": "recomputes as a whole", "layers": "recomputes layer by layer"}
    parts = how.get(stage.recompute, f"recomputes {stage.recompute}"), f"offloads {', '.join(stage.offload)}"
    return " and ".join(part for part in parts if part not in ("", "offloads "))


@click.command(
    cls=Command,
    examples=("stageline plan", "stageline plan examples/digits --set schedule.microbatches=16"),
    groups={"Plan": ("--fit", "--allow"), "Output": ("--schema",)},
    codes=codes(ExitCode.REFUSED),
)
@options.config
@options.sets
@options.as_json
@click.option("--schema", is_flag=True, help="Print the JSON schema of plan files instead, for editors.")
@click.option(
    "--fit",
    "hosts",
    metavar="HOSTS",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Instead, find the stages for the machines that this file describes.",
)
@allow
def plan(config: str, sets: tuple[str, ...], as_json: bool, schema: bool, hosts: Path | None) -> None:
    """Show what the plan CONFIG comes to, or why it cannot work.

    Every key with its origin, how the model is split, what a stage holds in memory, what a queue carries. Loads
    the model and the data, and trains the first microbatch, in processes of their own.

    With --fit, each layer is measured here, and the stages, their machines and the schedule are chosen by which a
    step takes least.
    """
    if schema:
        from stageline.pipeline.plan.keys.models import plan_schema

        click.echo(json.dumps(plan_schema(), indent=2))
        return
    from stageline.workers.extras.preflight import trials
    from stageline.workers.launch import template

    read, named = options.plan_of(config, sets), options.plan_arguments(config, sets)
    with template.Template() as processes:
        if hosts is not None:
            found_fit = trials.fitted(read, named, processes, hosts)
            answer(found_fit, as_json, partial(show_fit, found_fit))
            return
        found = trials.try_plan(read, named, processes).estimate
    answer(found, as_json, partial(_show, read, found))


def _show(read: "Plan", found: "Estimate") -> None:
    options.warn(found.warnings[len(read.warnings) :])
    chosen = read.undecided_keys(len(found.stages)) if found.memory else ()
    origins = {**found.origins, **({"model.cut": "measured"} if found.seconds else {})}
    origins |= dict.fromkeys(chosen, "chosen")
    keys = [(key, shown(value), origins.get(key, "the model")) for key, value in flat(found.plan).items()]
    show("plan", ("key", "value", "from"), keys)
    _show_split(found)
    _show_queues(found)
    show_chosen(found.memory)
    _show_workers(found)
    _show_schedules(found)
    if found.prefix_cache is not None:
        kept = found.prefix_cache
        idle_stages = "stage 0 does" if kept.stage == 1 else f"stages 0 to {kept.stage - 1} do"
        say(
            f"prefix cache: {kept.samples} rows of {size(kept.row_bytes)}, {size(kept.bytes)} on the disk of worker "
            f"{kept.worker}; from step {kept.replayed_from} on, {idle_stages} not run"
        )
    _show_taps(found, dict(flat(found.plan)))
    _show_copies(found)
    idle = ", ".join(f"worker {index} {share(part)}" for index, part in enumerate(found.idle))
    frozen = " (as one where nothing is trained)" if any(not each.trained for each in found.stages) else ""
    say(f"idle, if a backward takes as long as two forwards{frozen} and a message no time: {idle}")


def _show_split(found: "Estimate") -> None:
    parts = list(found.stages[0].bytes)
    freezes = any(each.trained < each.parameters for each in found.stages)
    rows = [
        (
            each.label,
            each.worker,
            span(each.layers),
            each.parameters,
            *([each.trained] if freezes else []),
            each.in_flight,
            *_sizes([*(each.bytes[part] for part in parts), each.total], known=each.group == 1),
        )
        for each in (*found.stages, *found.replicas)
    ]
    heads = (part.replace("_", " ") for part in parts)
    of_parameters = ("parameters", "trained") if freezes else ("parameters",)
    show("stages", ("stage", "worker", "layers", *of_parameters, "in flight", *heads, "total"), rows)
    for each in found.stages:
        if each.group > 1:
            say(
                f"stage {each.label} is computed by a group of {each.group} processes: what each of them takes is not "
                f"known. Before it is split, each loads the whole stage, {size(each.bytes['weights'])} of weights"
            )
    if found.seconds:
        times = ", ".join(f"stage {stage} {1000 * each:.3g} ms" for stage, each in enumerate(found.seconds))
        cut = dict(flat(found.plan))["model.cut"]
        say(f"cut = {shown(cut)} as measured now; forward and backward of a microbatch: {times}")


def _show_schedules(found: "Estimate") -> None:
    """Print the schedules between which the run chooses, if it does."""
    if not found.schedules:
        return
    from stageline.pipeline.choice import MOST_HALVING
    from stageline.pipeline.plan.keys.stages import AUTO_BEGINS_WITH  # slow to import

    rows = [
        (each.name, "" if not each.in_flight else ",".join(map(str, each.in_flight)), size(each.bytes), each.reason)
        for each in found.schedules
    ]
    show("schedules", ("schedule", "in flight", "a worker takes", "not available"), rows)
    say(
        f"auto: the run begins with {AUTO_BEGINS_WITH} and measures stages and links in its first steps. Then it takes "
        "the fastest of these schedules, or of windows that hide the links' latency and fit into schedule.memory"
    )
    if halving := [each.name for each in found.schedules if each.halves and not each.reason]:
        say(
            f"auto: {', '.join(halving)} split each backward in two halves. The halves are measured only if such a "
            f"schedule could be the fastest; it is rejected if they take over {MOST_HALVING} times as long as the whole"
        )


def _show_copies(found: "Estimate") -> None:
    """Print how many bytes each worker sends to the holder of its copies, and the stages that have no copy."""
    from stageline.pipeline.plan import from_mapping
    from stageline.pipeline.plan.copies import copy_groups
    from stageline.pipeline.program import neighbours_of

    plan = from_mapping(found.plan)
    holders = neighbours_of(len(plan.workers), copy_groups(plan)) if plan.recovery.copies else ()
    every, limit = counted(plan.recovery.snapshot_every, "step"), plan.recovery.copy_bandwidth
    for worker, near in enumerate(holders):
        own = [each for each in (*found.stages, *found.replicas) if each.worker == worker]
        sent = sum(each.bytes.get(part, 0) for each in own for part in ("weights", "optimizer", "averages"))
        takes = "" if limit is None else f", which takes {duration(sent / limit)} by recovery.copy_bandwidth"
        if near:
            say(f"copies: worker {worker} sends {size(sent)} to worker {near[0]} every {every}{takes}")
        for each in () if near else own:
            say(f"stage {each.label} has no copy: its party has no other worker, or data.stays keeps it here")


def _show_taps(found: "Estimate", plan: dict[str, Any]) -> None:
    """Print how many bytes of layers' outputs are written."""
    sizes = {each.stage: each.tapped for each in found.stages}
    if any(sizes.values()):
        of_step = sum(sizes.values()) * plan["schedule.microbatches"] * plan["schedule.accumulate"]
        steps = ceil(found.steps / plan["taps.every"])
        stages = ", ".join(f"stage {stage} {size(count)}" for stage, count in sizes.items() if count)
        say(
            f"taps: {stages} a microbatch; {size(of_step)} a stored step, and {size(of_step * steps)} in the "
            f"{counted(steps, 'step')} that are stored"
        )


def _show_workers(found: "Estimate") -> None:
    parts = list(found.workers[0].bytes)
    grouped = {stage.worker for stage in found.stages if stage.group > 1}
    rows = [
        (each.worker, *_sizes([*(each.bytes[part] for part in parts), each.total], known=each.worker not in grouped))
        for each in found.workers
    ]
    limits = [each.limits for each in found.workers]
    heads = ("limit", "tight") if any(limits) else ()
    cells = [(size(each[0]), "yes" if each[1] else "no") if each else ("", "")[: len(heads)] for each in limits]
    title, columns = "memory of a worker's process at most, beyond its program", ("worker", *parts, "total", *heads)
    show(title, columns, [(*row, *more) for row, more in zip(rows, cells, strict=True)])
    for line in tight_lines(found.memory, found.workers):
        say(line)


def _sizes(counts: Iterable[int], *, known: bool) -> list[str]:
    """Return sizes as text, "unknown" unless `known`.

    The forecast is of one process: it would be a wrong number for a group's process.
    """
    return [size(count) if known else "unknown" for count in counts]


def _show_queues(found: "Estimate") -> None:
    lossy = any(each.codec != "lossless" for each in found.queues)
    rows = [
        (
            each.queue,
            each.ends,
            *([each.codec] if lossy else []),
            each.in_flight,
            size(each.message),
            size(each.passed_on),
            size(each.retained),
        )
        for each in found.queues
    ]
    codecs = ("codec",) if lossy else ()
    show("queues", ("queue", "stages", *codecs, "in flight", "a message", "passed on", "retained at most"), rows)
