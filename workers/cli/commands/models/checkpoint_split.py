"""`stageline checkpoint split`: which old snapshots other stages need, and these stages' snapshots, made of them."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from stageline.workers.cli import options
from stageline.workers.cli.display.output import counted, say, show

if TYPE_CHECKING:  # it loads torch
    from stageline.workers.checkpoint.recut import Recut
    from stageline.workers.checkpoint.regroup import Share


class NewStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of schema checkpoint-split/1: `worker` needs the old `snapshots`, of which `absent` are not here.

    The `best_snapshots` are those of the checkpoint of the best evaluation, which moves along if all of them are here.
    """

    worker: int
    stage: int
    layers: tuple[str, ...]
    old_stages: tuple[int, ...]
    snapshots: tuple[str, ...]
    absent: tuple[str, ...]
    best_snapshots: tuple[str, ...]
    best_absent: tuple[str, ...]


@click.command(epilog="Example: stageline checkpoint split runs/digits-20260131-101500-1f0c --set model.stages=2")
@click.argument("run", metavar="RUN", type=click.Path())
@options.sets
@click.option("--plan", "config", type=click.Path(), help="The plan. Default: that of the run, with its --set.")
@click.option("--step", type=click.IntRange(min=1), help="The checkpoint of this step. Default: the newest here.")
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
    """Show which snapshots of RUN each worker needs to go on in another layout: other stages, workers or schedule.

    On one machine, `stageline train --resume` does all of it. On several, each worker's machine needs those snapshots
    in its own RUN, and makes its own with --write. Calls the plan's model and optimizer.
    """
    from stageline.workers.runs import folder as runs

    plan = options.plan_of_run(Path(run), config, (*sets, f"run.dir={Path(run).absolute().parent}"))
    with options.user_prints_to_stderr():
        from stageline.workers.extras.exchange.layout_change import layout_change

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
    if as_json:
        facts = {"run": change.source.run, "step": change.step, "new_run": change.run, "written": write}
        click.echo(msgspec.json.encode({"schema": "checkpoint-split/1", **facts, "stages": rows}))
        return
    _show(change, rows, written=write)


def _new_stage(change: "Recut", share: "Share") -> NewStage:
    stage = share.layout.stage
    snapshots, absent = _needed(change, share)
    best_snapshots, best_absent = ((), ()) if change.best is None else _needed(change.best, share)
    return NewStage(
        worker=next(index for index, each in enumerate(change.plan.workers) if stage in each.stages),
        stage=stage,
        layers=share.layout.layers,
        old_stages=share.sources,
        snapshots=snapshots,
        absent=absent,
        best_snapshots=best_snapshots,
        best_absent=best_absent,
    )


def _needed(checkpoint: "Recut", share: "Share") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the snapshots of `checkpoint` that make the new stage, and those of them that are not here."""
    paths = {old: str(checkpoint.source.snapshots.path(old, checkpoint.step)) for old in share.sources}
    return tuple(paths.values()), tuple(path for old, path in paths.items() if old not in checkpoint.present)


def _show(change: "Recut", rows: list[NewStage], *, written: bool) -> None:
    title = f"step {change.step} of run {change.source.run} goes on as run {change.run}"
    table = [
        (row.worker, row.stage, _span(row.layers), ", ".join(map(str, row.old_stages)), _absent(row)) for row in rows
    ]
    show(title, ("worker", "stage", "layers", "of old stages", "not here"), table)
    if written:
        say(f"written: {', '.join(f'stage {row.stage}' for row in rows)}")
    else:
        say("nothing was written; --write makes the snapshots of the new stages")


def _absent(row: NewStage) -> str:
    return ", ".join([*row.absent, *(f"{path} (optional)" for path in row.best_absent)]) or "none"


def _span(layers: tuple[str, ...]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
