"""A worker with a place in the plan, or the script: the facts about it, and what it is called."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from stageline.broker.control.messages import Exited, Failed, Finished, Goodbye, Hello, Report
from stageline.pipeline.digest import TensorDigest
from stageline.pipeline.program import Queue

SCRIPT = "the script"


class MemberStatus(StrEnum):
    """A worker's part in the run."""

    PRESENT = "present"
    FINISHED = "finished"
    LEFT = "left"
    LOST = "lost"


@dataclass(slots=True)
class Member:
    """A worker with a place in the plan, or the script. Its methods note its messages and its end."""

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
    queues: tuple[Queue, ...] = ()  # that it has an end of, as it has told

    @property
    def is_script(self) -> bool:
        """True for the script, which has no stages."""
        return not self.stages

    @property
    def title(self) -> str:
        """The member for people: "worker 1", "the script"."""
        return SCRIPT if self.is_script else f"worker {self.index}"

    @property
    def label(self) -> str:
        """The member with its stages, for people: "worker 1 (stages 0 and 2)", "the script"."""
        return worker_label(self.index, self.labels or self.stages)

    @property
    def titles(self) -> str:
        """The member's stages for people: "stages 0 and 2", "stage 1.0"."""
        return stages_label(self.labels or self.stages)

    @property
    def process(self) -> str:
        """The member's process for people: "worker-1 (pid 101, host a)"."""
        return f"{self.name} (pid {self.pid}, host {self.host})"

    @property
    def reachable(self) -> bool:
        """True while messages are still sent to the member."""
        return self.status in (MemberStatus.PRESENT, MemberStatus.FINISHED)

    @property
    def resumes(self) -> str:
        """The end of a sentence about a lost member's successor that is at work; "" before it reports work."""
        working = "computes again" if self.report is not None and self.report.actions else ""
        return "is there again" if self.is_script else working

    def queue(self, name: str) -> Queue | None:
        """Return the queue `name` that the member has an end of; None if it has none of that name."""
        return next((queue for queue in self.queues if queue.name == name), None)

    def note_contact(self, sender: bytes, now: float) -> None:
        """Note a message under the member's incarnation, from the address `sender`."""
        self.sender, self.last_seen, self.aware = sender, now, True
        self.superseded = False

    def note_report(self, report: Report, now: float) -> None:
        """Note the newest report, and the member's progress."""
        before, self.report = self.report, report
        if before is None or before.actions != report.actions or report.waiting:
            self.last_progress = now
        if before is None or before.now != report.now:
            self.activity_since = now

    def reconnect(self, hello: Hello, sender: bytes, now: float) -> None:
        """Note another Hello of the member, which may bring its endpoint.

        Args:
            hello: The Hello.
            sender: The member's address on the channel.
            now: Seconds since the epoch.
        """
        self.sender, self.endpoint, self.last_seen = sender, hello.endpoint, now
        self.queues = hello.queues or self.queues
        self.aware = self.aware or hello.incarnation == self.incarnation
        if not self.introduced and (self.aware or hello.endpoint):
            self.introduced, self.last_progress = True, now  # from here on it is expected to make progress

    def move(self, sender: bytes) -> None:
        """Send messages to the address `sender` from now on."""
        self.sender = sender

    def contest(self) -> None:
        """Note that another process of its host asks for the member's place, unless this broker has heard the member.

        A member that was heard keeps its lease: a name and a host prove nothing, and a paused process is silent too.
        """
        self.superseded = not self.sender

    def restart_lease(self, now: float) -> None:
        """Start the lease over: the broker itself was away."""
        self.last_seen = self.last_progress = now

    def part(self, message: Failed | Goodbye, now: float) -> None:
        """Note that the member says that it ends. The first such message counts."""
        self.parting = self.parting or (now, message)

    def take_parting(self) -> Failed | Goodbye | None:
        """Return the message in which the member said that it ends, and forget it; None if there is none."""
        said, self.parting = self.parting, None
        return None if said is None else said[1]

    def note_exit(self, exited: Exited, now: float) -> None:
        """Note the end of the member's process."""
        self.exited = now, exited

    def finish(self, finished: Finished) -> None:
        """Note that the member has done all steps."""
        self.status = MemberStatus.FINISHED
        self.digests, self.copies = finished.digests, finished.copies

    def leave(self) -> None:
        """Note that the member takes no part in the run any more, as it said or was told."""
        self.status = MemberStatus.LEFT

    def lose(self) -> None:
        """Note that the member is lost."""
        self.status = MemberStatus.LOST

    def recall_finished(self) -> None:
        """Note that a worker told a former broker that it has finished. A script does not tell that; it leaves."""
        self.status = self.status if self.is_script else MemberStatus.FINISHED


def worker_label(index: int, stages: Sequence[int | str]) -> str:
    """Return a place's worker for people: "worker 1 (stages 0 and 2)"; "the script" for the place without stages."""
    return f"worker {index} ({stages_label(stages)})" if stages else SCRIPT


def stages_label(stages: Sequence[int | str]) -> str:
    """Return stages for people: "stage 1", "stages 0 and 2", "stages 0, 2 and 4"."""
    *others, last = map(str, stages)
    return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
