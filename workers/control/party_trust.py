"""Judgement of what a broker tells a worker about the other places: in a run with parties, its own plan must agree.

    broker                       tells                       taken if the worker's own plan
    Assigned.keys.public         by which key a place is met     lists the key for the place's party; none is left out
    Assigned.keys.salt           random bytes of the run         (any, of their full length)
    Peers.workers                addresses with keys             likewise
    Peers.parties                the parties of its plan         has the same
    Peers.notes                  what other workers' plans are   has the same, and the note opens

A worker that comes leaves again if something differs, with the name of the party. One that has begun stays, says so,
and does without what it does not believe.
"""

import os
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec
import structlog

from stageline.broker.control.messages import Assigned, FromBroker, Hello, Peers
from stageline.broker.control.place_keys import PlaceKeys
from stageline.broker.errors import BadKey, BadMessage
from stageline.broker.keys.join_line import split_key
from stageline.broker.keys.pairs import KeyPair, PublicKey
from stageline.broker.keys.parties import Parties, Party, conflict, differences, parties_of, party_at
from stageline.broker.keys.party_secrets import LinkContext, PartyNote, link_secret, opened_note, sealed_note
from stageline.pipeline.errors import ExitCode

from .joining import Stopped

if TYPE_CHECKING:  # pydantic takes long to load
    from stageline.pipeline.plan import Plan

UNKNOWN = 32  # bytes of a secret that is to open nothing
_SALT = 32  # bytes of a run's salt; without one, queues at a server would not be sealed
_SAME = "give all sides the same [parties]"

log = structlog.get_logger()


class PartiesDiffer(Stopped):
    """Error that a broker, or another worker, has other parties than the plan here.

    Mend: Compare the two keys or digests with the party that the message names, over the telephone for example; then
    give all sides the same `[parties]`.

    Example: the broker tells that worker 1, of party lab, has the key k1.2n8Fh0XQb5q9Zr1jv7d3mS6tYcAeKpWuLxGiOoNnHfM,
    and the plan here lists k1.jYnYr-khFObh8liWlG3VTOvjQxjZ7EbxZFntm6u6kj4: ask lab which is right, and give all sides
    the same [parties]
    """

    error_code = "SL617"

    def __init__(self, reason: str) -> None:
        """Take the text for people."""
        super().__init__(reason, ExitCode.REFUSED, broker_knows=True)


