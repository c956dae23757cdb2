"""Answers to Hellos: places, standby or refusals; places of lost workers for those on standby; peers for all workers.

    Hello ──> assigned                           a place is free, or it is the worker's own
        ├───> standby ──(a place is free)──> assigned
        └───> refused

While it is not known at which step the stages start, all stand by: see `restart`.

Reads `config`, `checkpoints`, `ledger`, `orders`, `replacements`, `outcome`, `search.poll`. Writes `registry`,
`standby`, `length`, `declined`, `search.reconciliation`; through `restart.lose_records`, what follows.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import msgspec

from stageline.broker.control.messages import (
    CONTROL_VERSION,
    Assigned,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Refused,
    Report,
    Standby,
)
from stageline.broker.control.peek import Peeked
from stageline.broker.control.records import RunLength
from stageline.broker.ledger.losses import MOST
from stageline.broker.ledger.member import Member
from stageline.broker.ledger.recovery import is_gone
from stageline.broker.ledger.registry import Contact, may_take, process_key
from stageline.pipeline.addresses import Reach, transport_of
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import differences
from stageline.pipeline.program import Queue

from . import records, reports
from .place_keys import keys_of, note_key, other_parties, peers_of
from .restart import lose_records, waiting_for
from .run import RunConfig
from .script_place import place_of
from .state import Life, RunState

FromMember = Report | Finished | Failed | Goodbye | Peeked


def answer(run: RunState, hello: Hello, sender: bytes, now: float) -> None:
    """Answer a Hello with a place, an instruction to stand by, or the reason for a refusal.

    Args:
        run: The state; the answer is added to its `outgoing`.
        hello: The Hello.
        sender: Its sender's address on the channel.
        now: Seconds since the epoch.
    """
    known = process_key(hello) in run.standby or run.registry.current(hello.incarnation) is not None
    if run.outcome is not None and (hello.spare or known):  # the run's end is the end of this worker too
        run.outgoing.append((sender, run.outcome.stop_message))
        return
    lose_records(run, outdates_records(run, hello), now)
    newest = run.registry.incarnation
    match (
        _mismatch(run, hello)
        or _unreachable_queues(run, hello)
        or _other_queues(run, hello)
        or _decide(run, hello, sender, now)
    ):
        case Member() as member:
            assign(run, member, new=member.incarnation > newest)
        case Refused() as refused:
            run.events.count("refused", f"{hello.name}: {refused.reason}")
            run.note_declined(hello.host, hello.pid, refused.reason)
            run.outgoing.append((sender, refused))
        case Standby() as standby:
            if (predecessor := _predecessor(run, hello)) is not None:
                predecessor.contest()
            _stand_by(run, hello, sender, now)
            run.outgoing.append((sender, standby))


def answer_unknown(run: RunState, message: FromMember, sender: bytes) -> None:
    """Answer a message of an incarnation that is not current.

    A worker whose incarnation may only be missing in the records gets no answer before it sends Hello.
    """
    incarnation = message.incarnation
    renewed = run.registry.renewed(incarnation)
    unknown = run.config.restarts > 0 and run.registry.is_unknown(incarnation)
    if renewed is not None:
        renewed.move(sender)
        assign(run, renewed)
    elif run.lifecycle.state is not Life.RECONCILING and not unknown:
        run.events.count("fenced", f"{type(message).__name__} of incarnation {incarnation}, which is not current")
        reason = (
            f"incarnation {incarnation} is not current in run {run.id}: its stages belong to another "
            "process, or its run is over. Stop this worker"
        )
        run.outgoing.append((sender, Refused(reason, code=ExitCode.FAILED)))


def promote(run: RunState, now: float) -> None:
    """Give the empty places of a run that has begun to processes on standby."""
    run.standby.prune(now)
    for index in run.registry.missing if run.registry.begun else []:
        contact = run.standby.take(index, run.config.placement[index], length_known=run.length is not None)
        if contact is not None:
            claims = msgspec.structs.replace(contact.hello, claim=index)
            member = _register(run, claims, contact.sender, now, promoted=True)
            if isinstance(member, Member):
                assign(run, member, new=True)


def assign(run: RunState, member: Member, *, new: bool = False) -> None:
    """Send a worker its place, its peers and the newest checkpoint.

    Args:
        run: The state.
        member: The worker.
        new: True to log the place.
    """
    if new:
        who = f"{member.process}, generation {member.generation}, incarnation {member.incarnation}"
        run.events.infos.append(f"{member.label} is {who}")
    run.outgoing.append((member.sender, _place_of(run, member)))
    _inform(run, member)


def assign_again(run: RunState) -> None:
    """Send all workers that keep running their places, after the records were lost.

    Places are sent before all else: they bring the secrets that later messages are sealed with.
    """
    members = run.registry.reachable()
    run.outgoing.extend((member.sender, _place_of(run, member)) for member in members)
    for member in members:
        _inform(run, member)


def start_step(run: RunState, member: Member) -> int:
    """Return the step at which `member` is told to begin."""
    if run.config.snapshots:
        return member.start
    return min((run.ledger.finished[stage] for stage in member.stages), default=run.ledger.finished_floor)


def outdates_records(run: RunState, hello: Hello) -> str:
    """Return, for people, that a worker proves the records lost or stale; "" if it does not."""
    memory = hello.memory
    if not run.config.restarts or hello.plan != run.config.plan:
        return ""
    if memory is None:
        proven = has_lost_its_start(run, hello)
    else:
        ahead = reports.lacks_checkpoint(run, memory.complete, run.registry.current(hello.incarnation))
        proven = memory.run == run.id and (ahead or run.registry.is_unknown(hello.incarnation))
    return f"{hello.name} knows more of the run than the broker's records, which are lost or stale" if proven else ""


def has_lost_its_start(run: RunState, hello: Hello) -> bool:
    """Return True if a worker's start snapshot was deleted after a newer one; the records must then be stale."""
    member = run.registry.current(hello.incarnation)
    every = range(run.config.schedule.copies)  # the script begins where all stages do
    return member is not None and is_gone(member.start, member.stages or every, hello.snapshots or ())


