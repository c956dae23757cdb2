"""The plan as a value: what is trained, how it is cut and scheduled, and which worker owns which stage.

Its settings come from a file, the environment and `--set`; `merged` says which overrules which.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

from pydantic import Field

from stageline.pipeline.addresses import lacking_protection, masked, open_to_others
from stageline.pipeline.schedule import Schedule, make_schedule

from .checks import problems
from .difference import counted
from .errors import PlanError, PlanRefused, Reason, shown
from .keys.models import TABLES, PlanTables, section
from .keys.stages import MemoryPlan, StagePlan
from .stage_checks import loose_stage_memory
from .tables import FileUnreadable, Key, canonical, dotted, flat, tables_in

Origin = Literal["default", "file", "environment", "--set"]

_EXPOSED = (
    "can be reached from other machines and nothing on it is encrypted: anyone who reaches it can read and change "
    "the run. Use 127.0.0.1, or an address inside a tunnel (WireGuard, ssh)."
)
_BARE = (
    "names a server on the network, without {lacking}: anyone who {who} can {what}. Use rediss:// and a password, or "
    "an address inside a tunnel (WireGuard, ssh)."
)
_WHAT = {
    False: "hold up the run or end it, though what passes is sealed and cannot be read or changed",
    True: "read and change the run",
}
_WHO = {"a password": "can reach it", "TLS": "sees the traffic to it"}
_SEEN = (
    "{key} was given with a password on the command line, where every user of this machine can read it (ps). Leave "
    "that --set out, and put the address into the environment, as {variable}, or into a plan file that only you can "
    "read."
)

_MEASURED = (
    "where to cut is measured once, by `stageline train`, which begins the run; this process cannot decide it. Run "
    "`stageline plan`, and write the cut that it shows into the plan file, as model.cut"
)

_CHOSEN = (
    "what stages recompute and offload, and for which workers the limit is tight, is chosen once, by "
    "`stageline train`, which begins the run; this process cannot choose it. Run `stageline plan`, and write what it "
    "chooses into the plan file: recompute and offload in [stage.0], [stage.1] and so on, tight in [memory]"
)


class Plan(PlanTables):
    """All settings of a run.

    Two plans are equal if their tables are equal, wherever they were read from. `workers` is empty as long as
    `model.stages` is None and the plan names no workers: see `resolved`.

    Attributes:
        file: The plan file; None if the plan was not read from a file.
        origins: What set each key, by dotted key.
        places: The line that has a key or a table, or "--set", by dotted key.
    """

    file: Path | None = None
    origins: Mapping[str, Origin] = Field(default_factory=dict)  # dotted key -> what set it
    places: Mapping[str, str] = Field(default_factory=dict)  # dotted key or table -> the line that has it, or "--set"

    def __eq__(self, other: object) -> bool:
        """Return True if `other` is a plan with the same tables."""
        if not isinstance(other, Plan):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in PlanTables.model_fields)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about settings that are allowed, for the user to know before the run begins.

        Such are addresses that other machines can reach, servers without a password or TLS, passwords given on the
        command line, and stages that may be cut as large as their worker's memory.
        """
        urls = {"queues.url": self.queues.url, "broker.url": self.broker.url, "broker.store": self.broker.store}
        reached = () if self.broker.has_keys else urls.items()
        exposed = (f'{key} = "{masked(url)}" {_EXPOSED}' for key, url in reached if open_to_others(url))
        bare = (
            f'{key} = "{masked(url)}" {_bare(lacking, _WHAT[self.broker.insecure])}'
            for key, url in urls.items()
            if (lacking := lacking_protection(url))
        )
        typed = (key for key, url in urls.items() if masked(url) != url and self.origins.get(key) == "--set")
        seen = (_SEEN.format(key=key, variable=f"STAGELINE_{key.replace('.', '__').upper()}") for key in typed)
        return (*exposed, *bare, *seen, *loose_stage_memory(self))

    def at(self, broker: str) -> "Plan":
        """Return the plan with another address of the broker."""
        return self.model_copy(update={"broker": self.broker.model_copy(update={"url": broker})})

    def resolved(self, stages: int) -> "Plan":
        """Return the plan for a model that turned out to have `stages` stages.

        If the plan names no workers, each stage gets one.

        Raises:
            PlanRefused: The plan asks for another number of stages, or workers and schedule do not fit the number.
        """
        if self.model.stages not in (None, stages):
            raise PlanRefused([self._error("model.stages", f"the model has {stages} stages")])
        plan = self.with_stages(stages)
        plan.demand_none(problems(plan))
        return plan

    def demand_none(self, found: Iterable[PlanError]) -> None:
        """Raise `PlanRefused` if there are errors in `found`, each with the value and the place of its key."""
        if wrong := [self._error(problem.key, problem.told) for problem in found]:
            raise PlanRefused(wrong)

    def make_schedule(self, *, first_trainable: int = 0) -> Schedule:
        """Return the schedule that the run begins with, for a plan whose workers are named.

        Args:
            first_trainable: Number of the first stage that trains.

        Raises:
            ScheduleRefused: The schedule cannot run on the plan's workers.
        """
        choice = self.schedule
        made = make_schedule(
            choice.begins_with,
            self.placement,
            choice.in_step,
            mode=choice.mode,
            window=choice.window,
            times=choice.times,
            rows=choice.rows,
            first_trainable=first_trainable,
            shares=self.shares,
        )
        return replace(made, name=choice.name) if choice.is_function else made

    def with_cut(self, cut: Sequence[int]) -> "Plan":
        """Return the plan, cut before the layers with the numbers `cut` into as many stages as the plan has."""
        model = self.model.model_copy(update={"cut": tuple(cut)})
        return self.model_copy(update={"model": model, "origins": {**self.origins, "model.cut": "--set"}})

    def with_memory(self, chosen: Mapping[str, object]) -> "Plan":
        """Return the plan with the values in `chosen`, by dotted key.

        Args:
            chosen: Values of stage.N.recompute, stage.N.offload and memory.tight.
        """
        if not chosen:
            return self
        stages, memory = dict(self.stage or {}), self.memory
        for key, value in chosen.items():
            *table, name = key.split(".")
            given = {name: tuple(value) if isinstance(value, list | tuple) else value}
            if table == ["memory"]:
                memory = (memory or MemoryPlan()).model_copy(update=given)
            else:
                stages[table[1]] = stages.get(table[1], StagePlan()).model_copy(update=given)
        origins = {**self.origins, **dict.fromkeys(chosen, "--set")}
        return self.model_copy(update={"stage": stages or None, "memory": memory, "origins": origins})

    def demand_memory(self) -> None:
        """Raise `PlanRefused` if what stages and workers do to keep to a limit has yet to be chosen.

        A process that computes only some of the stages cannot choose: it does not try all stages.
        """
        if self.chooses_memory:
            raise PlanRefused([self._error(key, _CHOSEN) for key in self.limit_keys])

    def demand_cut(self) -> None:
        """Raise `PlanRefused` if where the model is cut has yet to be measured.

        Two processes that each measured it would not agree.
        """
        if self.measures_cut:
            key = "balance" if self.model.balance == "time" else "stage_memory"
            raise PlanRefused([self._error(f"model.{key}", _MEASURED)])

    def refused(self, key: str, reason: Reason) -> PlanRefused:
        """Return the error that refuses the value of `key` for a `reason` that the plan alone does not tell."""
        return PlanRefused([self._error(key, reason)])

    def as_mapping(self) -> dict[str, object]:
        """Return the plan as nested tables of JSON's own types, as `from_mapping` takes them, without values of None.

        The result may be shown and sent: its addresses are without their passwords.
        """
        tables = self.model_dump(mode="json", exclude_none=True, exclude={"file", "origins", "places", "workers"})
        if not self.recovery.snapshot_every and "restarts" not in self.recovery.model_fields_set:
            del tables["recovery"]["restarts"]  # given, it would be refused
        if self.workers:
            tables["workers"] = {
                str(index): each.model_dump(mode="json", exclude_none=True) for index, each in enumerate(self.workers)
            }
        return tables

    def digest(self) -> str:
        """Return the SHA-256 (hex) of all settings that decide the computation and which worker does which part of it.

        Names, folders, paths, addresses and settings of reports are left out: two machines may differ in them.
        """
        return sha256(canonical(counted(self.as_mapping())).encode()).hexdigest()

    def _error(self, key: str, reason: Reason) -> PlanError:
        value = flat(self.as_mapping()).get(key)
        return PlanError(key, reason, self._place(key), "" if value is None else shown(value))

    def _place(self, key: str) -> str:
        """Return the place that set `key` or the innermost table around it; the plan file if neither is known."""
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return self.places[key] if key else str(self.file or "")


