"""Asks about a run: its broker, if one is there, otherwise the run's records.

--broker URL        that broker, and nothing else
a run's folder      the broker whose address is in it, if a process listens there; otherwise its records
a plan              the broker of the newest run in its run.dir, the one at its broker.url, the run's records
nothing             the newest run in ./runs, then the plan of the current folder
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import time

import msgspec

from stageline.broker.transports.base import backend_of
from stageline.pipeline.addresses import masked
from stageline.pipeline.errors import ExitCode
from stageline.workers.control.client import BrokerUnreachable, Client
from stageline.workers.runs import folder as runs
from stageline.workers.runs.owner import read_owner
from stageline.workers.runs.result import Facts

from . import options
from .output import CommandFailed

PATIENCE = 3.0  # seconds to wait for the broker's answer
RUNS = Path("runs")


def answer_about(where: str | None, broker: str | None, query: str, **of: str) -> Facts:
    """The facts of the answer. `source` is "broker" or "records", `as_of` when that was so (seconds since the epoch).

    Raises `BrokerUnreachable`, `CommandFailed` for a refused question, `QueryRefused`, `PlanRefused`, `RecordsDamaged`
    or `StoreUnusable`.
    """
    if broker is not None:
        return _from_broker(broker, query, of)
    found = _find(where)
    unreachable: BrokerUnreachable | None = None
    for url in found.brokers():
        try:
            return _from_broker(url, query, of)
        except BrokerUnreachable as error:  # it is killed at this moment, or hangs: the records tell how far it came
            unreachable = error
    if found.run is not None:
        return _from_records(found.run, found.store, query, of)
    raise unreachable or BrokerUnreachable(found.absence)


def folder_of(where: str | None) -> Path:
    """The folder of the run that `where` names. Raises `CommandFailed` if none is there."""
    found = _find(where)
    if found.run is None:
        raise CommandFailed(found.absence, ExitCode.USAGE)
    return found.run


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What was found of a run: its folder, and what a plan says of its broker. `absence`: the error if none of it is
    there."""

    run: Path | None = None
    broker: str | None = None
    store: str | None = None
    absence: str = ""

    def brokers(self) -> Iterator[str]:
        """Addresses at which a broker may answer: of those of this machine, where a process listens."""
        known = None if self.run is None else runs.read_broker_url(self.run)
        if known is not None and self.run is not None and _may_live(self.run) and backend_of(known).listens(known):
            yield known
        if self.broker is not None and backend_of(self.broker).listens(self.broker):
            yield self.broker


def _may_live(run: Path) -> bool:
    """Return True if the process that the run belongs to may be there: with `train`, its broker is gone too."""
    try:
        owner = read_owner(run)
    except ValueError:
        return True
    return owner is None or owner.alive is not False


def _from_broker(url: str, query: str, of: dict[str, str]) -> Facts:
    try:
        with Client(url) as client:
            return {**client.ask(query, PATIENCE, **of), "source": "broker", "as_of": time()}
    except ValueError as refusal:
        raise CommandFailed(str(refusal), ExitCode.USAGE) from refusal


def _from_records(run: Path, store: str | None, query: str, of: dict[str, str]) -> Facts:
    from stageline.workers.runs.recorded_answer import recorded_answer  # imports pydantic
    from stageline.workers.runs.records import recorded_run

    with recorded_run(run, store) as recorded:
        result = None if recorded.result is None or query != "status" else msgspec.to_builtins(recorded.result)
        facts = recorded_answer(recorded, query, of)
        facts |= {"source": "records", "as_of": recorded.as_of, "folder": str(run), "state": str(recorded.state)}
        return facts | ({"result": result} if result else {})


def _find(where: str | None) -> Whereabouts:
    if where is not None and runs.is_known(Path(where)):
        return Whereabouts(run=Path(where))
    if where is not None:
        options.require_existence(where)
    elif (newest := runs.newest_in(RUNS)) is not None:
        return Whereabouts(run=newest)
    elif url := os.environ.get("STAGELINE_BROKER__URL"):
        return Whereabouts(broker=url, absence=f"no broker listens at {masked(url)}")
    elif not Path("stageline.toml").exists():
        return Whereabouts(
            absence="no run is in ./runs, and no plan is here: name the folder of a run, a plan, or a broker's address "
            "with --broker; `stageline train CONFIG` begins a run"
        )
    return _find_by_plan(where or ".")


def _find_by_plan(config: str) -> Whereabouts:
    from stageline.pipeline.model.own_schedule import read_plan

    with options.user_prints_to_stderr():
        plan = read_plan(config, environment=os.environ)
    found = [each for each in runs.all_in(plan.run.dir) if each.name.startswith(f"{plan.run.name}-")]
    return Whereabouts(
        found[-1] if found else None,
        plan.broker.url,
        plan.broker.store,
        f"no broker listens at {masked(plan.broker.url)}, and no run of {plan.run.name} is in {plan.run.dir}; "
        f"`stageline train {config}` begins one",
    )
