"""The times of a few steps, as workers would report them, of a schedule that is simulated."""

from stageline.pipeline.choice import StepActions
from stageline.pipeline.choice.measured import ActionTimes
from stageline.pipeline.program import Costs, Program, check_schedule
from stageline.pipeline.schedule import Schedule


def steps_of(checked: Schedule | Program, costs: Costs, *, clocks: float = 100.0) -> list[StepActions]:
    """Four steps; the clock of each stage is so many seconds ahead of that of the stage before."""
    timed = check_schedule(checked, costs, steps=5).timed
    return [
        {
            stage: [
                ActionTimes(each.action, each.start + clocks * stage, each.end + clocks * stage)
                for each in timed
                if each.step == step and each.action.stage == stage
            ]
            for stage in range(costs.stages)
        }
        for step in range(1, 5)
    ]
