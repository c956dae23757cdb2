"""`stageline microbatch`: the microbatches that are under way, by their state."""

from time import time

import click

from stageline.broker.ledger.ledger import MicrobatchState
from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import broker_address, options
from stageline.workers.cli.asking.looking import look, watched
from stageline.workers.cli.help import CommandGroup, codes
from stageline.workers.cli.output import duration, say, show
from stageline.workers.runs.folder import Facts


@click.group(cls=CommandGroup)
def microbatch() -> None:
    """Inspect the microbatches of a run."""


@microbatch.command(
    examples=("stageline microbatch ls --state stashed", "stageline microbatch ls runs/digits-20260131-101500-1f0c"),
    groups={"Microbatches": ("--state",)},
    codes=codes(ExitCode.NO_BROKER, ExitCode.NOT_ADMITTED, ExitCode.REFUSED),
)
@options.where
@click.option(
    "--state",
    type=click.Choice([str(state) for state in MicrobatchState]),
    metavar="STATE",
    help=f"List those in this state: {', '.join(MicrobatchState)}. Default: all that are begun and not done.",
)
@watched
@broker_address.broker
@options.as_json
def ls(where: str | None, state: str | None, watch: float | None, broker: str | None, as_json: bool) -> None:
    """List the microbatches of the steps that some stage has not finished.

    A row is a microbatch at a stage, with its state there. WHERE is a run's folder, or a plan, whose newest run is
    meant. Default: the newest run in ./runs.
    """
    arguments = {} if state is None else {"state": state}
    look("microbatches", where, broker, as_json, _show_microbatches, watch, arguments)


def _show_microbatches(facts: Facts) -> None:
    now = time() if facts["source"] == "broker" else facts["as_of"]
    rows = [
        (
            *(each[name] for name in ("step", "microbatch", "stage", "worker", "state")),
            "-" if each["since"] is None else duration(max(0.0, now - each["since"])),
            each["holder"] or "-",
        )
        for each in facts["microbatches"]
    ]
    columns = ("step", "microbatch", "stage", "worker", "state", "for", "process")
    show(f"microbatches of run {facts['run']}", columns, rows)
    if facts["left_out"]:
        say(f"and {facts['left_out']} more")
    counts = ", ".join(f"{count} {state}" for state, count in facts["states"].items() if count)
    say(f"in all: {counts or 'no step is open'}")
