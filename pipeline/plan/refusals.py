"""Pairs of features that a plan cannot have together: one table, with the reason of each.

    replicas      stage.1.replicas = 2       of stage 1     }  refused on the key of the first:
    groups        stage.1.shard = 2          of stage 1     }  "a stage with replicas cannot have several processes"

Two traits of a row are in conflict where their stages meet. A new feature adds its traits and its rows;
docs/reference/plan.md lists the rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from stageline.pipeline.schedule.replicas import NAMES as REPLICATED

from .errors import PlanError, Reason, ReasonPart, Setting, say
from .keys.models import PlanTables
from .traits import (
    ACCUMULATION,
    ALL,
    ASYNC,
    AVERAGES,
    BALANCED,
    CHOSEN,
    CLIPPING,
    DROPPING,
    ELASTIC,
    FEATURES,
    FLUSHED,
    FROM_FILE,
    GROUPS,
    HALVED,
    IN_MEMORY,
    INLINE,
    KEEPS_BEST,
    LIMIT,
    NO_RECOVERY,
    NOT_ON_CPU,
    OFFLOAD,
    OFFLOADED_WEIGHTS,
    PIPEDREAM,
    PREFIX_CACHE,
    RECOMPUTED,
    RECORDED,
    REPLICAS,
    ROUNDS,
    SCRIPT,
    SHARD,
    SKIPPING,
    STAYING,
    TAPS,
    TENSOR,
    TWO_VERSIONS,
    UNREPLICATED,
    Asked,
    Stages,
    Trait,
    given,
    setting_of,
)

BESIDE = Setting("...")  # in a reason: the other setting, as the plan has it


class Why(StrEnum):
    """The kind of a refusal's reason."""

    MATHEMATICAL = "mathematical"  # no result is defined for the two together
    PHYSICAL = "physical"  # beside the one, something is not there that the other needs
    NOT_BUILT = "not built"  # nothing but work is in the way


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row of the table of refused pairs: `trait` is refused beside `beside`.

    Attributes:
        trait: The trait whose keys get the error.
        beside: The other trait.
        why: The kind of the reason.
        reason: The reason and the way out, told of the keys that ask for `trait`. `BESIDE` stands for the other
            setting.
        anywhere: True if the two traits are in conflict even if they do not meet in a stage.
    """

    trait: Trait
    beside: Trait
    why: Why
    reason: Reason
    anywhere: bool = False

    def problems(self, plan: PlanTables, beside: Asked) -> Iterator[PlanError]:
        """Yield an error for each key that asks for the trait and meets a key of `beside`.

        Two keys meet if they are about one stage; all keys meet in a row that holds `anywhere`.

        Args:
            plan: The tables of the plan.
            beside: Keys that ask for the other trait, each with its stages.
        """
        for key, stages in self.trait.asked(plan).items():
            met = (other for other, others in beside.items() if self.anywhere or _meet(stages, others))
            if (other := next(met, None)) is not None:
                yield PlanError(key, self.reason_beside(setting_of(plan, other)))

    @property
    def text(self) -> str:
        """The reason for docs, without the values of one plan."""
        return say(self.reason_beside(Setting("the other")))

    def reason_beside(self, other: ReasonPart) -> Reason:
        """Return the reason with `other` in the place of `BESIDE`."""
        return tuple(other if part is BESIDE else part for part in self.reason)


def _row(why: Why, trait: Trait, beside: Trait, *reason: str | ReasonPart, anywhere: bool = False) -> Refusal:
    return Refusal(trait, beside, why, reason, anywhere)


mathematical, physical, not_built = (partial(_row, why) for why in Why)


def refused_pairs(plan: PlanTables, skipped: Callable[[str], bool] = lambda key: False) -> Iterator[PlanError]:
    """Yield an error for each refused pair of traits that `plan` has.

    Args:
        plan: The tables of the plan.
        skipped: Returns True for a key that must not be read; pairs that read such a key are left out.
    """
    for row in REFUSED:
        if not any(map(skipped, (*row.trait.reads, *row.beside.reads))):
            yield from row.problems(plan, row.beside.asked(plan))


def refused_inline(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error for each key of `plan` that a line with inline workers cannot have."""
    for row in REFUSED:
        if row.beside is INLINE:
            yield from row.problems(plan, {"": ALL})


def _meet(some: Stages, others: Stages) -> bool:
    return some is None or others is None or bool(some & others)


