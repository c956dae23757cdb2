"""The kinds of value that an option may take, beyond click's own."""

import math
from collections.abc import Callable
from typing import Any

import click
import msgspec

from stageline.broker.control.protocol import RunId
from stageline.pipeline.plan import urls
from stageline.pipeline.plan.passwords import masked

_SEEN = (
    "was given with a password, and everybody on this machine can read a command line (ps). Leave the option out, and "
    "put the address into the environment, as STAGELINE_BROKER__URL, or into a plan file that only you can read"
)
Callback = Callable[[click.Context, click.Parameter, str | None], str | None]


class Finite(click.FloatRange):
    """A number within bounds; "nan" and what is too large for a float are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


def address(*, dials: bool) -> Callback:
    """The callback of an option that takes the broker's address: to reach it there (`dials`), or to listen there."""

    def checked(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None and (fault := _fault(value, dials=dials)) is not None:
            examples = " or ".join(urls.BROKER.values())
            raise click.BadParameter(f"{masked(value)!r} is not an address of a broker: {fault}; write {examples}")
        if value is not None and masked(value) != value:
            click.echo(f"stageline: warning: {parameter.opts[0]} {_SEEN}", err=True)
        return value

    return checked


def run_id(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """The callback of an option that takes the id of a run, or "": it becomes the name of a folder."""
    try:
        return msgspec.convert(value, RunId) if value else value
    except msgspec.ValidationError:
        wanted = "letters, digits and - _ . with a letter or digit first, 200 at most"
        raise click.BadParameter(f"{value!r} is no run's id: {wanted}") from None


def _fault(url: str, *, dials: bool) -> str | None:
    if (fault := urls.fault(url, urls.BROKER)) is not None:
        return fault or f"it begins with {' or '.join(f'{scheme}://' for scheme in urls.BROKER)}"
    scheme, _, rest = url.partition("://")
    if not rest:
        return f"{scheme}:// goes with a path"
    if dials and scheme == "tcp" and rest.rpartition(":")[2].strip("0") in ("", "*"):
        return "its port must be the one that the broker listens at"
    return None
