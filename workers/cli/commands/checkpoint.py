"""`stageline checkpoint`: lists, verifies and splits checkpoints, and imports weights."""

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import completion, options
from stageline.workers.cli.help import CommandGroup, codes
from stageline.workers.cli.options import RUNS
from stageline.workers.cli.output import CommandFailed, answer, counted, say, show, size, span
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import Facts

if TYPE_CHECKING:
    from stageline.workers.checkpoint.recut import Recut
    from stageline.workers.checkpoint.regroup import Share
    from stageline.workers.checkpoint.source import CheckpointRow, CheckpointSource, SnapshotState

_newest = click.argument("run", metavar="[RUN]", type=click.Path(), required=False, shell_complete=completion.runs)


@click.group(cls=CommandGroup)
def checkpoint() -> None:
    """List, verify and split checkpoints; import weights.

    `stageline export` exports weights. RUN is the folder of a run, or of what Line.save has saved.
    """


@checkpoint.command(
    examples=(
        "stageline checkpoint split runs/digits-20260131-101500-1f0c --set model.stages=3",
        "stageline checkpoint split runs/digits-20260131-101500-1f0c --set model.stages=3 --worker 1 --write",
    ),
    groups={"Plan": ("--plan",), "Checkpoint": ("--worker", "--write")},
    codes=codes(ExitCode.REFUSED, failed="a snapshot is damaged or not here"),
)
@options.run
@options.sets
@click.option(
    "--plan",
    "config",
    type=click.Path(),
    shell_complete=completion.plans,
    help="The plan. Default: that of the run, with its --set.",
)
@click.option(
    "--step",
    type=click.IntRange(min=1),
    shell_complete=completion.steps,
    help="The checkpoint of this step. Default: the newest here.",
)
@click.option("--worker", type=click.IntRange(min=0), help="Only for this worker of the new plan.")
@click.option("--write", is_flag=True, help="Make the new snapshots, in a folder beside RUN.")
@options.as_json
def split(
    run: str,
    sets: tuple[str, ...],
    config: str | None,
    step: int | None,
    worker: int | None,
    write: bool,
    as_json: bool,
) -> None:
    """Show which snapshots of RUN another layout needs, or make them.

    Another layout has other stages, workers or schedule. The table says what each of its workers needs.

    On one machine, `stageline train --resume` does all of it. On several, each worker's machine needs those snapshots
    in its own RUN, and makes its own with --write. Calls the plan's model and optimizer.
    """
    plan = options.plan_of_run(Path(run), config, (*sets, f"run.dir={Path(run).absolute().parent}"))
    with options.user_prints_to_stderr():
        from stageline.workers.extras.exchange.load import layout_change

        change = layout_change(plan, Path(run), step)
    count = len(change.plan.workers)
    if worker is not None and worker >= count:
        raise click.UsageError(f"there is no worker {worker}: the plan has {counted(count, 'worker')}")
    workers = range(count) if worker is None else [worker]
    stages = [stage for index in workers for stage in change.plan.workers[index].stages]
    rows = [_new_stage(change, share) for share in change.shares if share.layout.stage in stages]
    if write:
        change.check(stages)
        change.write(runs.make_folder(change.plan, change.run), options.tell, stages)
    place = {"run": change.source.run, "step": change.step, "new_run": change.run, "written": write}
    facts = {"schema": "checkpoint-split/1", **place, "stages": rows}
    answer(facts, as_json, lambda: _show(change, rows, written=write))


def _new_stage(change: "Recut", share: "Share") -> Facts:
    """Return a stage of schema checkpoint-split/1: `worker` needs the old `snapshots`, of which `absent` are not here.

    The `best_snapshots` are those of the checkpoint of the best evaluation, which moves along if all of them are here.
    """
    stage = share.layout.stage
    snapshots, absent = _needed(change, share)
    best_snapshots, best_absent = ((), ()) if change.best is None else _needed(change.best, share)
    return {
        "worker": next(index for index, each in enumerate(change.plan.workers) if stage in each.stages),
        "stage": stage,
        "layers": share.layout.layers,
        "old_stages": share.sources,
        "snapshots": snapshots,
        "absent": absent,
        "best_snapshots": best_snapshots,
        "best_absent": best_absent,
    }


