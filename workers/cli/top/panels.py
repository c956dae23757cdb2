"""Panels of `stageline top` as text: what was seen of a run, in as many columns as there are.

run digits-...: running   step 12 of 460            head
worker  0  ████████████░░░░░░▓▓▒  71 %              a bar of what each worker does
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from textwrap import wrap
from time import time

from rich.text import Text

from stageline.pipeline.printable import printable_line
from stageline.workers.cli import options
from stageline.workers.cli.output import counted, duration, share, size
from stageline.workers.cli.tables import answers
from stageline.workers.cli.tables.answers import history
from stageline.workers.cli.tables.queues import queue_lines, queue_table
from stageline.workers.extras.drawn_steps import DrawnStep, draw_text
from stageline.workers.runs.folder import Facts

from .facts import Glance, PaceCourse, Question, bars

_SPARKS = "▁▂▃▄▅▆▇█"
_ASCII_SPARKS = "_.-=*#"
PARTS = {  # of a worker's bar: its sign, its sign in ASCII, its colour
    "compute": ("█", "#", "green"),
    "wait": ("░", ".", "bright_black"),
    "data": ("▓", "d", "yellow"),
    "disk": ("▒", "s", "red"),
}
_TROUBLE, _DIM, _BOLD = "bold red", "bright_black", "bold"
_STEPS = 10  # newest steps that a bar is the mean of
_BAR = "compute wait data disk"
_NARROW_BAR, _WIDE_BAR = len(_BAR), 40  # columns
_FIRST = ("worker", "stages", "is", _BAR, "busy", "memory")  # columns of workers that are always shown
_LEAST_SPARKS, _MOST_SPARKS = 8, 60  # columns
_WIDE = 110  # columns from which on a table has all of its columns


@dataclass(frozen=True, slots=True)
class PanelTable:
    """Rows of a panel, each with what opens when it is chosen."""

    columns: Sequence[str]
    rows: Sequence[tuple[Question, Sequence[Text]]] = ()
    note: str = ""


@dataclass(slots=True)
class RunPanels:
    """Panels of one run, made from looks at it; the pace, and the bars of the newest steps, outlast a look."""

    width: int = 80
    seen: Glance | None = None
    pace: PaceCourse = field(default_factory=PaceCourse)
    steps: dict[int, Facts] = field(default_factory=dict)

    def note(self, seen: Glance) -> None:
        """Take a look; of one that had no answer, only the trouble."""
        before = self.seen
        if not seen.answers and before is not None:
            seen = Glance(seen.at, before.answers, before.refused, seen.trouble, seen.over, before.close)
        elif seen.answers:
            status = seen.answers["status"]
            usual = (status.get("pace") or {}).get("last_minute")
            self.pace.note(seen.at, int(status["finished_floor"]), usual)
            self.steps |= {each["step"]: each for each in _timetable(seen).get("steps", ())}
            self.steps = {step: self.steps[step] for step in sorted(self.steps)[-_STEPS:]}
        self.seen = seen

    @property
    def status(self) -> Facts:
        """Newest status; empty without any."""
        return {} if self.seen is None else self.seen.answers.get("status", {})

    def head(self) -> Text:
        """Return the lines about the run as a whole."""
        if self.seen is None or not self.status:
            trouble = "" if self.seen is None else self.seen.trouble
            return Text(trouble or "asking the broker ...", style=_TROUBLE if trouble else "")
        lines = [self._title(), self._speed(), self._cause()]
        for line in lines:
            line.truncate(self.width - 2, overflow="ellipsis")
        if self.seen.trouble:
            age = self.status.get("as_of")
            since = "" if age is None else f". Shown: the run's records of {datetime.fromtimestamp(age):%H:%M:%S}"
            lines.append(Text("\n".join(wrap(f"{_line(self.seen.trouble)}{since}", self.width - 2)), style=_TROUBLE))
        elif self.seen.over:
            lines.append(Text("the run is over: this is how it ended; q quits", style=_BOLD))
        return Text("\n").join(lines)

    def _title(self) -> Text:
        facts = self.status
        total, steps = facts["training_steps"], facts["finished_floor"]
        text = Text(f"run {facts['run']}", style=_BOLD)
        text.append(f": {facts.get('state', facts['phase'])}", style="")
        text.append(f"   step {steps}" if total is None else f"   {min(steps, total)} of {total} steps", style="")
        loss = facts["finished_loss"] and facts["finished_loss"]["loss"]
        text.append("" if loss is None else f"   loss {loss:.4g}", style="")
        lost = [row["index"] for row in facts["workers"] if row["standing"] == "lost"]
        if lost:
            text.append(f"   lost: {', '.join(map(str, lost))}", style=_TROUBLE)
        return text

    def _speed(self) -> Text:
        found = self.status.get("pace") or {}
        now, best, left = (found.get(key) for key in ("last_minute", "best", "left"))
        text = Text("- steps/s" if now is None else f"{now:.3g} steps/s")
        text.append("" if best is None or self.width < _WIDE else f" (best {best:.3g})", style=_DIM)
        bubble, after = found.get("bubble") or {}, Text()
        if bubble.get("measured") is not None:
            planned = "" if bubble.get("planned") is None else f" (planned {share(bubble['planned'])})"
            after.append(f"bubble {share(bubble['measured'])}{planned}  ")
        after.append("" if left is None else f"{duration(left)} left")
        room = min(_MOST_SPARKS, max(_LEAST_SPARKS, self.width - len(text) - len(after) - 5))
        return text.append(f" {sparkline(list(self.pace.rates), room)}  ", style="green").append(after)

    def _cause(self) -> Text:
        why = {} if self.seen is None else self.seen.answers.get("why", {})
        found = (why.get("slow") or {}).get("findings") or []
        if found:
            return Text(_line(f"limited by {found[0]['cause']}: {found[0]['text']}"), style="yellow")
        return Text(_line((why.get("slow") or why).get("text", "") or "what limits the run is not known yet"))

    def workers(self) -> PanelTable:
        """Return a row for each worker, with a bar of what it did in the newest steps."""
        wide, done = self.width >= _WIDE, bars(list(self.steps.values()))
        names = [*_FIRST, "heard", "process", "now"] if wide else [*_FIRST, "now"]
        rows = []
        for row in self.status.get("workers", ()):
            cells = {name: Text(text) for name, text in _worker_cells(row).items()}
            bar = done.get(row["index"], {})
            cells[_BAR] = stacked(bar, _WIDE_BAR if wide else _NARROW_BAR)
            cells["busy"] = Text(share(bar["compute"] / total) if (total := sum(bar.values())) else "-")
            cells["is"].stylize("" if row["standing"] in ("present", "finished") else _TROUBLE)
            labels = _labels(row)
            rows.append((Question("why", {"stage": labels[0]} if labels else {}), [cells[name] for name in names]))
        used = sum(max([len(name), *(len(cells[at]) for _, cells in rows)]) + 2 for at, name in enumerate(names[:-1]))
        for _, texts in rows:
            texts[-1].truncate(max(len("now"), self.width - used - 4), overflow="ellipsis")
        return PanelTable(names, rows)

    def legend(self) -> Text:
        """Return what the signs of a bar mean."""
        text = Text(f"mean of {counted(len(self.steps), 'step')}: " if self.steps else "no step is finished yet: ")
        for name, (sign, plain, colour) in PARTS.items():
            text.append((plain if options.ascii_only() else sign) * 2, style=colour).append(f" {name}  ")
        return text

    def queues(self, width: int) -> PanelTable:
        """Return a row for each queue, in as many columns as fit into `width`."""
        found = {} if self.seen is None else self.seen.answers.get("queues", {})
        if not found.get("queues"):
            return PanelTable(["queue"], note=self._lacking("queues", "no worker has told of its queues yet"))
        table = queue_table(found["queues"], width)
        names = [Question("queue", {"name": row["queue"]}) for row in found["queues"]]
        texts = [[_cell(cell, flush) for cell, flush in zip(row, table.right, strict=True)] for row in table.rows]
        return PanelTable(table.columns, list(zip(names, texts, strict=True)))

    def microbatches(self) -> PanelTable:
        """Return a row for each microbatch at a stage that is begun and not done."""
        found = {} if self.seen is None else self.seen.answers.get("microbatches", {})
        columns = ["microbatch", "stage", "worker", "state", "for"]
        rows = []
        now = time() if self.seen is None else self.seen.at
        for each in found.get("microbatches", ()):
            question = Question("story", {"step": str(each["step"]), "microbatch": str(each["microbatch"])})
            since = "-" if each["since"] is None else duration(max(0.0, now - each["since"]))
            cells = (f"{each['step']}/{each['microbatch']}", each["stage"], str(each["worker"]), each["state"], since)
            rows.append((question, [Text(str(cell)) for cell in cells]))
        return PanelTable(columns, rows, self._lacking("microbatches", "no microbatch is under way"))

    def timetable(self, width: int) -> Text:
        """Return the newest step that is known whole, planned above measured."""
        steps = [] if self.seen is None else _timetable(self.seen).get("steps", ())
        if not steps:
            return Text(self._lacking("timetable", "no step is finished yet"))
        return Text(draw_text(DrawnStep.of(steps[-1]), width=width, ascii_only=options.ascii_only()))

    def _lacking(self, what: str, otherwise: str) -> str:
        return _line(self.seen.refused.get(what, otherwise)) if self.seen is not None else otherwise

    def closely(self, question: Question, width: int) -> Text:
        """Return what is known of the worker, queue or microbatch that is looked at closely."""
        if self.seen is None or self.seen.close is None or self.seen.close[0] != question:
            return Text("asking the broker ...")
        answer = self.seen.close[1]
        if isinstance(answer, str):
            return Text(_line(answer), style=_TROUBLE)
        return Text("\n".join(_CLOSE[question.what](answer)))

    def worker(self, index: int, question: Question, width: int) -> Text:
        """Return what is known of a worker: its process, its bar, what it waited for, and why."""
        row = next((each for each in self.status.get("workers", ()) if each["index"] == index), None)
        if row is None:
            return Text(f"worker {index} is not known")
        lines = Text("\n".join(_worker_lines(row)) + "\n\n")
        bar = bars(list(self.steps.values())).get(index, {})
        lines.append(stacked(bar, min(width - 2, 60))).append("\n").append(self.legend()).append("\n")
        if total := sum(bar.values()):
            lines.append(", ".join(f"{name} {share(seconds / total)}" for name, seconds in bar.items()) + "\n")
        lines.append("\n").append(self.closely(question, width))
        return lines


def _timetable(seen: Glance) -> Facts:
    return dict(seen.answers.get("timetable", {}))


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the newest values as a line of `width` bars, the greatest as the highest, after blanks."""
    shown = list(values)[-width:]
    signs = _ASCII_SPARKS if options.ascii_only() else _SPARKS
    most = max(shown, default=0.0)
    bars = "".join(signs[round(each / most * (len(signs) - 1))] if most else signs[0] for each in shown)
    return bars.rjust(width)


