"""Arguments and options that several commands share."""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click

from stageline.pipeline.plan.passwords import masked

from . import option_types as kinds

if TYPE_CHECKING:  # imports pydantic
    from stageline.pipeline.plan import Plan

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

config = click.argument("config", type=click.Path(), default=".")  # a folder stands for the plan in it
sets = click.option(
    "--set", "sets", metavar="KEY=VALUE", multiple=True, help="Overrule a key of the plan: --set run.steps=20."
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON of a versioned schema on stdout.")
where = click.argument("where", type=click.Path(), required=False)
broker = click.option("--broker", callback=kinds.address(dials=True), metavar="URL", help="Where the broker listens.")
parent = click.option("--parent", type=int, default=0, hidden=True, help="Leave when this process is gone.")


def plan_of(config: str, sets: Sequence[str]) -> "Plan":
    """The plan that the command line and the environment name; warnings go to stderr."""
    from stageline.pipeline.plan import read_plan

    plan = read_plan(config, sets=sets, environment=os.environ)
    for warning in plan.warnings:
        click.echo(f"stageline: warning: {warning}", err=True)
    return plan


def demand_restarts(plan: "Plan") -> None:
    """Raises `click.UsageError` if the plan has no use for spare workers."""
    if not plan.recovery.on:
        raise click.UsageError("a spare has nothing to wait for: no worker is replaced; add --set recovery.restarts=5")


def plan_words(config: str, sets: Sequence[str]) -> list[str]:
    """The same plan, as arguments for another of our commands: with passwords, if there are any, not to be shown."""
    return [config, *(word for each in sets for word in ("--set", each))]


def without_passwords(sets: Sequence[str]) -> list[str]:
    """Those of `sets` that may be shown."""
    values = {each: each.partition("=")[2].strip().strip("\"'") for each in sets}
    return [each for each, value in values.items() if masked(value) == value]


def user_prints_to_stderr() -> contextlib.redirect_stdout[TextIO]:
    """A context in which what a user's code prints goes to stderr: stdout is for the command's result."""
    return contextlib.redirect_stdout(sys.stderr)


def width() -> int | None:
    """The columns that stdout has, None if it is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def writes_unicode() -> bool:
    """Whether stdout can show more than ASCII."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
