"""One process that has a place in the run, a worker or the script, and the rule by which it counts as lost.

A scripted run has one place without stages, the last: that of the user's script, which calls the workers.

A worker is lost if it is silent, loads, or is in one action for too long, or if its process has ended. A worker that
waits for a message is not to blame for making no progress. When all of them wait, the messages do not arrive:
`Standstill` notices that. The script is lost by silence alone, or by its process's end: its user's code may take hours
between two calls.
"""

import signal
from collections.abc import Iterable, Mapping, Sequence
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


EXIT_GRACE = 0.5  # seconds that a process's last messages may arrive after the news of its exit
PARTING = 1.0  # seconds of silence after which a worker is believed that it ends: it reports ten times a second
KILL_GRACE = 0.1  # likewise for a process that was killed
SUPERSEDED_AFTER = 2.0  # seconds of silence after which a worker counts as lost while another asks for its place
STANDSTILL_LEASES, STANDSTILL_LEAST = 6, 60.0  # a standstill ends the run after that many leases, and that many seconds


@dataclass(frozen=True, slots=True)
class Leases:
    """How long a worker may be silent, be in one action, and load before it is ready to work; in seconds."""

    silence: float
    action: float
    loading: float


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """A worker was lost: `why` continues a sentence about it. `exited`: its process has ended; `result`: the exit code
    that its command returned, if it did."""

    member: Member
    why: str
    exited: bool = False
    result: int | None = None


def loss_of(member: Member, leases: Leases, now: float) -> WorkerLoss | None:
    """The reason why `member` counts as lost at `now` (seconds); None if it does not."""
    if member.exited is not None:
        when, end = member.exited
        if now - when >= (EXIT_GRACE if end.status >= 0 else KILL_GRACE):
            return WorkerLoss(member, _describe_end(member, end), exited=True, result=end.result)
    silence, stalled = now - member.last_seen, now - member.last_progress
    if member.superseded and silence >= SUPERSEDED_AFTER:
        return WorkerLoss(member, f"was silent for {silence:.1f} s while another process asked for its place")
    key, limit = silence_limit(member, leases)
    if silence >= limit:
        return WorkerLoss(member, f"was silent for {silence:.1f} s ({key} is {limit:g} s)")
    at_work = member.status is MemberStatus.PRESENT and member.introduced and member.report is not None
    if at_work and not member.is_script and stalled >= leases.action:
        return WorkerLoss(
            member,
            f"is alive, but completed no action for {stalled:.1f} s; if one may take this long, "
            f"raise recovery.action ({leases.action:g} s)",
        )
    return None


def silence_limit(member: Member, leases: Leases) -> tuple[str, float]:
    """The plan's key that bounds its silence, and its seconds. A worker promoted from standby was ready to answer; any
    other may load its model before it does."""
    starting = not member.introduced and (member.aware or not member.promoted)
    if starting and leases.loading > leases.silence:
        return "recovery.loading", leases.loading
    return "recovery.lease", leases.silence


def describe_exit(end: Exited) -> str:
    """How a process ended, continuing a sentence about it. A status that its command did not return can be anything:
    the user's code may have chosen it."""
    how = describe_status(end.status) if end.result is None else f"exited with status {end.result}"
    return f"{how}, {end.detail}" if end.detail else how


def _describe_end(member: Member, end: Exited) -> str:
    """No process of the run started the script, so that its status is not known, unless it was killed."""
    return "has ended" if member.is_script and end.status >= 0 else describe_exit(end)


def describe_status(status: int) -> str:
    """How a process ended that has returned no result, from its status as `subprocess` gives it."""
    if status >= 0:
        return f"ended without a result (status {status})"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


class Standstill:
    """How long all workers have been waiting for each other. `lease` in seconds."""

    def __init__(self, lease: float) -> None:
        self.bound = max(STANDSTILL_LEAST, STANDSTILL_LEASES * lease)  # seconds after which the run is given up
        self._actions = -1
        self._since = 0.0

    def lasts(self, members: Iterable[Member], now: float) -> float:
        """Seconds; 0 if a worker computes, has completed an action, or has yet to report."""
        reports = [member.report for member in members if member.status is MemberStatus.PRESENT]
        waiting = [report for report in reports if report is not None and report.waiting]
        actions = sum(report.actions for report in waiting)
        if not reports or len(waiting) < len(reports) or actions != self._actions:
            self._actions, self._since = actions, now
        return now - self._since