def _stand_by(run: RunState, hello: Hello, sender: bytes, now: float) -> None:
    """Keep the sender of `hello` on standby, unless too many processes stand by already.

    The settings in the Hello are dropped, since they are the run's.
    """
    key, standby = process_key(hello), run.standby
    if key in standby or len(standby) < MOST + len(run.config.placement):
        standby[key] = Contact(msgspec.structs.replace(hello, settings={}), sender, now, _came(run, hello, now))


def _place_of(run: RunState, member: Member) -> Assigned:
    return Assigned(
        run.id,
        member.index,
        member.incarnation,
        step=start_step(run, member),
        keep=member.former > 0,
        since=run.registry.since,
        secret=b"" if member.aware else run.keys.of_incarnation(member.incarnation),
        keys=keys_of(run, member.index),
        length=run.length,
        orders=tuple(run.orders.orders),
        closed=run.orders.closed,
    )


def _inform(run: RunState, member: Member) -> None:
    """Tell the peers, to all workers if they have changed, and the newest checkpoint, which may have been missed."""
    if run.registry.complete:
        if run.registry.announces():
            run.events.infos.append(f"run {run.id}: all workers have joined")
            run.broadcast(peers_of(run))
        else:
            run.outgoing.append((member.sender, peers_of(run)))
    complete = run.checkpoints.announced if run.config.snapshots else 0
    if complete and (announcement := run.announcement(complete)) is not None:
        run.outgoing.append((member.sender, announcement))


def _decide(run: RunState, hello: Hello, sender: bytes, now: float) -> Member | Refused | Standby | None:
    """Return a place, a refusal, or standby; None for a running worker that has to wait for the broker's decision."""
    state = run.lifecycle.state
    if state is Life.RECONCILING:
        run.search.reconciliation.add(hello, sender, now)
        return None if hello.memory else Standby(waiting_for(run), run.id)
    if state is Life.RECONNECTING and not hello.incarnation:
        return Standby(waiting_for(run))
    if hello.spare and not run.registry.begun:
        return Standby("the run has not begun; a spare takes the place of a lost worker")
    possible = hello.claim is None or hello.claim < len(run.config.placement)
    if state is Life.CHOOSING_CHECKPOINT and possible and not hello.incarnation:
        return Standby(waiting_for(run), run.id, run.search.poll.step)
    if hello.needs_length and not hello.incarnation and run.length is None:
        return Standby("no worker that has the data has come yet, and only those know how many steps the run has")
    found = _register(run, hello, sender, now)
    if isinstance(found, Refused):
        silent = _silent_owners(run, hello, now)
        for owner in silent:  # one that loads its model is silent meanwhile
            if owner.introduced and owner.host == hello.host:
                owner.contest()
        if silent or _may_stand_by(run, hello):
            return Standby(found.reason)
    run.standby.pop(process_key(hello), None)
    return found


