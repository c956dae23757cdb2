"""`stageline why`: what a run waits for, and what can be done about it."""

import click

from stageline.workers.cli import options
from stageline.workers.cli.ask import ask


@click.command(epilog="Example: stageline why --broker tcp://10.0.0.4:5600")
@options.where
@options.broker
@click.option("--stage", type=click.IntRange(min=0), help="Why this stage waits; the longest wait if not given.")
@options.as_json
def why(where: str | None, broker: str | None, stage: int | None, as_json: bool) -> None:
    """Say why a run waits: who waits for whom, down to the one that keeps all others waiting, and what to do.

    WHERE is a plan, whose broker.url is asked, or a run's folder. Without it and --broker, the newest run in ./runs.
    """
    of = {} if stage is None else {"stage": str(stage)}
    facts = ask("why", where, broker, as_json=as_json, **of)
    if facts is not None:
        click.echo(f"run {facts['run']}: {facts['phase']}\n  {facts['text']}\n  what to do: {facts['action']}")
