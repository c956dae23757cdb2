"""Queues of a run for people: a table of all, in the columns that a terminal has room for, and both ends of one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stageline.workers.cli import options
from stageline.workers.cli.output import aligned, counted, duration, say, size
from stageline.workers.runs.folder import Facts
from stageline.workers.runs.pauses import paused_text

_BAR = 10  # characters
Row = Mapping[str, Any]


class _Column(NamedTuple):
    """Column of the table of queues. `rank` says which are left out first where there is no room: the highest."""

    name: str
    rank: int
    cell: Callable[[Row], str]
    sum: Callable[[Sequence[Row]], str] = lambda rows: ""


def _count(key: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[key] is None else str(row[key])


def _total(rows: Sequence[Row], key: str) -> float:
    return sum(row[key] or 0 for row in rows)


def _sum(key: str) -> Callable[[Sequence[Row]], str]:
    return lambda rows: str(int(_total(rows, key)))


def _pace(key: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[key] is None else f"{row[key]:.3g}"


def _sum_of_paces(key: str) -> Callable[[Sequence[Row]], str]:
    return lambda rows: "-" if all(row[key] is None for row in rows) else f"{_total(rows, key):.3g}"


def _ends(row: Row) -> str:
    """Return the two ends in few characters: `0 -> 1` for stages, `w1` for a worker."""
    ends = (str(row[end]) for end in ("producer", "consumer"))
    return " -> ".join(end.removeprefix("stage ").removeprefix("the ").replace("worker ", "w") for end in ends)


def _credit(row: Row) -> str:
    return "-" if row["credit_limit"] is None else f"{row['credit_used']}/{row['credit_limit']}"


def _bar(row: Row) -> str:
    """Return how much of the credit is used, as a bar."""
    if not row["credit_limit"]:
        return ""
    full = round(_BAR * min(1.0, float(row["credit_used"]) / float(row["credit_limit"])))
    sign, rest = ("#", ".") if options.ascii_only() else ("█", "░")
    return sign * full + rest * (_BAR - full)


_COLUMNS = (
    _Column("queue", 0, lambda row: str(row["queue"]), lambda rows: counted(len(rows), "queue")),
    _Column("from -> to", 0, _ends),
    _Column("put", 1, _count("put"), _sum("put")),
    _Column("taken", 1, _count("taken"), _sum("taken")),
    _Column("ready", 6, _count("ready"), _sum("ready")),
    _Column("in flight", 3, _count("in_flight"), _sum("in_flight")),
    _Column("retained", 7, _count("retained"), _sum("retained")),
    _Column(
        "bytes",
        4,
        lambda row: "-" if row["bytes"] is None else size(row["bytes"]),
        lambda rows: size(_total(rows, "bytes")),
    ),
    _Column("in/s", 8, _pace("put_pace"), _sum_of_paces("put_pace")),
    _Column("out/s", 5, _pace("taken_pace"), _sum_of_paces("taken_pace")),
    _Column("credit", 2, _credit),
    _Column("", 11, _bar),
    _Column("resent", 9, _count("resent"), _sum("resent")),
    _Column("oldest", 10, lambda row: "-" if row["oldest"] is None else duration(row["oldest"])),
)


class QueueTable(NamedTuple):
    """Table of queues as text: names of columns, a row of cells for each queue, the sum, and columns left out.

    `right` tells which columns are flush right.
    """

    columns: list[str]
    rows: list[list[str]]
    sum: list[str]
    left_out: list[str]
    right: list[bool]


def queue_table(rows: Sequence[Row], room: int | None) -> QueueTable:
    """Return the table of some queues in as many columns as fit into `room` characters; in all for None."""
    cells = {column: [column.cell(row) for row in rows] + [column.sum(rows)] for column in _COLUMNS}
    shown = _fitting(cells, room)
    *found, total = (list(row) for row in zip(*(cells[column] for column in shown), strict=True))
    left_out = [column.name for column in _COLUMNS if column not in shown and column.name]
    right = [index > 1 and bool(column.name) for index, column in enumerate(shown)]
    return QueueTable([column.name for column in shown], found, total, left_out, right)


def show_queues(facts: Facts) -> None:
    """Print a row for each queue and their sum, in as many columns as the terminal has room for."""
    if not facts["queues"]:
        say(f"queues of run {facts['run']}: no worker has told of its queues yet")
        return
    found = queue_table(facts["queues"], options.width())
    heard = "" if facts["heard"] is None else f", as reported up to {duration(facts['heard'])} ago"
    lines = aligned([found.columns, *found.rows, found.sum], found.right)
    say("\n".join([f"queues of run {facts['run']}{heard}", *lines]))
    if pause := paused_text(facts.get("paused")):
        say(f"the run is {pause}")
    if found.left_out:
        say(f"a wider terminal also shows: {', '.join(found.left_out)}")


def _fitting(cells: Mapping[_Column, Sequence[str]], room: int | None) -> list[_Column]:
    """Return the columns that fit into `room` characters, the highest ranks left out first; all for None."""
    shown = list(_COLUMNS)
    widths = {column: max(map(len, (column.name, *found))) for column, found in cells.items()}
    while room is not None and sum(widths[each] + 2 for each in shown) - 2 > room and any(each.rank for each in shown):
        shown.remove(max(shown, key=lambda each: each.rank))
    return shown


def queue_lines(facts: Facts) -> list[str]:
    """Return the answer `queue`, both ends of a queue, as lines for people."""
    row, window = facts["row"], facts["window"]
    bound = "the schedule bounds its length" if window is None else f"window {window}"
    return [
        f"queue {row['queue']} of run {facts['run']}: {row['producer']} -> {row['consumer']}",
        f"  {counted(facts['count'], 'message')} a {facts['unit']}, {bound}, {facts['codec']}",
        *_end("producer", facts["producer"], _produced),
        *_end("consumer", facts["consumer"], _consumed),
    ]


def _end(title: str, end: Row, values: Callable[[Row], Iterator[tuple[str, str]]]) -> Iterator[str]:
    process = end["name"] or f"no process has place {end['worker']}"
    age = "has not counted it yet" if end["counted"] is None else f"counted {duration(end['counted'])} ago"
    yield f"  {title}: {process}, {age}"
    if end["counted"] is not None:
        yield from (f"    {name:<11} {value}" for name, value in values(end))


def _produced(end: Row) -> Iterator[tuple[str, str]]:
    yield "put", _place(end["put"])
    yield "sent", str(end["sent"])
    yield "arrived", str(end["arrived"])
    yield "granted", "without a limit" if end["granted"] is None else str(end["granted"])
    yield "pace", _per_second(end)
    yield "retained", _retained(end)
    yield "put so far", size(end["put_bytes"])
    yield "sent again", counted(end["resent"], "message")
    yield from (("", _resend(each)) for each in reversed(end["resends"]))


def _consumed(end: Row) -> Iterator[tuple[str, str]]:
    yield "received", str(end["received"])
    yield "taken", _place(end["taken"])
    yield "granted", "without a limit" if end["granted"] is None else str(end["granted"])
    yield "pace", _per_second(end)
    yield "waiting", counted(end["waiting"], "message")
    yield "in vain", f"{end['duplicates']} came twice, {end['damaged']} damaged, {end['lost']} times requested again"


def _place(place: Row) -> str:
    return f"{place['number']} (next: {place['unit']} {place['index']}, microbatch {place['microbatch']})"


def _retained(end: Row) -> str:
    if not end["retained"]:
        return "nothing"
    each, first = size(end["bytes"] / end["retained"]), end["first"]
    since = f"{first['unit']} {first['index']}, microbatch {first['microbatch']}"
    return (
        f"{counted(end['retained'], 'message')} from {since} on, {size(end['bytes'])} ({each} each), the oldest "
        f"{duration(end['oldest'])}"
    )


def _resend(resend: Row) -> str:
    return f"{resend['first']} to {resend['end'] - 1}, {resend['reason']}, {duration(resend['ago'])} ago"


def _per_second(end: Row) -> str:
    return "not known yet" if end["pace"] is None else f"{end['pace']:.3g} messages a second"
