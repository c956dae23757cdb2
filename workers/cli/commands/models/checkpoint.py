"""`stageline checkpoint`: lists and verifies checkpoints, lays them out for other stages, and imports weights."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import options
from stageline.workers.cli.asking import RUNS
from stageline.workers.cli.display.output import counted, say, show, size
from stageline.workers.cli.errors import CommandFailed
from stageline.workers.runs import folder as runs

from .checkpoint_split import split

if TYPE_CHECKING:  # they load torch
    from stageline.workers.checkpoint.source import CheckpointRow, CheckpointSource, SnapshotState

_newest = click.argument("run", metavar="[RUN]", type=click.Path(), required=False)


@click.group()
def checkpoint() -> None:
    """List and verify checkpoints, lay them out for other stages, and import weights. `stageline export` exports them.

    RUN is the folder of a run, or of what Line.save has saved.
    """


checkpoint.add_command(split)


@checkpoint.command(epilog="Example: stageline checkpoint ls runs/digits-20260131-101500-1f0c")
@_newest
@options.as_json
def ls(run: str | None, as_json: bool) -> None:
    """List the checkpoints of RUN (default: the newest in ./runs), and which stages have a snapshot here."""
    from stageline.workers.checkpoint.source import checkpoint_rows
    from stageline.workers.runs.notes import read_note

    source = _source(run)
    rows, note = checkpoint_rows(source), read_note(source.folder)
    if as_json:
        facts = {"run": source.run, "folder": str(source.folder), "stages": source.stages, "goes_on_from": note}
        click.echo(msgspec.json.encode({"schema": "checkpoint-ls/1", **facts, "checkpoints": rows}))
        return
    title = f"checkpoints of run {source.run}, of {counted(len(source.first_replicas), 'stage')}"
    if note is not None:
        title += f", which goes on from step {note.step} of {note.run}"
    show(title, ("step", "stages", "is", "size", "written"), [_row(source, each) for each in rows])
    for row in rows:
        for damage in row.damages:
            options.tell(damage)


@checkpoint.command(epilog="Example: stageline checkpoint verify runs/digits-20260131-101500-1f0c --step 120")
@_newest
@click.option(
    "--step", type=click.IntRange(min=1), help="Only the checkpoint of this step, which all stages must have."
)
@options.as_json
def verify(run: str | None, step: int | None, as_json: bool) -> None:
    """Read every byte of the snapshots of RUN (default: the newest in ./runs); exit code 1 if one is damaged."""
    from stageline.workers.checkpoint.source import snapshot_states, source_in

    source = _source(run)
    found = list(snapshot_states(source, None if step is None else source.step_of(step)))
    if as_json:
        facts = {"run": source.run, "folder": str(source.folder), "step": step}
        click.echo(msgspec.json.encode({"schema": "checkpoint-verify/1", **facts, "snapshots": found}))
    else:
        for each in found:
            say(_verdict(each))
    if problem := _problem(source, found):
        raise CommandFailed(f"{problem} in {source.folder}", ExitCode.FAILED, answered=True)
    if step is not None:  # a run that goes on may have deleted some meanwhile
        source_in(source.folder).demand_all(step)


@checkpoint.command("import", epilog="Example: stageline checkpoint import /data/gpt2 parts --plan examples/gpt2")
@click.argument("source", type=click.Path())
@click.argument("out", type=click.Path())
@click.option("--plan", "config", type=click.Path(), help="Compare with this plan's model, and write a file per stage.")
@options.sets
def import_(source: str, out: str, config: str | None, sets: tuple[str, ...]) -> None:
    """Write the weights in SOURCE to OUT, which must not exist: one safetensors file, or with --plan a folder with a
    file for each stage, which model.weights can name.

    SOURCE is a safetensors file, an index of several, a folder with them (as transformers or HuggingFaceStorageWriter
    write it), or the .pt file of a state dict.
    """
    from stageline.workers.extras.exchange.foreign import foreign_weights

    weights = foreign_weights(Path(source))
    if config is None:
        if sets:
            raise click.UsageError("--set goes with --plan")
        from stageline.workers.extras.exchange.export import export_file

        export_file(weights, Path(out))
    else:
        from stageline.workers.extras.exchange.import_stages import import_stages

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
    """What is wrong with the snapshots `found`; "" if nothing is."""
    if damaged := sum(bool(each.damages) for each in found):
        return f"{counted(damaged, 'snapshot is', 'snapshots are')} damaged"
    if found:
        return ""
    return "the run has deleted meanwhile what was to be read" if source.present else "there is no snapshot"


def _verdict(state: "SnapshotState") -> str:
    found = f"damaged: {'; '.join(state.damages)}" if state.damages else "whole"
    return f"stage {state.label}, step {state.step}: {found}"
