"""`stageline broker`: runs the broker of a plan."""

import shlex

import click
import msgspec

from stageline.pipeline.addresses import masked
from stageline.workers.cli import options
from stageline.workers.cli.display.output import say
from stageline.workers.cli.logs import log_to_stderr


@click.command(epilog="Example: stageline broker examples/digits --bind tcp://10.0.0.4:5600")
@options.config
@options.sets
@click.option(
    "--bind",
    callback=options.address(dials=False),
    metavar="URL",
    help="Address to listen at. Default: broker.url of the plan.",
)
@click.option("--run", metavar="ID", callback=options.run_id, help="Continue the run with this id. Default: a new run.")
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the run even if it was stopped. Workers that are still training keep their places.",
)
@click.option("--new", is_flag=True, hidden=True, help="No broker has served the run before.")
@click.option(
    "--length",
    hidden=True,
    help="How long the run is, as a RunLength in JSON.",
)
@options.lifeline
def broker(
    config: str,
    sets: tuple[str, ...],
    bind: str | None,
    run: str | None,
    resume: bool,
    new: bool,
    length: str | None,
    lifeline: int,
) -> int:
    """Run the broker of the plan CONFIG until the run is over."""
    log_to_stderr()
    plan = options.plan_of(config, sets)
    from stageline.broker.control.records import RunLength
    from stageline.pipeline.process.lifeline import Lifeline
    from stageline.workers.process.broker_process import BrokerOptions, run_broker
    from stageline.workers.runs import folder as runs

    def announce(endpoint: str) -> None:
        records = runs.folder(plan, place.run) if plan.broker.store == runs.IN_FOLDER else masked(plan.broker.store)
        say(f"run {place.run}: broker at {masked(endpoint)}, records in {records}", err=True)
        if not place.lifeline.supervised:
            shown = options.without_passwords(sets)
            named = () if endpoint == plan.broker.url else ("--broker", masked(endpoint))
            command = ("stageline", "worker", *options.plan_arguments(config, shown), *named)
            say(f"start every worker with: {shlex.join(command)}", err=True)
            if len(shown) < len(sets):
                say("and put the addresses that contain a password into its environment", err=True)

    place = BrokerOptions(
        bind or plan.broker.url,
        run or runs.new_id(plan),
        Lifeline(lifeline),
        resume,
        new or not run,
        msgspec.json.decode(length, type=RunLength) if length else None,
    )
    return run_broker(plan, place, announce)
