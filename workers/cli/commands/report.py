"""`stageline report`: a run on one page, in a file that a browser opens without a network."""

from pathlib import Path
from time import time

import click

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import broker_address, options
from stageline.workers.cli.asking.looking import view_of
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import say, size
from stageline.workers.disk.atomic_file import write_file


@click.command(
    cls=Command,
    examples=(
        "stageline report runs/digits-20260131-101500-1f0c -o run.html",
        "stageline report --broker tcp://10.0.0.4:5600",
    ),
    groups={"Output": ("--output",)},
    codes=codes(ExitCode.NO_BROKER, ExitCode.REFUSED),
)
@options.where
@broker_address.broker
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write. Default: the run's id with .html, in the current folder.",
)
def report(where: str | None, broker: str | None, output: Path | None) -> None:
    """Write one page about a run, which a browser opens offline.

    Has what limits the run, its pace and loss, a timetable, queues, memory, lost workers, and the plan. The page is one
    file and loads nothing. WHERE is a run's folder, or a plan, whose newest run is meant. Default: the newest run in
    ./runs.
    """
    from stageline.workers.extras.report.facts import sections
    from stageline.workers.extras.report.page import page_of

    with view_of(where, broker) as run:
        found = sections(run.ask, run.folder, run.source, run.as_of)
    named = found["run"]["id"]
    page, file = page_of(found, time()).encode(), output or Path(f"{named}.html")
    write_file(file, page)
    say(f"{file}: run {named}, {size(len(page))}; any browser opens it, without a network")