def _register(run: RunState, hello: Hello, sender: bytes, now: float, *, promoted: bool = False) -> Member | Refused:
    """Return a place, which is stored, or a refusal."""
    replaced = run.replacements.ever
    found = run.registry.register(hello, sender, now, run.checkpoints.complete, replaced, promoted=promoted)
    if isinstance(found, Member):
        run.learn_length(hello)
        rekeyed = note_key(run, found.index, hello.key, now)
        records.save(run)
        if rekeyed:  # the links to this place have other secrets
            others = [each for each in run.registry.reachable() if each is not found]
            run.outgoing.extend((each.sender, _place_of(run, each)) for each in others)
    return found


def _may_stand_by(run: RunState, hello: Hello) -> bool:
    """Return True if a worker for which there is no place may stand by until one becomes free.

    A spare may. So may a worker that was restarted before its loss was noticed, or after its place was given away, or
    while its place's owner has not reconnected to this broker. Two that claim one place from the beginning may not:
    that is a user's mistake. Nor may another script while there is one, which may run for days.
    """
    if not run.config.restarts or hello.incarnation:
        return False
    given_away = hello.claim is not None and run.replacements.generation(hello.claim) > 1
    owners = run.registry.members.values()
    unconfirmed = any(not owner.sender for owner in owners if may_take(hello.claim, owner.index, owner.stages))
    restarted = place_of(run, hello.claim).may_be_restarted(_predecessor(run, hello))
    return hello.spare or given_away or unconfirmed or restarted


def _silent_owners(run: RunState, hello: Hello, now: float) -> list[Member]:
    """Return the owners of places that a newcomer could have which have been silent since the newcomer came.

    A worker that was killed and started again by hand comes while its predecessor still has the place. Only processes
    of its own host count, and only until each has sent a message or is declared lost, which may take long for one that
    loads its model. Another script may come from any host, and wait until the one before it is lost.
    """
    came = _came(run, hello, now)
    replaces = run.config.restarts > 0 or not run.registry.begun
    if hello.incarnation or not replaces:
        return []
    owners = [owner for owner in run.registry.reachable() if may_take(hello.claim, owner.index, owner.stages)]
    silent = [owner for owner in owners if owner.last_seen <= came]
    return place_of(run, hello.claim).awaited(silent, hello, now - came)


def _came(run: RunState, hello: Hello, now: float) -> float:
    contact = run.standby.get(process_key(hello))
    return now if contact is None else contact.came


def _predecessor(run: RunState, hello: Hello) -> Member | None:
    """Return the owner of the place that is claimed, if it seems to be the same worker before it was restarted."""
    owner = run.registry.members.get(hello.claim) if hello.claim is not None else None
    same = owner is not None and (owner.name, owner.host) == (hello.name, hello.host)
    return owner if same else None


def _mismatch(run: RunState, hello: Hello) -> Refused | None:
    """Return the refusal of a worker of another version or plan, or of a run that is over; None if the worker fits."""
    config, outcome, known = run.config, run.outcome, run.length
    if hello.version != CONTROL_VERSION:
        return Refused(
            f"{hello.name} uses control protocol version {hello.version}, the broker version {CONTROL_VERSION}; "
            "install the same stageline on both machines",
            code=ExitCode.FAILED,
        )
    if hello.plan != config.plan:
        reason = f"{hello.name} has another plan than the broker: {_difference(hello, config)}"
        return Refused(reason, code=ExitCode.REFUSED)
    if reason := other_parties(run, hello):
        return Refused(reason, code=ExitCode.REFUSED)
    if (theirs := _restarts(hello)) is not None and (theirs > 0) != (config.restarts > 0):
        return Refused(
            f"{hello.name} has recovery.restarts = {theirs}, the broker has {config.restarts}: either all workers "
            "write snapshots, or none does",
            code=ExitCode.REFUSED,
        )
    if hello.length is not None and known is not None and hello.length != known:
        return Refused(
            f"{hello.name} has data for {_steps(hello.length)}, the run has {_steps(known)}: give every worker "
            "that reads data the same",
            code=ExitCode.REFUSED,
        )
    if outcome is not None:
        return Refused(f"the run is over ({outcome.reason}); start the broker again for a new one", outcome.code, True)
    return None


