"""The page of a script's run for a notebook: what its broker answers, or its records once it is over."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from html import escape
from pathlib import Path
from pkgutil import resolve_name
from time import time

from stageline.broker.keys.pairs import KeyPair
from stageline.pipeline.errors import StagelineError
from stageline.workers.control.client import BrokerUnreachable, Client
from stageline.workers.runs.folder import Facts
from stageline.workers.runs.listing import recorded_answer
from stageline.workers.runs.records import recorded_run
from stageline.workers.script.calls.page import framed

REPORT = "stageline.workers.extras.report"  # imported by name: a script that shows no page does without it
_PATIENCE = 5.0  # seconds for the broker to answer

Ask = Callable[..., Facts]


def panels_of(folder: Path, broker: str, pair: KeyPair | None) -> str:
    """Return the page of a run as an element of a notebook's page; a sentence if nothing answers.

    Args:
        folder: Folder of the run.
        broker: Address of its broker; "" once the run is over.
        pair: Pair by which the broker knows this process.
    """
    try:
        return framed(_page(folder, broker, pair), f"run {folder.name}")
    except (StagelineError, ValueError) as error:
        return f"<p>{escape(str(error))}</p>"


def _page(folder: Path, broker: str, pair: KeyPair | None) -> str:
    if broker:
        try:
            with Client(broker, pair=pair) as client:
                return _written(partial(client.ask, timeout=_PATIENCE), folder, "broker", time())
        except BrokerUnreachable:  # its records tell how far it came
            pass
    with _recorded(folder) as (ask, as_of):
        return _written(ask, folder, "records", as_of)


def _written(ask: Ask, folder: Path, source: str, as_of: float) -> str:
    sections = resolve_name(f"{REPORT}.facts:sections")(ask, folder, source, as_of)
    page: str = resolve_name(f"{REPORT}.page:page_of")(sections, time())
    return page


@contextmanager
def _recorded(folder: Path) -> Iterator[tuple[Ask, float]]:
    with recorded_run(folder) as run:
        yield lambda what, **of: recorded_answer(run, what, of), run.as_of
