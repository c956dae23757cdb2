"""`stageline why`: what a run waits for, and what can be done about it."""

import click

from stageline.workers.cli import options
from stageline.workers.cli.ask import ask


@click.command(epilog="Example: stageline why --broker tcp://10.0.0.4:5600")
@options.where
@options.broker
@click.option("--stage", type=click.IntRange(min=0), help="Explain this stage's wait. Default: the longest one.")
@options.as_json
def why(where: str | None, broker: str | None, stage: int | None, as_json: bool) -> None:
    """Explain what a run waits for: which worker waits for which, down to the cause, and what to do about it.

    WHERE is a run's folder, or a plan, whose broker.url is queried. Default: the newest run in ./runs.
    """
    arguments = {} if stage is None else {"stage": str(stage)}
    facts = ask("why", where, broker, as_json=as_json, **arguments)
    if facts is not None:
        click.echo(f"run {facts['run']}: {facts['phase']}\n  {facts['text']}\n  what to do: {facts['action']}")
