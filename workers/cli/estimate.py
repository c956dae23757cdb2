"""Shows what a plan comes to: its stages on machines (`stageline plan --fit`), and choices for limits of memory."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .output import counted, say, share, show, size, span

if TYPE_CHECKING:
    from stageline.workers.extras.fitting import HostFit
    from stageline.workers.extras.preflight.trial_result import StageMemory, WorkerEstimate


def show_fit(found: "HostFit") -> None:
    """Prints it on stdout."""
    rows = [
        (
            each.stage,
            each.host,
            span(each.layers),
            f"{1000 * each.seconds:.3g} ms",
            each.in_flight,
            f"{size(each.bytes)} of {size(each.memory)}",
            size(each.message) if each.stage + 1 < len(found.stages) else "",
            f"{1000 * each.carrying:.3g} ms" if each.carrying else "",
        )
        for each in found.stages
    ]
    heads = ("stage", "host", "layers", "microbatch", "in flight", "memory", "hands on", "on its way")
    show("stages", heads, rows)
    ways = [
        (way.stages, way.schedule, "no room" if way.seconds is None else f"{1 / way.seconds:.3g}") for way in found.ways
    ]
    show("compared", ("stages", "schedule", "steps/s"), ways)
    say(
        f"a step of {counted(found.microbatches, 'microbatch', 'microbatches')} takes {1000 * found.seconds:.3g} ms as "
        "simulated, if a backward takes as long as two forwards. In the plan:"
    )
    say("\n".join(_lines(found)))


def _lines(found: "HostFit") -> list[str]:
    """What to write into the plan's file."""
    cut = [f"cut = {list(found.cut)}"] if found.cut else ["stages = 1"]
    window = [] if found.window is None else [f"window = {list(found.window)}"]
    workers = [
        line
        for each in found.stages
        for line in ("", f"[workers.{each.stage}]  # {each.host}", f"stages = [{each.stage}]")
    ]
    return ["", "[model]", *cut, "", "[schedule]", f'name = "{found.schedule}"', *window, *workers]


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