def stacked(bar: Mapping[str, float], width: int) -> Text:
    """Return a worker's bar, `width` columns wide; blank if nothing is known of it.

    A part that is there at all has one column, at least.
    """
    total = sum(bar.values())
    if not total:
        return Text(" " * width)
    wanted = {name: bar[name] / total * width for name in PARTS if bar.get(name, 0.0) > total / 1000}
    columns = {name: max(1, int(exact)) for name, exact in wanted.items()}
    while (left := width - sum(columns.values())) != 0:
        by_need = sorted(columns, key=lambda name: wanted[name] - columns[name])
        columns[by_need[-1] if left > 0 else next(each for each in by_need if columns[each] > 1)] += left // abs(left)
    text = Text()
    for name, count in columns.items():
        sign, plain, colour = PARTS[name]
        text.append((plain if options.ascii_only() else sign) * count, style=colour)
    return text


def _line(text: str) -> str:
    return printable_line(text)


def _cell(text: str, flush: bool) -> Text:
    return Text(_line(text), justify="right" if flush else "left")


def _labels(row: Facts) -> list[str]:
    return [str(each) for each in (row["labels"] if "labels" in row else row["stages"])]


def _stages(row: Facts) -> str:
    return ", ".join(_labels(row)) or "-"


def _worker_cells(row: Facts) -> dict[str, str]:
    return {
        "worker": str(row["index"]),
        "stages": _stages(row),
        "is": row["standing"],
        "memory": size(row["memory"]) if row.get("memory") else "-",
        "heard": "-" if row.get("heard") is None else duration(row["heard"]),
        "process": _process(row),
        "now": _line(str(row.get("now", "-"))),
    }


