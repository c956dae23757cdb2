"""Why the run waits, in words: the chain of who waits for whom down to its root, and what can be done about it.

"stage 2 waits for the gradient of step 118 microbatch 5 from stage 3 (worker w3, life 2), which took it 14 s ago
and has made no progress since; it is in layers.30.mlp"
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stageline.broker.membership.failure_detector import exit_in_words
from stageline.broker.membership.member import Member, place_in_words, stages_in_words

from .wait_graph import ClusterView, RootCause, WaitChain, WaitEdge, follow, held, longest, silence

_MESSAGES = {"forward": "the activation", "backward": "the gradient", "target": "the targets"}


@dataclass(frozen=True, slots=True)
class Prospect:
    """What becomes of a worker that does not get on. Times in seconds."""

    lease: float
    patience: float  # for somebody to take an empty place
    replaces: bool  # whether lost workers are replaced


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`text` says why, `action` what can be done."""

    chain: WaitChain
    text: str
    action: str


def diagnose(scene: ClusterView, prospect: Prospect, worker: int | None = None) -> Diagnosis:
    """Why the run waits, or why worker `worker` does."""
    chain = longest(scene) if worker is None else follow(scene, worker)
    return Diagnosis(chain, chain_in_words(scene, chain), _action(scene, chain, prospect))


def chain_in_words(scene: ClusterView, chain: WaitChain) -> str:
    """One sentence, without a full stop."""
    if not chain.lacks:
        return f"{_subject(scene, chain)} {_predicate(scene, chain)}"
    edges = [_edge(scene, chain.lacks[:number]) for number in range(1, len(chain.lacks) + 1)]
    root = "" if chain.cause is RootCause.SOURCE else f", which {_predicate(scene, chain)}"
    return "".join(edges) + root


def _edge(scene: ClusterView, lacks: Sequence[WaitEdge]) -> str:
    """The last of `lacks`, as it follows the others."""
    lack = lacks[-1]
    whom = _whom(scene, lack)
    what = f"room in {lack.queue} until {whom} gets on" if lack.room else f"{_message(lack)} from {whom}"
    if len(lacks) == 1:
        return f"stage {lack.stage} waits for {what}"
    if lacks[-2].source == lack.stage:
        return f", which waits for {what}"
    return f", whose worker first runs {lack.action} of stage {lack.stage}, which waits for {what}"


def _message(lack: WaitEdge) -> str:
    return f"{_MESSAGES[lack.flow]} of step {lack.step} microbatch {lack.microbatch}"


def _whom(scene: ClusterView, lack: WaitEdge) -> str:
    if lack.source is None:
        return "the data source"
    return f"stage {lack.source} ({_holder(scene, scene.schedule.owner(lack.source))})"


def _holder(scene: ClusterView, index: int) -> str:
    member = scene.members.get(index)
    if member is None:
        return f"worker {index}"
    name = member.name if member.name.startswith("worker") else f"worker {member.name}"
    return f"{name}, life {member.life}"


def _subject(scene: ClusterView, chain: WaitChain) -> str:
    if chain.index is None:
        return "the broker"
    missing = [index for index in range(len(scene.schedule.placement)) if index not in scene.members]
    if chain.cause is RootCause.MISSING and len(missing) > 1:
        return " and ".join(place_in_words(index, scene.schedule.placement[index]) for index in missing)
    return f"{stages_in_words(scene.schedule.placement[chain.index])} ({_holder(scene, chain.index)})"


def _predicate(scene: ClusterView, chain: WaitChain) -> str:
    """What is so with the root, continuing a sentence about it."""
    if chain.cause is RootCause.BROKER:
        return f"has heard nobody for {min(silence(scene, each) for each in scene.members.values()):.0f} s"
    if chain.index is None:
        return ""
    if chain.cause is RootCause.CIRCLE:
        return "closes the circle" if not chain.harmless else "has just begun to wait itself"
    member = scene.members.get(chain.index)
    return _missing(scene, chain.index) if member is None else _of_worker(scene, chain, member)


