"""What was chosen for a limit of memory, for people."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .output import share, show

if TYPE_CHECKING:  # slow to import
    from stageline.workers.extras.preflight.trial_result import StageMemory, WorkerEstimate


def chosen_lines(stages: Sequence["StageMemory"]) -> Iterator[str]:
    """One for each stage that does something; one if none does."""
    for each in stages:
        if each.recompute != "nothing" or each.offload:
            yield f"for its limit of memory, stage {each.stage} {_does(each)}; it takes {share(each.share)} longer"
    if stages and all(each.recompute == "nothing" and not each.offload for each in stages):
        yield "all stages fit their limit of memory as they are"


def tight_lines(stages: Sequence["StageMemory"], workers: Sequence["WorkerEstimate"]) -> Iterator[str]:
    """One for each worker whose limit is tight. Where what `stages` do was chosen, another limit may choose otherwise:
    only if they do nothing, it is known from which limit on it is not tight."""
    known = not any(each.recompute != "nothing" or each.offload for each in stages)
    for each in workers:
        if each.tight:
            enough = f'. With "{-(-(each.ample or 0) // 2**20)}MiB" it would do neither' if known else ""
            yield (
                f"worker {each.worker}: its limit of memory is tight, so it gives back what it frees and waits until "
                f"its snapshots are written, which takes time{enough}"
            )


def show_chosen(stages: Sequence["StageMemory"]) -> None:
    """A table, if something was chosen."""
    if stages:
        rows = [
            (each.stage, each.recompute, ", ".join(each.offload) or "nothing", share(each.share)) for each in stages
        ]
        show("chosen for the limit of memory", ("stage", "recompute", "offload", "takes longer by about"), rows)


def _does(stage: "StageMemory") -> str:
    recomputes = {"nothing": "", "stage": "recomputes as a whole", "layers": "recomputes layer by layer"}
    first = recomputes.get(stage.recompute, f"recomputes {stage.recompute}")
    second = f"offloads {', '.join(stage.offload)}" if stage.offload else ""
    return " and ".join(part for part in (first, second) if part)
