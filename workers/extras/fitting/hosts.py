"""The file that says which machines there are: how fast each computes, its memory, and the links between them.

[hosts.desk]
memory = "8GiB"

[hosts.cloud]
speed = 4.0
memory = "24GiB"
data = false

[[links]]
between = ["desk", "cloud"]
latency = "20ms"
bandwidth = "50Mbit/s"
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stageline.pipeline.plan import PlanError, PlanRefused
from stageline.pipeline.plan.errors import shown
from stageline.pipeline.plan.keys.key_types import (
    Accepts,
    Bandwidth,
    Positive,
    Seconds,
    Section,
    Size,
    Truth,
    whole,
)
from stageline.pipeline.plan.keys.names import nearest
from stageline.pipeline.plan.tables import Key, dotted, lines_of, place

_MOST_WORKERS = 64  # of one machine


class Host(Section):
    """Machine with workers.

    `memory` is the bytes that one worker may take there. `speed` is relative to the machine on which layers are
    measured. Without `data`, the machine gets neither the first stage nor the last, which read the data.
    """

    memory: Size
    speed: Positive = 1.0
    workers: Annotated[int, whole(1, _MOST_WORKERS)] = 1
    data: Truth = True


class Link(Section):
    """Link between two machines: seconds that a message takes one way, and bytes a second in each direction."""

    between: Annotated[
        tuple[str, str], Accepts('the names of two hosts, such as ["desk", "cloud"]'), Field(min_length=2)
    ]
    latency: Seconds
    bandwidth: Bandwidth


class Hosts(BaseModel):
    """Machines, by name, and the links between them. Two machines without a link cannot have neighbouring stages."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hosts: Mapping[str, Host]
    links: tuple[Link, ...] = ()

    def link(self, one: str, other: str) -> Link | None:
        """Return the link between two machines; None if there is none."""
        return next((link for link in self.links if {*link.between} == {one, other}), None)


def read_hosts(path: Path) -> Hosts:
    """Return the machines and links in the file at `path`. Raises `PlanRefused`, which names all faults of the file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        tables = tomllib.loads(text)
    except OSError as error:
        raise PlanRefused([PlanError("", f"it cannot be read: {error.strerror}", str(path))]) from error
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8, which a TOML file is written in"
        raise PlanRefused([PlanError("", reason, str(path))]) from error
    except tomllib.TOMLDecodeError as error:
        raise PlanRefused([PlanError("", f"this is not TOML: {error}", str(path))]) from error
    lines = lines_of(text)
    try:
        found = Hosts.model_validate(tables)
    except ValidationError as error:
        raise PlanRefused([*_faults(error, str(path), lines)]) from None
    if wrong := [PlanError(dotted(key), reason, place(str(path), lines, key)) for key, reason in _problems(found)]:
        raise PlanRefused(wrong)
    return found


def _faults(error: ValidationError, file: str, lines: Mapping[Key, int]) -> Iterator[PlanError]:
    for each in error.errors(include_url=False):
        key = tuple(map(str, each["loc"]))
        where = place(file, lines, key)
        match each["type"]:
            case "missing" if len(key) == 1:
                yield PlanError(dotted(key), "missing; write a table for each machine, such as [hosts.desk]", where)
            case "missing":
                yield PlanError(dotted(key), f"missing; expected {_wanted(key)}", where)
            case "extra_forbidden":
                known = _table(key).model_fields
                hint = nearest(key[-1], known) or f"there are {', '.join(known)}"
                yield PlanError(dotted(key), f"there is no such key; {hint}", where)
            case "value_error":
                yield PlanError(dotted(key), str(each["ctx"]["error"]), where, shown(each["input"]))
            case _:  # not a table
                header = "[[links]]" if key[0] == "links" else "[hosts.NAME]"
                yield PlanError(
                    dotted(key), f"this is a table: write {header}, and its keys below", where, shown(each["input"])
                )


def _table(key: Key) -> type[BaseModel]:
    if len(key) == 1:
        return Hosts
    return Host if key[0] == "hosts" else Link


def _wanted(key: Key) -> str:
    return next(each.what for each in _table(key).model_fields[key[-1]].metadata if isinstance(each, Accepts))


def _problems(found: Hosts) -> Iterator[tuple[Key, str]]:
    """Yield faults of tables that are valid one by one."""
    if not found.hosts:
        yield ("hosts",), "there is none; write a table for each machine, such as [hosts.desk]"
    elif not any(host.data for host in found.hosts.values()):
        yield ("hosts",), "none has data, which the first stage and the last read; leave data = false out of one"
    for number, link in enumerate(found.links):
        yield from _of_link(("links", str(number)), link, found.links[:number], found.hosts)


def _of_link(key: Key, link: Link, before: Sequence[Link], hosts: Mapping[str, Host]) -> Iterator[tuple[Key, str]]:
    one, other = link.between
    for name in {one, other} - set(hosts):
        hint = nearest(name, hosts) or f"there are {', '.join(hosts)}"
        yield (*key, "between"), f'there is no host "{name}"; {hint}'
    if one == other:
        yield (*key, "between"), f'"{one}" has no link to itself: within a machine messages take no time'
    if any({*each.between} == {one, other} for each in before):
        yield (*key, "between"), f'there is another link between "{one}" and "{other}"; leave one out'
