"""Facts of the broker's answer for monitoring systems: numbers, and the names that tell them apart.

Nothing else is in it: no text that a worker or a user's code has written, no address, no host. Durations and ages are
in seconds, sizes in bytes, shares from 0 to 1. None stands for what is not known. What is called a counter counts since
the broker began, and never becomes less.
"""

import msgspec


class _Measures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all measures."""


class QueueMeasures(_Measures, frozen=True, kw_only=True):
    """A queue.

    Attributes:
        put: Counter of messages put; a message that a replacement puts again counts again.
        taken: Counter of messages taken, likewise.
        put_bytes: Bytes of all messages that the producing process has put since it began, as are the next four.
        resent: Messages sent again.
        duplicates: Messages that came although they had arrived before.
        damaged: Messages that came damaged.
        lost: Times that a message was requested again.
        oldest: Age of the oldest retained message.
    """

    queue: str
    put: int | None = None
    taken: int | None = None
    put_bytes: int | None = None
    resent: int | None = None
    duplicates: int | None = None
    damaged: int | None = None
    lost: int | None = None
    ready: int | None = None
    in_flight: int | None = None
    retained: int | None = None
    bytes: int | None = None
    credit_used: int | None = None
    credit_limit: int | None = None
    oldest: float | None = None


class StageMeasures(_Measures, frozen=True, kw_only=True):
    """A stage, or a copy of a stage with replicas: counters of its steps and its seconds, those of waits by cause."""

    stage: str
    worker: int
    steps: int
    computed: float
    waited: dict[str, float]


class WorkerMeasures(_Measures, frozen=True, kw_only=True):
    """A worker's place.

    Attributes:
        present: True if a process has the place and is not lost.
        heard: Age of its last message.
        idle: Share of the recent time in which it had nothing to compute.
        actions: Actions that the process has completed.
        memory: Memory of the process.
        retained: Bytes of the messages that it keeps.
        faulty: True while its work fails for want of disk space, descriptors or memory, and is tried again.
        cut_off: True while the server of its queues moves no messages.
        ahead: Seconds by which the broker's clock is ahead.
        losses: Workers that were lost at this place, in the whole run.
    """

    worker: int
    present: bool
    losses: int
    heard: float | None = None
    idle: float | None = None
    actions: int | None = None
    memory: int | None = None
    retained: int | None = None
    faulty: bool = False
    cut_off: bool = False
    ahead: float | None = None


class RunMeasures(_Measures, frozen=True, kw_only=True):
    """A run.

    Attributes:
        name: Name of the run in its plan.
        phase: "waiting", "running", "finished" or "failed".
        paused: True while a person has paused the run.
        stalled: Seconds since the newest step was finished, a pause ended, or workers first reported to this broker;
            None unless the run goes on.
        began: When workers first reported to this broker, in seconds since the epoch; None before.
        steps: Counter of the steps that every stage has finished, each counted once.
        finished: Steps that every stage has finished, in the whole run.
        planned: Steps that the run trains; None if a script decides.
        bounds: Upper bounds of `took`, in seconds.
        took: Counter of steps by their time: one for each bound, and one for those above all.
        took_seconds: Counter of the time of those steps.
        best: Most steps per second over five seconds or more.
        bubble: Share of a step in which the busiest worker does not compute.
        planned_bubble: The same, as planned for equal stages.
        loss: Loss of the newest step that every stage has finished.
        gradient_norm: Norm of the newest step's gradients.
        evaluation: Values of the newest evaluation by name, as texts if they are not finite.
        checkpoint: Step of the newest complete checkpoint; None in a run without snapshots.
        checkpoint_at: Its time in seconds since the epoch; None if this broker has not seen one.
        faulty: True while the broker cannot write its records.
        recovering: Places whose workers are being replaced.
        recoveries: Counter of lost workers whose place is at work again.
        recovery_seconds: Counter of the seconds that this took.
        oddities: Counters of unexpected events, by kind.
    """

    run: str
    name: str
    schedule: str
    mode: str
    phase: str
    paused: bool
    stalled: float | None
    began: float | None
    steps: int
    finished: int
    planned: int | None
    bounds: list[float]
    took: list[int]
    took_seconds: float
    best: float | None
    bubble: float | None
    planned_bubble: float | None
    loss: float | None
    gradient_norm: float | None
    evaluation: dict[str, float | str]
    checkpoint: int | None
    checkpoint_at: float | None
    faulty: bool
    recovering: int
    recoveries: int
    recovery_seconds: float
    oddities: dict[str, int]
    workers: list[WorkerMeasures]
    stages: list[StageMeasures]
    queues: list[QueueMeasures]
