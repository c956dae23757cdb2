"""Join a script's run without a plan file: ask the broker for the plan, compare the code, and check the run's folder.

ask "join" (again, until the broker is there) -> the plan, for this machine -> the same code? -> as any other worker
  ^                                                                           └─ no: the script is told
  └── a run that is over, or ends before it has a place for this worker: another may begin at that address

The broker names the run and with it the folder. A process that poses as a broker could name any other run in `run.dir`,
whose snapshots and weights would be deleted. So the folder must be absent, empty, or hold the same plan and snapshots:

    joined.json     the plan, in a folder that a joining worker has made; where the run was begun, plan.json has it
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import msgspec
import structlog

from stageline.broker.coordinator.run import ScriptCode
from stageline.broker.keys.pairs import KeyPair
from stageline.pipeline.addresses import masked, transport_of
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.pipeline.model.consent import demand_consent
from stageline.pipeline.plan import Plan, PlanError, PlanRefused, differences, from_mapping
from stageline.pipeline.plan.difference import is_weights_path
from stageline.pipeline.plan.plan import GivenValue, from_environment, from_set
from stageline.pipeline.plan.tables import dotted, leaves, nested
from stageline.workers.checkpoint.directory import SnapshotDirectory
from stageline.workers.checkpoint.snapshot import SnapshotDamaged, read_manifest
from stageline.workers.control.client import BrokerUnreachable, Client, KeyRefused, NoAnswer
from stageline.workers.control.joining import NotAdmitted
from stageline.workers.control.refusals import REDIAL
from stageline.workers.disk.atomic_file import persist_json
from stageline.workers.runs import folder as runs

from .open_queues import address_towards
from .script_code import demand_same_code, listed

ATTEMPT = 1.0  # seconds for the broker to answer, before it is asked again
PAUSE = 0.2  # seconds until an address is tried again that cannot be used
_WEIGHTS_HERE = (
    "the script's workers read their weights from files, each from its own: say where this machine has them, with "
    "--set model.weights=PATH, or STAGELINE_MODEL__WEIGHTS in the environment"
)
_PARTIES_HERE = (
    "the script's run has parties, whose keys each machine takes from its own settings: give all keys of [parties], "
    "with --set parties.NAME.key=k1.... and the like, or STAGELINE_PARTIES__NAME__KEY in the environment"
)
RUNS = "runs"  # where the files of runs go, unless --set or the environment tells

log = structlog.get_logger()


class CannotJoin(StagelineError):
    """Error that a worker cannot join a script's run by its address alone.

    Mend: Give this machine the script's files and versions of packages, or start its workers with the plan, as the
    message says.

    Example: run a is not a script's: start its workers with its plan
    """

    error_code = "SL512"
    exit_code = ExitCode.REFUSED


class JoinAnswer(msgspec.Struct, frozen=True):
    """The broker's answer to "join": the run's id, its plan, and the code that goes with it."""

    run: str
    settings: dict[str, Any]
    torch: str
    files: dict[str, str]
    over: bool


def work_for_script(
    broker: str, patience: float, sets: Sequence[str], work: Callable[[Plan], int], pair: KeyPair | None = None
) -> int:
    """Do `work` with the plan of the script's run at `broker`. Returns the exit code.

    All names in the plan are imported from the current folder before. The broker is awaited for `patience` seconds. If
    `work` raises `NotAdmitted` because the broker has no place, and that run is over by then, the next run at the
    address is awaited. The script is told of errors, too.

    Args:
        broker: Address of the broker.
        patience: Seconds to look for the broker.
        sets: Settings that overrule, with the environment, keys in which machines may differ.
        work: Called with the plan; returns the exit code.
        pair: Pair by which the broker knows this process; None for an address without a key.

    Raises:
        BrokerUnreachable: No broker answers, or none takes the pair.
        CannotJoin, PlanRefused, ModelRefused: This machine has other code, or the plan cannot be used.
    """
    deadline, imported = monotonic() + patience, ScriptCode("", {})
    while True:
        answer = _ask(broker, pair, deadline, patience)
        code = ScriptCode(answer.torch, answer.files)
        try:
            plan = plan_here(answer.settings, broker, sets, os.environ)
            if not plan.scripted:
                raise CannotJoin(f"run {answer.run} is not a script's: start its workers with its plan")
            if imported.files and imported != code:
                raise CannotJoin(f"the code of run {answer.run} is not that of the run before: start this worker again")
            demand_consent(plan)
            demand_same_code(plan, code, Path.cwd(), socket.gethostname())
            imported = code  # by this process
            return work(plan)
        except NotAdmitted as refusal:
            if _goes_on(answer.run, broker, pair):
                log.error("stopped", reason=str(refusal))
                return refusal.exit_code
        except StagelineError as error:
            tell_script(broker, error, pair)
            raise


def tell_script(broker: str, error: Exception, pair: KeyPair | None) -> None:
    """Tell the script why this process does not join: its user waits there."""
    with suppress(BrokerUnreachable), Client(broker, pair=pair) as client:
        client.decline(str(error))


def _goes_on(run: str, broker: str, pair: KeyPair | None) -> bool:
    """Return True if `run` is still at `broker`, and not over."""
    try:
        with Client(broker, pair=pair) as client:
            answer = msgspec.convert(client.ask("join", timeout=ATTEMPT), JoinAnswer)
    except (BrokerUnreachable, ValueError):
        return False
    return answer.run == run and not answer.over


def is_insecure(sets: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return True if `sets` or the environment renounce keys, which must be known before the plan is asked for."""
    given = [*from_environment(environment), *map(from_set, sets)]
    values = [each.value for each in given if isinstance(each, GivenValue) and each.key == ("broker", "insecure")]
    return values[-1:] == [True]


