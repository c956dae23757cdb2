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
from stageline.pipeline.addresses import masked, transport_of
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.pipeline.plan import Plan, PlanError, PlanRefused, differences, from_mapping
from stageline.pipeline.plan.difference import is_weights_path
from stageline.pipeline.plan.tables import dotted, leaves, nested
from stageline.workers.checkpoint.directory import FOLDER, SnapshotDirectory
from stageline.workers.checkpoint.snapshot import Origin, SnapshotDamaged, read_manifest
from stageline.workers.control.client import BrokerUnreachable, Client, NoAnswer
from stageline.workers.control.joining import NotAdmitted
from stageline.workers.disk.atomic_file import persist_json
from stageline.workers.runs import folder as runs

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
    over: bool


def work_for_script(broker: str, patience: float, sets: Sequence[str], work: Callable[[Plan], int]) -> int:
    """Does `work` with the plan of the script's run whose broker is at `broker`, which is waited for `patience`
    seconds; all that it names has been imported from the current folder. Returns the exit code.

    `sets` and the environment overrule keys in which machines may differ. `work` raises `NotAdmitted` if the broker has
    no place: if that run is over by then, the next one there is waited for. Raises `BrokerUnreachable`, `CannotJoin`,
    `PlanRefused`, or `ModelRefused` for other code; the script is told of these, too.
    """
    deadline, imported = monotonic() + patience, ScriptCode("", {})
    while True:
        answer = _ask(broker, deadline, patience)
        code = ScriptCode(answer.torch, answer.files)
        try:
            plan = _plan_of(answer, code, imported, broker, sets)
            imported = code
            return work(plan)
        except NotAdmitted as refusal:
            if _goes_on(answer.run, broker):
                log.error("stopped", reason=str(refusal))
                return refusal.code
        except StagelineError as error:
            tell_script(broker, error)
            raise


def tell_script(broker: str, error: Exception) -> None:
    """Why this process does not join: who waits for it sits at the script."""
    with suppress(BrokerUnreachable), Client(broker) as client:
        client.decline(str(error))


def _plan_of(answer: JoinAnswer, code: ScriptCode, imported: ScriptCode, broker: str, sets: Sequence[str]) -> Plan:
    """`imported`: the code that this process has imported already, if it has."""
    plan = plan_here(answer.settings, broker, sets, os.environ)
    if not plan.scripted:
        raise CannotJoin(f"run {answer.run} is not a script's: start its workers with its plan")
    if imported.files and imported != code:
        raise CannotJoin(f"the code of run {answer.run} is not that of the run before: start this worker again")
    demand_same_code(plan, code, Path.cwd(), socket.gethostname())
    return plan


def _goes_on(run: str, broker: str) -> bool:
    """Whether `run` is still there at `broker`, and not over."""
    try:
        with Client(broker) as client:
            answer = msgspec.convert(client.ask("join", timeout=ATTEMPT), JoinAnswer)
    except (BrokerUnreachable, ValueError):
        return False
    return answer.run == run and not answer.over


def plan_here(settings: Mapping[str, object], broker: str, sets: Sequence[str], environment: Mapping[str, str]) -> Plan:
    """The plan that `settings` are, with the addresses and folders of this machine, and as much memory for its queues
    as it says itself. No other machine says which files of weights it opens. Raises `PlanRefused`."""
    url = broker.partition("#")[0] if transport_of(broker).has_server else f"tcp://{address_towards(broker)}:0"
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


def _ask(broker: str, deadline: float, patience: float) -> JoinAnswer:
    """Asks until there is an answer, of a run that is not over; not beyond the `deadline`, which is `patience` seconds
    after the beginning. Raises `BrokerUnreachable`, `CannotJoin`."""
    told = ""
    while True:
        awaited = "the script's broker"
        try:
            with Client(broker) as client:
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
        sleep(PAUSE)


NOTE = "joined.json"
_LISTED = 5  # differences that a refusal names


def why_not_own(plan: Plan, run: str) -> str | None:
    """Why the folder of `run` cannot be used for `plan`, which has its stages filled in; None if it can: it is not
    there, or empty, or its plan and the snapshots in it are the same. Changes nothing."""
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
    """Notes the plan in the folder of `run`, which is made if need be, for the next worker that begins there. Raises
    `FolderUnusable`, `OSError`."""
    folder = runs.make_folder(plan, run)
    if not any((folder / name).exists() for name in (runs.PLAN, NOTE)):
        persist_json(folder / NOTE, plan.as_mapping())


def _what_else(plan: Plan, run: str, folder: Path) -> str | None:
    there = [entry for entry in _entries(folder) if not entry.name.startswith(".")]  # before the note is looked for
    noted = [folder / name for name in (runs.PLAN, NOTE) if (folder / name).exists()]
    for file in noted:
        if wrong := _other_plan(plan, file):
            return wrong
    if there and not noted:
        return f"it has neither {runs.PLAN} nor {NOTE}"
    return _other_snapshot(plan, run, folder)


def _other_plan(plan: Plan, file: Path) -> str | None:
    """How the plan in `file` differs."""
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return f"its {file.name} cannot be read"
    found = differences(plan.as_mapping(), kept)
    more = f"; and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    first = "; ".join(map(str, found[:_LISTED])) + more
    return f"it was begun with another plan: {first} (here: the broker's, there: the folder's)" if found else None


def _other_snapshot(plan: Plan, run: str, folder: Path) -> str | None:
    """A snapshot that was written for another run or plan. What is damaged belongs to none."""
    checkpoints = SnapshotDirectory(folder / FOLDER, Origin(run, plan.digest()))
    for stage, step in checkpoints.present():
        path = checkpoints.path(stage, step)
        try:
            manifest = read_manifest(path)
        except SnapshotDamaged:
            continue
        if (manifest.run, manifest.plan) != (run, plan.digest()):
            return f"{path} is of run {manifest.run}, of a plan with the digest {manifest.plan[:12]}"
    return None


def _entries(folder: Path) -> list[Path]:
    return [*folder.iterdir()] if folder.exists() else []
