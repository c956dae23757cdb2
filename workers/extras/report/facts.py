"""Data of a run's page, in sections, from the answers to the questions that `status`, `why` and `timetable` ask.

run          state, steps, loss, pace                     status
why          what it waits for, what limits it            why
curves       steps/s, losses, events, memory over time    course, history, metrics.jsonl or status
timetable    the newest steps                             timetable
stores       workers and queues                           status, queues
faults       losses of workers, and returns               history
plan         the plan and the processes                   plan.json and process.json, or status
"""

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from stageline.pipeline.addresses import masked
from stageline.pipeline.plan.tables import flat
from stageline.workers.runs.folder import PLAN, Facts
from stageline.workers.runs.owner import read_owner

from .columns import TimetableColumns
from .curves import MeasuredLosses, curves

Ask = Callable[..., Facts]  # a question by its name, with its parameters as texts
Section = dict[str, Any]

_MOST_ACTIONS = 12_000  # in a timetable, about
_MOST_STEPS = 8  # likewise


def sections(ask: Ask, folder: Path | None, source: str, as_of: float) -> dict[str, Section]:
    """Return all sections.

    Args:
        ask: Asks the run's broker or its records.
        folder: Folder of the run, for its plan and its metrics; None if it is not on this machine.
        source: "broker" or "records".
        as_of: Time at which the answers are true, in seconds since the epoch.
    """
    status = ask("status")
    found = {"run": run_section(status, source, as_of), "why": why_section(ask("why"))}
    if status["plan"] is None:  # it has not begun
        rest = empty_sections()
    else:
        rest = {**course_sections(ask, status, MeasuredLosses(folder)), **state_sections(ask, status)}
    return {**found, **rest, "plan": plan_section(status, folder)}


def run_section(status: Facts, source: str, as_of: float) -> Section:
    """Return the state of a run: how far it is, and how fast."""
    loss = status["finished_loss"]
    total = status["training_steps"]
    steps = status["finished_floor"] if total is None else min(status["finished_floor"], total)
    return {
        "id": status["run"],
        "phase": status["phase"],
        "reason": status["reason"],
        "source": source,
        "as_of": as_of,
        "steps": steps,
        "total": total,
        "loss": None if loss is None else loss["loss"],
        "best": status["best"],
        "checkpoint": status["checkpoint"],
        "restarts": status["restarts"],
        "pace": status.get("pace"),
    }


def why_section(why: Facts) -> Section:
    """Return what a run waits for, what limits it, and the time that it lost to recovery."""
    return {"text": why["text"], "action": why["action"], "slow": why["slow"], "recovery": why.get("recovery")}


def empty_sections() -> dict[str, Section]:
    """Return the sections of a run that has not begun."""
    nothing: Section = {"at": [], "step": [], "value": []}
    trend: Section = {"at": [], "memory": [], "retained": []}
    return {
        "curves": {"rates": nothing, "losses": nothing, "evaluations": [], "events": [], "workers": trend},
        "timetable": TimetableColumns.of([], {}).section(),
        "stores": {"workers": [], "queues": []},
        "faults": {"losses": [], "others": [], "recovering": []},
    }


def state_sections(ask: Ask, status: Facts) -> dict[str, Section]:
    """Return what changes from moment to moment: workers, queues and faults."""
    milestones = ask("history")["milestones"]
    stores = {"workers": [_worker(each) for each in status["workers"]], "queues": ask("queues")["queues"]}
    return {"stores": stores, "faults": _faults(status, milestones)}


def course_sections(ask: Ask, status: Facts, measured: MeasuredLosses) -> dict[str, Section]:
    """Return what grows with the run: its curves, and the timetable of its newest steps."""
    milestones, evaluations = ask("history")["milestones"], status["evaluations"]
    found = curves(ask("course"), milestones, evaluations, measured.points(status["losses"]))
    return {"curves": found, "timetable": timetable_section(ask, status)}


def timetable_section(ask: Ask, status: Facts) -> Section:
    """Return the newest steps as they ran, above them as they were planned, in columns."""
    plan, floor = status["plan"], status["finished_floor"]
    each = 3 * plan["microbatches"] * sum(map(len, plan["placement"])) + 1
    first = max(0, floor - max(1, min(_MOST_STEPS, _MOST_ACTIONS // each)))
    if not floor:
        return TimetableColumns.of([], {}).section()
    before = max(0, first - 1)  # waits at the border of two steps have their cause by it
    steps = ask("timetable", first=str(before), last=str(floor - 1))["steps"]
    labels = {stage: label for worker in status["workers"] for stage, label in _labels(worker)}
    return TimetableColumns.of([step for step in steps if step["step"] >= first], labels).section()


def _labels(worker: Facts) -> Iterable[tuple[int, str]]:
    return zip(worker["stages"], worker.get("labels") or map(str, worker["stages"]), strict=True)


def _worker(worker: Facts) -> Facts:
    there = "pid" in worker
    return {
        "index": worker["index"],
        "stages": ", ".join(label for _, label in _labels(worker)),
        "standing": worker["standing"],
        "process": f"{worker['name']}, pid {worker['pid']} on {worker['host']}" if there else None,
        "idle": worker.get("idle"),
        "memory": worker.get("memory"),
        "retained": worker.get("retained_bytes"),
        "actions": worker.get("actions"),
        "now": worker.get("now"),
    }


def _faults(status: Facts, milestones: Sequence[Facts]) -> Section:
    losses = [
        {
            "at": each["at"],
            "worker": each["worker"],
            "why": each["why"],
            "step": each["step"],
            "returned": next((other["at"] for other in milestones[place + 1 :] if _same(other, each)), None),
        }
        for place, each in enumerate(milestones)
        if each["what"] in ("loss", "leave")
    ]
    recovering = [f"Worker {each['index']} is being replaced: {each['why']}." for each in status["recovering"]]
    damaged = [(text, 1) for text in status["damaged"]]
    return {"losses": losses, "others": [*status["oddities"].items(), *damaged], "recovering": recovering}


def _same(other: Facts, loss: Facts) -> bool:
    return bool(other["what"] == "return" and other["worker"] == loss["worker"])


def plan_section(status: Facts, folder: Path | None) -> Section:
    """Return the plan by key, without passwords, and the processes and versions."""
    return {"plan": list(_plan(status, folder)), "environment": list(_environment(status, folder))}


def _plan(status: Facts, folder: Path | None) -> Iterator[tuple[str, str]]:
    try:
        kept = {} if folder is None else msgspec.json.decode((folder / PLAN).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        kept = {}
    known = flat(kept) or {f"plan.{key}": value for key, value in (status["plan"] or {}).items()}
    for key, value in sorted(known.items()):
        yield key, masked(value) if isinstance(value, str) else msgspec.json.encode(value).decode()


def _environment(status: Facts, folder: Path | None) -> Iterator[tuple[str, str]]:
    owner = None if folder is None else _owner(folder)
    if owner is not None:
        yield "began with", owner.begin
        yield "began on", f"{owner.host}, pid {owner.pid}"
    for worker in status["workers"]:
        if "pid" in worker:
            yield (
                f"worker {worker['index']}",
                f"{worker['host']}, pid {worker['pid']}, generation {worker['generation']}",
            )
    here = ", ".join(f"{name} {_version(name)}" for name in ("stageline", "torch"))
    yield "this page was made by", f"{here}, Python {platform.python_version()}, on {platform.node()}"


def _owner(folder: Path) -> Any:
    try:
        return read_owner(folder)
    except ValueError:
        return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"
