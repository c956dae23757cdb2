"""`stageline worker`: one worker of a run."""

import click

from stageline.workers.cli import option_types as kinds
from stageline.workers.cli import options
from stageline.workers.cli.logs import log_to_stderr

ONCE = 0.5  # seconds that a broker which is asked once gets to answer


@click.command(epilog="Example: stageline worker examples/digits --broker tcp://10.0.0.4:5600")
@options.config
@options.sets
@click.option(
    "--broker",
    callback=kinds.address(dials=True),
    metavar="URL",
    help="Where the broker listens; broker.url of the plan if not given.",
)
@click.option("--index", type=click.IntRange(min=0), help="Which worker of the plan to be; any free one if not given.")
@click.option("--name", help="What to call it in reports.")
@click.option(
    "--patience",
    type=kinds.Finite(min=0),
    default=10.0,
    show_default=True,
    help="Seconds to look for the broker; with 0 it is asked once.",
)
@click.option("--spare", is_flag=True, help="Wait until a worker of the run is lost, and take its place at once.")
@options.parent
@click.option("--sockets", hidden=True, help="The folder for its sockets.")
def worker(
    config: str,
    sets: tuple[str, ...],
    broker: str | None,
    index: int | None,
    name: str | None,
    patience: float,
    spare: bool,
    parent: int,
    sockets: str | None,
) -> int:
    """Run one worker of the plan CONFIG.

    It computes its stages, wherever the other workers are, until the run is over. A spare has loaded everything and
    computes nothing until it is needed.
    """
    log_to_stderr()
    plan = options.plan_of(config, sets)
    from stageline.workers.process.worker_process import WorkerOptions, run_worker

    if spare:
        options.demand_restarts(plan)
    called = name or ("worker" if index is None else f"worker-{index}")
    url = broker or plan.broker.url
    return run_worker(
        plan, WorkerOptions(url, called, index, patience or ONCE, parent=parent, sockets=sockets, spare=spare)
    )
