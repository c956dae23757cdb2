"""Joins a script's run without a plan file: asks the broker for the plan, and compares the code.

ask "join" (again, until the broker is there) -> the plan, for this machine -> the same code? -> as any other worker
"""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import msgspec
import structlog

from stageline.broker.control.open import REDIS
from stageline.broker.coordinator.run import ScriptCode
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.pipeline.plan import Plan, PlanError, PlanRefused, from_mapping
from stageline.pipeline.plan.addresses import masked
from stageline.pipeline.plan.difference import is_weights_path
from stageline.pipeline.plan.tables import dotted, leaves, nested
from stageline.workers.control.client import BrokerUnreachable, Client, NoAnswer

from .open_queues import address_towards
from .script_code import demand_same_code

ATTEMPT = 1.0  # seconds for the broker to answer, before it is asked again
PAUSE = 0.2  # seconds until an address is tried again that cannot be used
_WEIGHTS_HERE = (
    "the script's workers read their weights from files, each from its own: say where this machine has them, with "
    "--set model.weights=PATH, or STAGELINE_MODEL__WEIGHTS in the environment"
)
RUNS = "runs"  # where the files of runs go, unless --set or the environment tells

log = structlog.get_logger()


class CannotJoin(StagelineError):
    """The broker's run is none that workers join by an address alone."""

    exit_code = ExitCode.REFUSED


class JoinAnswer(msgspec.Struct, frozen=True):
    """The broker's answer to "join": the run's id, its plan, and which code that goes with."""

    run: str
    settings: dict[str, Any]
    torch: str
    files: dict[str, str]


def joined_plan(broker: str, patience: float, sets: Sequence[str]) -> Plan:
    """The plan of the script's run whose broker is at `broker`, which is waited for `patience` seconds; all that it
    names has been imported from the current folder. `sets` and the environment overrule keys in which machines may
    differ. Raises `BrokerUnreachable`, `CannotJoin`, `PlanRefused`, or `ModelRefused` for other code."""
    answer = _ask(broker, patience)
    plan = plan_here(answer.settings, broker, sets, os.environ)
    if not plan.scripted:
        raise CannotJoin(f"run {answer.run} is not a script's: start its workers with its plan")
    demand_same_code(plan, ScriptCode(answer.torch, answer.files), Path.cwd(), socket.gethostname())
    return plan


def plan_here(settings: Mapping[str, object], broker: str, sets: Sequence[str], environment: Mapping[str, str]) -> Plan:
    """The plan that `settings` are, with the addresses and folders of this machine, and as much memory for its queues
    as it says itself. No other machine says which files of weights it opens. Raises `PlanRefused`."""
    url = broker.partition("#")[0] if broker.startswith(REDIS) else f"tcp://{address_towards(broker)}:0"
    own: dict[str, dict[str, object]] = {"run": {"dir": RUNS}, "queues": {"url": url}, "broker": {"url": broker}}
    given = list(leaves(settings))
    tables = nested((key, value) for key, value in given if not is_weights_path(dotted(key)))
    for table, keys in own.items():
        there = tables.get(table)
        tables[table] = {**(there if isinstance(there, Mapping) else {}), **keys}
    tables["queues"] = {key: value for key, value in tables["queues"].items() if key != "retain_bytes"}
    plan = from_mapping(tables, sets=sets, environment=environment)
    if any(is_weights_path(dotted(key)) for key, _ in given) and not plan.loads_weights:
        raise PlanRefused([PlanError("model.weights", _WEIGHTS_HERE)])
    return plan


def _ask(broker: str, patience: float) -> JoinAnswer:
    """Asks until there is an answer. Raises `BrokerUnreachable`, `CannotJoin`."""
    deadline, told = monotonic() + patience, False
    while True:
        try:
            with Client(broker) as client:
                return msgspec.convert(client.ask("join", timeout=ATTEMPT), JoinAnswer)
        except NoAnswer as error:
            if monotonic() > deadline:
                raise BrokerUnreachable(
                    f"no script's broker answered at {masked(broker)} within {max(patience, ATTEMPT):g} s: start the "
                    "script, or name another address after --join"
                ) from error
        except BrokerUnreachable:
            if monotonic() > deadline:
                raise
        except msgspec.ValidationError as error:
            raise CannotJoin(f"the answer of the broker at {masked(broker)} is no plan: {error}") from error
        except ValueError as refusal:
            raise CannotJoin(str(refusal)) from refusal
        if not told:
            told = True
            log.info("waiting for the script's broker", address=masked(broker), seconds=patience)
        sleep(PAUSE)
