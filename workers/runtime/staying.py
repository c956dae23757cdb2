"""The demand of stages that stay at home on the plan's model: they share no parameters with stages elsewhere."""

from stageline.pipeline.plan import Plan
from stageline.pipeline.program import Program


def demand_staying(plan: Plan, program: Program) -> None:
    """Raise `PlanRefused` if a stage that stays at home shares parameters with one elsewhere.

    The parameters' values, and the gradients of both, would be sent.
    """
    home = program.schedule.owner(0)
    for queue in program.queues.values() if plan.data.stays else ():
        pair = [stage for stage in (queue.source, queue.target) if stage is not None]
        leaves_home = [stage for stage in pair if program.schedule.owner(stage) != home]
        if queue.flow == "total" and leaves_home and set(pair) & set(plan.data.stays or ()):
            raise plan.refused(
                "data.stays",
                f"stages {pair[0]} and {pair[1]} share parameters, and stage {leaves_home[0]} is at worker "
                f"{program.schedule.owner(leaves_home[0])}: their gradients would leave worker {home}. Give each "
                "stage parameters of its own, or cut so that one machine has all that share them",
            )
