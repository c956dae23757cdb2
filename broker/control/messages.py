"""The control messages: one tagged Struct each, encoded as msgpack behind a seal (see `protocol.py`).
`records.py` has what they contain.

    worker  -> broker   Hello, Report, Failed, Finished, Goodbye, Declined
    broker  -> worker   Assigned, Standby, Peers, Confirmed, Trim, ScheduleOrders, Stop, Refused
    command -> broker   Ask, StopRun; a supervisor also Exited
    broker  -> command  Answer, Refused

The script of a scripted run is a worker without stages: it claims the place after the workers', reports what it does,
and sends no steps, snapshots, or Finished.

A worker repeats Hello until Assigned or Refused comes (also after Standby), a Report's `steps` and `snapshots` until
Confirmed comes, and Finished until Stop comes. All else is sent once and may get lost. Tensors never travel here:
training continues while the broker is away.
"""

from typing import Annotated

import msgspec

from stageline.pipeline.program import Queue

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

CONTROL_VERSION = 13
MOST_STEPS = 2000  # finished steps in one report, so that a broker that comes back is not swamped
MOST_TIMES = 8 * 2**20  # bytes of times of the finished steps in one report, from which on no other step is added
MOST_ROUNDS = 500  # of evaluation, in one report
MOST_DIGESTS = 5000  # of steps of queues, in one report
MOST_QUEUES = 20_000  # that one process has ends of
LONGEST_TEXT = 100_000  # characters of a reason
WAITS = "waits"  # the first word of `Report.now` while the compute loop has nothing to compute

Text = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]
Token = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")]
Secret = Annotated[bytes, msgspec.Meta(max_length=64)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
StepDigest = tuple[Name, Count, Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]]  # of a queue's step


def is_full(steps: int, times: int) -> bool:
    """Return True if no more fit into a report that has so many finished `steps`, with so many bytes of `times`."""
    return steps >= MOST_STEPS or times >= MOST_TIMES


class _ControlMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    """Base of all; the field "is" of an encoded message tells which."""


