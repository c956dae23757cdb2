"""A run whose lost workers are replaced: conversations about losses, snapshots and replacements."""

from dataclasses import replace

from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import CONTROL_VERSION, Exited, FromBroker, Hello, Report, Stop
from stageline.broker.control.store import Store
from stageline.broker.coordinator.run import RunConfig
from stageline.broker.ledger.losses import EXIT_GRACE
from support.conversation import TERMS, Conversation, name, steps

REPLACING = replace(TERMS, restarts=2, snapshots=True)
Sends = list[tuple[bytes, FromBroker]]


def talk_of(store: Store | None = None, terms: RunConfig = REPLACING) -> Conversation:
    """A run that has just begun: both workers are there, under incarnations 1 and 2."""
    talk = Conversation(store, terms=terms)
    talk.join(0), talk.join(1)
    return talk


def said(incarnation: int, *, stage: int = 1, actions: int = 5, upto: int = 0, **more: object) -> Report:
    """A report of `stage`'s owner, which has finished the steps before `upto`."""
    records = steps(stage, *range(upto))
    return Report(incarnation, actions, "computes", 999.0, 0.25, records, **more)  # type: ignore[arg-type]


def reach(talk: Conversation, step: int, *, incarnations: tuple[int, int] = (1, 2)) -> None:
    """Both stages have finished the steps before `step`, and have a snapshot of it."""
    for stage, incarnation in enumerate(incarnations):
        talk.send(name(stage), said(incarnation, stage=stage, upto=step, snapshots=[(stage, step)]))


def kill(talk: Conversation, index: int, pid: int, status: int = -9) -> Sends:
    """The supervisor sees the process of worker `index` end, and its last words have had time."""
    return talk.send(b"supervisor", Exited(index, pid, status, status if status >= 0 else None)) + talk.after(
        EXIT_GRACE + 0.2
    )


def replacement(index: int, pid: int, incarnation: int = 0, endpoint: str = "") -> Hello:
    return Hello(CONTROL_VERSION, "d" * 64, f"worker-{index}", "desk", pid, endpoint, index, incarnation)


def trims(sends: Sends) -> list[int]:
    return [message.step for recipient, message in sends if recipient == name(0) and isinstance(message, Trim)]


def stops(sends: Sends) -> list[Stop]:
    return [message for _, message in sends if isinstance(message, Stop)]
