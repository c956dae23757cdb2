"""The reason why the run waits, as text: the chain of waiting workers down to its root, and what can be done about it.

"stage 2 waits for the gradient of step 118 microbatch 5 from stage 3 (worker w3, generation 2), which took it 14 s ago
and has made no progress since; it is in layers.30.mlp"
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from stageline.broker.ledger.ledger import Held, Ledger
from stageline.broker.ledger.losses import WorkerLoss, silence_limit
from stageline.broker.ledger.member import SCRIPT, Member, describe_exit, stages_label, worker_label
from stageline.pipeline.program import Per

from .wait_graph import (
    ClusterState,
    RootCause,
    WaitChain,
    WaitEdge,
    faults,
    follow,
    is_computed,
    longest_chain,
    silence,
)

_PROGRESS = "nothing: the run makes progress"
MEND = "make room on that disk, or raise the limit that is named: the run continues by itself"
_ACTIONS = {  # by the cause alone
    RootCause.STARTING: "wait: it is loading its model",
    RootCause.ON_ITS_WAY: "check the network between the two workers, and `stageline queue ls`",
    RootCause.RESOURCE: MEND,
    RootCause.CIRCLE: "a checked schedule cannot deadlock, so this is a bug: report it, and start the run again",
    RootCause.BROKER: "check the broker's machine and its network: the workers keep training without it",
}
_HARMLESS_ACTIONS = {RootCause.SCRIPT: "nothing, if the script's own code may take that long: see its output"}
_JOINTS = {RootCause.SCRIPT: f"; {SCRIPT} "}  # between a chain and what its root does
_CONTENTS = {  # of queues by their flow; other queues are named
    "forward": "the activation",
    "backward": "the gradient",
    "tied": "the gradient of shared parameters",
    "subtotal": "the gradient of shared parameters",
    "total": "the gradient of shared parameters",
    "sum": "the sum of the gradients",
    "norms": "the norms of gradients",
    "clip": "the norm of all gradients",
    "replayed": "the end",
    "evaluation": "the activation",
    "verdict": "the verdict",
    "call": "call",
    "loss": "the loss",
    "reply": "the reply",
}
_PLACES = {
    Per.MICROBATCH: "of step {edge.step} microbatch {edge.microbatch}",
    Per.STEP: "of step {edge.step}",
    Per.EVALUATED: "of evaluated batch {edge.step} microbatch {edge.microbatch}",
    Per.ROUND: "on round {edge.step} of evaluation",
    Per.CALL: "{edge.step}",
    Per.REPLY: "to call {edge.step}",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A finding about why the run waits: the `chain`, its `text` for people, and the `action` that can be taken."""

    chain: WaitChain
    text: str
    action: str


def diagnose(cluster: ClusterState, worker: int | None = None) -> Diagnosis:
    """Return why the run waits, or why the worker with index `worker` does."""
    chain = longest_chain(cluster) if worker is None else follow(cluster, worker)
    found = [(index, fault) for index, fault in faults(cluster) if worker in (None, index)]
    text, action = _text(cluster, chain), _action(cluster, chain)
    if not found or chain.cause is RootCause.RESOURCE:
        return Diagnosis(chain, text, action)
    lacking = "; ".join(f"{cluster.members[index].title} {fault}" for index, fault in found)
    if chain.harmless:
        return Diagnosis(chain, f"{lacking}. Training goes on meanwhile", MEND)
    return Diagnosis(chain, f"{text}. Besides, {lacking}", action)


def _text(cluster: ClusterState, chain: WaitChain) -> str:
    """Return the chain as text, without a full stop."""
    if not chain.edges:
        return f"{_subject(cluster, chain)} {_predicate(cluster, chain)}"
    edges = "".join(_edge(cluster, chain.edges[:number]) for number in range(1, len(chain.edges) + 1))
    return f"{edges}{_JOINTS.get(chain.cause, ', which ')}{_predicate(cluster, chain)}"


def _edge(cluster: ClusterState, edges: Sequence[WaitEdge]) -> str:
    """Return the last of `edges` as text that follows the text of the others."""
    edge = edges[-1]
    source = _place(cluster, edge.on, (edge.source,) if edge.source is not None else cluster.placement[edge.on])
    what = f"room in {edge.queue} until {source} makes progress" if edge.room else f"{_message(edge)} from {source}"
    if len(edges) == 1 and edge.stage is None:
        return f"{worker_label(edge.index, _labels(cluster, edge.index))} waits for {what}"
    if len(edges) == 1:
        return f"stage {_label(cluster, edge.stage)} waits for {what}"
    if edge.stage is None or edges[-2].source in (edge.stage, None):
        return f", which waits for {what}"
    return f", whose worker first runs {edge.action} of stage {_label(cluster, edge.stage)}, which waits for {what}"


