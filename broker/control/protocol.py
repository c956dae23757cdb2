"""What workers, the broker and the commands say to each other: one tagged Struct per sentence, CRC-32 and msgpack.

    worker  -> broker   Hello, Report, Failed, Finished, Goodbye
    broker  -> worker   Assigned, Standby, Peers, Heard, Trim, Stop, Refused
    command -> broker   Ask, StopRun; a supervisor also Exited
    broker  -> command  Answer, Refused

A worker repeats Hello until Assigned or Refused comes (also after Standby), a Report's `steps` and `snapshots` until
Heard comes, and Finished until Stop comes. All else is said once and may get lost. Data never takes this way; a broker
that is away costs nothing but news.
"""

from typing import Annotated, TypeVar

import msgspec

from stageline.broker.codec.checksum import checked, sealed
from stageline.broker.errors import BadMessage, ForeignMessage

CONTROL_VERSION = 3
WAITS = "waits"  # how `Report.now` begins while the compute loop has nothing to compute

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]  # stays exact in JSON and in a store
RunId = Annotated[str, msgspec.Meta(pattern=r"^\w[\w.-]*\Z", max_length=200)]  # a folder, and a part of Redis keys
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _ControlMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    pass


class Memory(_ControlMessage, frozen=True, tag="memory"):
    """What a worker knows of its run and a broker may have lost: the `run`, its own `index`, the newest checkpoint of
    which it was told that it is `complete`, and the first `step` that it has not finished at all its stages."""

    run: RunId
    index: Count
    complete: Count
    step: Count


class Inspection(_ControlMessage, frozen=True, tag="inspection"):
    """What a worker has found that has read its snapshots of `step`: those of `stages` can be used; what is wrong with
    the others, each named with its folder, is in `damages`."""

    step: Count
    stages: list[Count]
    damages: list[str]


class Hello(_ControlMessage, frozen=True, tag="hello"):
    """A worker offers itself. `plan` is `Plan.digest()`; `endpoint` is where its queues can be reached ("" if nowhere).

    `claim` is the worker index it wants (None: any that is free). `incarnation` is 0 at first. A worker that has been
    given one says hello with it: when it has an endpoint to name, and when it suspects that the broker was restarted.
    `settings` is `Plan.as_mapping()`, so that a refusal can say in what two plans differ. A `spare` waits for a
    worker to be lost: until the run has begun, and as long as no place is free, it is told to stand by.
    `memory` goes with an incarnation. `snapshots`: (stage, step) of what it finds whole on its disk of the run, of any
    stage; None as long as it has not looked, or has not been told which run it is. A worker that has been given a place
    and finds that the snapshots to begin with are gone says hello with its incarnation, with these, and no `memory`.
    `inspection` is the answer to `Standby.step`.
    """

    version: int
    plan: str
    name: str
    host: str
    pid: int
    endpoint: str
    claim: Count | None = None
    incarnation: Count = 0
    settings: dict[str, object] = {}
    spare: bool = False
    memory: Memory | None = None
    snapshots: list[tuple[Count, Count]] | None = None
    inspection: Inspection | None = None


class StepRecord(_ControlMessage, frozen=True, tag="step"):
    """One step a stage has finished. `times` holds, for each of the worker's actions of that stage in schedule order,
    its start and end as seconds since the epoch (float64, little-endian, 16 bytes an action).

    Empty `times`: not measured. `loss` is the step's on the last stage, None elsewhere and for a step without rows.
    """

    stage: Count
    step: Count
    times: bytes
    loss: float | None = None


class Event(_ControlMessage, frozen=True, tag="event"):
    """One microbatch entered a state at a stage (`ledger.py: State`), `at` seconds since the epoch."""

    stage: Count
    step: Count
    microbatch: Count
    state: str
    at: float


class Wait(_ControlMessage, frozen=True, tag="wait"):
    """The compute loop lacks message `number` of `queue` ("forward-1") for `action` ("1F3") of `step`, `since` then.

    With `room` it lacks the room to keep that message, which `action` has given: it is to be put into `queue`.
    """

    queue: str
    number: Count
    action: str
    step: Count
    since: float
    room: bool = False


class Report(_ControlMessage, frozen=True, tag="report"):
    """What a worker's compute loop has done since the last report. Sent even when nothing happened: a heartbeat.

    `number` counts the reports of an incarnation from 1 on; 0 for one that needs no confirmation. One with steps or
    snapshots says again all of them that were said before and are not confirmed.
    `now` says in words what the compute loop does at the moment ("2F3 of step 7", "waits for forward-1 message 40"),
    `since` when it began to, `actions` how many actions it has completed: no growth means no progress, unless `now`
    begins with `WAITS`. `idle` is the share of the time since the last report in which the compute loop waited, 0 to 1.
    `training_steps`: how many steps the run has before it evaluates, from whoever has loaded the data.
    `snapshots`: (stage, step) of each snapshot that is on disk and was read back: the state after `step` steps.
    `complete`: the newest checkpoint of which the worker was told. `waits`: what it lacks, empty while it computes;
    `layer`: where in the model it computes ("layers.30.mlp"). `trouble`: why messages do not move, for `troubled`
    seconds now, if the server of its queues is away or refuses them; "" if nothing keeps them.
    """

    incarnation: Count
    actions: Count
    now: str
    since: float
    idle: float
    steps: list[StepRecord] = []
    events: list[Event] = []
    retained_bytes: int = 0
    queues: dict[str, list[float]] = {}  # queue -> ready, in flight, retained, bytes, oldest age in seconds
    metrics: dict[str, float] = {}
    training_steps: Count | None = None
    number: Count = 0
    snapshots: list[tuple[Count, Count]] = []
    complete: Count = 0
    waits: list[Wait] = []
    layer: str = ""
    trouble: str = ""
    troubled: float = 0.0


