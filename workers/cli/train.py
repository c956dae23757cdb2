"""`stageline train`: a whole run on this machine, in one terminal."""

import click
import msgspec

from . import options
from .failure import Failure
from .logs import log_to_stderr


@click.command(epilog="Example: stageline train examples/digits --set schedule.name=gpipe")
@options.config
@options.sets
@options.as_json
def train(config: str, sets: tuple[str, ...], as_json: bool) -> int:
    """Train the plan CONFIG here: a broker and every worker, each in a process of its own."""
    log_to_stderr()
    plan = options.plan_of(config, sets)
    from .. import launch

    start = launch.ready(plan)
    ended = launch.go(start, options.plan_words(config, sets), lambda facts: None)
    if ended.result is None:
        raise Failure(f"{ended.reason}\nThe logs are in {start.folder}.", ended.code)
    if as_json:
        click.echo(msgspec.json.encode(ended.result))
    return 0
