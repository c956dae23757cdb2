"""Facts of the broker's answers about a run and its pace, as the published schemas of `status`, `why` and `timetable`.

A command prints such facts with `Envelope` around them. Times are in seconds since the epoch unless said otherwise,
durations and ages in seconds, sizes in bytes, shares from 0 to 1.
"""

from typing import Any

from msgspec import UNSET, UnsetType

from .answers import AnswerFacts
from .copies_answer import CopyFacts
from .history_answers import BubbleFact, RecoveryFacts
from .pauses import PauseFacts


class ActionFact(AnswerFacts, frozen=True, kw_only=True):
    """An action of a worker.

    Attributes:
        kind: Kind of the action: "F", "B", "I", "W", "U", or another letter.
        stage: Stage, or copy of a stage with replicas.
        start: Start; of a planned action, in seconds from the beginning of the step.
        end: End, likewise.
    """

    kind: str
    stage: int
    microbatch: int
    worker: int
    start: float
    end: float


class IdleFact(AnswerFacts, frozen=True, kw_only=True):
    """A stretch of time in which a worker computed nothing.

    Attributes:
        cause: Why: "schedule" while another stage computes what is waited for, "wire", "data", "disk", "script",
            "evaluation", "switching", "credit", "room", "paused", "offload" while activations come from files,
            or "loop" for the worker's own work between actions.
        stage: The stage whose message is waited for; None without one.
    """

    worker: int
    cause: str
    stage: int | None
    start: float
    end: float


class TimetableStep(AnswerFacts, frozen=True, kw_only=True):
    """A step of all workers.

    Attributes:
        schedule: Name of the schedule that was valid then.
        start: Start of its first action.
        seconds: Time from there to the end of its last action.
        actions: Actions as they ran.
        idle: Stretches without an action.
        planned: Actions as the schedule has them, with the measured times and nothing else to wait for.
    """

    step: int
    schedule: str
    start: float
    seconds: float
    actions: list[ActionFact]
    idle: list[IdleFact]
    planned: list[ActionFact]


class ClockFact(AnswerFacts, frozen=True, kw_only=True):
    """The clock of a worker's machine: the broker's was `ahead` by so many seconds, which the times contain."""

    worker: int
    host: str
    ahead: float


class TimetableFacts(AnswerFacts, frozen=True, kw_only=True):
    """Steps of a run, measured and planned.

    Attributes:
        step: The last of the steps; None without any.
        actions: Its actions.
        steps: All steps.
        clocks: Clocks of the workers.
    """

    run: str
    step: int | None
    actions: list[ActionFact]
    steps: list[TimetableStep]
    clocks: list[ClockFact]


class RemedyFact(AnswerFacts, frozen=True, kw_only=True):
    """Something to do: a step would then take `seconds`, by simulation, which is shorter by the share `gain`."""

    do: str
    seconds: float | None
    gain: float


class FindingFact(AnswerFacts, frozen=True, kw_only=True):
    """A cause that limits a run.

    Attributes:
        cause: "compute", "wire", "data", "disk", "window", "credit", "room", "script", "evaluation", "switching" or
            "offload".
        share: Share of a step by which it would be shorter without the cause.
        idle: Share of the workers' idle time that the cause takes.
        worker: Worker that is slow, of "compute".
        stages: Labels of its stages.
        hop: The stages between which messages are slow, of "wire".
        since: First step that it was so; None if it was in all known steps.
        began: Time at which all stages had ended the step before it; None if that is not known.
        figures: Measured figures.
        text: The finding in words.
        remedies: What to do.
    """

    cause: str
    share: float
    idle: float
    worker: int | None
    stages: list[str] | None
    hop: list[int] | None
    since: int | None
    began: float | None
    figures: dict[str, float]
    text: str
    remedies: list[RemedyFact]


class LimitingFact(AnswerFacts, frozen=True, kw_only=True):
    """The worker that computes most: it is `busy` for so large a share of a step."""

    worker: int
    stages: list[str]
    busy: float