def _of_worker(scene: ClusterView, chain: WaitChain, member: Member) -> str:
    match chain.cause:
        case RootCause.ON_ITS_WAY:
            return f"has put it; it has not arrived for {chain.lacks[-1].seconds:.1f} s"
        case RootCause.SERVER if member.report is not None:
            seconds = member.report.troubled + max(0.0, scene.now - member.heard)
            return f"waits for the server of its queues, for {seconds:.0f} s now: {member.report.trouble.rstrip('.')}"
        case RootCause.STARTING if not member.sender:
            since = max(0.0, scene.now - member.heard)
            return f"had a worker before the broker was started again, {since:.1f} s ago, that has not spoken since"
        case RootCause.STARTING:
            return f"has a worker that has not begun yet, {max(0.0, scene.now - member.heard):.1f} s after it came"
        case RootCause.SILENT:
            how = (
                exit_in_words(member.exited[1])
                if member.exited
                else f"was not heard for {silence(scene, member):.1f} s"
            )
            return f"{how}; {_last_words(member)}"
        case RootCause.STUCK:
            return f"{_doing(scene, chain, member)} and has made no progress since{_layer(member)}"
        case RootCause.COMPUTING:
            return f"{_doing(scene, chain, member)}{_layer(member)}"
        case _:
            return _last_words(member)


def _missing(scene: ClusterView, index: int) -> str:
    gap = scene.gaps.get(index)
    if gap is None:
        return "did not join yet"
    return f"was lost {scene.now - gap.since:.0f} s ago and has not been replaced: {gap.why}"


def _doing(scene: ClusterView, chain: WaitChain, member: Member) -> str:
    seconds = max(0.0, scene.now - member.changed)
    if chain.last is not None and held(scene, chain.last) is not None:
        return f"took it {seconds:.0f} s ago"
    return f"began {member.report.now if member.report else 'nothing'} {seconds:.0f} s ago"


def _layer(member: Member) -> str:
    layer = member.report.layer if member.report else ""
    return f"; it is in {layer}" if layer else ""


def _last_words(member: Member) -> str:
    if member.report is None:
        return "it has said nothing yet"
    where = f", in {member.report.layer}" if member.report.layer else ""
    return f'it said last: "{member.report.now}"{where}'


def _action(scene: ClusterView, chain: WaitChain, prospect: Prospect) -> str:
    member = scene.members.get(chain.index) if chain.index is not None else None
    if chain.harmless:
        return "nothing: the run gets on"
    match chain.cause:
        case RootCause.MISSING:
            return _start(scene, chain, prospect)
        case RootCause.STUCK | RootCause.SILENT if member is not None:
            return f"look at process {member.pid} on {member.host}; {_verdict(scene, chain, member, prospect)}"
        case RootCause.STARTING if member is not None and not member.sender:
            return "nothing yet: it speaks if it is still there, and counts as lost otherwise"
        case RootCause.STARTING:
            return "nothing yet: it loads its model"
        case RootCause.ON_ITS_WAY:
            return "look at the network between the two workers, and at `stageline queue ls`"
        case RootCause.SERVER if member is not None:
            return (
                f"start that server, or see that {member.host} can reach it and that it has room: once it answers, the "
                "run goes on by itself"
            )
        case RootCause.SOURCE:
            return "look at what makes the batches"
        case RootCause.CIRCLE if any(lack.room for lack in chain.lacks):
            return (
                "room comes with the end of a step, or where snapshots are written with the next checkpoint: see that "
                "the disks take them, and resume the run with a larger queues.retain_bytes"
            )
        case RootCause.CIRCLE:
            return "this cannot be with a checked schedule: report it, and start the run again"
        case RootCause.BROKER:
            return "look at the broker's machine and its network: the workers train on without it"
        case _:
            return "nothing: the run gets on"


def _start(scene: ClusterView, chain: WaitChain, prospect: Prospect) -> str:
    gap = scene.gaps.get(chain.index) if chain.index is not None else None
    start = f"start `stageline worker CONFIG --broker URL --index {chain.index}`"
    if gap is None:
        return start
    left = max(0.0, prospect.patience - (scene.now - gap.awaited))
    return f"{start}; if nobody comes within {left:.0f} s, the run is given up"


def _verdict(scene: ClusterView, chain: WaitChain, member: Member, prospect: Prospect) -> str:
    since = member.heard if chain.cause is RootCause.SILENT else member.progressed
    left = max(0.0, prospect.lease - (scene.now - since))
    what = "another takes its place" if prospect.replaces else "the run ends"
    return f"in {left:.0f} s it counts as lost and {what} (recovery.lease is {prospect.lease:g} s)"
