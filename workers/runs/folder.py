"""Names of runs, and the files in their folders."""

import os
import secrets
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from stageline.broker.control.sqlite_store import LONGEST_PATH
from stageline.pipeline import plan as plans  # pydantic is imported when a plan is read
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.pipeline.plan.errors import OTHER_SETTINGS, RESUME_AS_BEGUN, Afresh, EachOnce
from stageline.pipeline.plan.tables import flat
from stageline.pipeline.printable import is_utf8
from stageline.workers.disk.atomic_file import write_file

if TYPE_CHECKING:
    from stageline.pipeline.plan.difference import Difference

Facts = dict[str, Any]  # the broker's answer to the query `status`: schema status/1
STORE = "broker.sqlite"
IN_FOLDER = "sqlite"  # of `broker.store`: the records are in that file
RESULT = "result.json"
PLAN = "plan.json"
OWNER = "process.json"  # the first file in the folder: see owner.py
BROKER = "broker.url"  # there while the broker of the run is
SECRET = "broker.secret"  # noqa: S105 - likewise: the file with what it wants from those who stop the run


class LaunchOutcome(msgspec.Struct, frozen=True, tag=True):
    """End of a run on this machine: exit code, the reason in words, and the broker's last status of the run."""

    code: int
    reason: str
    facts: Facts


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a finished run, in schema train/1.

    A metric that is not finite is a text ("nan", "inf"), since JSON has no such number; `float` reads it.

    Attributes:
        steps: Number of steps trained.
        microbatches: Microbatches of one step.
        loss: Loss of the last step; None if it had no rows.
        losses: Losses by step, counted from 0.
        metrics: Metrics of the last evaluation.
        weights_sha256: Digest of the weights.
        seconds: Time from the start of the processes to the end of the run.
        gradient_norm: Norm of the last step, where gradients are clipped.
        evaluations: Rounds of evaluation, in order: the `step` after which, the number of `rows`, the mean `loss` and
            `metrics`.
        best: Best round, where rounds are compared.
        stopped_early: Why the run ended before its last step; None if it did not. `steps` is then the step of the end.
    """

    schema: str = "train/1"
    run: str
    steps: int
    microbatches: int
    loss: float | None
    losses: dict[str, float | None]
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]]
    weights_sha256: str
    seconds: float
    restarts: int = 0
    gradient_norm: float | None = None
    evaluations: list[Facts] = []
    best: Facts | None = None
    stopped_early: str | None = None


def result_of(run: str, microbatches: int, facts: Facts, seconds: float) -> Result:
    """Return the result of a run.

    Args:
        run: Id of the run.
        microbatches: Microbatches of one step.
        facts: The broker's last status.
        seconds: Duration of the run.
    """
    last, norm = facts["last_loss"], facts.get("gradient_norm")
    return Result(
        run=run,
        steps=facts["training_steps"],
        microbatches=microbatches,
        loss=last and last["loss"],
        losses=facts["losses"],
        metrics=facts["metrics"],
        weights_sha256=facts["weights_sha256"],
        seconds=round(seconds, 3),
        restarts=int(facts.get("restarts") or 0),
        gradient_norm=norm and norm["norm"],
        evaluations=facts.get("evaluations", []),
        best=facts.get("best"),
        stopped_early=facts.get("stopped_early"),
    )


def new_id(plan: "plans.Plan") -> str:
    """Return a name that no other run has, and that sorts by time: digits-20260131-235959-1f0c."""
    return f"{plan.run.name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def name_of(plan: "plans.Plan", resume: str | None) -> str:
    """Return a new run's id, or the id of the run that `resume` names. Raises `NoSuchRun`."""
    return new_id(plan) if resume is None else run_to_resume(plan, resume)


class FolderUnusable(StagelineError):
    """Error that the folder for a run's files cannot be made.

    Mend: Give another `run.dir`, or another `folder` in a script: one that can be written to, whose path is short and
    UTF-8.

    Example: the folder of the run, runs/a, has too long a path: that of broker.sqlite in it has 600 bytes, and SQLite
    opens no file of more than 504. Give a shorter run.dir, run.name, or a script's folder or name
    """

    error_code = "SL504"
    exit_code = ExitCode.REFUSED


class NoSuchRun(StagelineError):
    """Error that a run does not exist, or cannot be resumed.

    Mend: Name one that `stageline run ls` lists.

    Example: there is no run a in runs; `stageline train` without --resume begins one
    """

    error_code = "SL502"
    exit_code = ExitCode.USAGE


