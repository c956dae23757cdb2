"""Answers of `status`, `why` and `story` as lines and rows for people: pace, limits, time lost, attempts, parties."""

from collections.abc import Iterator, Sequence
from datetime import datetime

from stageline.broker.keys.pairs import short
from stageline.workers.cli.output import duration, share
from stageline.workers.runs.folder import Facts

_MOST_REMEDIES = 3  # of a finding that are shown
Row = tuple[object, ...]


def limits(why: Facts) -> Iterator[str]:
    """Yield the lines about what limits a run, and what to do about it; none if too few steps are known."""
    if (slow := why.get("slow")) is None:
        return
    first, last = slow["steps"]
    old = f", as of {duration(why['age'])} ago" if why.get("age", 0.0) >= 1 else ""
    yield f"a step takes {duration_of(slow['seconds'])} (steps {first} to {last}{old})"
    if not slow["findings"]:
        yield slow["text"]
    for found in slow["findings"]:
        began = "" if found.get("began") is None else f" ({datetime.fromtimestamp(found['began']):%Y-%m-%d %H:%M:%S})"
        yield f"limited by {found['cause']}: {found['text']}{began}"
        for remedy in found["remedies"][:_MOST_REMEDIES]:
            took = f"a step would take {duration_of(remedy['seconds'])}, {share(remedy['gain'])} less, by simulation"
            yield f"  to do: {remedy['do']} ({took})"


def lost(recovery: Facts | None) -> Iterator[str]:
    """Yield the lines about the time that a run lost to losses, restarts and stalls; none if it lost none."""
    if not recovery:
        return
    yield recovery["text"]
    for found in recovery["setbacks"]:
        yield f"  {found['text']}"
    for remedy in recovery["remedies"]:
        saved = "" if remedy["seconds"] is None else f" (that would have saved {duration_of(remedy['seconds'])})"
        yield f"  to do: {remedy['do']}{saved}"


def pace(facts: Facts) -> Iterator[str]:
    """Yield the lines about the steps per second, the time left and the bubble of a run that goes on."""
    found = facts.get("pace") or {}
    if found.get("last_minute"):
        best = "" if found["best"] is None else f", at best {found['best']:.3g}"
        left = "" if found["left"] is None else f", {duration(found['left'])} left"
        yield f"{found['last_minute']:.3g} steps/s in the last minute{best}{left}"
    bubble = found.get("bubble") or {}
    if bubble.get("measured") is not None:
        planned = "" if bubble["planned"] is None else f", {share(bubble['planned'])} planned"
        yield f"bubble {share(bubble['measured'])} measured{planned}"


def duration_of(seconds: float) -> str:
    """Return seconds as text, with three digits below one second: `310 ms`, `4.12 ms`."""
    return duration(seconds) if seconds >= 1 or seconds <= 0 else f"{seconds * 1000:.3g} ms"


def history(facts: Facts) -> tuple[str, Sequence[str], list[Row]]:
    """Return the answer `story` as a table: its title, its columns and its rows."""
    starts = [action["start"] for stage in facts["stages"] for action in stage["actions"]]
    rows = [row for stage in facts["stages"] for row in attempts(stage, min(starts, default=0.0))]
    title = f"microbatch {facts['microbatch']} of step {facts['step']} of run {facts['run']}"
    return title, ("stage", "worker", "attempt", "state", "by", "began at, took"), rows


def attempts(found: Facts, beginning: float) -> Iterator[Row]:
    """Yield a row for each attempt of a stage, of which the last counts. Times are relative to `beginning`."""
    stage, worker, before = found.get("label", found["stage"]), found["worker"], found["attempts"]
    for number, former in enumerate(before, start=1):
        yield stage, worker, number, f"lost ({former['state']})", _name(former), former["why"]
    actions = "; ".join(
        f"{each['action']} {duration(each['start'] - beginning)}, {duration(each['end'] - each['start'])}"
        for each in found["actions"]
    )
    yield stage, worker, len(before) + 1, found["state"], _name(found["holder"]), actions or "-"


def _name(worker: Facts | None) -> str:
    if worker is None:
        return "-"
    return f"{worker['name']}, generation {worker['generation']}" if worker["generation"] else str(worker["name"])


def of_parties(parties: Sequence[Facts]) -> list[tuple[str, ...]]:
    """Return a row for each party, of its name, its keys, its places and its rights."""
    return [
        (
            each["name"],
            " ".join(map(short, each["keys"])),
            " ".join(map(str, each["places"])) or "-",
            " ".join(each["rights"]),
        )
        for each in parties
    ]


def trusted(keys: Facts) -> str:
    """Return the level of a run with keys: who is trusted with what the queues carry, for people."""
    parties = keys.get("parties") or []
    if not parties:
        return "level 1: the broker is trusted with what the queues carry"
    owned = (f"{each['name']} has {_places(each['workers'])}" for each in parties)
    return f"level 2, parties in the plan: {'; '.join(owned)}. The broker cannot read what the queues carry"


def _places(places: Sequence[int]) -> str:
    return f"worker{'s' * (len(places) > 1)} {' and '.join(map(str, places))}" if places else "no worker"
