"""Whether workers that run rows of actions in order ever wait for each other in a circle, and in which one."""

from collections.abc import Iterator, Mapping, Sequence

from stageline.pipeline.schedule.action import Action, Kind

from stageline.pipeline.schedule.rows import Listed

_Rows = Sequence[Sequence[Listed]]


def deadlock(rows: _Rows) -> Iterator[str]:
    """The circle in which workers wait, as a chain of actions; nothing if there is none. The rows have every action of
    every stage."""
    places = {each.action: each for row in rows for each in row}
    heads = _stuck(rows, places)
    if heads:
        yield _chain(_circle(heads, places), places)


def _stuck(rows: _Rows, places: Mapping[Action, Listed]) -> dict[int, Listed]:
    """By worker, the action at which it waits for ever."""
    ran: set[Action] = set()
    heads = [0] * len(rows)
    moves = True
    while moves:
        moves = False
        for worker, row in enumerate(rows):
            while heads[worker] < len(row) and _source(row[heads[worker]].action, places) in {None} | ran:
                ran.add(row[heads[worker]].action)
                heads[worker] += 1
                moves = True
    return {worker: row[heads[worker]] for worker, row in enumerate(rows) if heads[worker] < len(row)}


def _source(action: Action, places: Mapping[Action, Listed]) -> Action | None:
    """The action of a neighbouring stage whose message it takes; None for none."""
    if action.kind is Kind.WEIGHT:
        return None
    forward = action.kind is Kind.FORWARD
    kinds = [Kind.FORWARD] if forward else [Kind.BACKWARD, Kind.INPUT]
    stage = action.stage - 1 if forward else action.stage + 1
    found = (action._replace(kind=kind, stage=stage) for kind in kinds)
    return next((each for each in found if each in places), None)


def _circle(heads: Mapping[int, Listed], places: Mapping[Action, Listed]) -> list[Listed]:
    """The actions at which workers wait, each for the worker of the next one, the last for that of the first."""
    way: list[int] = []
    worker = min(heads)
    while worker not in way:
        way.append(worker)
        worker = _wanted_by(heads[worker], places).row
    return [heads[each] for each in way[way.index(worker) :]]


def _wanted_by(head: Listed, places: Mapping[Action, Listed]) -> Listed:
    source = _source(head.action, places)
    if source is None:
        raise AssertionError(f"{head} takes no message, so no worker waits at it")
    return places[source]


def _chain(circle: Sequence[Listed], places: Mapping[Action, Listed]) -> str:
    parts = []
    for head, following in zip(circle, (*circle[1:], circle[0]), strict=True):
        wanted = _wanted_by(head, places)
        behind = "" if wanted == following else f", which comes after {following.action} on worker {following.row}"
        parts.append(f"waits for {wanted.action}{behind}")
    return f"{circle[0]} {', which '.join(parts)}: none of them ever runs; change their order"
