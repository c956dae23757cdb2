"""Traits of a plan: what it may ask for, by which keys, and for which stages.

`refusals.py` names pairs of traits that a plan cannot have together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stageline.pipeline.schedule import DELAYED, LISTED
from stageline.pipeline.schedule.replicas import NAMES as REPLICATED

from .errors import Setting, say
from .keys.models import SCRIPT_BATCHES, PlanTables
from .keys.stages import AUTO, StagePlan

Stages = frozenset[int] | None  # the stages that a key is about; None is all of them
ALL: Stages = None
Asked = Mapping[str, Stages]  # stages by dotted key


@dataclass(frozen=True, slots=True)
class Trait:
    """A property that a plan may ask for.

    Attributes:
        name: The trait's name in docs.
        reads: The keys that `asked` reads.
        asked: Returns the dotted keys by which a plan asks for the trait, each with its stages; none if it does not.
    """

    name: str
    reads: tuple[str, ...]
    asked: Callable[[PlanTables], Asked]


def setting_of(plan: PlanTables, key: str) -> Setting:
    """Return the dotted `key` with its value in `plan`, or without a value if that is a table or is not set."""
    value = _value(plan, key)
    return Setting(key, value if isinstance(value, str | int | float | tuple) else None)


def _value(plan: PlanTables, key: str) -> object:
    """Return the value of a dotted key; None where its table is not there."""
    found: object = plan
    for name in key.split("."):
        match found:
            case Mapping():
                found = found.get(name)
            case tuple():
                found = found[int(name)]
            case _:
                found = getattr(found, name, None)
    return found


def _is(key: str, *values: object, name: str = "") -> Trait:
    """Return the trait of plans in which `key` has one of `values`.

    The trait is called `name`, or by the key with the first value.
    """
    shown = name or say((Setting(key, values[0]),))
    return Trait(shown, (key,), lambda plan: {key: ALL} if _value(plan, key) in values else {})


def given(*keys: str, name: str = "") -> Trait:
    """Return the trait of plans that set one of `keys` to something other than false."""

    def asked(plan: PlanTables) -> Asked:
        return {key: ALL for key in keys if _value(plan, key) not in (None, False)}

    return Trait(name or keys[0], keys, asked)


def _of_stages(name: str, *keys: str, has: Callable[[StagePlan], str]) -> Trait:
    """Return the trait of plans with a table [stage.N] of which `has` names a key; "" stands for none."""

    def asked(plan: PlanTables) -> Asked:
        tables = {number: has(table) for number, table in (plan.stage or {}).items()}
        return {f"stage.{number}.{key}": frozenset({int(number)}) for number, key in tables.items() if key}

    return Trait(name, ("stage", *keys), asked)


def _pipedream(plan: PlanTables) -> Asked:
    choice = plan.schedule
    return {"schedule.mode": ALL} if choice.mode == "async" and choice.name != DELAYED else {}


def _with_a_flush(plan: PlanTables) -> Asked:
    return {} if plan.schedule.name in ("1f1b", DELAYED, AUTO) else {"schedule.name": ALL}


def _not_replicated(plan: PlanTables) -> Asked:
    return {} if plan.schedule.name in REPLICATED else {"schedule.name": ALL}


def _halving(plan: PlanTables) -> Asked:
    halves = plan.schedule.name in HALVING or any({"I", "W"} & {*row} for row in plan.schedule.rows or ())
    return {"schedule.name": ALL} if halves else {}


def _recomputed(plan: PlanTables) -> Asked:
    own = {int(number): table.recompute for number, table in (plan.stage or {}).items() if table.recompute is not None}
    found = {f"stage.{stage}.recompute": frozenset({stage}) for stage, wanted in own.items() if wanted != "nothing"}
    others = _others(plan, own)
    given = plan.memory is not None and plan.memory.recompute is not None and others != frozenset()
    return ({"memory.recompute": others} if given else {}) | found


def _others(plan: PlanTables, own: Mapping[int, object]) -> Stages:
    """Return the stages for which a key for all stages counts: those without a value in `own`."""
    return ALL if plan.model.stages is None else frozenset(range(plan.model.stages)) - own.keys()


def _offloaded(plan: PlanTables, part: str = "") -> Asked:
    own = {int(number): table.offload for number, table in (plan.stage or {}).items() if table.offload is not None}
    stages: dict[str, Stages] = {f"stage.{stage}.offload": frozenset({stage}) for stage in own}
    stages["memory.offload"] = _others(plan, own)
    return {key: stages[key] for key, parts in plan.offloads.items() if not part or part in parts}


def _limited(plan: PlanTables) -> Asked:
    stages = {f"workers.{index}.memory": frozenset(each.stages) for index, each in enumerate(plan.workers)}
    rest = frozenset[int]().union(*(stages[key] for key in stages.keys() - plan.limits.keys()))
    return {key: stages.get(key, rest if plan.workers else ALL) for key in plan.limits}


def _not_on_cpu(plan: PlanTables) -> Asked:
    workers = enumerate(plan.workers)
    return {f"workers.{index}.device": frozenset(each.stages) for index, each in workers if each.device != "cpu"}


def _staying(plan: PlanTables) -> Asked:
    last = {(plan.model.stages or 1) - 1} if plan.data.labels_stay else set()
    return {} if plan.data.stays is None else {"data.stays": frozenset({*plan.data.stays, *last})}


def _balanced(plan: PlanTables) -> Asked:
    wanted = {"model.balance": plan.model.balance != "parameters", "model.stage_memory": plan.model.stage_memory}
    return {key: ALL for key, given in wanted.items() if given}


def _without_recovery(plan: PlanTables) -> Asked:
    return {} if plan.recovery.on else {"recovery.restarts": ALL}


HALVING = ("zb-h1", "zb-v", "dualpipe-v")  # and those that are listed with I and W

SCRIPT = _is("data.source", SCRIPT_BATCHES, name="a script (`Line`)")
INLINE = Trait("inline workers of a script", (), lambda plan: {})  # no key of a plan says it
IN_MEMORY = Trait(
    'queues.url = "memory://"',
    ("queues.url",),
    lambda plan: {"queues.url": ALL} if plan.queues.in_one_process else {},
)
ASYNC = _is("schedule.mode", "async")
PIPEDREAM = Trait('schedule.mode = "async" without "2bw"', ("schedule.mode", "schedule.name"), _pipedream)
TWO_VERSIONS = _is("schedule.name", DELAYED)
CHOSEN = _is("schedule.name", AUTO)
FROM_FILE = _is("schedule.name", LISTED)
FLUSHED = Trait("schedules with a flush (all but 1f1b and 2bw)", ("schedule.name",), _with_a_flush)
UNREPLICATED = Trait(f"schedules other than {', '.join(REPLICATED)}", ("schedule.name",), _not_replicated)
HALVED = Trait("schedules that split backwards (zb-h1, zb-v, ...)", ("schedule.name", "schedule.rows"), _halving)
ACCUMULATION = Trait(
    "schedule.accumulate",
    ("schedule.accumulate",),
    lambda plan: {"schedule.accumulate": ALL} if plan.schedule.accumulate > 1 else {},
)
REPLICAS = _of_stages("stage.N.replicas", has=lambda table: "replicas" if table.replicas > 1 else "")
ELASTIC = _of_stages("stage.N.elastic", has=lambda table: "elastic" if table.elastic else "")
TENSOR = _of_stages("stage.N.tensor", has=lambda table: "tensor" if table.tensor > 1 else "")
SHARD = _of_stages("stage.N.shard", has=lambda table: "shard" if table.shard > 1 else "")
GROUPS = _of_stages(
    "stage.N.tensor, stage.N.shard",
    has=lambda table: "" if table.processes == 1 else "tensor" if table.tensor > 1 else "shard",
)
RECOMPUTED = Trait("memory.recompute, stage.N.recompute", ("memory", "stage"), _recomputed)
OFFLOAD = Trait("memory.offload, stage.N.offload", ("memory", "stage"), _offloaded)
OFFLOADED_WEIGHTS = Trait('offload with "weights"', ("memory", "stage"), lambda plan: _offloaded(plan, "weights"))
LIMIT = Trait("memory.limit, workers.N.memory", ("memory", "workers"), _limited)
NOT_ON_CPU = Trait('workers.N.device other than "cpu"', ("workers",), _not_on_cpu)
STAYING = Trait("data.stays", ("data.stays", "data.labels_stay"), _staying)
CLIPPING = given("optimizer.clip_norm")
AVERAGES = given("optimizer.ema_decay")
DROPPING = given("data.drop_last")
PREFIX_CACHE = given("model.prefix_cache")
TAPS = given("taps")
FEATURES = Trait("features", ("features",), lambda plan: {"features": ALL} if plan.features else {})
SKIPPING = _is("recovery.on_bad_microbatch", "skip")
RECORDED = _is("recovery.record", "all")
NO_RECOVERY = Trait(
    "recovery.restarts = 0 or snapshot_every = 0", ("recovery.restarts", "recovery.snapshot_every"), _without_recovery
)
ROUNDS = given("evaluation.every")
KEEPS_BEST = given("evaluation.keep_best")
BALANCED = Trait("model.balance, model.stage_memory", ("model.balance", "model.stage_memory"), _balanced)