def _message(edge: WaitEdge) -> str:
    """Return the missing message as text; the loss of a step is called that of its call."""
    place = "of call {edge.step}" if edge.per is Per.STEP and edge.source is None else _PLACES[edge.per]
    return f"{_CONTENTS.get(edge.flow, f'the message of {edge.queue}')} {place.format(edge=edge)}"


def _place(cluster: ClusterState, index: int, stages: Sequence[int]) -> str:
    """Return a place as text: "stage 3 (worker w3, generation 2)", or "the script"."""
    if not stages:
        return SCRIPT
    return f"{stages_label([_label(cluster, stage) for stage in stages])} ({_holder(cluster, index)})"


def _labels(cluster: ClusterState, index: int) -> list[str]:
    return [_label(cluster, stage) for stage in cluster.placement[index]]


def _label(cluster: ClusterState, stage: int | None) -> str:
    return "" if stage is None else cluster.schedule.label(stage)


def _holder(cluster: ClusterState, index: int) -> str:
    member = cluster.members.get(index)
    if member is None:
        return f"worker {index}"
    name = member.name if member.name.startswith("worker") else f"worker {member.name}"
    return f"{name}, generation {member.generation}"


def _subject(cluster: ClusterState, chain: WaitChain) -> str:
    if chain.index is None:
        return "the broker"
    missing = [index for index in range(len(cluster.placement)) if index not in cluster.members]
    if chain.cause is RootCause.MISSING and len(missing) > 1:
        return " and ".join(worker_label(index, _labels(cluster, index)) for index in missing)
    return _place(cluster, chain.index, cluster.placement[chain.index])


def _predicate(cluster: ClusterState, chain: WaitChain) -> str:
    """Return the root's activity, continuing a sentence whose subject is the root."""
    if chain.cause is RootCause.BROKER:
        return f"has received no report for {min(silence(cluster, each) for each in cluster.members.values()):.0f} s"
    if chain.index is None:
        return ""
    if chain.cause is RootCause.CIRCLE:
        return "completes the cycle" if not chain.harmless else "has only just begun to wait"
    member = cluster.members.get(chain.index)
    return _missing(cluster, chain.index) if member is None else _of_worker(cluster, chain, member)


def _of_worker(cluster: ClusterState, chain: WaitChain, member: Member) -> str:
    match chain.cause:
        case RootCause.ON_ITS_WAY:
            return f"has put it; it has not arrived for {chain.edges[-1].seconds:.1f} s"
        case RootCause.SERVER if member.report is not None:
            seconds = member.report.troubled + silence(cluster, member)
            return f"waits for the server of its queues, for {seconds:.0f} s now: {member.report.trouble.rstrip('.')}"
        case RootCause.RESOURCE if member.report is not None:
            return f"waits: {member.title} {member.report.fault}"
        case RootCause.STARTING:
            return member.starting(silence(cluster, member))
        case RootCause.SILENT if member.exited is not None:
            return f"{describe_exit(member.exited[1])}; {_last_report(member, silence(cluster, member))}"
        case RootCause.SILENT:
            return f"was silent for {silence(cluster, member):.1f} s; {_last_report(member)}"
        case RootCause.STUCK:
            return f"{_doing(cluster, chain, member)} and has made no progress since{_layer(member)}"
        case RootCause.SCRIPT if member.report is not None:
            seconds = max(0.0, cluster.now - member.activity_since)
            return f"{member.report.now}, for {seconds:.0f} s now"
        case RootCause.COMPUTING:
            return f"{_doing(cluster, chain, member)}{_layer(member)}"
        case _:
            return _last_report(member, silence(cluster, member))


def _missing(cluster: ClusterState, index: int) -> str:
    replacement = cluster.replacements.get(index)
    if replacement is None:
        return "did not join yet"
    return f"was lost {cluster.now - replacement.since:.0f} s ago and has not been replaced: {replacement.why}"


def _doing(cluster: ClusterState, chain: WaitChain, member: Member) -> str:
    seconds = max(0.0, cluster.now - member.activity_since)
    if chain.edges and is_computed(cluster, chain.edges[-1]):
        return f"took it {seconds:.0f} s ago"
    return f"began {member.report.now if member.report else 'nothing'} {seconds:.0f} s ago"


