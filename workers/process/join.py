"""Join a script's run without a plan file: ask the broker for the plan, compare the code, and check the run's folder.

ask "join" (again, until the broker is there) -> the plan, for this machine -> the same code? -> as any other worker
  ^                                                                           └─ no: the script is told
  └── a run that is over, or ends before it has a place for this worker: another may begin at that address

The broker names the run and with it the folder. A process that poses as a broker could name any other run in `run.dir`,
whose snapshots and weights would be deleted. So the folder must be absent, empty, or hold the same plan and snapshots:

    joined.json     the plan, in a folder that a joining worker has made; where the run was begun, plan.json has it

This machine imports only what its own folder has, too, and public names of torch. Before any import, every file
must be there with the script's content, and Python must find every name in one of these files. Afterwards, every module
must come from its file, and every name must be a class or function that its module itself defines: `model.system` is
refused also where model.py imports it from `os`.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path, PurePosixPath
from time import monotonic, sleep
from typing import Any

import msgspec
import structlog
import torch

from stageline.broker.coordinator.run import ScriptCode
from stageline.pipeline.addresses import masked, transport_of
from stageline.pipeline.errors import ExitCode, ModelRefused, StagelineError
from stageline.pipeline.model.load import load_object, references_of
from stageline.pipeline.model.object_names import defines, is_torch_name
from stageline.pipeline.plan import Plan, PlanError, PlanRefused, differences, from_mapping
from stageline.pipeline.plan.difference import is_weights_path
from stageline.pipeline.plan.keys.models import SCRIPT_BATCHES
from stageline.pipeline.plan.tables import dotted, leaves, nested
from stageline.workers.checkpoint.directory import SnapshotDirectory
from stageline.workers.checkpoint.snapshot import SnapshotDamaged, read_manifest
from stageline.workers.control.client import BrokerUnreachable, Client, NoAnswer
from stageline.workers.control.joining import NotAdmitted
from stageline.workers.disk.atomic_file import persist_json
from stageline.workers.runs import folder as runs
from stageline.workers.runs.records import hashes_of, public_version

from .open_queues import address_towards

_SHOWN = 12  # digits of a hash
_LONGEST = 100  # characters of a name in a refusal
_LOADERS = (  # in the order in which Python looks
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)
ATTEMPT = 1.0  # seconds for the broker to answer, before it is asked again
PAUSE = 0.2  # seconds until an address is tried again that cannot be used
_WEIGHTS_HERE = (
    "the script's workers read their weights from files, each from its own: say where this machine has them, with "
    "--set model.weights=PATH, or STAGELINE_MODEL__WEIGHTS in the environment"
)
RUNS = "runs"  # where the files of runs go, unless --set or the environment tells

log = structlog.get_logger()


def demand_same_code(plan: Plan, code: ScriptCode, folder: Path, host: str) -> None:
    """Import the names in `plan` from `folder`, put first on the import path, if its code on `host` equals `code`.

    Raises `ModelRefused`, which names everything that is not allowed or not the script's.
    """
    folder = folder.resolve()
    if public_version(torch.__version__) != public_version(code.torch):
        raise ModelRefused(
            f"{host} has torch {torch.__version__}, the script's machine {code.torch}: the weights could differ. "
            "Install the same version on both"
        )
    if wrong := [*_different_files(code, folder)]:
        raise ModelRefused(
            f"the code in {folder} on {host} is not the script's: {_listed(wrong, '; ')}. "
            "Copy the files from the script's folder"
        )
    modules = _modules(plan, code, folder)
    if str(folder) not in sys.path[:1]:
        sys.path.insert(0, str(folder))
    for key, module, name in modules:
        load_object(f"{module}.{name}", folder, key)
        if (other := _other_file(module, [folder / file for file in _files_of(module, folder)])) is not None:
            raise _refused(key, f"{module}.{name}", f"{other} was imported, which is not the file that was compared")
        if not defines(sys.modules[module], name):
            raise _refused(key, f"{module}.{name}", f"{module} does not itself define such a class or function")


def _different_files(code: ScriptCode, folder: Path) -> Iterator[str]:
    """Yield the faults of the files in `folder`."""
    for file, wanted in code.files.items():
        try:
            wrong = _difference(file, wanted, folder)
        except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL in it, links in a circle, not readable
            wrong = f"cannot be read ({getattr(error, 'strerror', None) or type(error).__name__})"
        if wrong is not None:
            yield f"{_named(file)} {wrong}"


def _difference(file: str, wanted: str, folder: Path) -> str | None:
    """Return a file's fault, None if it has none. Raises `OSError`, `ValueError` or `RuntimeError` for a bad name."""
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".py" or (folder / file).resolve() != folder / file:
        return "leads out of the folder"
    if not (folder / file).is_file():
        return "is not there"
    if (found := hashes_of(folder, [file])[file]) != wanted:
        return f"differs (SHA-256 {found[:_SHOWN]} here, {_named(wanted[:_SHOWN])} there)"
    return None


def _named(file: str) -> str:
    """Return a name from the broker as messages show it: shortened, and quoted with escapes if not printable."""
    short = file if len(file) <= _LONGEST else f"{file[:_LONGEST]}..."
    return short if short.isprintable() and short else repr(short)


def _listed(each: Sequence[str], separator: str) -> str:
    """Return the first few entries, followed by the number of the others."""
    more = f"{separator}and {len(each) - _LISTED} more" if len(each) > _LISTED else ""
    return separator.join(each[:_LISTED]) + more


