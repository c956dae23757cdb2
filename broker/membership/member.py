"""A worker that was given its place in the plan: what the broker knows of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from stageline.broker.control.protocol import WAITS, Hello, Report
from stageline.broker.ledger.ledger import Holder
from stageline.pipeline.digest import TensorDigest


class MemberStatus(StrEnum):
    """How a worker stands to the run."""

    PRESENT = "present"
    FINISHED = "finished"
    LEFT = "left"
    LOST = "lost"


@dataclass(slots=True)
class Member:
    """A worker that was given its place in the plan. Times are seconds since the epoch."""

    index: int
    stages: tuple[int, ...]
    incarnation: int
    name: str
    host: str
    pid: int
    endpoint: str
    heard: float
    start: int = 0  # the step it began at
    life: int = 1  # which of the workers that have had the place, one after another
    former: int = 0  # the incarnation it has worked under before the broker's records were lost
    sender: bytes = b""  # empty until it has spoken to this broker
    introduced: bool = False  # its endpoint is known, even if that is nowhere
    aware: bool = False  # it has shown that it knows its incarnation
    called: bool = False  # it stood by when the place became free
    succeeded: bool = False  # another process of its name and host wants its place: it was started again
    standing: MemberStatus = MemberStatus.PRESENT
    report: Report | None = None
    progressed: float = 0.0  # when it last completed an action, or had none to compute
    changed: float = 0.0  # when it was first heard to do what it does now
    digests: Mapping[str, TensorDigest] | None = None  # of its stages' weights, once it has finished
    exited: tuple[float, int] | None = None  # when, and with which status

    @property
    def holder(self) -> Holder:
        return Holder(self.name, self.incarnation)

    @property
    def place(self) -> str:
        """The worker in words: its number and stages."""
        return place_in_words(self.index, self.stages)

    @property
    def process(self) -> str:
        """Its process in words."""
        return f"{self.name} (pid {self.pid}, host {self.host})"

    @property
    def here(self) -> bool:
        """Whether it can be spoken to."""
        return self.standing in (MemberStatus.PRESENT, MemberStatus.FINISHED)

    @property
    def idle(self) -> bool:
        """Whether it says that it has nothing to compute."""
        return self.report is not None and self.report.now.startswith(WAITS)

    def is_process_of(self, hello: Hello) -> bool:
        return (self.name, self.host, self.pid) == (hello.name, hello.host, hello.pid)


def place_in_words(index: int, stages: Sequence[int]) -> str:
    """ "worker 1 (stages 0 and 2)"."""
    return f"worker {index} ({stages_in_words(stages)})"


def stages_in_words(stages: Sequence[int]) -> str:
    """ "stage 1", "stages 0 and 2", "stages 0, 2 and 4"."""
    *others, last = map(str, stages)
    return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
