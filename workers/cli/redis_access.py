"""`stageline keys acl`, which is added to the other commands about keys in `commands/keys.py`."""

import click

from stageline.pipeline.errors import ExitCode

from . import options
from .help import Command, codes
from .output import say


@click.command(
    cls=Command,
    examples=(
        "stageline keys acl examples/digits --set queues.url=redis://host:6379/0",
        "stageline keys acl examples/digits --run digits-20260131-101500-1f0c",
    ),
    groups={"Run": ("--run",)},
    codes=codes(ExitCode.REFUSED, failed="the model or the data cannot be loaded"),
)
@options.config
@options.sets
@click.option(
    "--run", metavar="ID", help="Id of the run, or a pattern. Default: the runs that have the plan's run.name."
)
def acl(config: str, sets: tuple[str, ...], run: str | None) -> None:
    """Print the access list of the Redis servers that the plan CONFIG names: a user for each part of the run.

    Put a password in place of each PASSWORD-OF-..., and give each process the address with its user. The server must
    be Redis 7 or newer, or Valkey.
    """
    plan = options.plan_of(config, sets)
    from stageline.broker.transports.redis.access_list import access_list, uses
    from stageline.workers.runtime.job import prepare

    found = uses(run or f"{plan.run.name}-*", plan.queues.url, plan.broker.url, plan.broker.store)
    if not found:
        raise click.UsageError("the plan names no Redis server: neither in queues.url, broker.url nor broker.store")
    program = prepare(plan).program
    for address, use in found.items():
        say(f"stageline: the users at {address}; {use.run} stands for the id of the run", err=True)
        for line in access_list(use, program.queues.values(), program.script):
            say(line)
