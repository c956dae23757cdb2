"""Puts a question to the broker of a run, wherever that is."""

import os
from pathlib import Path
from typing import Any

import click
import msgspec

from stageline.pipeline.exit_code import ExitCode
from stageline.pipeline.plan import urls
from stageline.workers.control.client import BrokerUnreachable, Client
from stageline.workers.runs import folder as runs

from .errors import CommandFailed

PATIENCE = 3.0  # seconds that the broker gets to answer


def ask(what: str, where: str | None, broker: str | None, *, as_json: bool, **of: str) -> dict[str, Any] | None:
    """The broker's facts, for a table; with `as_json` they are printed as they are, and None is returned.

    Raises `BrokerUnreachable`, and `CommandFailed` if the broker will not answer this.
    """
    where = where if broker else place(where)
    try:
        with Client(broker or _address(where)) as client:
            facts = client.ask(what, PATIENCE, **of)
    except ValueError as refusal:
        raise CommandFailed(str(refusal), ExitCode.USAGE) from refusal
    except BrokerUnreachable as error:
        if broker or where is None or not runs.is_run(Path(where)):
            raise
        raise BrokerUnreachable(_away(Path(where))) from error
    if not as_json:
        return facts
    click.echo(msgspec.json.encode(facts))
    return None


def place(where: str | None) -> str | None:
    """`where`, or the folder of the newest run in ./runs; None if there is none."""
    if where is not None:
        return where
    newest = runs.newest_in(Path("runs"))
    return None if newest is None else str(newest)


def _address(where: str | None) -> str:
    if where is None:
        return os.environ.get("STAGELINE_BROKER__URL") or urls.BROKER["tcp"]
    if (url := runs.read_broker_url(Path(where))) is not None:
        return url
    if runs.is_run(Path(where)):
        raise BrokerUnreachable(_away(Path(where)))
    from stageline.pipeline.plan import read_plan  # imports pydantic

    return read_plan(where, environment=os.environ).broker.url


def _away(folder: Path) -> str:
    """Why there is nobody to ask about the run in `folder`, and what can be done."""
    name = folder.resolve().name
    if runs.result_in(folder) is not None:
        return f"run {name} has finished, and its broker has left; `stageline status {folder}` shows the result"
    return (
        f"run {name} has ended, or its broker is away. Go on with it on this machine with `stageline train CONFIG "
        f"--resume {name}`, or, if its workers still train, start its broker: `stageline broker CONFIG --run {name}`"
    )