class SlowFacts(AnswerFacts, frozen=True, kw_only=True):
    """Limits of a run that makes progress.

    Attributes:
        steps: First and last of the steps that were looked at.
        seconds: Time of a step.
        limiting: The worker that computes most.
        busy: By worker, the share of a step in which it computes.
        bubble: The bubble.
        findings: What limits the run, the largest first; empty if nothing does but its stages and their schedule.
        text: The same in words.
    """

    steps: list[int]
    seconds: float
    limiting: LimitingFact
    busy: list[float]
    bubble: BubbleFact
    findings: list[FindingFact]
    text: str


class WaitFact(AnswerFacts, frozen=True, kw_only=True):
    """A wait of worker `index` for a message, room or credit, in the chain of waits; see the reference of `why`."""

    index: int
    stage: int | None
    action: str
    queue: str
    flow: str
    per: str
    step: int
    microbatch: int
    seconds: float
    source: int | None
    on: int
    number: int
    room: bool


class WorkerFact(AnswerFacts, frozen=True, kw_only=True):
    """A worker, or the script, as its process last reported; without a process, only its place is known.

    Attributes:
        index: Place in the plan.
        labels: Labels of its stages, of a plan with replicas.
        standing: "present", "missing", "unheard", "finished", "left" or "lost".
        heard: Age of the last report.
        since: When it began what it does now.
        idle: Share of the recent time in which it had nothing to compute.
        layer: Place in the model where it computes.
        memory: Memory of the process; None if it has not told.
        clock: Seconds by which the broker's clock is ahead, and how far that may be wrong.
    """

    index: int
    stages: list[int]
    standing: str
    labels: list[str] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    host: str | UnsetType = UNSET
    pid: int | UnsetType = UNSET
    endpoint: str | UnsetType = UNSET
    incarnation: int | UnsetType = UNSET
    generation: int | UnsetType = UNSET
    heard: float | UnsetType = UNSET
    now: str | UnsetType = UNSET
    trouble: str | UnsetType = UNSET
    fault: str | UnsetType = UNSET
    since: float | UnsetType | None = UNSET
    idle: float | UnsetType | None = UNSET
    layer: str | UnsetType = UNSET
    actions: int | UnsetType = UNSET
    retained_bytes: int | UnsetType = UNSET
    memory: int | UnsetType | None = UNSET
    clock: list[float] | UnsetType | None = UNSET


class RootFact(AnswerFacts, frozen=True, kw_only=True):
    """The end of the chain of waits: its cause, and the worker where it ends."""

    cause: str
    worker: WorkerFact | None


class HeardFact(AnswerFacts, frozen=True, kw_only=True):
    """A worker whose report the answer is made of, and the age of that."""

    worker: int
    name: str
    heard: float


class WhyFacts(AnswerFacts, frozen=True, kw_only=True):
    """Why a run waits, or ended, and what limits it.

    Attributes:
        slow: What limits a run that makes progress, or did; None if it waits, or too few steps are known.
        recovery: Time that such a run lost to losses, restarts and stalls; None if none is known.
        age: Age of `slow` and `recovery`: they are given again for a while if they took long to compute.
        text: What it waits for, or why it ended.
        chain: The waits, from the worker that waits to the cause.
        root: The cause.
        reports: Ages of the reports that the answer is made of.
        action: What to do.
    """

    run: str
    phase: str
    slow: SlowFacts | None
    recovery: RecoveryFacts | UnsetType | None = UNSET
    age: float | UnsetType = UNSET
    text: str
    chain: list[WaitFact]
    root: RootFact | None
    reports: list[HeardFact]
    action: str


class PlanFact(AnswerFacts, frozen=True, kw_only=True):
    """The plan of a run, as its broker knows it; `placement` has the stages of each worker."""

    digest: str
    schedule: str
    mode: str
    microbatches: int
    stages: int
    placement: list[list[int]]
    lease: float


