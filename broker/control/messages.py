"""The control messages, one tagged Struct each. Their encoding is in `protocol.py`, their records are in `records.py`.

    worker  -> broker   Hello, Report, Failed, Finished, Goodbye, Declined, Peeked
    broker  -> worker   Assigned, Standby, Peers, Confirmed, Trim, Copying, ScheduleOrders, Hold, Leave, Peek,
                        ShowStacks, ShowLog, Stop, Refused
    command -> broker   Ask, StopRun, PauseRun, LeaveWorker, KeyChange; a supervisor also Exited
    broker  -> command  Answer, Refused

The script of a scripted run is a worker without stages: it claims the place after the workers', reports what it does,
and sends no steps, snapshots, or Finished.

A worker repeats Hello until Assigned or Refused comes (also after Standby), a Report's `steps` and `snapshots` until
Confirmed comes, and Finished until Stop comes. All other messages are sent once and may get lost. Control messages
carry no tensors: training continues while the broker is away.
"""

from typing import Annotated

import msgspec

from stageline.broker.keys.changes import KeyChange
from stageline.broker.keys.parties import MOST_PARTIES, ReceivedParties
from stageline.pipeline.program import Queue

from .checkpoints import NO_COPIES, Copying, CopyReport, Trim
from .leaves import Leave, LeaveWorker, Leaving
from .pauses import NOT_HELD, HeldBack, Hold, PauseRun
from .peek import Look, Peeked
from .place_keys import PlaceKeys, Secret
from .queue_counts import Depth, Intake
from .records import (
    Count,
    EvaluationRecord,
    Event,
    Inspection,
    Name,
    RunId,
    RunLength,
    ScheduleOrder,
    StepRecord,
    Wait,
    WorkerRecord,
)

CONTROL_VERSION = 19
MOST_STEPS = 2000  # finished steps in one report, so that a broker that comes back is not swamped
MOST_TIMES = 8 * 2**20  # bytes of times of the finished steps in one report, from which on no other step is added
MOST_ROUNDS = 500  # of evaluation, in one report
MOST_DIGESTS = 5000  # of steps of queues, in one report
MOST_QUEUES = 20_000  # that one process has ends of
LONGEST_TEXT = 100_000  # characters of a reason
WAITS = "waits"  # the first word of `Report.now` while the compute loop has nothing to compute

Text = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]
Token = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16,32}$")]  # with the mark of its key
StepDigest = tuple[Name, Count, _Digest]  # of a queue's step
_Note = Annotated[bytes, msgspec.Meta(max_length=2**16)]
Notes = Annotated[dict[Name, _Note], msgspec.Meta(max_length=2 * MOST_PARTIES)]  # by the text of the opening key


class _ControlMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    """The base of all messages; the field "is" of an encoded message names its type."""


class Hello(_ControlMessage, frozen=True, tag="hello"):
    """A process's request for a place, or a worker's news of its endpoint or its survival.

    A worker that has an incarnation sends Hello again when it has an endpoint, and when the broker may be another. One
    that finds its initial snapshots deleted sends its incarnation and `snapshots`, without `memory`.

    Attributes:
        plan: `Plan.digest()`.
        endpoint: Address of the process's queues, "" if they have none.
        claim: The wanted worker index; None for any free one.
        incarnation: The incarnation assigned to the worker, 0 at first.
        settings: `Plan.as_mapping()`, so that a refusal can name how two plans differ.
        spare: True for a process that replaces a lost worker: it stands by before the start, and until a place is free.
        memory: The worker's record of the run, sent with an incarnation.
        snapshots: (stage, step) of the run's snapshots on the worker's disk, of any stage; None before it has looked,
            or if it does not know the run.
        inspection: The answer to `Standby.step`.
        token: A secret that the process draws and shows to the broker alone. It identifies a worker that has not used
            its incarnation yet.
        length: The run's length, from a worker that knows it.
        needs_length: True for a worker without data, which stands by until the broker knows the length.
        queues: Queues that the process has an end of, sent with its endpoint. The broker explains waits by them, and
            refuses a process whose queues differ from those of the processes at their other ends.
        parties: The parties of the process's plan.
        key: The text of the party's key that the process has; "" in a run without parties.
        notes: Notes for the other parties, sent with its endpoint. The broker passes them on, and cannot open them.
        disk: A name that the run's folder there has for itself alone: workers with one hold no copies for each other.
    """

    version: int
    plan: Name
    name: Name
    host: Name
    pid: int
    endpoint: Name
    claim: Count | None = None
    incarnation: Count = 0
    settings: dict[str, object] = {}
    spare: bool = False
    memory: WorkerRecord | None = None
    snapshots: list[tuple[Count, Count]] | None = None
    inspection: Inspection | None = None
    token: Token = ""
    length: RunLength | None = None
    needs_length: bool = False
    queues: Annotated[tuple[Queue, ...], msgspec.Meta(max_length=MOST_QUEUES)] = ()
    parties: ReceivedParties = ()
    key: Name = ""
    notes: Notes = {}
    disk: Name = ""


