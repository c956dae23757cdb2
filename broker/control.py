"""What workers, the broker and the commands say to each other: msgpack, one tagged Struct per sentence.

    worker  -> broker   Hello, Report, Failed, Finished, Goodbye
    broker  -> worker   Assigned, Peers, Trim, Stop, Refused
    command -> broker   Ask, StopRun
    broker  -> command  Answer, Refused

Data never takes this way; a broker that is away costs nothing but news.
"""

import msgspec

CONTROL_VERSION = 1


class _Sentence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    pass


class Hello(_Sentence, tag="hello"):
    """A worker offers itself. `plan` is `Plan.digest()`; `endpoint` is where its queues can be reached ("" if nowhere).

    `claim` is the worker index it wants (None: any that is free). `incarnation` is 0 at first; a worker that speaks to
    a restarted broker names the incarnation it still holds.
    """

    version: int
    plan: str
    name: str
    host: str
    pid: int
    endpoint: str
    claim: int | None = None
    incarnation: int = 0


class StepRecord(_Sentence, tag="step"):
    """One step a stage has finished. `times` holds, for each of the worker's actions of that stage in schedule order,
    its start and end as seconds since the epoch (float64, little-endian, 16 bytes an action).

    `loss` is the step's loss on the last stage, None elsewhere and for a step without rows.
    """

    stage: int
    step: int
    times: bytes
    loss: float | None = None


class Event(_Sentence, tag="event"):
    """One microbatch entered a state at a stage (`ledger.py: State`), `at` seconds since the epoch."""

    stage: int
    step: int
    microbatch: int
    state: str
    at: float


class Report(_Sentence, tag="report"):
    """What a worker's compute loop has done since the last report. Sent even when nothing happened: a heartbeat.

    `now` says in words what the compute loop does at the moment ("2F3 of step 7", "waits for forward-1 message 40"),
    `since` when it began to, `actions` how many actions it has completed: no growth means no progress.
    `idle` is the share of the time since the last report in which the compute loop waited, 0 to 1.
    """

    incarnation: int
    actions: int
    now: str
    since: float
    idle: float
    steps: list[StepRecord] = []
    events: list[Event] = []
    retained_bytes: int = 0
    queues: dict[str, list[float]] = {}  # queue -> ready, in flight, retained, bytes, oldest age in seconds
    metrics: dict[str, float] = {}


class Failed(_Sentence, tag="failed"):
    """The worker's run is over: `reason` for people, `code` the exit code it leaves with."""

    incarnation: int
    reason: str
    code: int


class Finished(_Sentence, tag="finished"):
    """All steps are done. `digests` maps each state_dict name of the worker's stages to [dtype, shape, sha256 hex]."""

    incarnation: int
    digests: dict[str, tuple[str, tuple[int, ...], str]]


class Goodbye(_Sentence, tag="goodbye"):
    """The worker leaves on purpose (`reason`), with nothing unreported."""

    incarnation: int
    reason: str


class Assigned(_Sentence, tag="assigned"):
    """The worker is number `index` of the plan, under `incarnation`, and begins at `step`."""

    run: str
    index: int
    incarnation: int
    step: int


class Peers(_Sentence, tag="peers"):
    """Where every worker's queues are: index -> (incarnation, endpoint). Sent when all are there, and on every change."""

    workers: dict[int, tuple[int, str]]


class Trim(_Sentence, tag="trim"):
    """No stage needs a message from before `step` any more."""

    step: int


class Stop(_Sentence, tag="stop"):
    """End the run: `reason` for people, `code` the exit code to leave with. `at_step_end`: finish the step first."""

    reason: str
    code: int
    at_step_end: bool = False


class Refused(_Sentence, tag="refused"):
    """The broker will not: `reason` says what, and the way out. `code` is the exit code to leave with."""

    reason: str
    code: int


class Ask(_Sentence, tag="ask"):
    """A command's question: "status", "queues", "story"... with `of` saying of what."""

    what: str
    of: dict[str, str] = {}


class StopRun(_Sentence, tag="stop-run"):
    """Someone with the right to (the supervisor, a command) ends the run."""

    reason: str
    code: int
    at_step_end: bool = False


class Answer(_Sentence, tag="answer"):
    """JSON-ready facts, under a versioned schema name such as `status/1`."""

    schema: str
    facts: dict[str, object]


FromWorker = Hello | Report | Failed | Finished | Goodbye | Ask | StopRun
FromBroker = Assigned | Peers | Trim | Stop | Refused | Answer

encode = msgspec.msgpack.Encoder().encode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_from_broker = msgspec.msgpack.Decoder(FromBroker).decode
