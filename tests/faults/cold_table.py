"""The tables of the cold trials, and their place in docs/project/promises.md."""

from collections.abc import Iterable, Sequence
from statistics import median

from faults.cold import TEMPLATE, TRANSPORTS, ColdTrial, Moment
from faults.cold_trial import ColdVerdict
from support.paths import DOCS

PAGE = DOCS / "project/promises.md"
BEGIN, END = "<!-- make faults, cold: begin -->", "<!-- make faults, cold: end -->"
MACHINES = {False: "quiet", True: "busy"}
Pair = tuple[ColdTrial, ColdVerdict]


def write(verdicts: Sequence[ColdVerdict]) -> None:
    """Puts the tables between the page's markers."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{tables(verdicts)}\n{END}{after}", encoding="utf-8")


def tables(verdicts: Sequence[ColdVerdict]) -> str:
    """By transport and machine; and by what is killed, and when."""
    pairs = [(ColdTrial.parse(verdict.trial), verdict) for verdict in verdicts]
    return f"{_by_transport(pairs)}\n\n{_by_moment(pairs)}"


def _by_transport(pairs: Sequence[Pair]) -> str:
    heads = ("over", "machine", "trials", "processes killed", "a worker computes again", "longest", "the next broker")
    groups = {
        (transport, machine): [pair for pair in pairs if (pair[0].transport, pair[0].busy) == (transport, busy)]
        for transport in TRANSPORTS
        for busy, machine in MACHINES.items()
    }
    rows = [(*names, *_counts(group), *_both(group)) for names, group in groups.items() if group]
    return _table((*heads, "longest"), rows)


def _by_moment(pairs: Sequence[Pair]) -> str:
    heads = ("killed", "when", "quiet, median", "longest", "busy, median", "longest")
    rows = [
        (killed, moment.value, *(cell for busy in MACHINES for cell in _workers(_at(pairs, forks, moment, busy))))
        for killed, forks in (("workers", False), ("all but `train`", True))
        for moment in Moment
    ]
    return _table(heads, rows)


def _at(pairs: Iterable[Pair], forks: bool, moment: Moment, busy: bool) -> list[Pair]:
    """`forks`: with the process that the others are forked from."""
    return [
        (trial, verdict)
        for trial, verdict in pairs
        if (TEMPLATE in trial.targets, trial.moment, trial.busy) == (forks, moment, busy)
    ]


def _counts(pairs: Sequence[Pair]) -> tuple[str, str]:
    return str(len(pairs)), str(sum(verdict.fired for _, verdict in pairs))


def _both(pairs: Sequence[Pair]) -> tuple[str, ...]:
    return *_workers(pairs), *_times([seconds for _, verdict in pairs for seconds in verdict.brokers])


def _workers(pairs: Sequence[Pair]) -> tuple[str, str]:
    return _times([seconds for _, verdict in pairs for seconds in verdict.workers])


def _times(seconds: Sequence[float]) -> tuple[str, str]:
    return (f"{median(seconds):.2f} s", f"{max(seconds):.2f} s") if seconds else ("-", "-")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    every = [heads, ("---", "---", *["---:"] * (len(heads) - 2)), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in every)
