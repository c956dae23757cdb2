"""Options that name a broker: by its address, or by the join line that it has printed.

--join 'tcp://desk:7000#k1....'     on the command line, where every user of this machine can read it (ps)
--join @FILE                        in a file
--join -                            on the standard input
STAGELINE_JOIN                      in the environment
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

from stageline.broker.keys.join_line import JoinLine
from stageline.pipeline import addresses
from stageline.pipeline.addresses import masked
from stageline.workers.control.enrolling import JOIN, is_join_line

from . import completion
from .output import say

LONGEST = 4096  # characters of a line that is read

Callback = Callable[[click.Context, click.Parameter, str | None], str | None]
_VISIBLE = (
    "contains a password, and every user of this machine can read a command line (ps). Leave the option out and put "
    "the address into the environment, as STAGELINE_BROKER__URL, or into a plan file that only you can read"
)


def address(*, dials: bool) -> Callback:
    """Return the callback of an option that takes the broker's address.

    With `dials`, the address is one to connect to; a join line, @FILE or - may stand for it, which `given` reads.
    Otherwise, it is one to listen at. An empty value stays so.
    """

    def checked(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        if not value or (dials and (_is_elsewhere(value) or is_join_line(value))):
            return value
        _demand_address(value, dials=dials)
        bare = addresses.parted(value)[0]
        if masked(bare) != bare:
            say(f"stageline: warning: {parameter.opts[0]} {_VISIBLE}", err=True)
        return value

    return checked


broker = click.option(
    "--broker",
    callback=address(dials=True),
    metavar="URL",
    shell_complete=completion.broker_addresses,
    help="The broker's address. Default: found from WHERE.",
)


def given(value: str | None) -> str:
    """Return the address or sound join line that an option's value stands for, or STAGELINE_JOIN; "" for neither.

    Raises:
        BadJoinLine: A join line is wrong.
        click.UsageError: An address is wrong, or the file cannot be read.
    """
    text = told(value)
    if is_join_line(text):
        JoinLine.parse(text)
    return text


def told(value: str | None) -> str:
    """Return the address or join line, which may be wrong, that `value` or STAGELINE_JOIN stands for; "" for neither.

    The variable is removed: processes that this one starts are to have no secret that is not for them. Raises
    `click.UsageError` if an address is wrong, or the file cannot be read.
    """
    kept = os.environ.pop(JOIN, "").strip()
    text = _read(value) if value else kept
    if text and not is_join_line(text):
        _demand_address(text, dials=True, hint=f"'{value or JOIN}'")
    return text


def _demand_address(text: str, *, dials: bool, hint: str | None = None) -> None:
    if fault := _fault(text, dials=dials):
        raise click.BadParameter(
            f"{masked(text)!r} is not an address of a broker: {fault}; "
            f"write {' or '.join(addresses.broker_schemes().values())}",
            param_hint=hint,
        )


def _is_elsewhere(value: str) -> bool:
    """Return True if `value` says where the address or line is, in a file or on the standard input."""
    return value.startswith("@") or value == "-"


def _read(value: str) -> str:
    """Return the text that `value` stands for: the content of a file or of the standard input, or itself."""
    if not _is_elsewhere(value):
        return value.strip()
    try:
        text = sys.stdin.readline(LONGEST) if value == "-" else Path(value[1:]).expanduser().read_text()[:LONGEST]
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{value}: {getattr(error, 'strerror', 'it is not UTF-8')}") from error
    if not text.strip():
        raise click.UsageError(f"{value}: nothing is in it; put the line there that the broker printed")
    return text.strip()


def _fault(url: str, *, dials: bool) -> str | None:
    if (fault := addresses.fault(url, addresses.broker_schemes())) is not None:
        return fault or f"one begins with {' or '.join(f'{scheme}://' for scheme in addresses.broker_schemes())}"
    scheme, _, rest = url.partition("://")
    if not rest:
        return f"{scheme}:// goes with a path"
    if dials and addresses.transport_of(url).has_free_port(url):
        return "its port must be the one that the broker listens at"
    return None
