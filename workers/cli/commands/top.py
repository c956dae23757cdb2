"""`stageline top`: a screen of a run, as it goes on."""

import os
import sys

import click

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import broker_address, options
from stageline.workers.cli.asking.looking import EVERY
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import CommandFailed
from stageline.workers.cli.top.facts import looker

INSTEAD = "`stageline status --watch` prints the same run, line by line"


@click.command(
    cls=Command,
    examples=("stageline top runs/digits-20260131-101500-1f0c", "stageline top --broker tcp://10.0.0.4:5600"),
    codes=codes(ExitCode.NO_BROKER, ExitCode.NOT_ADMITTED, ExitCode.REFUSED, ok="q was pressed"),
)
@options.where
@click.option(
    "--every",
    type=options.Finite(min=0.1),
    default=EVERY,
    help=f"Seconds from one look to the next. Default: {EVERY:g}.",
)
@broker_address.broker
def top(where: str | None, every: float, broker: str | None) -> None:
    """Show a run on a screen, as it goes on.

    There are panels for workers, queues, microbatches and the newest step. The keys are named in the last line; q
    quits. The run is asked about, and never changed. WHERE is a run's folder, or a plan, whose newest run is meant.
    Default: the newest run in ./runs.
    """
    if not all(each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr)):  # the screen is written to stderr
        raise CommandFailed(f"top draws a screen, and this is no terminal: {INSTEAD}", ExitCode.USAGE)
    if os.environ.get("TERM", "dumb") in ("", "dumb"):
        raise CommandFailed(f"top draws a screen, which a terminal of TERM=dumb cannot: {INSTEAD}", ExitCode.USAGE)
    try:
        from stageline.workers.cli.top.app import TopApp
    except ImportError as error:
        raise CommandFailed(
            f"top is drawn by the package textual, which is not installed, or not whole ({error}): "
            f'pip install "stageline[top]". {INSTEAD}',
            ExitCode.USAGE,
        ) from error
    options.answer_about(where, broker, "status")  # what is wrong is told before the screen is drawn
    TopApp(lambda show: looker(where, broker, show, every)).run()
