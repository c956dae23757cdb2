"""Takes a worker's report into the ledger and the store; what cannot be is left out, and handed back."""

from collections.abc import Sequence

from stageline.broker.control.protocol import Event, Report, StepRecord
from stageline.broker.ledger.ledger import IllegalTransition, Ledger
from stageline.broker.membership.member import Member
from stageline.broker.stores.base import Store


def ingest_report(report: Report, member: Member, ledger: Ledger, store: Store) -> list[IllegalTransition]:
    """Writes down what `member` reports. Returns what was wrong with it."""
    kept, wrong = _steps(report.steps, member, ledger)
    if kept:
        store.append(kept, {record.step: record.loss for record in kept if ledger.takes_loss(record)})
    return wrong + _events(report.events, member, ledger)


def _steps(
    records: Sequence[StepRecord], member: Member, ledger: Ledger
) -> tuple[list[StepRecord], list[IllegalTransition]]:
    kept: list[StepRecord] = []
    wrong: list[IllegalTransition] = []
    for record in records:
        try:
            _check_owner(member, record.stage)
            ledger.finish(record)
        except IllegalTransition as error:
            wrong.append(error)
        else:
            kept.append(record)
    return kept, wrong


def _events(events: Sequence[Event], member: Member, ledger: Ledger) -> list[IllegalTransition]:
    wrong: list[IllegalTransition] = []
    for event in events:
        try:
            _check_owner(member, event.stage)
            ledger.enter(event, member.holder)
        except IllegalTransition as error:
            wrong.append(error)
    return wrong


def _check_owner(member: Member, stage: int) -> None:
    if stage not in member.stages:
        raise IllegalTransition(f"stage {stage} is not its own")
