"""What `stageline plan --fit` shows: the stages on their machines, what was compared, and the plan's lines."""

from typing import TYPE_CHECKING

from .output import counted, say, show, size

if TYPE_CHECKING:  # slow to import
    from stageline.workers.extras.placement import HostFit


def show_fit(found: "HostFit") -> None:
    """Prints it on stdout."""
    rows = [
        (
            each.stage,
            each.host,
            each.layers[0] if len(each.layers) == 1 else f"{each.layers[0]} to {each.layers[-1]}",
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
