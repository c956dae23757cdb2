"""Queries the broker of a run, found by its address, its plan or its folder."""

import os
from pathlib import Path
from typing import Any

import click
import msgspec

from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import addresses
from stageline.workers.control.client import BrokerUnreachable, Client
from stageline.workers.runs import folder as runs

from .errors import CommandFailed

PATIENCE = 3.0  # seconds to wait for the broker's answer


def ask(query: str, where: str | None, broker: str | None, *, as_json: bool, **arguments: str) -> dict[str, Any] | None:
    """The broker's answer; with `as_json` it is printed as it is, and None is returned.

    Raises `BrokerUnreachable`, and `CommandFailed` if the broker refuses the query.
    """
    where = where if broker else run_or_newest(where)
    try:
        with Client(broker or _address(where)) as client:
            facts = client.ask(query, PATIENCE, **arguments)
    except ValueError as refusal:
        raise CommandFailed(str(refusal), ExitCode.USAGE) from refusal
    except BrokerUnreachable as error:
        if broker or where is None or not runs.is_run(Path(where)):
            raise
        raise BrokerUnreachable(_why_unreachable(Path(where))) from error
    if not as_json:
        return facts
    click.echo(msgspec.json.encode(facts))
    return None


def run_or_newest(where: str | None) -> str | None:
    """`where`, or the folder of the newest run in ./runs; None if there is no run."""
    if where is not None:
        return where
    newest = runs.newest_in(Path("runs"))
    return None if newest is None else str(newest)


def _address(where: str | None) -> str:
    if where is None:
        return os.environ.get("STAGELINE_BROKER__URL") or addresses.BROKER["tcp"]
    if (url := runs.read_broker_url(Path(where))) is not None:
        return url
    if runs.is_run(Path(where)):
        raise BrokerUnreachable(_why_unreachable(Path(where)))
    from stageline.pipeline.plan import read_plan  # imports pydantic

    return read_plan(where, environment=os.environ).broker.url


def _why_unreachable(folder: Path) -> str:
    """Why no broker answers for the run in `folder`, and what can be done."""
    name = folder.resolve().name
    if runs.result_in(folder) is not None:
        return f"run {name} has finished, and its broker has exited; `stageline status {folder}` shows the result"
    return (
        f"run {name} has ended, or its broker is down. Resume it on this machine with `stageline train CONFIG "
        f"--resume {name}`, or, if its workers still train, start its broker: `stageline broker CONFIG --run {name}`"
    )
