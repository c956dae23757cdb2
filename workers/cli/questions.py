"""Puts a question to the broker of a run, wherever that is."""

import os
from pathlib import Path
from typing import Any

import click
import msgspec

from pipeline.plan import read
from pipeline.plan.value import BrokerPlan

from .. import runs
from ..client import Client


def ask(what: str, where: str | None, broker: str | None, *, as_json: bool) -> dict[str, Any] | None:
    """The broker's facts, for a table; with `as_json` they are printed as they are, and None is returned.

    Raises `BrokerUnreachable`.
    """
    with Client(broker or _address(where)) as client:
        facts = client.ask(what)
    if not as_json:
        return facts
    click.echo(msgspec.json.encode(facts))
    return None


def _address(where: str | None) -> str:
    if where is None:
        return runs.newest_broker(Path("runs")) or BrokerPlan().url
    if (url := runs.broker_of(Path(where))) is not None:
        return url
    return read(where, environment=os.environ).broker.url