class Report(_ControlMessage, frozen=True, tag="report"):
    """A worker's progress since its last report. Sent even when nothing happened, as a heartbeat.

    Attributes:
        actions: Completed actions; no growth means no progress, unless `waiting`. A script's are the number of its next
            call; between two calls it is not `waiting`, for as long as its user's code takes.
        now: The compute loop's present action or wait: "2F3 of step 7", "waits for forward-1 message 40".
        since: The start of that, in seconds since the epoch.
        idle: The share of the time since the last report in which the loop waited, 0 to 1.
        puts: Counts of the queues that it puts into, by name, as they were `counted` seconds ago.
        takes: Counts of the queues that it takes from.
        steps: Finished steps. `steps`, `snapshots`, `evaluations` and `digests` are repeated until they are confirmed.
        training_steps: Steps that the run trains, if the worker knows; from a script that makes no more calls, all that
            it has called for.
        number: The report's number under its incarnation, from 1 on; 0 if it needs no confirmation.
        snapshots: (stage, step) of each snapshot that is on disk and was read back: the state after `step` steps.
        complete: The newest checkpoint announced to the worker.
        waits: The messages, room or credit that the loop lacks; empty while it computes.
        layer: The place in the model where it computes, such as "layer 30".
        trouble: The reason why the server of the worker's queues moves no messages for `troubled` seconds; else "".
        fault: The work that fails for want of a resource and is tried again, continuing "worker 1"; "" without one.
        evaluations: Rounds of evaluation, from the last stage's worker; the snapshot of a later step comes no earlier.
        orders: The number of schedule orders that the worker knows.
        closed: The first step that the worker does not begin before it knows the next order; None if it waits for none.
        held: The newest order about a pause that the worker knows.
        leaving: Notice that the worker leaves; None if it stays.
        stage_bytes: Memory of each stage: (stage, bytes without activations, bytes of one microbatch in flight, further
            bytes of that between the halves of its backward or None if the stage cannot split it).
        digests: Digests of the messages that this end has put into, or taken from, a queue at a server, by step. They
            come with the snapshots of the steps after or before them.
        memory: Bytes of memory that the process takes; 0 if it does not know.
        timed: True to have the confirmation say when it was sent.
        clock: The seconds by which the broker's clock is ahead of the worker's, and how far that may be wrong; None if
            it is not known.
        copies: What the worker knows of transfers of snapshots.
    """

    incarnation: Count
    actions: Count
    now: Text
    since: float
    idle: float
    steps: list[StepRecord] = []
    events: list[Event] = []
    retained_bytes: int = 0
    puts: dict[Name, Depth] = {}
    takes: dict[Name, Intake] = {}
    counted: float = 0.0
    training_steps: Count | None = None
    number: Count = 0
    snapshots: list[tuple[Count, Count]] = []
    complete: Count = 0
    waits: list[Wait] = []
    layer: Name = ""
    trouble: Text = ""
    troubled: float = 0.0
    fault: str = ""
    evaluations: list[EvaluationRecord] = []
    orders: Count = 0
    closed: Count | None = None
    held: HeldBack = NOT_HELD
    leaving: Leaving | None = None
    stage_bytes: list[tuple[Count, Count, Count, Count | None]] = []
    digests: list[StepDigest] = []
    memory: Count = 0
    timed: bool = False
    clock: tuple[float, float] | None = None
    copies: CopyReport = NO_COPIES

    @property
    def waiting(self) -> bool:
        """True if the compute loop has nothing to compute."""
        return self.now.startswith(WAITS)


class Failed(_ControlMessage, frozen=True, tag="failed"):
    """A worker's end by an error: `reason` for people, `code` its exit code."""

    incarnation: Count
    reason: Text
    code: int


class Finished(_ControlMessage, frozen=True, tag="finished"):
    """A worker's news that all its steps are done.

    Others may need its queues: the worker serves them until Stop with code 0 arrives, when all have finished.

    Attributes:
        digests: [dtype, shape, sha256 hex] of each state_dict entry of the worker's stages, by name.
        copies: Names of parameters that stages share, each with its name in the first stage that has it.
    """

    incarnation: Count
    digests: dict[str, tuple[str, tuple[int, ...], Sha256]]
    copies: dict[str, str] = {}


class Goodbye(_ControlMessage, frozen=True, tag="goodbye"):
    """A worker's departure on purpose, for `reason`, after all is reported.

    `training_steps`, sent by a script, counts all steps that it has called for; the workers carry those out, and save
    the state after them.
    """

    incarnation: Count
    reason: Text
    training_steps: Count | None = None


class Declined(_ControlMessage, frozen=True, tag="declined"):
    """A process's news that it does not join, with the `reason` for people; the script is told. Any may send it."""

    host: Name
    pid: int
    reason: Name


