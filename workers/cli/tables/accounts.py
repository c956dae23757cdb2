"""Accounts of runs as text: one alone, and two side by side, within 80 columns."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from textwrap import wrap

import msgspec

from stageline.broker.ledger.pauses import Pause
from stageline.workers.cli.output import aligned, counted, duration, size
from stageline.workers.runs.account import LossOfWorker, RunAccount
from stageline.workers.runs.comparison import Decides, KeyDifference, LossAt, LossComparison, RunDifference

from . import answers

_WIDTH = 80
_NAMES = 14  # columns before what is said of one run
_LEAST = 12  # characters of a value that stands in a column of its own
_NEWEST = 5  # losses of workers that are shown
_HEADINGS = {
    Decides.WEIGHTS: "the plans differ in what is computed:",
    Decides.LAYOUT: "the plans differ in who computes what:",
    Decides.NEITHER: "the plans differ in keys that change no weights:",
}


def account_lines(run: RunAccount) -> Iterator[str]:
    """Yield the lines about one run."""
    yield f"run {run.run}: {run.state}"
    rows = [
        *([] if run.reason is None else [("reason", run.reason)]),
        *([] if run.state == "finished" else [("what to do", run.action)]),
        ("plan", _plan(run)),
        *([] if run.began is None else [("began", f"{datetime.fromtimestamp(run.began):%F %T}")]),
        ("steps", _steps(run)),
        ("loss", _number(run.loss)),
        ("a step", _took(run)),
        *(("", line) for line in answers.pace({"pace": None if run.pace is None else msgspec.to_builtins(run.pace)})),
        ("restarts", str(run.restarts)),
        ("checkpoint", "-" if run.checkpoint is None else str(run.checkpoint)),
        ("snapshots", ", ".join(map(str, run.snapshots)) or "none in this folder"),
        ("weights", run.weights_sha256 or "-"),
        ("folder", f"{run.folder}, {size(run.bytes)}"),
    ]
    for name, text in rows:
        first, *more = wrap(text, _WIDTH - _NAMES, break_long_words=False, break_on_hyphens=False) or [""]
        yield f"  {name:{_NAMES - 2}}{first}"
        yield from (f"{'':{_NAMES}}{line}" for line in more)
    yield from _lost([("", each) for each in run.losses_of_workers])
    yield from _pauses(run.pauses)


def difference_lines(found: RunDifference) -> Iterator[str]:
    """Yield the lines about two runs."""
    a, b = found.a, found.b
    yield f"A  {a.folder}"
    yield f"B  {b.folder}"
    yield ""
    rows = [
        ("", "A", "B"),
        ("state", a.state, b.state),
        ("steps", _steps(a), _steps(b)),
        ("a step", _took(a), _took(b)),
        ("restarts", str(a.restarts), str(b.restarts)),
        ("checkpoint", *("-" if each.checkpoint is None else str(each.checkpoint) for each in (a, b))),
        ("loss", _number(a.loss), _number(b.loss)),
        ("weights", *((each.weights_sha256 or "-")[:16] for each in (a, b))),
        ("folder", size(a.bytes), size(b.bytes)),
    ]
    yield from aligned(rows, [False] * 3)
    yield from ("", _verdict(found))
    yield from _plans(found.plan)
    yield from _losses(found.losses)
    yield from _lost([(name, each) for name, run in (("A", a), ("B", b)) for each in run.losses_of_workers])
    yield from (f"{name} {run.state}: {run.reason}" for name, run in (("A", a), ("B", b)) if _ended_early(run))


def _ended_early(run: RunAccount) -> bool:
    return run.state != "finished" and run.reason is not None


def _plan(run: RunAccount) -> str:
    if run.plan is None:
        return "not yet known to work"
    plan = run.plan
    parts = (
        plan.schedule,
        f"{counted(plan.stages, 'stage')} on {counted(plan.workers, 'worker')}",
        "" if plan.batch_size is None else f"batches of {plan.batch_size} in {plan.microbatches or '?'} microbatches",
        plan.optimizer or "",
        plan.queues,
    )
    return ", ".join(part for part in parts if part)


def _steps(run: RunAccount) -> str:
    return f"{run.steps}{'' if run.script else ' of ?'}" if run.total is None else f"{run.steps} of {run.total}"


def _took(run: RunAccount) -> str:
    if not run.step_seconds or run.step_seconds <= 0:
        return "-"
    return f"{answers.duration_of(run.step_seconds)}, {1 / run.step_seconds:.3g} steps/s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _verdict(found: RunDifference) -> str:
    data = {True: "the first batches are equal", False: "the first batches differ", None: ""}[found.same_data]
    weights = {
        True: "the weights are equal, bit for bit",
        False: "the weights differ",
        None: "no weights to compare: both runs must have finished",
    }[found.same_weights]
    return "; ".join(part for part in (weights, data) if part)


def _plans(found: Sequence[KeyDifference] | None) -> Iterator[str]:
    if found is None:
        yield "a run has no plan yet that is known to work"
    elif not found:
        yield "the plans are equal"
    for decides, heading in _HEADINGS.items():
        rows = [each for each in found or () if each.decides == decides]
        if rows:
            yield heading
            yield from _keys(rows)


def _keys(found: Sequence[KeyDifference]) -> Iterator[str]:
    """Yield a row for each key; values that do not fit beside each other stand below it."""
    widest = max(len(each.key) for each in found)
    room = max(_LEAST, (_WIDTH - 2 - widest - 4) // 2)
    for each in found:
        a, b = _value(each.a), _value(each.b)
        if max(len(a), len(b)) <= room:
            yield f"  {each.key:{widest}}  {a:{room}}  {b}".rstrip()
        else:
            yield f"  {each.key}"
            yield from (f"    {name}  {_cut(text, _WIDTH - 7)}" for name, text in (("A", a), ("B", b)))


def _value(value: object) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _losses(found: LossComparison) -> Iterator[str]:
    compared = counted(found.compared, "common step")
    if not found.compared:
        yield "no step has a loss in both runs"
        return
    if found.first is None:
        yield f"the losses of all {compared} are equal, bit for bit"
        return
    yield f"the losses differ from step {found.first.step} on, of {compared}:"
    yield from aligned([("", "step", "A", "B", "A - B"), *map(_loss, found.rows)], [False, True, True, True, True])
    if found.largest is not None and found.largest.a is not None and found.largest.b is not None:
        yield f"  most in step {found.largest.step}, by {abs(found.largest.a - found.largest.b):.3g}"


def _loss(each: LossAt) -> tuple[str, ...]:
    apart = "-" if each.a is None or each.b is None else f"{each.a - each.b:.3g}"
    return ("", str(each.step), *("-" if value is None else f"{value:.9g}" for value in (each.a, each.b)), apart)


def _pauses(found: Sequence[Pause]) -> Iterator[str]:
    if not found:
        return
    shown = found[-_NEWEST:]
    yield f"pauses{'' if len(shown) == len(found) else f', the newest {len(shown)} of {len(found)}'}:"
    for each in shown:
        where = "" if each.step is None else f", before step {each.step}"
        why = f" ({each.reason})" if each.reason else ""
        took = None if each.until is None else max(0.0, each.until - each.since)
        end = "" if took is None else f"; ended by {each.ended} after {duration(took)}"
        yield f"  {datetime.fromtimestamp(each.since):%T} by {each.by}{where}{why}{end}"


def _lost(found: Sequence[tuple[str, LossOfWorker]]) -> Iterator[str]:
    if not found:
        return
    shown = sorted(found, key=lambda each: each[1].at)[-_NEWEST:]
    yield f"lost workers{'' if len(shown) == len(found) else f', the newest {len(shown)} of {len(found)}'}:"
    for run, each in shown:
        again = f"went on from step {each.step}, {counted(each.repeated, 'step')} again"
        yield f"  {run + ' ' if run else ''}{datetime.fromtimestamp(each.at):%T} {each.worker}: {each.why}; {again}"