class Hello(_ControlMessage, frozen=True, tag="hello"):
    """A worker registers. `plan` is `Plan.digest()`; `endpoint` is where its queues can be reached ("" if nowhere).

    `claim` is the worker index it wants (None: any that is free). `incarnation` is 0 at first. A worker that has been
    assigned one sends Hello again with it: when it has an endpoint, and when the broker may have been restarted.
    `settings` is `Plan.as_mapping()`, so that a refusal can name what differs in two plans. A `spare` replaces a lost
    worker: before the run starts, and while no place is free, it is told to stand by.
    `memory` is sent with an incarnation. `snapshots`: (stage, step) of the run's snapshots on its disk, of any stage;
    None before it has looked, or does not know which run to look for. An assigned worker that finds its initial
    snapshots deleted sends its incarnation and `snapshots`, without `memory`.
    `inspection` is the answer to `Standby.step`. `token` is drawn by the process and shown to the broker alone: by it a
    worker that has not used its incarnation yet is known again. `length` is sent by a worker that knows it; one that
    `needs_length` has no data, and stands by until the broker knows it.
    `queues` are those that the process has an end of, sent with its endpoint: the broker explains by them what it waits
    for, and refuses a process whose queues are others than those of the processes at their other ends.
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


class Report(_ControlMessage, frozen=True, tag="report"):
    """Progress of a worker's compute loop since the last report. Sent even when nothing happened: a heartbeat.

    `number` counts the reports of an incarnation from 1 on; 0 for one that needs no confirmation. `steps`, `snapshots`
    and `evaluations` are repeated until they are confirmed.
    `now` describes what the compute loop is doing ("2F3 of step 7", "waits for forward-1 message 40"), `since` (seconds
    since the epoch) when it began, `actions` how many actions it has completed: no growth means no progress, unless
    `waiting`. The script's `actions` is the number of its next call; between two calls it is not `waiting`, for as long
    as its user's code takes.
    `idle` is the share of the time since the last report in which the compute loop waited, 0 to 1.
    `training_steps`: how many steps the run trains, sent by a worker that knows it; or all that a script has called
    for, sent by a script that makes no more calls.
    `snapshots`: (stage, step) of each snapshot that is on disk and was read back: the state after `step` steps.
    `evaluations`: what rounds of evaluation have found, sent by the last stage's worker. Its snapshot of a later step
    comes with a round or after it: the broker knows the round before that checkpoint can be complete.
    In a run that chooses its schedule, `orders` is how many the worker knows, `closed` the first step that it does not
    begin before it knows the next one (None: it waits for none), and `stage_bytes` what each of its stages takes:
    (stage, without activations, activations of a microbatch in flight, and what that takes more between the halves of
    its backward, None if the stage cannot split it).
    `complete`: the newest checkpoint announced to the worker. `waits`: what it lacks, empty while it computes;
    `layer`: where in the model it computes ("layer 30"). `trouble`: why the server of its queues does not move
    messages, for `troubled` seconds now; "" if it does. `fault`: what the worker cannot do for want of disk space,
    descriptors or memory, and tries again; "" if there is nothing. It continues "worker 1".
    `digests`: of the messages that this end has put into a queue at a server, or has taken from there, in each step;
    they come with the snapshots of the steps after those or before, and are repeated until they are confirmed.
    """

    incarnation: Count
    actions: Count
    now: Text
    since: float
    idle: float
    steps: list[StepRecord] = []
    events: list[Event] = []
    retained_bytes: int = 0
    queues: dict[str, list[float]] = {}  # queue -> ready, in flight, retained, bytes, oldest age in seconds
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
    stage_bytes: list[tuple[Count, Count, Count, Count | None]] = []
    digests: list[StepDigest] = []

    @property
    def waiting(self) -> bool:
        """True if the compute loop has nothing to compute."""
        return self.now.startswith(WAITS)


class Failed(_ControlMessage, frozen=True, tag="failed"):
    """The worker ends with an error: `reason` for people, `code` its exit code."""

    incarnation: Count
    reason: Text
    code: int


class Finished(_ControlMessage, frozen=True, tag="finished"):
    """All steps are done. `digests` maps each state_dict name of the worker's stages to [dtype, shape, sha256 hex].
    `copies` are names of parameters that stages share, each with its name in the first stage that has it.

    Others may still need its queues: the worker serves them until Stop with code 0 arrives, when all have finished.
    """

    incarnation: Count
    digests: dict[str, tuple[str, tuple[int, ...], Sha256]]
    copies: dict[str, str] = {}


class Goodbye(_ControlMessage, frozen=True, tag="goodbye"):
    """The worker leaves on purpose (`reason`); everything is reported. `training_steps`: all that a script has called
    for, sent by a script; the workers carry those out, and save the state after them."""

    incarnation: Count
    reason: Text
    training_steps: Count | None = None


class Declined(_ControlMessage, frozen=True, tag="declined"):
    """Process `pid` on `host` was to join, and does not: `reason` for people. From anyone; the script is told."""

    host: Name
    pid: int
    reason: Name


class Assigned(_ControlMessage, frozen=True, tag="assigned"):
    """The worker is number `index` of the plan, under `incarnation`, and begins at `step`: 0, or a complete checkpoint.

    Newer snapshots of its stages belong to another incarnation and must be ignored.
    `keep` is sent to a running worker after the broker has lost its records: it continues where it is, under this
    incarnation from now on, and repeats the losses of its steps.
    No worker whose incarnation is `since` or older still runs: the run was restarted as a whole, perhaps further back
    than those were, and their statements about their queues must be ignored.
    `secret` is the incarnation's, for the worker's seals; empty if the worker has it. `queue_key` is for the seals of
    its queues' requests. `length` is the run's, if the broker knows it. `orders` and `closed`: see `ScheduleOrders`.
    """

    run: RunId
    index: Count
    incarnation: Count
    step: Count
    keep: bool = False
    since: Count = 0
    secret: Secret = b""
    queue_key: Secret = b""
    length: RunLength | None = None
    orders: tuple[ScheduleOrder, ...] = ()
    closed: Count | None = None

    def __repr__(self) -> str:
        """Without the secrets."""
        shown = (f"{name}={getattr(self, name)!r}" for name in ("run", "index", "incarnation", "step", "keep", "since"))
        return f"Assigned({', '.join(shown)})"


class Standby(_ControlMessage, frozen=True, tag="standby"):
    """No place is free yet: stay, and repeat Hello about once a second. `reason` is for people.

    With `run`, the id of the run, the broker has lost its records and needs `Hello.snapshots`. With `step` too, the run
    is resumed, and the broker needs `Hello.inspection` of that step.
    """

    reason: str
    run: RunId | None = None
    step: Count = 0


class Peers(_ControlMessage, frozen=True, tag="peers"):
    """Addresses of every worker's queues: index -> (incarnation, endpoint). Sent once all have joined, then on
    changes."""

    workers: dict[int, tuple[int, str]]


class Confirmed(_ControlMessage, frozen=True, tag="heard"):
    """The broker has stored the worker's reports up to this number."""

    number: Count