class Assigned(_ControlMessage, frozen=True, tag="assigned"):
    """A worker's place: number `index` of the plan, under `incarnation`, from `step` on.

    Snapshots of its stages that are newer than `step` belong to another incarnation and must be ignored.

    Attributes:
        step: 0, or a complete checkpoint.
        keep: True for a running worker after the broker has lost its records: it continues where it is, under this
            incarnation from now on, and repeats the losses of its steps.
        since: No worker of this incarnation or an older one still runs: the run was restarted as a whole, perhaps
            further back than those were, and their statements about their queues must be ignored.
        secret: The incarnation's secret, for the worker's seals; empty if the worker has it.
        keys: The secrets of the place's queues. A running worker takes them over if they are others than before.
        length: The run's length, if the broker knows it.
        orders: As in `ScheduleOrders`; so is `closed`.
    """

    run: RunId
    index: Count
    incarnation: Count
    step: Count
    keep: bool = False
    since: Count = 0
    secret: Secret = b""
    keys: PlaceKeys = PlaceKeys()
    length: RunLength | None = None
    orders: tuple[ScheduleOrder, ...] = ()
    closed: Count | None = None

    def __repr__(self) -> str:
        """Return the message as text, without the secrets."""
        shown = (f"{name}={getattr(self, name)!r}" for name in ("run", "index", "incarnation", "step", "keep", "since"))
        return f"Assigned({', '.join(shown)})"


class Standby(_ControlMessage, frozen=True, tag="standby"):
    """An instruction to stay, since no place is free yet, and to repeat Hello about once a second.

    With `run`, the run's id, the broker has lost its records and needs `Hello.snapshots`. With `step` too, the run is
    resumed, and the broker needs `Hello.inspection` of that step. `reason` is for people.
    """

    reason: str
    run: RunId | None = None
    step: Count = 0


class Peers(_ControlMessage, frozen=True, tag="peers"):
    """The addresses of every worker's queues: index -> (incarnation, endpoint).

    Sent once all have joined, and again after each change.

    Attributes:
        parties: The parties of the broker's plan.
        notes: The notes of the workers, by index.
    """

    workers: dict[int, tuple[int, str]]
    parties: ReceivedParties = ()
    notes: dict[int, Notes] = {}


class Confirmed(_ControlMessage, frozen=True, tag="heard"):
    """A confirmation that the broker has stored the worker's reports up to `number`.

    `at` is when it was sent, in seconds since the epoch by the broker's clock; 0.0 if the report did not ask.
    """

    number: Count
    at: float = 0.0


class ScheduleOrders(_ControlMessage, frozen=True, tag="orders"):
    """The schedules of a run's steps, in a run that chooses them: all `orders` so far.

    If there is a step `closed`, another order is to come: a worker begins neither that step nor a later one before it
    has come, and reports which step is the first that it has closed. Repeated until every worker's reports show it.
    """

    orders: tuple[ScheduleOrder, ...]
    closed: Count | None = None


class Stop(_ControlMessage, frozen=True, tag="stop"):
    """An instruction to end the run: `reason` for people, `code` the exit code.

    With `at_step_end`, all workers first finish the steps before `step`, the same for all, and write a snapshot of it;
    a worker that is past it, or cannot finish in time, leaves without. With `at_step_end` and no `step`, sent to the
    script alone: the script makes no more calls, and reports how many training steps it called for; the Stop with the
    step follows.
    """

    reason: str
    code: int
    at_step_end: bool = False
    step: Count | None = None


class Refused(_ControlMessage, frozen=True, tag="refused"):
    """The broker's refusal: `reason` says why and what would work, `code` is the exit code; the run may be `over`."""

    reason: str
    code: int
    over: bool = False


class Ask(_ControlMessage, frozen=True, tag="ask"):
    """A command's query.

    Attributes:
        what: The query's name, such as "status".
        of: The query's parameters, by name.
    """

    what: str
    of: dict[str, str] = {}


class StopRun(_ControlMessage, frozen=True, tag="stop-run"):
    """A request by the supervisor or a command to interrupt the run; the broker knows the exit code for it.

    With `over`, it only says that no more queries will come after the run's end, so that the broker may exit.
    """

    reason: Text
    at_step_end: bool = False
    over: bool = False


class Exited(_ControlMessage, frozen=True, tag="exited"):
    """The supervisor's news that the process of worker `index` ended.

    Attributes:
        status: The exit status as `subprocess` gives it; negative if a signal killed the process. Of the script, which
            is no child of a process of the run, only a negative status is known; else it is 0.
        result: The exit code that the worker's command returned; None if it ended without returning one. Then `status`
            says nothing about the run.
        detail: End of a sentence about an end without a result: "in forward (model.py, line 12)".
    """

    index: Count
    pid: int
    status: int
    result: int | None = None
    detail: str = ""


class Answer(_ControlMessage, frozen=True, tag="answer"):
    """The facts of a query's answer, ready for JSON, under a versioned schema name such as `status/1`."""

    schema: str
    facts: dict[str, object]


Request = StopRun | PauseRun | LeaveWorker
ToBroker = Hello | Report | Failed | Finished | Goodbye | Declined | Peeked | Exited | Ask | Request | KeyChange
_Order = Copying | Hold | Leave | Look
FromBroker = Assigned | Standby | Peers | Confirmed | Trim | ScheduleOrders | _Order | Stop | Refused | Answer
