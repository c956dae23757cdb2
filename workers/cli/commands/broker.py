"""`stageline broker`: the process that knows where every microbatch is."""

import shlex

import click

from stageline.pipeline.plan.passwords import masked
from stageline.workers.cli import option_types as kinds
from stageline.workers.cli import options
from stageline.workers.cli.logs import log_to_stderr


@click.command(epilog="Example: stageline broker examples/digits --bind tcp://10.0.0.4:5600")
@options.config
@options.sets
@click.option(
    "--bind",
    callback=kinds.address(dials=False),
    metavar="URL",
    help="Where to listen; broker.url of the plan if not given.",
)
@click.option(
    "--run", metavar="ID", callback=kinds.run_id, help="Go on with this run's records; a new run if not given."
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with the run even if it was stopped. If nobody has stopped it, workers still at work stay.",
)
@options.parent
def broker(config: str, sets: tuple[str, ...], bind: str | None, run: str | None, resume: bool, parent: int) -> int:
    """Run the broker of the plan CONFIG until the run is over."""
    log_to_stderr()
    plan = options.plan_of(config, sets)
    from stageline.workers.process.broker_process import BrokerOptions, run_broker
    from stageline.workers.runs import folder as runs

    def tell(endpoint: str) -> None:
        records = runs.folder(plan, place.run) if plan.broker.store == runs.IN_FOLDER else masked(plan.broker.store)
        click.echo(f"run {place.run}: broker at {masked(endpoint)}, records in {records}", err=True)
        if not parent:
            shown = options.without_passwords(sets)
            named = () if endpoint == plan.broker.url else ("--broker", masked(endpoint))
            words = ("stageline", "worker", *options.plan_words(config, shown), *named)
            click.echo(f"start every worker with: {shlex.join(words)}", err=True)
            if len(shown) < len(sets):
                click.echo("and with the addresses that hold a password in its environment", err=True)

    place = BrokerOptions(bind or plan.broker.url, run or runs.new_id(plan), parent, resume)
    return run_broker(plan, place, tell)
