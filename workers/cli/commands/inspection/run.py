"""`stageline run ls`: lists the runs in a folder."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import options
from stageline.workers.cli.asking import RUNS
from stageline.workers.cli.display.output import show, steps_of
from stageline.workers.cli.errors import CommandFailed

if TYPE_CHECKING:
    from stageline.workers.runs.listing import RunRow

_LONGEST = 60  # characters of a reason that the table shows


@click.group()
def run() -> None:
    """List runs."""


@run.command("ls", epilog="Example: stageline run ls /data/runs")
@click.argument("folder", metavar="[DIR]", type=click.Path(), default=RUNS)
@options.as_json
def list_runs(folder: str | Path, as_json: bool) -> None:
    """List the runs in DIR, by the time at which each was begun or resumed: how far each came, and what became of it.

    Reads their records; no broker is asked. Default: ./runs.
    """
    from stageline.workers.runs.listing import run_rows

    if not Path(folder).is_dir():
        raise CommandFailed(f"there is no folder {folder}: name the one in which the runs are", ExitCode.USAGE)
    rows = list(run_rows(Path(folder)))
    if as_json:
        click.echo(msgspec.json.encode({"schema": "run-ls/1", "folder": str(folder), "runs": rows}))
        return
    columns = ("run", "plan", "began", "state", "steps", "loss", "checkpoint", "weights", "reason")
    show(f"runs in {folder}", columns, [_cells(each) for each in rows])


def _cells(row: "RunRow") -> tuple[object, ...]:
    reason = (row.reason or "-").splitlines()[0]
    return (
        row.run,
        row.name or "-",
        "-" if row.began is None else f"{datetime.fromtimestamp(row.began):%F %T}",
        row.state,
        steps_of(row.steps, row.total, script=row.script),
        "-" if row.loss is None else f"{row.loss:.4g}",
        "-" if row.checkpoint is None else row.checkpoint,
        (row.weights_sha256 or "-")[:12],
        reason if len(reason) <= _LONGEST else f"{reason[: _LONGEST - 3]}...",
    )