REFUSED: tuple[Refusal, ...] = (
    # A script hands its batches over, call by call: nothing of them is known before.
    mathematical(given("run.steps"), SCRIPT, "the script decides how long it trains; leave it out"),
    mathematical(given("run.epochs"), SCRIPT, "the script decides how long it trains; leave it out"),
    mathematical(given("evaluation"), SCRIPT, "a script evaluates when it calls line.evaluate; leave the table out"),
    mathematical(
        given("data.targets"), SCRIPT, "a script gives the targets itself; leave it out, or train with a plan"
    ),
    physical(
        PREFIX_CACHE,
        SCRIPT,
        "a script's batches do not say which samples they have; leave it out, or train with a plan",
    ),
    physical(RECORDED, SCRIPT, 'a replay cannot load the objects of a script; use record = "none"'),
    physical(BALANCED, SCRIPT, "a script has no batch to measure before the run; set ", Setting("model.cut")),
    physical(
        LIMIT,
        SCRIPT,
        "a script has no batch for a trial before the run; leave it out, and set ",
        Setting("memory.recompute"),
        " yourself",
    ),
    physical(
        given("data.stays"),
        SCRIPT,
        "a script sends the rows to its workers, and fetches the weights of all stages; leave it out, or train "
        "with a plan",
    ),
    physical(
        given("data.labels_stay"),
        SCRIPT,
        "a script sends the labels to its workers; leave it out, or train with a plan",
    ),
    not_built(PIPEDREAM, SCRIPT, 'a script trains batch by batch; use mode = "sync"'),
    not_built(TWO_VERSIONS, SCRIPT, "a script has no asynchronous mode; use another name, or train with a plan"),
    not_built(FROM_FILE, SCRIPT, "a script cannot use a schedule from a file; use another name, or train with a plan"),
    not_built(
        CHOSEN, SCRIPT, 'a script does not support "auto"; use another name, such as "1f1b", or train with a plan'
    ),
    not_built(ELASTIC, SCRIPT, "a script starts no process for a lost replica; leave it out, or train with a plan"),
    not_built(GROUPS, SCRIPT, "a script does not support several processes for a stage; train with a plan"),
    # Workers in the script's own thread have no folder of a run.
    physical(TAPS, INLINE, "an inline line has no folder to store them in; leave out workers, to compute in processes"),
    physical(OFFLOAD, INLINE, "inline workers have no files; leave out workers, or this setting"),
    physical(SKIPPING, INLINE, "inline workers have no files; leave out workers, or this setting"),
    # With queues in memory, one process runs all stages in turn and writes no checkpoint.
    physical(RECORDED, IN_MEMORY, BESIDE, ' does not support it; use record = "bad"'),
    physical(KEEPS_BEST, IN_MEMORY, "with ", BESIDE, " no checkpoints are written: use another url, or leave it out"),
    physical(LIMIT, IN_MEMORY, "with ", BESIDE, " all workers share one process; use another url, or leave it out"),
    physical(GROUPS, IN_MEMORY, "with ", BESIDE, " one process computes all stages; use another url"),
    physical(
        CHOSEN, IN_MEMORY, "with ", BESIDE, ' one process runs all stages, so no schedule is faster; use name = "1f1b"'
    ),
    not_built(OFFLOAD, IN_MEMORY, BESIDE, " does not support it; use another url, or leave it out"),
    # Asynchronous stages update after every microbatch or batch, each at a time of its own.
    mathematical(
        CLIPPING,
        ASYNC,
        'mode = "async" does not support it, since its stages never have the gradients of one step at once; leave '
        "it out, or use ",
        Setting("schedule.mode", "sync"),
    ),
    mathematical(
        ROUNDS,
        ASYNC,
        'mode = "async" does not support it, since its stages are never after the same step; leave it out to '
        "evaluate after the last step, or use ",
        Setting("schedule.mode", "sync"),
    ),
    mathematical(
        REPLICAS, ASYNC, "replicas update together, at the end of a step; use ", Setting("schedule.mode", "sync")
    ),
    mathematical(
        FLUSHED, PIPEDREAM, 'mode = "async" supports only name = "1f1b" and "2bw"; use one of them, or mode = "sync"'
    ),
    mathematical(ACCUMULATION, PIPEDREAM, 'mode = "async" updates after every microbatch; use accumulate = 1'),
    mathematical(
        ACCUMULATION,
        TWO_VERSIONS,
        'name = "2bw" updates after each batch; use accumulate = 1, and larger batches with more microbatches',
    ),
    not_built(CHOSEN, ASYNC, 'mode = "async" does not support "auto"; use name = "1f1b", or mode = "sync"'),
    not_built(
        GROUPS,
        ASYNC,
        "several processes for a stage keep one version of its weights; use ",
        Setting("schedule.mode", "sync"),
    ),
    not_built(
        OFFLOADED_WEIGHTS,
        TWO_VERSIONS,
        'name = "2bw" keeps both versions of the weights in memory; leave out "weights"',
    ),
    not_built(PREFIX_CACHE, TWO_VERSIONS, 'name = "2bw" does not support it; leave it out, or use name = "1f1b"'),
    # Replicas add up the gradients of their own microbatches before a stage's update.
    not_built(REPLICAS, UNREPLICATED, BESIDE, f" does not support replicas; use {', '.join(REPLICATED)}"),
    not_built(REPLICAS, CLIPPING, BESIDE, " does not support replicas; leave one of the two out"),
    not_built(REPLICAS, PREFIX_CACHE, BESIDE, " does not support replicas; leave one of the two out"),
    not_built(REPLICAS, TAPS, BESIDE, " does not support replicas; leave the table out"),
    not_built(REPLICAS, SKIPPING, BESIDE, ' does not support replicas; use "halt"'),
    # The processes of a group have parts of a stage's weights, or of its gradients and optimizer.
    not_built(SHARD, TENSOR, BESIDE, " is given too; keep one of the two"),
    not_built(GROUPS, REPLICAS, "a stage with replicas cannot have several processes; leave one of the two out"),
    not_built(GROUPS, AVERAGES, BESIDE, " does not support split weights; leave one of the two out"),
    not_built(GROUPS, RECOMPUTED, BESIDE, ": recompute does not support split layers; leave one of the two out"),
    not_built(
        GROUPS,
        OFFLOAD,
        BESIDE,
        ": offload does not support several processes for a stage; leave one of the two out",
        anywhere=True,
    ),
    not_built(GROUPS, CHOSEN, BESIDE, ' does not support several processes for a stage; use another, such as "1f1b"'),
    not_built(
        GROUPS,
        HALVED,
        BESIDE,
        " splits backwards in two, which several processes for a stage do not support; leave it out, or use ",
        Setting("schedule.name", "1f1b"),
    ),
    not_built(
        GROUPS, PREFIX_CACHE, BESIDE, " does not support several processes for a stage; leave one of the two out"
    ),
    not_built(GROUPS, FEATURES, BESIDE, " are not called in the other processes of a stage; leave one of the two out"),
    not_built(GROUPS, TAPS, BESIDE, " does not support several processes for a stage; leave the table out"),
    not_built(GROUPS, SKIPPING, BESIDE, ' does not support several processes for a stage; use "halt"'),
    not_built(GROUPS, RECORDED, BESIDE, ' does not support several processes for a stage; use "bad"'),
    # Each half of a backward would run a microbatch forward again.
    not_built(
        RECOMPUTED,
        HALVED,
        BESIDE,
        " splits backwards in two, and each half would recompute; leave it out, or use ",
        Setting("schedule.name", "1f1b"),
    ),
    # A limit is kept by estimates from a trial on the CPU, for the microbatches that one schedule has in flight.
    not_built(
        LIMIT,
        CHOSEN,
        BESIDE,
        " may change how many microbatches are in flight; name a schedule, or use schedule.memory alone",
    ),
    not_built(
        LIMIT,
        GROUPS,
        BESIDE,
        ": several processes compute the stage, whose memory is not estimated; leave the limit or the processes out",
        anywhere=True,
    ),
    not_built(
        LIMIT,
        NOT_ON_CPU,
        BESIDE,
        ", and a limit supports only the CPU; leave it out, or set workers.N.memory for the workers on the CPU",
    ),
    not_built(
        OFFLOAD,
        NOT_ON_CPU,
        BESIDE,
        ", and offload supports only the CPU; leave it out, or use ",
        Setting("memory.recompute", "stage"),
    ),
    not_built(
        CHOSEN,
        REPLICAS,
        'stages with replicas do not support "auto"; use another name, such as "1f1b", or leave replicas out',
    ),
    # Replays begin at snapshots; a best checkpoint and the part of a lost replica are made of them.
    physical(
        RECORDED,
        NO_RECOVERY,
        "a replay begins at a snapshot, and none are written; use recovery.restarts = 5 and snapshot_every = 20, "
        'or record = "bad"',
    ),
    physical(
        KEEPS_BEST,
        NO_RECOVERY,
        "no checkpoints are written: use recovery.restarts = 5 and snapshot_every = 20, or leave it out",
    ),
    physical(
        ELASTIC,
        NO_RECOVERY,
        "it requires recovery: set recovery.restarts and recovery.snapshot_every above 0, or leave it out",
    ),
    # Rows of the cache are those of the first epoch; what stays is where its data is.
    physical(
        PREFIX_CACHE,
        SKIPPING,
        "with ",
        BESIDE,
        ', samples that are left out in the first epoch would have no cached rows for later epochs; use "halt", or '
        "leave it out",
    ),
    physical(
        PREFIX_CACHE,
        DROPPING,
        "with ",
        BESIDE,
        ", the rows that the first epoch leaves out would have no cached rows for later epochs; use a data.batch_size "
        "that divides the rows, or leave it out",
    ),
    physical(
        PREFIX_CACHE,
        STAYING,
        "a worker that lost its cache draws the rows itself, on any machine; leave it out, or leave data.stays out",
    ),
    physical(REPLICAS, STAYING, "the stage stays at one worker (data.stays); leave the table out"),
)
