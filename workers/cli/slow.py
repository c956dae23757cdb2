"""The pace of a run as `why` and `status` tell it: what limits it, what to do, steps per second, the bubble."""

from collections.abc import Iterator

from stageline.workers.runs.folder import Facts

from .output import duration, share

_MOST_REMEDIES = 3  # of a finding that are shown


def limits(why: Facts) -> Iterator[str]:
    """Yield the lines about what limits a run, and what to do about it; none if too few steps are known."""
    if (slow := why.get("slow")) is None:
        return
    first, last = slow["steps"]
    old = f", as of {duration(why['age'])} ago" if why.get("age", 0.0) >= 1 else ""
    yield f"a step takes {duration_of(slow['seconds'])} (steps {first} to {last}{old})"
    if not slow["findings"]:
        yield slow["text"]
    for found in slow["findings"]:
        yield f"limited by {found['cause']}: {found['text']}"
        for remedy in found["remedies"][:_MOST_REMEDIES]:
            took = f"a step would take {duration_of(remedy['seconds'])}, {share(remedy['gain'])} less, by simulation"
            yield f"  to do: {remedy['do']} ({took})"


def lost(recovery: Facts | None) -> Iterator[str]:
    """Yield the lines about the time that a run lost to losses, restarts and stalls; none if it lost none."""
    if not recovery:
        return
    yield recovery["text"]
    for found in recovery["setbacks"]:
        yield f"  {found['text']}"
    for remedy in recovery["remedies"]:
        saved = "" if remedy["seconds"] is None else f" (that would have saved {duration_of(remedy['seconds'])})"
        yield f"  to do: {remedy['do']}{saved}"


def pace(facts: Facts) -> Iterator[str]:
    """Yield the lines about the steps per second, the time left and the bubble of a run that goes on."""
    found = facts.get("pace") or {}
    if found.get("last_minute"):
        best = "" if found["best"] is None else f", at best {found['best']:.3g}"
        left = "" if found["left"] is None else f", {duration(found['left'])} left"
        yield f"{found['last_minute']:.3g} steps/s in the last minute{best}{left}"
    bubble = found.get("bubble") or {}
    if bubble.get("measured") is not None:
        planned = "" if bubble["planned"] is None else f", {share(bubble['planned'])} planned"
        yield f"bubble {share(bubble['measured'])} measured{planned}"


def duration_of(seconds: float) -> str:
    """Return seconds as text, with three digits below one second: `310 ms`, `4.12 ms`."""
    return duration(seconds) if seconds >= 1 or seconds <= 0 else f"{seconds * 1000:.3g} ms"
