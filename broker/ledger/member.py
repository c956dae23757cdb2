"""A worker with a place in the plan, or the script: its facts, its queues' pace, its name."""

import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from stageline.broker.control.leaves import Leaving
from stageline.broker.control.messages import Exited, Failed, Finished, Goodbye, Hello, Report
from stageline.broker.control.queue_counts import Depth, Intake
from stageline.pipeline.digest import TensorDigest
from stageline.pipeline.program import Queue

SCRIPT = "the script"
LEAST = 1.0  # seconds between two samples
SAMPLES = 6
SHORTEST = 0.5  # seconds that a pace is measured over, at least


class MemberStatus(StrEnum):
    """A worker's part in the run."""

    PRESENT = "present"
    FINISHED = "finished"
    LEFT = "left"
    LOST = "lost"


class Flowing(StrEnum):
    """Direction in which messages pass an end of a queue."""

    PUT = "put"
    TAKEN = "taken"


class _Sample(NamedTuple):
    at: float
    puts: Mapping[str, Depth]
    takes: Mapping[str, Intake]

    def position(self, name: str, way: Flowing) -> int | None:
        """Return a position of the queue `name`; None if it was not counted."""
        if way is Flowing.PUT:
            return self.puts[name].put if name in self.puts else None
        return self.takes[name].taken if name in self.takes else None


@dataclass(slots=True)
class QueuePace:
    """Pace of a worker's queues: messages a second, from the positions in its newest reports.

    Samples are of the last seconds, each a reference to what a report has: nothing is copied.
    """

    _samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _newest: _Sample | None = None

    def note(self, report: Report, now: float) -> None:
        """Take in a report that came at `now`, in seconds since the epoch."""
        if not (report.puts or report.takes):
            return
        self._newest = _Sample(now - report.counted, report.puts, report.takes)
        if not self._samples or self._newest.at - self._samples[-1].at >= LEAST:
            self._samples.append(self._newest)

    def rate(self, name: str, way: Flowing) -> float | None:
        """Return how many messages of the queue `name` passed in a second; None if that is not known yet.

        A replacement begins again at its checkpoint: then nothing is known until it has come as far as before.
        """
        if self._newest is None or not self._samples:
            return None
        first, last = self._samples[0], self._newest
        before, after = first.position(name, way), last.position(name, way)
        seconds = last.at - first.at
        if before is None or after is None or after < before or seconds < SHORTEST:
            return None
        return (after - before) / seconds


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
    notes: dict[str, bytes] = field(default_factory=dict)  # for the other parties, by the key that opens each
    disk: str = ""  # a name that its run's folder has for itself alone; "" until it is told
    pace: QueuePace = field(default_factory=QueuePace)  # of its queues

    @property
    def title(self) -> str:
        """The member for people: "worker 1"."""
        return f"worker {self.index}"

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
    def gone(self) -> str:
        """The subject of a sentence about the member's loss: "worker 1 (stage 1), worker-1 (pid 101, host a),"."""
        return f"{self.label}, {self.process},"

    @property
    def leaving(self) -> Leaving | None:
        """The notice of the member that it leaves; None if it stays."""
        return None if self.report is None else self.report.leaving

    @property
    def reachable(self) -> bool:
        """True while messages are still sent to the member."""
        return self.status in (MemberStatus.PRESENT, MemberStatus.FINISHED)

    @property
    def resumes(self) -> str:
        """The end of a sentence about a lost member's successor: "computes again"; "" before it reports an action."""
        return "computes again" if self.report is not None and self.report.actions else ""

    @property
    def unable_to_finish(self) -> str:
        """The reason for which the member cannot have finished; "" if it can."""
        return ""

    def stalled(self, now: float) -> float:
        """Return the seconds for which the member has been at work without progress; 0 if it is not at work."""
        at_work = self.status is MemberStatus.PRESENT and self.introduced and self.report is not None
        return now - self.last_progress if at_work else 0.0

    def ago(self, now: float) -> str:
        """Return the age of the member's last message for people: "0.4 s ago"."""
        return f"{max(0.0, now - self.last_seen):.1f} s ago"

    def starting(self, silence: float) -> str:
        """Return, continuing a sentence about the member's place, that the member is not at work yet.

        Args:
            silence: Seconds since the member's last message.
        """
        if self.sender:
            return f"has a worker that is still starting, {silence:.1f} s after its last message"
        return f"had a worker before the broker restarted {silence:.1f} s ago; it has not reconnected yet"

    def describe_end(self, end: Exited) -> str:
        """Return how the member ended, continuing a sentence about it."""
        return describe_exit(end)

    def occupies(self, now: float, *, others_free: bool) -> str:
        """Return why another process cannot have the member's place, and the way out.

        Args:
            now: Seconds since the epoch.
            others_free: True if another place is free.
        """
        if not self.sender:
            return (
                f"{self.titles} belonged to worker {self.process} before the broker restarted; it may still be running"
            )
        verb = "is" if len(self.stages) == 1 else "are"
        way_out = "start this one without --index or stop the other" if others_free else "stop the other first"
        return f"{self.titles} {verb} claimed by worker {self.process}, alive {self.ago(now)}; {way_out}"

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
        self.pace.note(report, now)
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
        self.notes = hello.notes or self.notes
        self.disk = hello.disk or self.disk
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
        """Note that the member told a former broker that it has finished."""
        self.status = MemberStatus.FINISHED


def describe_exit(end: Exited) -> str:
    """Return how a process ended, continuing a sentence about it.

    If its command returned no result, its status can be anything: the user's code may have chosen it.
    """
    how = describe_status(end.status) if end.result is None else f"exited with status {end.result}"
    return f"{how}, {end.detail}" if end.detail else how


def describe_status(status: int) -> str:
    """Return how a process ended that returned no result, from its status as `subprocess` gives it."""
    if status >= 0:
        return f"ended without a result (status {status})"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def worker_label(index: int, stages: Sequence[int | str]) -> str:
    """Return a place's worker for people: "worker 1 (stages 0 and 2)"; "the script" for the place without stages."""
    return f"worker {index} ({stages_label(stages)})" if stages else SCRIPT


def stages_label(stages: Sequence[int | str]) -> str:
    """Return stages for people: "stage 1", "stages 0 and 2", "stages 0, 2 and 4"."""
    *others, last = map(str, stages)
    return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