def run_to_resume(plan: "plans.Plan", run: str) -> str:
    """Return the run to resume: `run`, or for "" the newest unfinished one of the plan's name.

    A finished run can be resumed by a plan with more steps. Raises `NoSuchRun`.
    """
    if run and not is_run(folder(plan, run)):
        raise NoSuchRun(f"there is no run {run} in {plan.run.dir}; `stageline train` without --resume begins one")
    if run and (folder(plan, run) / RESULT).exists() and not lengthens(plan, folder(plan, run)):
        raise NoSuchRun(
            f"run {run} has finished: `stageline status {folder(plan, run)}` shows its result; leave out --resume to "
            f"begin another, or name more steps, such as {_more_steps(folder(plan, run))}, to go on with this one"
        )
    if run:
        return run
    begun = _begun(plan.run.dir, f"{plan.run.name}-")
    unfinished = [each.name for each in begun if not (each / RESULT).exists()]
    if found := unfinished or [each.name for each in begun if lengthens(plan, each)]:
        return found[-1]
    further = f", or go on with {begun[-1].name} by {_more_steps(begun[-1])}" if begun else ""
    raise NoSuchRun(
        f"no unfinished run of {plan.run.name} is in {plan.run.dir}; leave out --resume to begin one{further}"
    )


def _more_steps(folder: Path) -> str:
    """Return the option by which the run in `folder` would go on for as long again."""
    settings = _kept_plan(folder).get("run", {})
    key = "steps" if settings.get("steps") else "epochs"
    return f"--set run.{key}={2 * (settings.get(key) or 1)}"


def lengthens(plan: "plans.Plan", folder: Path) -> bool:
    """Return True if `plan` has more steps or epochs than the plan of the run in `folder`."""
    return any(each.lengthens for each in differences_from(plan.with_known_stages(), folder))


def require_same_plan(plan: "plans.Plan", folder: Path) -> None:
    """Raise `PlanRefused`, which names the differences, if the run in `folder` was begun with another plan.

    `plan` has its stages and workers filled in. Without a readable plan in `folder`, only the broker can compare.
    """
    if found := tuple(differences_from(plan, folder)):
        what = (f"run {folder.name} was begun with ", OTHER_SETTINGS, ": ", EachOnce(found))
        raise plans.PlanRefused([plans.PlanError("", (*what, RESUME_AS_BEGUN, ", or ", Afresh()))])


def recorded_cut(plan: "plans.Plan", folder: Path) -> list[int] | None:
    """Return the cut of the run in `folder` if this plan would measure it again for the same number of stages.

    Returns None otherwise, or if it cannot be read.
    """
    match _kept_plan(folder):
        case {"model": {"cut": [*cut]}} if plan.measures_cut and len(cut) + 1 == plan.model.stages:
            return cut
    return None


def recorded_memory(plan: "plans.Plan", folder: Path) -> dict[str, object]:
    """Return, by key, the memory settings chosen for the run in `folder` that this plan would choose again.

    Limits and layout must be equal. Returns nothing otherwise, or if the settings cannot be read.
    """
    kept = _kept_plan(folder)
    stages = kept.get("model", {}).get("stages")
    if not plan.chooses_memory or stages is None:
        return {}
    plan = plan.with_stages(stages)
    tables = plan.as_mapping()
    wanted = plan.undecided_keys(stages)
    if _limits(tables, wanted) != _limits(kept, wanted) or plans.differences(tables, kept):
        return {}
    recorded = flat(kept)
    found = {key: recorded.get(key) for key in wanted}
    return {} if None in found.values() else found


def recorded_microbatches(folder: Path) -> int | None:
    """Return the number of microbatches of a batch in the run in `folder`; None if it cannot be read."""
    match _kept_plan(folder):
        case {"schedule": {"microbatches": int(number)}}:
            return number
    return None


def _limits(tables: dict[str, Any], chosen: Collection[str]) -> list[object]:
    """Return a plan's memory settings for all stages and workers without the `chosen` keys, and the workers' limits."""
    of_all = {key: value for key, value in tables.get("memory", {}).items() if f"memory.{key}" not in chosen}
    return [of_all, {name: each.get("memory") for name, each in tables.get("workers", {}).items()}]


def differences_from(plan: "plans.Plan", folder: Path) -> "Sequence[Difference]":
    """Return how `plan` differs from the plan of the run in `folder`, as far as that can be read."""
    kept = _kept_plan(folder)
    return plans.differences(plan.as_mapping(), kept) if kept else ()


def _kept_plan(folder: Path) -> dict[str, Any]:
    """Return the plan of the run in `folder` as tables; an empty dict if it cannot be read."""
    try:
        return msgspec.json.decode((folder / PLAN).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}


