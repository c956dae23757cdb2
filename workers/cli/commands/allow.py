"""`stageline allow`: prints the entry by which the owner of data allows a plan. It runs no code of the plan."""

import os
from datetime import datetime

import click

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import options
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import say


@click.command(
    cls=Command,
    examples=("stageline allow", 'stageline allow examples/digits --asked-by "Anna, at the lab" --until 2026-12-31'),
    groups={"Entry": ("--asked-by", "--until")},
    codes=codes(ExitCode.REFUSED),
)
@options.config
@options.sets
@click.option("--asked-by", default="", metavar="NAME", help="Who asked you, for the record of use.")
@click.option("--until", type=click.DateTime(["%Y-%m-%d"]), metavar="DAY", help="Last day, such as 2026-12-31.")
def allow(config: str, sets: tuple[str, ...], asked_by: str, until: datetime | None) -> None:
    """Print the entry of an --allow file for the plan CONFIG.

    It lists what the plan sets, its data sources, and the SHA-256 of each file of code that the plan imports. Nothing
    of the plan is executed. Read the entry and these files; if you allow them, add the entry to your file.
    """
    from stageline.pipeline.plan import read_plan
    from stageline.workers.extras.consent.allow_file import entry_text

    plan = read_plan(config, sets=sets, environment=os.environ)
    say(entry_text(plan, asked_by, until and until.date()))
