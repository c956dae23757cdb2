"""The table of a sweep, and its place in docs/project/promises.md."""

from collections.abc import Sequence
from statistics import median

from faults.sweep import STAGES, TRANSPORTS, Trial
from faults.trial import TrialVerdict
from support.paths import DOCS

PAGE = DOCS / "project/promises.md"
BEGIN, END = "<!-- make faults: begin -->", "<!-- make faults: end -->"
COLUMNS = ("over", "stages", "trials", "kills that fired", "recovery, median", "longest", "actions done again", "most")


def write(verdicts: Sequence[TrialVerdict]) -> None:
    """Puts the table between the page's markers."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(verdicts)}\n{END}{after}", encoding="utf-8")


def table(verdicts: Sequence[TrialVerdict]) -> str:
    """A row for each transport and number of stages, as Markdown."""
    groups = {
        (transport, stages): [each for each in verdicts if each.trial.startswith(f"{transport}/{stages}/")]
        for transport in TRANSPORTS
        for stages in STAGES
    }
    rows = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1))]
    rows += [(transport, str(stages), *_figures(group)) for (transport, stages), group in groups.items() if group]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _figures(verdicts: Sequence[TrialVerdict]) -> tuple[str, ...]:
    """Of one group. The actions done again are those of a whole trial."""
    recoveries = [seconds for verdict in verdicts for seconds in verdict.recoveries] or [float("nan")]
    planned = sum(len(Trial.parse(verdict.trial).kills) for verdict in verdicts)
    fired, redone = sum(verdict.fired for verdict in verdicts), [verdict.redone for verdict in verdicts]
    times = (f"{seconds:.2f} s" for seconds in (median(recoveries), max(recoveries)))
    return (str(len(verdicts)), f"{fired} of {planned}", *times, f"{median(redone):g}", str(max(redone)))
