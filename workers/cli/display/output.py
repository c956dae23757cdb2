"""What commands print for people goes through here; answers as JSON do not, and keep their exact text."""

from typing import IO, Any

import click

from stageline.pipeline.printable import printable

LONGEST = 1_000_000  # characters; a table may be long


def say(text: str, *, err: bool = False, file: IO[Any] | None = None) -> None:
    """Prints `text` on stdout, or on stderr or to `file`. What would control a terminal is shown instead."""
    click.echo(printable(text, most=LONGEST), err=err, file=file)
