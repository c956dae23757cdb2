"""History of a microbatch for people: a row for each attempt of each stage."""

from collections.abc import Iterator, Sequence

from stageline.workers.runs.folder import Facts

from .output import duration

Row = tuple[object, ...]


def history(facts: Facts) -> tuple[str, Sequence[str], list[Row]]:
    """Return the answer `story` as a table: its title, its columns and its rows."""
    starts = [action["start"] for stage in facts["stages"] for action in stage["actions"]]
    rows = [row for stage in facts["stages"] for row in attempts(stage, min(starts, default=0.0))]
    title = f"microbatch {facts['microbatch']} of step {facts['step']} of run {facts['run']}"
    return title, ("stage", "worker", "attempt", "state", "by", "began at, took"), rows


def attempts(found: Facts, beginning: float) -> Iterator[Row]:
    """Yield a row for each attempt of a stage, of which the last counts. Times are relative to `beginning`."""
    stage, worker, before = found.get("label", found["stage"]), found["worker"], found["attempts"]
    for number, lost in enumerate(before, start=1):
        yield stage, worker, number, f"lost ({lost['state']})", _name(lost), lost["why"]
    actions = "; ".join(
        f"{each['action']} {duration(each['start'] - beginning)}, {duration(each['end'] - each['start'])}"
        for each in found["actions"]
    )
    yield stage, worker, len(before) + 1, found["state"], _name(found["holder"]), actions or "-"


def _name(worker: Facts | None) -> str:
    if worker is None:
        return "-"
    return f"{worker['name']}, generation {worker['generation']}" if worker["generation"] else str(worker["name"])