class Failed(_ControlMessage, frozen=True, tag="failed"):
    """The worker's run is over: `reason` for people, `code` the exit code it leaves with."""

    incarnation: Count
    reason: str
    code: int


class Finished(_ControlMessage, frozen=True, tag="finished"):
    """All steps are done. `digests` maps each state_dict name of the worker's stages to [dtype, shape, sha256 hex].

    Its queues are still wanted: the worker serves them until Stop with code 0 says that everyone has finished.
    """

    incarnation: Count
    digests: dict[str, tuple[str, tuple[int, ...], Sha256]]


class Goodbye(_ControlMessage, frozen=True, tag="goodbye"):
    """The worker leaves on purpose (`reason`), with nothing unreported."""

    incarnation: Count
    reason: str


class Assigned(_ControlMessage, frozen=True, tag="assigned"):
    """The worker is number `index` of the plan, under `incarnation`, and begins at `step`: 0, or a complete checkpoint.

    Whatever newer snapshots of its stages there are belong to another incarnation and count for nothing.
    `keep` is said to a worker that is at work: it goes on where it is, under this incarnation from now on, and says
    again what it knows of its steps' losses. The broker has lost its records.
    No worker whose incarnation is `since` or older is at work: the run has begun again as a whole, perhaps further back
    than those were, and what they have said of their queues counts for nothing.
    """

    run: RunId
    index: Count
    incarnation: Count
    step: Count
    keep: bool = False
    since: Count = 0


class Standby(_ControlMessage, frozen=True, tag="standby"):
    """No place is free, and one may become so: stay, and say Hello about once a second. `reason` is for people.

    `run` is the run's id if the broker's records of it are lost: what it wants to know is `Hello.snapshots`. With a
    `step`, the run is resumed, and it wants to know whether the snapshots of that step can be used.
    """

    reason: str
    run: RunId | None = None
    step: Count = 0


class Peers(_ControlMessage, frozen=True, tag="peers"):
    """Where every worker's queues are: index -> (incarnation, endpoint). Said when all are there, and after changes."""

    workers: dict[int, tuple[int, str]]


class Heard(_ControlMessage, frozen=True, tag="heard"):
    """The broker has stored the worker's reports up to this number."""

    number: Count


class Trim(_ControlMessage, frozen=True, tag="trim"):
    """Checkpoint `step` is complete: queues may be trimmed to it, older snapshots deleted.

    In a run without snapshots: every stage has finished the steps before `step`.
    """

    step: int


class Stop(_ControlMessage, frozen=True, tag="stop"):
    """End the run: `reason` for people, `code` the exit code to leave with.

    `at_step_end`: finish the steps before `step` first, the same for all, and write a snapshot of it; one that hears
    of it too late, or cannot in time, leaves without.
    """

    reason: str
    code: int
    at_step_end: bool = False
    step: Count | None = None


class Refused(_ControlMessage, frozen=True, tag="refused"):
    """The broker will not: `reason` says what, and the way out. `code` is the exit code to leave with."""

    reason: str
    code: int


class Ask(_ControlMessage, frozen=True, tag="ask"):
    """A command's question: "status", "queues", "story"... with `of` saying of what."""

    what: str
    of: dict[str, str] = {}


class StopRun(_ControlMessage, frozen=True, tag="stop-run"):
    """Someone with the right to (the supervisor, a command) ends the run.

    Where there are snapshots, `code` 75 and 130 become what is true: 75 if there is a complete checkpoint, 130 if not.
    """

    reason: str
    code: int
    at_step_end: bool = False


class Exited(_ControlMessage, frozen=True, tag="exited"):
    """The process of worker `index` is gone; `status` as `subprocess` gives it (negative: a signal killed it)."""

    index: Count
    pid: int
    status: int


class Answer(_ControlMessage, frozen=True, tag="answer"):
    """JSON-ready facts, under a versioned schema name such as `status/1`."""

    schema: str
    facts: dict[str, object]


ToBroker = Hello | Report | Failed | Finished | Goodbye | Exited | Ask | StopRun
FromBroker = Assigned | Standby | Peers | Heard | Trim | Stop | Refused | Answer

_encode = msgspec.msgpack.Encoder().encode
_to_broker: "msgspec.msgpack.Decoder[ToBroker]" = msgspec.msgpack.Decoder(ToBroker)
_from_broker: "msgspec.msgpack.Decoder[FromBroker]" = msgspec.msgpack.Decoder(FromBroker)
_AnySentence = TypeVar("_AnySentence")


def encode(sentence: ToBroker | FromBroker) -> bytes:
    """The bytes that travel."""
    return sealed(_encode(sentence))


def decode_to_broker(words: bytes) -> ToBroker:
    """Raises `BadMessage` if the words are damaged, `ForeignMessage` if they are no sentence of this version."""
    return _decode(words, _to_broker)


def decode_from_broker(words: bytes) -> FromBroker:
    """Raises `BadMessage` if the words are damaged, `ForeignMessage` if they are no sentence of this version."""
    return _decode(words, _from_broker)


def _decode(words: bytes, decoder: "msgspec.msgpack.Decoder[_AnySentence]") -> _AnySentence:
    body = checked(words)
    if body is None:
        raise BadMessage("a sentence is damaged: its CRC-32 does not match")
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError that msgspec does not make its own
        raise ForeignMessage(f"this is not a sentence of control version {CONTROL_VERSION}: {error}") from error