class LossFact(AnswerFacts, frozen=True, kw_only=True):
    """The loss of a step; None for a step without rows, or one that is no finite number."""

    step: int
    loss: float | None


class NormFact(AnswerFacts, frozen=True, kw_only=True):
    """The norm of a step's gradients."""

    step: int
    norm: float


class EvaluationFact(AnswerFacts, frozen=True, kw_only=True):
    """A round of evaluation after `step` steps; "nan", "inf" and "-inf" stand for numbers that JSON does not have."""

    step: int
    rows: int
    loss: float | str | None
    metrics: dict[str, float | str]


class BestFact(AnswerFacts, frozen=True, kw_only=True):
    """The best round of evaluation; `since` counts the newest rounds in a row that were not better."""

    step: int
    metric: str
    value: float
    since: int


class PaceFact(AnswerFacts, frozen=True, kw_only=True):
    """The pace of a run.

    Attributes:
        last_minute: Steps per second of the last minute; None if the run does not go on.
        best: Most steps per second over five seconds or more.
        left: Seconds until the end, at that pace.
        bubble: The bubble.
    """

    last_minute: float | None
    best: float | None
    left: float | None
    bubble: BubbleFact


class StatusFacts(AnswerFacts, frozen=True, kw_only=True):
    """The progress of a run, and what its workers do.

    Attributes:
        name: Name of the run in its plan.
        plan: The plan; None before it is known to work.
        orders: The schedules of a run that chooses them, with reasons; None for another run.
        phase: What the run does.
        missing: Places without a worker, while the run waits for them.
        script: The script that calls the workers; None for a run without one.
        reason: Why the run ended.
        code: Exit code of the run.
        saving: True while workers of a stopped run may still finish a step.
        paused: The pause of the run; None if it goes on.
        training_steps: Steps that the run trains; None if a script decides.
        finished: By stage, the steps that it has finished.
        finished_floor: Steps that every stage has finished.
        losses: Kept losses by step.
        metrics: Metrics of the newest round of evaluation.
        checkpoint: Step of the newest complete checkpoint; None in a run without snapshots.
        copies: Copies of snapshots, by stage; none in a run without them.
        listening: True while a broker that was started again waits for the workers.
        recollecting: True while a broker without records asks the workers how far the run is.
        damaged: Damaged snapshots.
        restarts: Workers that were replaced.
        recovering: Places whose workers are being replaced.
        fault: What the broker cannot do for now.
        declined: Processes that were to join and could not.
        spares: Processes on standby.
        oddities: Counts of unexpected events.
        keys: Who may speak to the broker; None if only this machine does.
        result: The result of a finished run, as `train --json` prints it.
    """

    run: str
    name: str
    plan: PlanFact | None
    phase: str
    missing: list[int]
    script: WorkerFact | None
    reason: str | None
    code: int | None
    weights_sha256: str | None
    training_steps: int | None
    finished: list[int]
    finished_floor: int
    last_loss: LossFact | None
    finished_loss: LossFact | None
    losses: dict[str, float | None]
    metrics: dict[str, float | str]
    evaluations: list[EvaluationFact]
    last_evaluation: EvaluationFact | None
    best: BestFact | None
    stopped_early: str | None
    checkpoint: int | None
    listening: bool
    recollecting: bool
    damaged: list[str]
    restarts: int
    recovering: list[dict[str, Any]]
    spares: list[dict[str, Any]]
    oddities: dict[str, int]
    workers: list[WorkerFact]
    keys: dict[str, Any] | None
    orders: dict[str, Any] | UnsetType | None = UNSET
    saving: bool | UnsetType = UNSET
    paused: PauseFacts | UnsetType | None = UNSET
    gradient_norm: NormFact | UnsetType | None = UNSET
    fault: str | UnsetType = UNSET
    declined: list[dict[str, Any]] | UnsetType = UNSET
    pace: PaceFact | UnsetType = UNSET
    copies: list[CopyFacts] | UnsetType = UNSET
    result: dict[str, Any] | UnsetType = UNSET