def _bare(lacking: Sequence[str], what: str) -> str:
    who = " or ".join(_WHO[each] for each in lacking)
    return _BARE.format(lacking=" and without ".join(lacking), who=who, what=what)


PREFIX = "STAGELINE_"
_TABLES = [name for name in TABLES if name not in ("stage", "workers", "parties")]  # these have a number or a name
_SHORT: dict[Key, Key] = {("memory",): ("memory", "limit")}  # the key that is meant if a table is written as one value
# Two keys for one thing: a higher origin that sets one overrules a lower origin that set the other.
_RIVALS: dict[Key, Key] = {
    ("run", "steps"): ("run", "epochs"),
    ("run", "epochs"): ("run", "steps"),
    ("data", "source"): ("data", "dataset"),
    ("data", "dataset"): ("data", "source"),
    ("model", "cut"): ("model", "stages"),
    ("model", "stages"): ("model", "cut"),
    ("schedule", "file"): ("schedule", "rows"),
    ("schedule", "rows"): ("schedule", "file"),
}


@dataclass(frozen=True, slots=True)
class GivenValue:
    """The value that one source gives to one key.

    Attributes:
        key: The key.
        value: The value as given.
        origin: The kind of source that gave it.
        where: The place that gave it; "" if there is none.
        text: The value as typed; None if it came as TOML.
    """

    key: Key
    value: object
    origin: Origin
    where: str = ""
    text: str | None = None


