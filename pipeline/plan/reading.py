"""Settings to a plan, key by key: what is wrong is noted down and stands as None, so that reading goes on."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .consistency import problems
from .keys import KEYS, TABLES, WORKER, Table
from .kinds import OPTION, KeyKind, Unfit, nearest
from .layers import Setting, nested
from .lines import place
from .refusal import PlanError, PlanRefused, shown
from .tables import Key, dotted, flat, leaves
from .value import Origin, Plan, WorkerPlan


class Reading:
    """One pass over the settings that hold.

    `name` is the plan file as errors shall call it, "" if there is none, and `lines` tells where its keys stand.
    """

    def __init__(self, settings: Mapping[Key, Setting], name: str, lines: Mapping[Key, int]) -> None:
        self._settings = settings
        self._name = name
        self._lines = lines
        self._refused: list[str] = []  # dotted keys that have no value
        self._errors: list[PlanError] = []

    def plan(self, file: Path | None, errors: Iterable[PlanError] = ()) -> Plan:
        """The plan. Raises `PlanRefused` with `errors`, which were found before, and all that is wrong besides."""
        tables = nested(self._settings.values())
        self._unknown_tables(tables)
        sections = {name: self._section((name,), table, tables) for name, table in TABLES.items()}
        plan = _with_stages(Plan(**sections, workers=self._workers(tables), file=file))
        plan = replace(plan, origins={dotted(key): self._origin(key) for key, _ in leaves(plan.as_mapping())})
        self._check(plan)
        if found := (*errors, *self._errors):
            raise PlanRefused(found)
        return plan

    def _section(self, path: Key, table: Table, tables: Mapping[str, Any]) -> Any:
        if table.optional and path[-1] not in tables:
            return None
        given = self._table(path, tables)
        if given is None:
            return table.makes(**dict.fromkeys(table.needed))
        values = {name: self._value((*path, name), kind, given) for name, kind in table.keys.items() if name in given}
        absent = [name for name in table.needed if name not in given]
        for name in absent:
            self._refuse((*path, name), f"missing; {table.keys[name].wanted} is wanted")
        return table.makes(**values, **dict.fromkeys(absent), **self._others(path, table, given))

    def _others(self, path: Key, table: Table, given: Mapping[str, Any]) -> dict[str, Any]:
        names = [name for name in given if name not in table.keys]
        if table.free:
            return {"options": {name: self._value((*path, name), OPTION, given) for name in names}}
        for name in names:
            self._refuse((*path, name), f"there is no such key; {_meant(name, path, table)}")
        return {}

    def _workers(self, tables: Mapping[str, Any]) -> tuple[WorkerPlan, ...]:
        given = self._table(("workers",), tables) or {}
        workers = {name: self._section(("workers", name), WORKER, given) for name in given}
        numbers = [str(number) for number in range(len(given))]
        if set(numbers) == set(given):
            return tuple(workers[number] for number in numbers)
        wanted = ", ".join(f"[workers.{number}]" for number in numbers)
        self._refuse(("workers",), f"workers are numbered from 0 without gaps: {wanted}")
        return ()

    def _table(self, path: Key, tables: Mapping[str, Any]) -> Mapping[str, Any] | None:
        given = tables.get(path[-1], {})
        if isinstance(given, Mapping):
            return given
        header = "workers.0" if path == ("workers",) else dotted(path)
        self._refuse(path, f"this is a table: write [{header}], and its keys below", given)
        return None

    def _value(self, key: Key, kind: KeyKind[Any], given: Mapping[str, Any]) -> Any:
        try:
            return kind.fit(given[key[-1]])
        except Unfit as fault:
            return self._typed(key, kind, fault, given[key[-1]])

    def _typed(self, key: Key, kind: KeyKind[Any], fault: Unfit, value: object) -> Any:
        """What was typed may be text that only looks like something else: `--set run.name=7`. An argument that is
        typed as nan or inf is a number, and refused: a factory would not know what to do with it as text."""
        if kind is OPTION and isinstance(value, float) and not math.isfinite(value):
            return self._refuse(key, str(fault), value)
        try:
            return kind.fit(self._settings[key].text)
        except (KeyError, Unfit):
            return self._refuse(key, str(fault), value)

    def _unknown_tables(self, tables: Iterable[str]) -> None:
        known = (*TABLES, "workers")
        for name in tables:
            if name not in known:
                hint = nearest(name, known) or f"there are {', '.join(known)}"
                self._refuse((name,), f"there is no such table; {hint}")

    def _check(self, plan: Plan) -> None:
        values = flat(plan.as_mapping())
        for problem in problems(plan, self._refused):
            self._note(tuple(problem.key.split(".")), problem.reason, values.get(problem.key))

    def _refuse(self, key: Key, reason: str, value: object = None) -> None:
        self._refused.append(dotted(key))
        self._note(key, reason, value)

    def _note(self, key: Key, reason: str, value: object) -> None:
        self._errors.append(PlanError(dotted(key), reason, self._where(key), "" if value is None else shown(value)))

    def _where(self, key: Key) -> str:
        inside = (setting.where for name, setting in self._settings.items() if name[: len(key)] == key)
        return next(inside, place(self._name, self._lines, key))

    def _origin(self, key: Key) -> Origin:
        return self._settings[key].origin if key in self._settings else "default"


def _with_stages(plan: Plan) -> Plan:
    match plan.model.cut, plan.model.stages:
        case _, int(stages):
            return plan.with_stages(stages)
        case tuple(cut), None:
            return plan.with_stages(len(cut) + 1)
        case _:
            return plan


def _meant(name: str, path: Key, table: Table) -> str:
    elsewhere = [key for key in KEYS if key.endswith(f".{name}")]
    if near := nearest(name, table.keys):
        return near
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    if "options" in table.keys:
        return f"arguments for the factory go into [{dotted(path)}.options]"
    return f"there are {', '.join(table.keys)}"
