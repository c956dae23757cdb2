"""`stageline worker`: runs one worker of a plan."""

import click

from stageline.workers.cli import options
from stageline.workers.cli.logs import log_to_stderr

ONE_ATTEMPT = 0.5  # seconds for the broker to answer, with --patience 0


@click.command(epilog="Example: stageline worker examples/digits --broker tcp://10.0.0.4:5600")
@options.config
@options.sets
@click.option(
    "--broker",
    callback=options.address(dials=True),
    metavar="URL",
    help="The broker's address. Default: broker.url of the plan.",
)
@click.option("--index", type=click.IntRange(min=0), help="Index of the worker in the plan. Default: any free one.")
@click.option("--name", help="Name of this worker in reports.")
@click.option(
    "--patience",
    type=options.Finite(min=0),
    default=10.0,
    show_default=True,
    help="Seconds to try to reach the broker; 0 tries once.",
)
@click.option("--spare", is_flag=True, help="Load everything and wait; take the place of the next worker that is lost.")
@options.lifeline
@click.option("--sockets", hidden=True, help="Folder for its sockets.")
def worker(
    config: str,
    sets: tuple[str, ...],
    broker: str | None,
    index: int | None,
    name: str | None,
    patience: float,
    spare: bool,
    lifeline: int,
    sockets: str | None,
) -> int:
    """Run one worker of the plan CONFIG.

    It computes its stages until the run is over. The other workers may be on any machine.
    """
    log_to_stderr()
    plan = options.plan_of(config, sets)
    from stageline.workers.process import last_line
    from stageline.workers.process.worker_process import WorkerOptions, run_worker

    if spare:
        options.require_restarts(plan)
    last_line.install()
    name = name or ("worker" if index is None else f"worker-{index}")
    return run_worker(
        plan,
        WorkerOptions(
            broker or plan.broker.url,
            name,
            index,
            patience or ONE_ATTEMPT,
            lifeline=lifeline,
            sockets=sockets,
            spare=spare,
        ),
    )
