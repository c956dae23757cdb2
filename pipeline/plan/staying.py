"""Checks of `data.stays` and `data.labels_stay`: one worker reads rows and computes the stages that stay.

    stays = [0], labels_stay = true            worker 0, with the data: stages 0 and 2
                                               worker 1: stage 1

A plan decides only which worker reads and computes each stage. A trial of a microbatch finds a stage whose output is a
copy of its input; `stageline audit` measures how much an output tells all the same.
"""

from collections.abc import Iterator

from stageline.pipeline.program import Program

from .errors import PlanError
from .keys.models import PlanTables

_HAS_BOTH = "worker {worker} has the first stage and the last: its batches have targets; leave it out"


def staying(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error for each way in which the plan breaks the promises of `data.stays` and `data.labels_stay`."""
    if plan.scripted:
        return
    if plan.data.stays is None:
        if plan.data.labels_stay:
            yield PlanError("data.labels_stay", "it requires data.stays: set which stages stay, such as stays = [0]")
        elif plan.data.targets is not None and plan.model.stages is not None:
            yield from _unused_targets(plan, plan.model.stages - 1)
        return
    yield from _stages(plan, plan.data.stays)


def _unused_targets(plan: PlanTables, last: int) -> Iterator[PlanError]:
    reads = _owners(plan, last)
    if reads and not {*reads} - {*_owners(plan, 0)}:
        yield PlanError("data.targets", _HAS_BOTH.format(worker=reads[0]))


def _stages(plan: PlanTables, stays: tuple[int, ...]) -> Iterator[PlanError]:
    count = plan.model.stages
    if 0 not in stays:
        yield PlanError("data.stays", f"the rows enter at stage 0; use stays = {sorted({0, *stays})}")
    elif count is not None and max(stays) >= count:
        yield PlanError("data.stays", f"there is no stage {max(stays)}: the plan has stages 0 to {count - 1}")
    elif count is not None and plan.workers:
        yield from _placed(plan, stays, count - 1)


def _placed(plan: PlanTables, stays: tuple[int, ...], last: int) -> Iterator[PlanError]:
    owners = {stage: _owners(plan, stage) for stage in (*stays, last)}
    if not all(owners.values()):
        return  # refused as a placement
    home = owners[0][0]
    for stage in stays:
        if owners[stage] != [home]:
            yield PlanError(
                "data.stays",
                f"stage {stage} is at worker {owners[stage][0]}, and the rows are at worker {home}, which has stage 0; "
                f"give both to one worker: workers.{home}.stages = {_with(plan, home, stage)}",
            )
    away = [owner for owner in owners[last] if owner != home]
    if not away and plan.data.targets is not None:
        yield PlanError("data.targets", _HAS_BOTH.format(worker=home))
    elif away and plan.data.labels_stay:
        yield PlanError(
            "data.labels_stay",
            f"worker {away[0]} has the last stage, {last}, which computes the loss and reads the labels; give it "
            f"to worker {home}, which has stage 0: workers.{home}.stages = {_with(plan, home, last)}. "
            "With two stages, cut once more, so that the other worker has the stage between",
        )
    elif away and plan.data.targets is None:
        yield PlanError(
            "data.stays",
            f"worker {away[0]} has the last stage, {last}, and would open {plan.data.origin}, which gives the "
            'rows too; name what gives labels alone, data.targets = "data.py:labels", or use labels_stay = true with '
            f"the last stage at worker {home}",
        )


def _owners(plan: PlanTables, stage: int) -> list[int]:
    """Return the workers that have `stage`, or a replica of it."""
    return [index for index, worker in enumerate(plan.workers) if stage in worker.stages]


def _with(plan: PlanTables, worker: int, stage: int) -> list[int]:
    return sorted({*plan.workers[worker].stages, stage})


def sharing_abroad(plan: PlanTables, program: Program) -> str:
    """Return why a stage that stays at home shares no parameters with one elsewhere, "" if none does.

    The parameters' values, and the gradients of both, would be sent.
    """
    owner, home = program.schedule.owner, program.schedule.owner(0)
    stays = plan.data.stays or ()
    for queue in program.queues.values() if stays else ():
        pair = [stage for stage in (queue.source, queue.target) if stage is not None]
        abroad = [stage for stage in pair if owner(stage) != home]
        if queue.flow == "total" and abroad and set(pair) & set(stays):
            return (
                f"stages {pair[0]} and {pair[1]} share parameters, and stage {abroad[0]} is at worker "
                f"{owner(abroad[0])}: their gradients would leave worker {home}. Give each "
                "stage parameters of its own, or cut so that one machine has all that share them"
            )
    return ""