def _modules(plan: Plan, code: ScriptCode, folder: Path) -> list[tuple[str, str, str]]:
    """Return key, module and name of everything to import from `folder`. Raises `ModelRefused`."""
    found = []
    for key, reference in references_of(plan):
        if (key, reference) == ("data.source", SCRIPT_BATCHES) or is_torch_name(reference):
            continue
        module, _, name = reference.rpartition(".")
        files = [] if ":" in reference else _files_of(module, folder)
        if not files or not set(files) <= code.files.keys():
            raise _refused(
                key,
                reference,
                "a worker that joins a script imports public names of torch, and names in those files of its own "
                f"folder that the script has, too: {_listed([*map(_named, code.files)], ', ') or 'none'}",
            )
        if (taken := _taken(module, [folder / file for file in files], folder)) is not None:
            reason = f"{taken} has that name here, as {folder / files[-1]} has; rename the file, or its folder"
            raise _refused(key, reference, reason)
        found.append((key, module, name))
    return found


def _files_of(module: str, folder: Path) -> list[str]:
    """Return the files in `folder` that an import of `module` executes, packages first; [] if there is no module."""
    found, where = [], folder
    *packages, last = module.split(".")
    for package in packages:
        origin = _origin(package, where)
        where = where / package
        found += [] if origin is None else [origin]
    origin = _origin(last, where)
    files = [*found, origin] if origin is not None else []
    return [Path(file).relative_to(folder).as_posix() for file in files]


def _origin(name: str, folder: Path) -> str | None:
    """Return the file that importing `name` from `folder` executes, None if there is none, as for a bare package."""
    spec = FileFinder(str(folder), *_LOADERS).find_spec(name)
    return None if spec is None else spec.origin


def _taken(module: str, compared: Sequence[Path], folder: Path) -> str | None:
    """Return what Python imports under the name of `module` or its packages in place of `compared`, None if nothing."""
    top = module.split(".")[0]
    if top in sys.stdlib_module_names:
        return f"Python's own module {top}"
    if top in sys.modules and not _is_file(there := getattr(sys.modules[top], "__file__", None), compared[0]):
        return f"{there or 'a package that is loaded'}"
    found = _found(module, [str(folder), *sys.path])
    return None if _is_file(found, compared[-1]) else f"{found or 'a package elsewhere'}"


def _found(module: str, path: Sequence[str]) -> str | None:
    """Return the file that importing `module` leads to. A package without `__init__.py` comes after all others."""
    origin = None
    for name in module.split("."):
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return None
        origin, path = spec.origin, list(spec.submodule_search_locations or ())
    return origin


def _other_file(module: str, compared: Sequence[Path]) -> str | None:
    """Return the first file that `module` or its packages were imported from that was not compared, None if none is."""
    names = [module.rsplit(".", up)[0] for up in range(module.count(".") + 1)]
    own, *packages = (getattr(sys.modules[name], "__file__", None) for name in names)
    if not _is_file(own, compared[-1]):
        return own or "something without a file"
    return next((file for file in packages if file is not None and Path(file).resolve() not in compared), None)


def _is_file(found: str | None, wanted: Path) -> bool:
    return found is not None and Path(found).resolve() == wanted


def _refused(key: str, reference: str, reason: str) -> ModelRefused:
    return ModelRefused(f'{key} = "{reference}" is not imported: {reason}')


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


def work_for_script(broker: str, patience: float, sets: Sequence[str], work: Callable[[Plan], int]) -> int:
    """Do `work` with the plan of the script's run at `broker`. Returns the exit code.

    All names in the plan are imported from the current folder before. The broker is awaited for `patience` seconds.
    `sets` and the environment overrule keys in which machines may differ. If `work` raises `NotAdmitted` because the
    broker has no place, and that run is over by then, the next run at the address is awaited. Raises
    `BrokerUnreachable`; or `CannotJoin`, `PlanRefused`, or `ModelRefused` for other code. The script is told of errors,
    too.
    """
    deadline, imported = monotonic() + patience, ScriptCode("", {})
    while True:
        answer = _ask(broker, deadline, patience)
        code = ScriptCode(answer.torch, answer.files)
        try:
            plan = plan_here(answer.settings, broker, sets, os.environ)
            if not plan.scripted:
                raise CannotJoin(f"run {answer.run} is not a script's: start its workers with its plan")
            if imported.files and imported != code:
                raise CannotJoin(f"the code of run {answer.run} is not that of the run before: start this worker again")
            demand_same_code(plan, code, Path.cwd(), socket.gethostname())
            imported = code  # by this process
            return work(plan)
        except NotAdmitted as refusal:
            if _goes_on(answer.run, broker):
                log.error("stopped", reason=str(refusal))
                return refusal.exit_code
        except StagelineError as error:
            tell_script(broker, error)
            raise


def tell_script(broker: str, error: Exception) -> None:
    """Tell the script why this process does not join: its user waits there."""
    with suppress(BrokerUnreachable), Client(broker) as client:
        client.decline(str(error))


def _goes_on(run: str, broker: str) -> bool:
    """Return True if `run` is still at `broker`, and not over."""
    try:
        with Client(broker) as client:
            answer = msgspec.convert(client.ask("join", timeout=ATTEMPT), JoinAnswer)
    except (BrokerUnreachable, ValueError):
        return False
    return answer.run == run and not answer.over


def plan_here(settings: Mapping[str, object], broker: str, sets: Sequence[str], environment: Mapping[str, str]) -> Plan:
    """Return the plan in `settings` with this machine's addresses, folders and queue memory. Raises `PlanRefused`.

    No other machine decides which files of weights are opened here: paths of weights come from `sets` or `environment`.
    """
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
    """Ask until a run that is not over answers, up to the `deadline`. Raises `BrokerUnreachable`, `CannotJoin`."""
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
    named = _listed(found, "; ")
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
