"""Both ends of a queue for people: positions, sizes, and what was sent again and why."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stageline.workers.runs.folder import Facts

from .output import counted, duration, size

Row = Mapping[str, Any]


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
