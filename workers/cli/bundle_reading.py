"""What a bundle tells: what the commands would have said where it was made."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from stageline.broker.control.pace_answers import StatusFacts, WhyFacts
from stageline.pipeline.plan.tables import flat
from stageline.pipeline.printable import bounded, printable_line
from stageline.workers.extras.bundle.archive import MANIFEST, Bundle, BundleManifest, BundleUnreadable
from stageline.workers.runs.folder import Facts

from .output import say
from .printed import DoctorFinding

Show = Callable[[Facts], None]
_UNTELLABLE = (  # what no broker has answered may be of the right form, and yet say nothing
    *(msgspec.MsgspecError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError),
)
_SIGNS = {"good": "ok", "note": "note", "bad": "WRONG"}


class BundleReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of a bundle, for people.

    Attributes:
        bundle: What the bundle is of.
        plan: Settings of the run.
        findings: What `stageline doctor` has found on the machine.
        status: Answer of `stageline status`; None if it is not there.
        why: Answer of `stageline why`; None if it is not there.
    """

    bundle: BundleManifest
    plan: dict[str, Any]
    findings: list[DoctorFinding]
    status: StatusFacts | None
    why: WhyFacts | None


def report_of(path: Path) -> BundleReport:
    """Return what the bundle at `path` tells. Raises `BundleUnreadable`, `OSError`."""
    found = Bundle(path)
    return BundleReport(
        bundle=found.manifest,
        plan=_read(found, "plan.json", dict[str, Any], {}),
        findings=_read(found, "doctor.json", list[DoctorFinding], []),
        status=_read(found, "status.json", StatusFacts, None),
        why=_read(found, "why.json", WhyFacts, None),
    )


def _read(bundle: Bundle, name: str, kind: Any, default: Any) -> Any:
    return bundle.read(name, kind) if name in bundle else default


def tell(report: BundleReport, show_status: Show, show_cause: Show) -> None:
    """Print a report, with the functions by which `status` and `why` print their answers.

    Raises `BundleUnreadable` for answers that cannot be told, such as one with a time that no calendar has.
    """
    with _doubted():
        _tell(report, show_status, show_cause)


@contextmanager
def _doubted() -> Iterator[None]:
    try:
        yield
    except _UNTELLABLE as error:
        said = printable_line(bounded(f"{type(error).__name__}: {error}"))
        raise BundleUnreadable(f"the bundle has an answer that cannot be told ({said}); ask for it again") from error


def _tell(report: BundleReport, show_status: Show, show_cause: Show) -> None:
    made = report.bundle
    say(f"bundle of run {made.run}, made {datetime.fromtimestamp(made.made):%F %T} by stageline {made.version}")
    say(f"files: {', '.join([MANIFEST, *(each.name for each in made.files)])}")
    for each in made.left_out:
        say(f"left out: {each}")
    for finding in report.findings:
        say(f"{_SIGNS.get(finding.health, '?'):5} {finding.what}: {finding.found}")
    for key, value in flat(report.plan).items():
        say(f"{key} = {value}")
    state = {"state": made.state} if made.state else {}
    if report.status is not None:
        show_status({**msgspec.to_builtins(report.status), **state})
    if report.why is not None:
        show_cause({**msgspec.to_builtins(report.why), **state})