def newest(plan: "plans.Plan") -> Path:
    """Return the folder of the plan's newest run. Raises `NoSuchRun`."""
    found = _begun(plan.run.dir, f"{plan.run.name}-")
    if not found:
        raise NoSuchRun(f"no run of {plan.run.name} is in {plan.run.dir}")
    return found[-1]


def newest_in(runs: Path) -> Path | None:
    """Return the folder of the run in `runs` that was begun or resumed last; None without runs.

    A run that is starting counts, too.
    """
    return next(reversed(all_in(runs)), None)


def all_in(runs: Path) -> list[Path]:
    """Return the folders of the runs in `runs`, in the order in which they were begun or resumed."""
    files = [*runs.glob(f"*/{PLAN}"), *runs.glob(f"*/{OWNER}")]
    return list(dict.fromkeys(file.parent for file in sorted(files, key=_started, reverse=True)))[::-1]


def is_known(folder: Path) -> bool:
    """Return True if a run was begun in `folder`, or is starting there."""
    return is_run(folder) or os.path.exists(folder / OWNER)


def folder(plan: "plans.Plan", run: str) -> Path:
    """Return the folder of a run's files: weights, logs, the broker's records, the result."""
    return plan.run.dir / run


def make_folder(plan: "plans.Plan", run: str) -> Path:
    """Make the folder of a run's files and return it. Raises `FolderUnusable`."""
    made = folder(plan, run)
    if not is_utf8(str(made.absolute())):
        raise FolderUnusable(
            f"the folder of the run, {str(made.absolute())!a}, is not UTF-8, as records are: give another run.dir, or "
            f"a script's folder; if it is relative, run from another folder"
        )
    length = len(os.fsencode(os.path.realpath(made / STORE)))
    if plan.broker.store == IN_FOLDER and length > LONGEST_PATH:
        raise FolderUnusable(
            f"the folder of the run, {made}, has too long a path: that of {STORE} in it has {length} bytes, and SQLite "
            f"opens no file of more than {LONGEST_PATH}. Give a shorter run.dir, run.name, or a script's folder or name"
        )
    try:
        made.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderUnusable(
            f"the folder of the run, {made}, cannot be made: {error.strerror}. "
            "It is made of run.dir and run.name, of a script's folder and name; give others, or remove what is there"
        ) from error
    return made


def is_run(folder: Path) -> bool:
    """Return True if a run was begun in `folder`."""
    return os.path.exists(folder / PLAN)  # False for a name that the system refuses


def no_run(folder: Path) -> str:
    """Return the text of an error that `folder`, which a user has named, is not that of a run."""
    meant = Path("runs") / folder
    way = f"did you mean {meant}?" if is_run(meant) else "`stageline run ls` lists those in ./runs"
    return f"{folder} is not the folder of a run: it has no {PLAN}; {way}"


def result_in(folder: Path) -> Result | None:
    """Return the result of the run in `folder`, None if it has not finished. Raises `NoSuchRun` for a damaged file."""
    file = folder / RESULT
    try:
        return msgspec.json.decode(file.read_bytes(), type=Result)
    except OSError:
        return None
    except msgspec.MsgspecError as error:
        raise NoSuchRun(f"{file} is not the result of a run: {error}") from error


def read_broker_url(folder: Path) -> str | None:
    """Return the address of the broker of the run in `folder`, None if it has none."""
    try:
        return (folder / BROKER).read_text().strip()
    except OSError:
        return None


def read_control_secret(folder: Path) -> bytes:
    """Return the secret that the broker of the run in `folder` demands from clients that stop the run.

    Returns b"" if the run has no broker.
    """
    try:
        return bytes.fromhex((folder / SECRET).read_text())
    except (OSError, ValueError):
        return b""


def write_broker_url(folder: Path, url: str, secret: bytes) -> None:
    """Write the broker's address and the control secret of the run in `folder`.

    Only this user may read the files: the address may hold a password.

    Args:
        folder: Folder of the run.
        url: Address of the broker.
        secret: Secret that clients which stop the run must know.
    """
    write_file(folder / SECRET, secret.hex().encode(), mode=0o600)
    write_file(folder / BROKER, f"{url}\n".encode(), mode=0o600)


def remove_broker_url(folder: Path) -> None:
    """Remove the broker's address and secret from `folder`, before the broker exits."""
    (folder / BROKER).unlink(missing_ok=True)
    (folder / SECRET).unlink(missing_ok=True)


def _begun(runs: Path, prefix: str = "") -> list[Path]:
    """Return the folders of runs whose ids begin with `prefix`, in the order in which they were begun or resumed."""
    return [file.parent for file in sorted(runs.glob(f"{prefix}*/{PLAN}"), key=_started)]


def _started(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # deleted meanwhile
        return 0.0