def _needed(checkpoint: "Recut", share: "Share") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the snapshots of `checkpoint` that make the new stage, and those of them that are not here."""
    paths = {old: str(checkpoint.source.snapshots.path(old, checkpoint.step)) for old in share.sources}
    return tuple(paths.values()), tuple(path for old, path in paths.items() if old not in checkpoint.present)


def _show(change: "Recut", rows: list[Facts], *, written: bool) -> None:
    title = f"step {change.step} of run {change.source.run} goes on as run {change.run}"
    table = [
        (
            row["worker"],
            row["stage"],
            span(row["layers"]),
            ", ".join(map(str, row["old_stages"])),
            ", ".join([*row["absent"], *(f"{path} (optional)" for path in row["best_absent"])]) or "none",
        )
        for row in rows
    ]
    show(title, ("worker", "stage", "layers", "of old stages", "not here"), table)
    if written:
        say("written: " + ", ".join(f"stage {row['stage']}" for row in rows))
    else:
        say("nothing was written; --write makes the snapshots of the new stages")


@checkpoint.command(
    examples=("stageline checkpoint ls", "stageline checkpoint ls runs/digits-20260131-101500-1f0c --json"),
)
@_newest
@options.as_json
def ls(run: str | None, as_json: bool) -> None:
    """List the checkpoints of RUN, and which stages have one here.

    Default: the newest run in ./runs.
    """
    from stageline.workers.checkpoint.source import checkpoint_rows
    from stageline.workers.runs.records import read_note

    source = _source(run)
    rows, note = checkpoint_rows(source), read_note(source.folder)
    place = {"run": source.run, "folder": str(source.folder), "stages": source.stages, "goes_on_from": note}
    title = f"checkpoints of run {source.run}, of {counted(len(source.first_replicas), 'stage')}"
    if note is not None:
        title += f", which goes on from step {note.step} of {note.run}"
    heads, table = ("step", "stages", "is", "size", "written"), [_row(source, each) for each in rows]
    facts = {"schema": "checkpoint-ls/1", **place, "checkpoints": rows}
    answer(facts, as_json, lambda: show(title, heads, table))
    for damage in (damage for row in rows for damage in row.damages if not as_json):
        options.tell(damage)


@checkpoint.command(
    examples=("stageline checkpoint verify", "stageline checkpoint verify runs/digits-20260131-101500-1f0c --step 120"),
    codes=codes(ok="all are whole", failed="a snapshot is damaged, or there is none"),
)
@_newest
@click.option(
    "--step",
    type=click.IntRange(min=1),
    shell_complete=completion.steps,
    help="Only the checkpoint of this step, which all stages must have.",
)
@options.as_json
def verify(run: str | None, step: int | None, as_json: bool) -> None:
    """Read every byte of the snapshots of RUN.

    Default: the newest run in ./runs.
    """
    from stageline.workers.checkpoint.source import snapshot_states, source_in

    source = _source(run)
    found = list(snapshot_states(source, None if step is None else source.step_of(step)))
    place = {"run": source.run, "folder": str(source.folder), "step": step}
    facts = {"schema": "checkpoint-verify/1", **place, "snapshots": found}
    answer(facts, as_json, partial(_show_verdicts, found))
    if problem := _problem(source, found):
        raise CommandFailed(f"{problem} in {source.folder}", ExitCode.FAILED, answered=True)
    if step is not None:  # a run that goes on may have deleted some meanwhile
        source_in(source.folder).demand_all(step)


@checkpoint.command(
    "import",
    examples=(
        "stageline checkpoint import model.safetensors weights.safetensors",
        "stageline checkpoint import /data/gpt2 parts --plan examples/gpt2",
    ),
    groups={"Plan": ("--plan",)},
    codes=codes(ExitCode.REFUSED),
)
@click.argument("source", type=click.Path())
@click.argument("out", type=click.Path())
@click.option(
    "--plan",
    "config",
    type=click.Path(),
    shell_complete=completion.plans,
    help="Compare with this plan's model, and write a file per stage.",
)
@options.sets
def import_(source: str, out: str, config: str | None, sets: tuple[str, ...]) -> None:
    """Write the weights in SOURCE to OUT, which must not exist.

    OUT is one safetensors file, or with --plan a folder with a file for each stage, which model.weights can name.

    SOURCE is a safetensors file, an index of several, a folder with them (as transformers or HuggingFaceStorageWriter
    write it), or the .pt file of a state dict.
    """
    from stageline.workers.extras.exchange.foreign import foreign_weights, import_stages

    weights = foreign_weights(Path(source))
    if config is None:
        if sets:
            raise click.UsageError("--set goes with --plan")
        from stageline.workers.extras.exchange.export import export_file

        export_file(weights, Path(out))
    else:
        plan = options.plan_of(config, sets)
        with options.user_prints_to_stderr():
            import_stages(weights, Path(source), plan, Path(out))
    say(f"{weights.title} are in {out}")


def _source(run: str | None) -> "CheckpointSource":
    from stageline.workers.checkpoint.source import source_in

    folder = Path(run) if run is not None else runs.newest_in(RUNS)
    if folder is None:
        raise CommandFailed("no run is in ./runs: name the folder of a run", ExitCode.USAGE)
    return source_in(folder)


def _row(source: "CheckpointSource", row: "CheckpointRow") -> tuple[object, ...]:
    lacking = sorted(set(range(source.stages)) - set(row.stages))
    state = (
        "damaged" if row.damages else f"lacks stage {', '.join(map(source.label, lacking))}" if lacking else "complete"
    )
    written = "-" if row.written is None else f"{datetime.fromtimestamp(row.written):%F %T}"
    return (
        row.step,
        ", ".join(map(source.label, row.stages)),
        f"{state}, best" if row.best else state,
        size(row.bytes),
        written,
    )


def _problem(source: "CheckpointSource", found: "Sequence[SnapshotState]") -> str:
    """Return what is wrong with the snapshots `found`; "" if nothing is."""
    if damaged := sum(bool(each.damages) for each in found):
        return f"{counted(damaged, 'snapshot is', 'snapshots are')} damaged"
    if found:
        return ""
    return "the run has deleted meanwhile what was to be read" if source.present else "there is no snapshot"


def _show_verdicts(states: "Sequence[SnapshotState]") -> None:
    for each in states:
        found = f"damaged: {'; '.join(each.damages)}" if each.damages else "whole"
        say(f"stage {each.label}, step {each.step}: {found}")