def _layer(member: Member) -> str:
    layer = member.report.layer if member.report else ""
    return f"; it is in {layer}" if layer else ""


def _last_report(member: Member, age: float | None = None) -> str:
    """Return the last report of `member` as text, with its `age` in seconds unless that was told before."""
    if member.report is None:
        return "it has sent no report yet"
    where = f", in {member.report.layer}" if member.report.layer else ""
    ago = "" if age is None else f", {age:.1f} s ago"
    return f'it last reported{ago}: "{member.report.now}"{where}'


def _action(cluster: ClusterState, chain: WaitChain) -> str:
    member = cluster.members.get(chain.index) if chain.index is not None else None
    if chain.harmless:
        return _HARMLESS_ACTIONS.get(chain.cause, _PROGRESS)
    match chain.cause:
        case RootCause.MISSING if chain.index is not None:
            return _start(cluster, chain.index)
        case RootCause.STUCK | RootCause.SILENT if member is not None:
            return f"check process {member.pid} on {member.host}; {_verdict(cluster, chain, member)}"
        case RootCause.STARTING if member is not None and not member.sender:
            _, limit = silence_limit(member, cluster.leases)
            left = max(0.0, limit - silence(cluster, member))
            return f"wait: it reconnects, or is declared lost in {left:.0f} s"
        case RootCause.SERVER if member is not None:
            return (
                f"start that server, make sure that {member.host} can reach it and that it has memory left, or delete "
                "the key that is named: the run continues once it answers"
            )
        case RootCause.CIRCLE if any(edge.room for edge in chain.edges):
            return (
                "room is freed at the end of a step, or with snapshots at the next checkpoint: make sure that they "
                "can be written, and resume the run with a larger queues.retain_bytes"
            )
        case cause:
            return _ACTIONS.get(cause, _PROGRESS)


def _start(cluster: ClusterState, index: int) -> str:
    place, replacement = cluster.places[index], cluster.replacements.get(index)
    if replacement is None:
        return place.first
    left = max(0.0, place.patience - (cluster.now - replacement.awaited))
    return f"{place.again}; the run {place.ends} if none joins within {left:.0f} s"


def _verdict(cluster: ClusterState, chain: WaitChain, member: Member) -> str:
    key, limit, since = "recovery.action", cluster.leases.action, member.last_progress
    if chain.cause is RootCause.SILENT:
        (key, limit), since = silence_limit(member, cluster.leases), member.last_seen
    left = max(0.0, limit - (cluster.now - since))
    what = "it is replaced" if cluster.places[member.index].replaced else "the run ends"
    return f"it is declared lost in {left:.0f} s, and {what} ({key} is {limit:g} s)"


_OUT_OF_MEMORY = " (if not by you, then by the kernel's out-of-memory killer: see dmesg)"


def failure_report(loss: WorkerLoss, ledger: Ledger, now: float) -> str:
    """Return the work that a lost worker held when it was lost, without a full stop.

    Args:
        loss: The loss.
        ledger: The ledger, before its stages go back.
        now: Seconds since the epoch; the time of the loss if its process's end is not known.
    """
    member = loss.member
    end = member.exited[0] if member.exited is not None else now
    return f"{member.gone} {how_lost(loss)}. It {_held(member, ledger.held(member.stages), end)}"


def how_lost(loss: WorkerLoss) -> str:
    """Return the cause of the loss, continuing a sentence about the worker: "was killed by SIGKILL (...)"."""
    exit = loss.member.exited[1] if loss.member.exited is not None else None
    killed = exit is not None and (exit.status, exit.detail) == (-signal.SIGKILL, "")
    return f"{loss.why}{_OUT_OF_MEMORY if killed else ''}"


def _held(member: Member, held: list[Held], now: float) -> str:
    computed = next((each for each in held if each.computed), None)
    stashed = [each for each in held if not each.computed]
    doing = f"held {computed}{_since(computed.entry.since, now)}" if computed else _last_known(member, now)
    return f"{doing}; {_stash(stashed)}" if stashed else doing


def _last_known(member: Member, now: float) -> str:
    if member.report is None:
        return "had sent no report" if member.sender else "had sent no report to this broker"
    return f'last reported: "{member.report.now}"{_since(member.report.since, now)}'


def _stash(stashed: list[Held]) -> str:
    if len(stashed) == 1:
        return str(stashed[0])
    return f"{len(stashed)} microbatches were stashed there, the first being {stashed[0]}"


def _since(then: float | None, now: float) -> str:
    return "" if then is None else f" since {max(0.0, now - then):.1f} s"
