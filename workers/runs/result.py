"""The result of a finished run: one value, printed by `train --json` and written to the run's folder."""

from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:  # imports pydantic
    from stageline.pipeline.plan import Plan


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Schema train/1. `loss` is the last step's, None if it had no rows; `losses` are by step, counted from 0. A metric
    that is no finite number is a text, since JSON has no such number; `float` reads it.

    `microbatches` are those of one step. `seconds` is from the start of the processes to the end of the run.
    """

    schema: str = "train/1"
    run: str
    steps: int
    microbatches: int
    loss: float | None
    losses: dict[str, float | None]
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]]
    weights_sha256: str
    seconds: float
    restarts: int = 0


def result_of(plan: "Plan", run: str, facts: dict[str, Any], seconds: float) -> Result:
    """The result of a run from the broker's last status of it."""
    last = facts["last_loss"]
    return Result(
        run=run,
        steps=facts["training_steps"],
        microbatches=plan.schedule.microbatches,
        loss=last and last["loss"],
        losses=facts["losses"],
        metrics=facts["metrics"],
        weights_sha256=facts["weights_sha256"],
        seconds=round(seconds, 3),
        restarts=int(facts.get("restarts") or 0),
    )