def _process(row: Facts) -> str:
    return _line(f"{row['name']}, pid {row['pid']} on {row['host']}") if row.get("name") else "-"


def _worker_lines(row: Facts) -> Iterator[str]:
    yield f"worker {row['index']}, stages {_stages(row)}: {row['standing']}"
    if not row.get("name"):
        return
    yield f"process   {_process(row)}, generation {row['generation']}"
    yield f"reported  {duration(row['heard'])} ago"
    yield f"now       {_line(str(row['now']))}"
    if row.get("memory"):
        yield f"memory    {size(row['memory'])}, of which {size(row['retained_bytes'])} are retained messages"
    if row.get("clock") and abs(row["clock"][0]) > row["clock"][1]:
        yield f"clock     the broker's is {row['clock'][0]:+.3f} s ahead, give or take {row['clock'][1]:.3f} s"
    yield from (f"trouble   {_line(row[each])}" for each in ("trouble", "fault") if row.get(each))


def _why_lines(facts: Facts) -> Iterator[str]:
    yield _line(facts["text"])
    yield f"what to do: {_line(facts['action'])}"
    yield from map(_line, answers.limits(facts))


def _story_lines(facts: Facts) -> Iterator[str]:
    title, _, rows = history(facts)
    yield title
    for stage, worker, attempt, state, by, actions in rows:
        yield ""
        whose = "" if by == "-" else f", by {by}"
        yield _line(f"stage {stage}, worker {worker}, attempt {attempt}: {state}{whose}")
        yield from (f"  {_line(each)}" for each in str(actions).split("; "))


_CLOSE = {"why": _why_lines, "queue": queue_lines, "story": _story_lines}
