"""What a plan with `data.stays` promises of stages that share parameters: only the model can break it."""

from stageline.pipeline.plan import Plan
from stageline.pipeline.schedule import Schedule


def demand_staying(plan: Plan, schedule: Schedule) -> None:
    """Raises `PlanRefused` if a stage that stays shares parameters with one elsewhere: their values, and the gradients
    of both, would be sent."""
    for pair in schedule.ties if plan.data.stays else ():
        leaves_home = [stage for stage in pair if schedule.owner(stage) != schedule.owner(0)]
        if leaves_home and set(pair) & set(plan.data.stays or ()):
            raise plan.refused(
                "data.stays",
                f"stages {pair[0]} and {pair[1]} share parameters, and stage {leaves_home[0]} is at worker "
                f"{schedule.owner(leaves_home[0])}: their gradients would leave worker {schedule.owner(0)}. Give each "
                "stage parameters of its own, or cut so that one machine has all that share them",
            )
