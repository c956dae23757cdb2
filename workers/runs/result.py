"""How a run ended: its outcome on this machine, and the result of a finished run, which is written to its folder."""

from typing import Any, Literal

import msgspec

Facts = dict[str, Any]  # the broker's answer to the query `status`: schema status/1


class LaunchOutcome(msgspec.Struct, frozen=True, tag=True):
    """The end of a run on this machine: exit code, the reason in words, and the broker's last status of the run."""

    code: int
    reason: str
    facts: Facts


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Schema train/1. `loss` is the last step's, None if it had no rows; `losses` are by step, counted from 0. A metric
    that is no finite number is a text, since JSON has no such number; `float` reads it.

    `evaluations` has an entry for each round of evaluation, in order: after which `step`, over how many `rows`, the
    mean `loss` and `metrics`; `metrics` are those of the last one. `best` is the best of them, where they are compared.
    `stopped_early`: why the run has ended before its last step, which `steps` then is; None if it has not.
    `microbatches` are those of one step. `gradient_norm` is that of the last step, where gradients are clipped.
    `seconds` is from the start of the processes to the end of the run.
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
    gradient_norm: float | None = None
    evaluations: list[Facts] = []
    best: Facts | None = None
    stopped_early: str | None = None


def result_of(run: str, microbatches: int, facts: Facts, seconds: float) -> Result:
    """The result of a run from the broker's last status of it."""
    last, norm = facts["last_loss"], facts.get("gradient_norm")
    return Result(
        run=run,
        steps=facts["training_steps"],
        microbatches=microbatches,
        loss=last and last["loss"],
        losses=facts["losses"],
        metrics=facts["metrics"],
        weights_sha256=facts["weights_sha256"],
        seconds=round(seconds, 3),
        restarts=int(facts.get("restarts") or 0),
        gradient_norm=norm and norm["norm"],
        evaluations=facts.get("evaluations", []),
        best=facts.get("best"),
        stopped_early=facts.get("stopped_early"),
    )