class Trim(_ControlMessage, frozen=True, tag="trim"):
    """Checkpoint `step` is complete: queues may be trimmed to it, older snapshots deleted, but for those of step
    `best`, of the best round of evaluation before `step`.

    In a run without snapshots: every stage has finished the steps before `step`.
    """

    step: int
    best: Count | None = None


class ScheduleOrders(_ControlMessage, frozen=True, tag="orders"):
    """By which schedules the run's steps go, of a run that chooses them: all `orders` so far. Another one is to come if
    there is a step `closed`: begin neither that one nor a later one before it has come, and report which step is the
    first that is closed. Repeated until every worker's reports show it."""

    orders: tuple[ScheduleOrder, ...]
    closed: Count | None = None


class Stop(_ControlMessage, frozen=True, tag="stop"):
    """End the run: `reason` for people, `code` the exit code to end with.

    `at_step_end`: finish the steps before `step` first, the same for all, and write a snapshot of it; a worker that is
    past it, or cannot finish in time, leaves without. With `at_step_end` and no `step`, sent to the script alone: make
    no more calls, and report how many training steps were called for; the Stop with the step follows.
    """

    reason: str
    code: int
    at_step_end: bool = False
    step: Count | None = None


class Refused(_ControlMessage, frozen=True, tag="refused"):
    """The broker refuses: `reason` says why, and what would work. `code` is the exit code to end with."""

    reason: str
    code: int


class Ask(_ControlMessage, frozen=True, tag="ask"):
    """A command's query: `what` is "status", "queues", "story" or "why", `of` its parameters."""

    what: str
    of: dict[str, str] = {}


class StopRun(_ControlMessage, frozen=True, tag="stop-run"):
    """The supervisor, or a command, interrupts the run; the broker knows with which exit code that ends.

    With `over` it only says that no more queries will come after the run's end, so that the broker may exit.
    """

    reason: Text
    at_step_end: bool = False
    over: bool = False


class Exited(_ControlMessage, frozen=True, tag="exited"):
    """The process of worker `index` ended; `status` as `subprocess` gives it (negative: a signal killed it).

    `result` is the exit code that its command returned, None if it ended without returning one: then `status` says
    nothing about the run. `detail` continues a sentence about such an end: "in forward (model.py, line 12)".
    Of the script, which is no child of a process of the run, only a negative `status` is known; else it is 0.
    """

    index: Count
    pid: int
    status: int
    result: int | None = None
    detail: str = ""


class Answer(_ControlMessage, frozen=True, tag="answer"):
    """JSON-ready facts, under a versioned schema name such as `status/1`."""

    schema: str
    facts: dict[str, object]


ToBroker = Hello | Report | Failed | Finished | Goodbye | Declined | Exited | Ask | StopRun
FromBroker = Assigned | Standby | Peers | Confirmed | Trim | ScheduleOrders | Stop | Refused | Answer
