"""What the broker knows of one process that has a place in the run: a worker, or the script.

A scripted run has one place without stages, the last: that of the user's script, which calls the workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from stageline.broker.control.messages import Exited, Failed, Goodbye, Report
from stageline.pipeline.digest import TensorDigest

SCRIPT = "the script"


class MemberStatus(StrEnum):
    """Whether a worker takes part in the run."""

    PRESENT = "present"
    FINISHED = "finished"
    LEFT = "left"
    LOST = "lost"


@dataclass(slots=True)
class Member:
    """A worker with a place in the plan, or the script. Times are seconds since the epoch."""

    index: int
    stages: tuple[int, ...]
    incarnation: int
    name: str
    host: str
    pid: int
    endpoint: str
    last_seen: float
    start: int = 0  # the step it began at
    generation: int = 1  # counts the workers that have had this place, from 1
    former: int = 0  # the incarnation it had before the broker's records were lost
    token: str = ""  # of its first Hello: by it the process is known before it has used its incarnation
    sender: bytes = b""  # its address on the channel; empty until it contacts this broker
    introduced: bool = False  # its endpoint is known, even if it has none
    aware: bool = False  # it has sent a message under its incarnation
    counted: set[int] = field(default_factory=set)  # stages of which this broker knows how many steps it has finished
    promoted: bool = False  # it was on standby when the place became free
    superseded: bool = False  # another process of its host asks for its place: it may have been started in its stead
    status: MemberStatus = MemberStatus.PRESENT
    report: Report | None = None  # the newest
    last_progress: float = 0.0  # when it last completed an action, or had none to compute
    activity_since: float = 0.0  # when its present activity was first reported
    digests: Mapping[str, TensorDigest] | None = None  # of its stages' weights, once it has finished
    copies: Mapping[str, str] = field(default_factory=dict)  # names there of what stages share, with that in the first
    exited: tuple[float, Exited] | None = None  # when its process ended, and how
    parting: tuple[float, Failed | Goodbye] | None = None  # when it said that it ends, and how; nothing since
    labels: tuple[str, ...] = ()  # its stages for people, where stages have replicas: "1.0", "1.1"

    @property
    def is_script(self) -> bool:
        """Whether it is the script: it has no stages, and its user's code may take hours between two calls."""
        return not self.stages

    @property
    def title(self) -> str:
        """ "worker 1", "the script"."""
        return SCRIPT if self.is_script else f"worker {self.index}"

    @property
    def label(self) -> str:
        """ "worker 1 (stages 0 and 2)", "the script"."""
        return worker_label(self.index, self.labels or self.stages)

    @property
    def titles(self) -> str:
        """ "stages 0 and 2", "stage 1.0"."""
        return stages_label(self.labels or self.stages)

    @property
    def process(self) -> str:
        """ "worker-1 (pid 101, host a)"."""
        return f"{self.name} (pid {self.pid}, host {self.host})"

    @property
    def reachable(self) -> bool:
        """Whether messages are still sent to it."""
        return self.status in (MemberStatus.PRESENT, MemberStatus.FINISHED)


def worker_label(index: int, stages: Sequence[int | str]) -> str:
    """ "worker 1 (stages 0 and 2)"; "the script" for the place without stages."""
    return f"worker {index} ({stages_label(stages)})" if stages else SCRIPT


def may_take(claim: int | None, index: int, stages: Sequence[int]) -> bool:
    """Whether a process that claims `claim`, or with None any worker's place, may have place `index`. The script's
    place is only for one that claims it."""
    return claim == index or (claim is None and bool(stages))


def stages_label(stages: Sequence[int | str]) -> str:
    """ "stage 1", "stages 0 and 2", "stages 0, 2 and 4"."""
    *others, last = map(str, stages)
    return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