class PartyTrust:
    """Trust in the worker's own plan. The keys of the place's queues are made here, from the parties' keys."""

    def __init__(self, parties: Parties, plan: str, pair: KeyPair) -> None:
        """Begin without a place.

        Args:
            parties: Parties of the worker's plan.
            plan: Digest of the worker's plan.
            pair: Pair of the worker's party.
        """
        self._parties, self._plan, self._pair = parties, plan, pair
        self._own = pair.public.text
        self._public: dict[int, PublicKey] = {}  # by place: the key that was believed last
        self._run, self._place = "", -1
        self._notes: dict[str, bytes] = {}
        self._keys: PlaceKeys | None = None  # that were made last
        self._settled = False  # the worker has begun, and what is told later does not end it
        self._told: set[str] = set()

    def introduced(self, hello: Hello) -> Hello:
        """Return a Hello of the worker with its key, and with notes for all parties once it has its queues."""
        if hello.endpoint and not self._notes:
            self._notes = self._sealed_notes()
        notes = self._notes if hello.endpoint else {}
        return msgspec.structs.replace(hello, parties=self._parties, key=self._own, notes=notes)

    def received(self, message: FromBroker) -> FromBroker:
        """Return a message of the broker as it is taken. Raises `PartiesDiffer`, of a worker that has not begun."""
        match message:
            case Assigned():
                return self._placed(message)
            case Peers():
                return self._believed(message)
            case _:
                return message

    def _placed(self, assigned: Assigned) -> Assigned:
        """Return the place with the keys of its queues, of which the broker knows none."""
        index, told = assigned.index, assigned.keys
        if (assigned.run, index) != (self._run, self._place):
            self._run, self._place, self._notes = assigned.run, index, {}
        own = party_at(self._parties, index)
        if own is None or self._own not in own.keys:
            whose = "no party's" if own is None else f"of party {own.name}"
            self._differs(f"the broker gives place {index}, which is {whose} in the plan here, to another party's key")
        keys = [raw for party in self._parties if party.places for raw in map(_raw, party.keys)]
        for place, raw in enumerate(told.public):
            self._believe(place, raw)
        if unfit := self._unfit(told):
            self._differs(unfit)
            return msgspec.structs.replace(assigned, keys=self._keys)  # with less, queues would not be sealed
        if told.public[index : index + 1] != (self._pair.public.raw,):
            self._differs(
                f"the broker tells that worker {index}, this process, has another key than its own, {self._own}: "
                "the others cannot reach it. Start the broker again"
            )
        context = LinkContext(told.salt, assigned.run, told.generation)
        links = tuple(self._link(context, index, place) for place in range(len(told.public)))
        name = f"{blake2b(assigned.run.encode(), digest_size=8).hexdigest()}-{index}"
        made = PlaceKeys(index, links, self._pair.secret, tuple(keys), told.salt, told.generation, name)
        self._keys = made
        return msgspec.structs.replace(assigned, keys=made)

    def _unfit(self, told: PlaceKeys) -> str:
        """Return why no secrets can be made of what the broker tells; "" if they can."""
        if len(told.salt) != _SALT:
            return (
                f"the broker tells {len(told.salt)} bytes of salt, expected {_SALT}: queues would carry what anyone "
                "can read. Ask its operator, and use another broker"
            )
        lacking = [each for party in self._parties for each in party.places if each >= len(told.public)]
        if not lacking:
            return ""
        return f"the broker tells no key of worker {lacking[0]}, so its plan has no such party: give it the plan here"

    def _believe(self, place: int, raw: bytes) -> None:
        """Note the key of a place that the broker tells, if the plan here lists it for the place's party."""
        try:
            key = PublicKey.received(raw)
        except BadKey as error:
            self._differs(f"the broker tells of worker {place} what is no key: {error}")
            return
        if self._is_listed(place, key):
            self._public[place] = key

    def _is_listed(self, place: int, key: PublicKey) -> bool:
        party = party_at(self._parties, place)
        if party is None:
            self._differs(f"the broker tells of worker {place}, which is of no party in the plan here; {_SAME}")
        elif key.text not in party.keys:
            self._differs(
                f"the broker tells that worker {place}, of party {party.name}, has the key {key.text}, and the plan "
                f"here lists {' and '.join(party.keys)}: ask {party.name} which is right, and {_SAME}"
            )
        return party is not None and key.text in party.keys

    def _link(self, context: LinkContext, index: int, place: int) -> bytes:
        if place == index:
            return b""
        if place not in self._public:
            return os.urandom(UNKNOWN)  # no other process has that
        return link_secret(self._pair, self._public[place], context, index, place)

    def _sealed_notes(self) -> dict[str, bytes]:
        """Return a note for each key of a party that has places."""
        note = PartyNote(self._run, self._place, self._plan, self._parties)
        keys = [key for party in self._parties if party.places for key in party.keys]
        return {key: sealed_note(self._pair, PublicKey.parse(key), note, os.urandom) for key in keys}

    def _believed(self, peers: Peers) -> Peers:
        """Return the peers that the plan here knows, at addresses with keys that it lists."""
        for difference in differences(self._parties, peers.parties):
            self._differs(f"the broker has other parties: {difference} (here: this worker, there: the broker); {_SAME}")
        workers = {index: there for index, there in peers.workers.items() if self._knows(index, there[1], peers)}
        self._settled = self._keys is not None
        return msgspec.structs.replace(peers, workers=workers)

    def _knows(self, index: int, endpoint: str, peers: Peers) -> bool:
        """Return True if a peer is who the plan here says, and has the same plan."""
        if index == self._place:
            return True
        party = party_at(self._parties, index)
        try:
            key = split_key(endpoint)[1]
        except BadKey as error:
            self._differs(f"the broker tells an address of worker {index} that has no sound key: {error}")
            return False
        if party is None or (key is not None and not self._is_listed(index, key)):
            return False
        found = [*self._faults(index, party, peers.notes.get(index, {}))]
        for each in found:
            self._differs(each)
        return not found

    def _faults(self, index: int, party: Party, notes: Mapping[str, bytes]) -> Iterator[str]:
        """Yield what is different in the plan of worker `index`, as its note tells, which no broker can make."""
        who = f"worker {index}, of party {party.name},"
        if self._own not in notes:
            yield (
                f"{who} has told nothing that the key of this machine, {self._own}, opens: its plan lists another key "
                f"for the party of worker {self._place}, or the broker keeps that back; {_SAME}"
            )
            return
        note = self._opened(party, notes[self._own])
        if note is None:
            yield f"what the broker passes on of {who} is not sealed with that party's key, {party.shown}; {_SAME}"
        elif (note.run, note.place) != (self._run, index):
            yield f"what the broker passes on of {who} is of worker {note.place} of run {note.run}"
        elif note.plan != self._plan:
            digests = f"its digest is {note.plan[:12]} there, {self._plan[:12]} here"
            yield f"{who} has another plan: {digests}; give both the same"
        else:
            conflicts = conflict(self._parties, note.parties)
            for each in differences(self._parties, note.parties):
                told = f"{who} has other parties: {each} (here: this worker, there: worker {index}); {_SAME}"
                if conflicts:
                    yield told
                else:
                    self._say(told)

    def _opened(self, party: Party, text: bytes) -> PartyNote | None:
        for key in party.keys:
            try:
                return opened_note(self._pair, PublicKey.parse(key), text)
            except BadMessage:
                continue
        return None

    def _differs(self, reason: str) -> None:
        """Raise `PartiesDiffer` in a worker that has not begun; in one that has, say so, once."""
        if not self._settled:
            raise PartiesDiffer(reason)
        self._say(f"not believed: {reason}")

    def _say(self, text: str) -> None:
        """Log a text, once."""
        if text not in self._told:
            self._told.add(text)
            log.warning(text)


def trust_of(plan: "Plan", pair: KeyPair | None) -> PartyTrust | None:
    """Return the trust of a process in a run of `plan`, whose workers are known; None without parties.

    Args:
        plan: Plan of this process.
        pair: Pair by which the broker knows it; None for a broker that other machines do not reach.
    """
    if pair is None or plan.parties is None:
        return None
    return PartyTrust(parties_of(plan), plan.digest(), pair)


def _raw(key: str) -> bytes:
    return PublicKey.parse(key).raw