def _unreachable_queues(run: RunState, hello: Hello) -> Refused | None:
    """Return the refusal of a worker whose queues are at a file, out of reach for workers on other hosts; else None."""
    for other in run.registry.members.values():
        if (
            transport_of(hello.endpoint).reach < Reach.NETWORK
            and other.endpoint
            and other.host != hello.host
            and other.index != hello.claim
        ):
            return Refused(
                f"the queues of {hello.name} are at {hello.endpoint} on host {hello.host}, where {other.title} "
                f"on host {other.host} cannot reach them; set queues.url to tcp://ADDRESS:0, or to redis://..., "
                "for every worker",
                code=ExitCode.REFUSED,
            )
    return None


def _other_queues(run: RunState, hello: Hello) -> Refused | None:
    """Return the refusal of a worker whose queues are not those of the plan, or of the workers at their other ends."""
    member = run.registry.current(hello.incarnation) or run.registry.renewed(hello.incarnation)
    index = member.index if member is not None else hello.claim if hello.memory is None else hello.memory.index
    for queue in hello.queues:
        if not _has_ends(run.config, queue) or index not in (queue.producer, queue.consumer):
            ends = f"from place {queue.producer} to place {queue.consumer}"
            return Refused(f"{hello.name} has queue {queue.name} {ends}: that is not its own", code=ExitCode.REFUSED)
    for other in run.registry.members.values():
        if hello.queues and other.queues and index is not None and index != other.index:
            ours, theirs = _between(hello.queues, index, other.index), _between(other.queues, index, other.index)
            if difference := next(_differences(ours, theirs), ""):
                return Refused(
                    f"{hello.name} and {other.title} have different queues: {difference}. Give both the same plan, "
                    "the same code, and the same stageline",
                    code=ExitCode.REFUSED,
                )
    return None


def _has_ends(config: RunConfig, queue: Queue) -> bool:
    ends = (queue.producer, queue.source), (queue.consumer, queue.target)
    places = config.placement
    return all(place < len(places) and (stage is None or stage in places[place]) for place, stage in ends)


def _between(queues: Iterable[Queue], index: int, other: int) -> dict[str, Queue]:
    return {each.name: each for each in queues if {each.producer, each.consumer} == {index, other} and not each.copies}


def _differences(ours: Mapping[str, Queue], theirs: Mapping[str, Queue]) -> Iterator[str]:
    for name in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(name), theirs.get(name)
        if mine is None or other is None:
            yield f"{name}, which only one of them has"
        elif key := mine.differing(other):
            yield f"{name}, whose {key} is {getattr(mine, key)} and {getattr(other, key)}"


def _steps(length: RunLength) -> str:
    epoch = f", {length.epoch} in an epoch" if length.epoch else ""
    return f"{length.training} training steps and {length.evaluation} batches to evaluate{epoch}"


def _restarts(hello: Hello) -> int | None:
    """Return `recovery.restarts` of the worker's plan, 0 without snapshots; None if its settings do not include it."""
    match hello.settings:
        case {"recovery": {"restarts": int(restarts), "snapshot_every": int(every)}}:
            return restarts if every else 0
        case _:
            return None


def _difference(hello: Hello, config: RunConfig) -> str:
    with suppress(TypeError, RecursionError):  # the settings received are not a plan's
        found = "; ".join(map(str, differences(hello.settings, config.settings)))
        if found and hello.settings:
            return f"{found} (here: the worker, there: the broker)"
    return f"its digest is {hello.plan[:12]}, the broker's {config.plan[:12]}; give both the same plan file"
