"""Loss and metrics of a run's model."""

from stageline.workers.extras.exchange.load import RunModel
from stageline.workers.script.arguments.arguments import Workers

from .forward_run import ForwardRun, Measured, Tell
from .held_out import Wanted, batches_of, loss_of, metrics_of, plan_with


def evaluate_run(model: RunModel, wanted: Wanted, workers: Workers, tell: Tell) -> tuple[str, Measured]:
    """What was evaluated on, in the plan's words, and what was measured. Raises what `ForwardRun`, `load_source` and
    `load_function` do."""
    plan = plan_with(model.plan, wanted)
    loss, metrics, batches = loss_of(plan), metrics_of(plan), batches_of(plan, wanted)
    with ForwardRun(model, workers, loss=loss, metrics=metrics, tell=tell) as run:
        return plan.data.origin_held_out, run.evaluate(batches)
