"""`--allow FILE` of commands that import code of a plan or open data: they keep to what the data's owner allows."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import click

from stageline.pipeline.model.object_names import is_of_script

VARIABLE = "STAGELINE_ALLOW"


def allow(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a command with the option --allow, which holds for it and for processes that it starts.

    A fork of a script has no such file: the script has opened its data before.
    """

    @click.option(
        "--allow",
        "allowed",
        metavar="FILE",
        type=click.Path(),
        help=f"Import code and open data only as the owner's FILE lists. Default: {VARIABLE} of the environment.",
    )
    @wraps(command)
    def within(*arguments: Any, allowed: str | None, **named: Any) -> Any:
        file = os.environ.get(VARIABLE) if allowed is None else allowed
        if file is None or is_of_script(str(named.get("config"))):
            return command(*arguments, **named)
        if not file:
            raise click.UsageError(f"--allow, or {VARIABLE}, names no file: name one, or unset the variable")
        with _kept_to(Path(file).absolute()):
            return command(*arguments, **named)

    return within


@contextmanager
def _kept_to(file: Path) -> Iterator[None]:
    from stageline.workers.extras.consent.guard import keep_to  # imports torch

    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(file)
    try:
        with keep_to(file, click.get_current_context().info_name or ""):
            yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