def plan_here(settings: Mapping[str, object], broker: str, sets: Sequence[str], environment: Mapping[str, str]) -> Plan:
    """Return the plan in `settings` with this machine's addresses, folders and queue memory. Raises `PlanRefused`.

    No other machine decides which files of weights are opened here, or which keys of parties are believed: paths of
    weights, and parties, come from `sets` or `environment`.
    """
    url = broker.partition("#")[0] if transport_of(broker).is_shared else f"tcp://{address_towards(broker)}:0"
    own: dict[str, dict[str, object]] = {"run": {"dir": RUNS}, "queues": {"url": url}, "broker": {"url": broker}}
    given = list(leaves(settings))
    tables = nested((key, value) for key, value in given if not is_weights_path(dotted(key)))
    theirs = tables.pop("parties", None)
    for table, keys in own.items():
        there = tables.get(table)
        tables[table] = {**(there if isinstance(there, Mapping) else {}), **keys}
    tables["queues"] = {key: value for key, value in tables["queues"].items() if key != "retain_bytes"}
    plan = from_mapping(tables, sets=sets, environment=environment)
    if theirs and plan.parties is None:
        raise PlanRefused([PlanError("parties", _PARTIES_HERE)])
    if any(is_weights_path(dotted(key)) for key, _ in given) and not plan.loads_weights:
        raise PlanRefused([PlanError("model.weights", _WEIGHTS_HERE)])
    return plan


def _ask(broker: str, pair: KeyPair | None, deadline: float, patience: float) -> JoinAnswer:
    """Ask until a run that is not over answers, up to the `deadline`. Raises `BrokerUnreachable`, `CannotJoin`.

    A broker that does not admit the key of this machine is asked again: it may do so later.
    """
    told = ""
    while True:
        awaited, pause = "the script's broker", PAUSE
        try:
            with Client(broker, pair=pair) as client:
                answer = msgspec.convert(client.ask("join", timeout=ATTEMPT), JoinAnswer)
            if not answer.over:
                return answer
            awaited = f"the next run: {answer.run} is over"
            if monotonic() > deadline:
                raise BrokerUnreachable(
                    f"run {answer.run} at {masked(broker)} is over, and no other began within {patience:g} s: start "
                    "the script, or name another address after --join"
                )
        except NoAnswer as error:
            if monotonic() > deadline:
                raise BrokerUnreachable(
                    f"no script's broker answered at {masked(broker)} within {max(patience, ATTEMPT):g} s: start the "
                    "script, or name another address after --join"
                ) from error
        except KeyRefused as error:
            if monotonic() > deadline or not error.refusal.may_pass:
                raise
            awaited, pause = f"admission: {error}", REDIAL
        except BrokerUnreachable:
            if monotonic() > deadline:
                raise
        except msgspec.ValidationError as error:
            raise CannotJoin(f"the answer of the broker at {masked(broker)} is no plan: {error}") from error
        except ValueError as refusal:
            raise CannotJoin(str(refusal)) from refusal
        if told != awaited:
            told = awaited
            log.info(f"waiting for {awaited}", address=masked(broker), seconds=patience)
        sleep(pause)


NOTE = "joined.json"


def why_not_own(plan: Plan, run: str) -> str | None:
    """Return why the folder of `run` cannot be used for `plan`, which has its stages filled in; None if it can.

    It can if it is absent, empty, or has the same plan and snapshots. Changes nothing.
    """
    folder = runs.folder(plan, run)
    try:
        wrong = _what_else(plan, run, folder)
    except OSError as error:
        wrong = f"it cannot be read: {error}"
    if wrong is None:
        return None
    return (
        f"the broker's run is {run}, but the folder {folder} is not this run's: {wrong}. Nothing in it was changed. "
        "Move it away, or join from another folder"
    )


def note_own(plan: Plan, run: str) -> None:
    """Note the plan in the folder of `run` for the next worker there. Raises `FolderUnusable` or `OSError`."""
    folder = runs.make_folder(plan, run)
    if not any((folder / name).exists() for name in (runs.PLAN, NOTE)):
        persist_json(folder / NOTE, plan.as_mapping())


def _what_else(plan: Plan, run: str, folder: Path) -> str | None:
    entries = [*folder.iterdir()] if folder.exists() else []  # before the note is looked for
    there = [entry for entry in entries if not entry.name.startswith(".")]
    noted = [folder / name for name in (runs.PLAN, NOTE) if (folder / name).exists()]
    for file in noted:
        if wrong := _other_plan(plan, file):
            return wrong
    if there and not noted:
        return f"it has neither {runs.PLAN} nor {NOTE}"
    return _other_snapshot(plan, run, folder)


def _other_plan(plan: Plan, file: Path) -> str | None:
    """Return how the plan in `file` differs, None if it does not."""
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return f"its {file.name} cannot be read"
    found = [*map(str, differences(plan.as_mapping(), kept))]
    named = listed(found, "; ")
    return f"it was begun with another plan: {named} (here: the broker's, there: the folder's)" if found else None


def _other_snapshot(plan: Plan, run: str, folder: Path) -> str | None:
    """Return a snapshot that was written for another run or plan, None if there is none. Damaged ones do not count."""
    checkpoints = SnapshotDirectory.of(folder, run, plan)
    for stage, step in checkpoints.present():
        path = checkpoints.path(stage, step)
        try:
            manifest = read_manifest(path)
        except SnapshotDamaged:
            continue
        if (manifest.run, manifest.plan) != (run, plan.digest()):
            return f"{path} is of run {manifest.run}, of a plan with the digest {manifest.plan[:12]}"
    return None