def from_environment(environment: Mapping[str, str]) -> Iterator[GivenValue]:
    """Yield the settings among environment variables, sorted by name: STAGELINE_SECTION__KEY sets section.key.

    Names of keys are taken in lower case.
    """
    for name, text in sorted(environment.items()):
        key = tuple(name.removeprefix(PREFIX).lower().split("__"))
        if name.startswith(PREFIX) and len(key) > 1:
            yield GivenValue(key, _toml(text), "environment", name, text)


def almost_named(environment: Mapping[str, str]) -> Iterator[PlanError]:
    """Yield an error for each variable that names a key with one underscore in place of two: it would set nothing."""
    meant = {_joined(name, key, "_"): (name, key) for name in _TABLES for key in section(name).model_fields}
    for name in sorted(meant.keys() & environment.keys()):
        yield PlanError(dotted(meant[name]), f"expected two underscores: {_joined(*meant[name], '__')}", name)


def _joined(table: str, key: str, between: str) -> str:
    return f"{PREFIX}{table}{between}{key}".upper()


def from_set(argument: str) -> GivenValue | PlanError:
    """Return the setting that `--set section.key=value` makes, or the error of a malformed `argument`."""
    name, equals, text = argument.partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if not equals or not all(key):
        return PlanError(masked(argument), "write section.key=value, such as run.steps=20", "--set")
    value = _toml(text.strip())
    return GivenValue(long_key(key, value), value, "--set", "--set", text.strip())


def long_key(key: Key, value: object) -> Key:
    """Return the key that `key` stands for, if a table is written as one value: `memory = "2GiB"` sets memory.limit."""
    return key if isinstance(value, Mapping) else _SHORT.get(key, key)


def merged(default: GivenValue, written: Sequence[GivenValue], typed: Iterable[GivenValue]) -> dict[Key, GivenValue]:
    """Return the settings that hold, by key.

    Args:
        default: The default of the run's name.
        written: Settings of a file; none of them overrules another.
        typed: Settings of the environment and of `--set`, in order; each overrules those before it and those in
            `written`.
    """
    held = {} if any(overrules(each, default) for each in written) else {default.key: default}
    held |= {setting.key: setting for setting in written}
    for setting in typed:
        held = {key: earlier for key, earlier in held.items() if not overrules(setting, earlier)}
        held[setting.key] = setting
    return held


def overrules(later: GivenValue, earlier: GivenValue) -> bool:
    """Return True if `later` replaces `earlier`.

    A setting replaces another of the same key, of a table around it or of a key in it. A setting of another origin also
    replaces its rival, a second key for one thing, such as run.steps and run.epochs.
    """
    shared = min(len(later.key), len(earlier.key))
    rivals = _RIVALS.get(later.key) == earlier.key and later.origin != earlier.origin
    return rivals or later.key[:shared] == earlier.key[:shared]


def _toml(text: str) -> object:
    """Return the value that `text` writes in TOML, or `text` itself if it writes none: text needs no quotes."""
    try:
        tables = tables_in(f"value = {text}")
    except FileUnreadable:
        return text
    return tables["value"] if len(tables) == 1 else text
