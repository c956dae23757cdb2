"""Store of a run in a Redis server (or Valkey), so that the broker may come back on any machine.

    stageline:{NAME}:store:owner   string   "1 TOKEN": the version of this layout, and the broker that opened it last
    stageline:{NAME}:store:fact    hash     name -> JSON
    stageline:{NAME}:store:step    hash     "STAGE SLOT" -> "STEP TIMES"; a ring: slot is step modulo the steps kept
    stageline:{NAME}:store:loss    hash     step -> loss; nothing for none

With a secret, owner is "2 CHECK TOKEN", where CHECK tells secrets apart, and each value of a hash is sealed under the
names of its hash and field (`broker/keys/single_use.py`): the server learns steps, stages, times and sizes.

A broker takes ownership with its first change; every later change is made on the condition that the owner is still the
same, so that two brokers cannot undo each other. A server without an append-only file forgets it all when it restarts.
"""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Event
from time import monotonic
from typing import Protocol, TypeVar

import msgspec

from stageline.broker.control.records import StepRecord
from stageline.broker.control.store import KEPT_STEPS, Fact, StoredRun, StoreUnusable, steps_finished
from stageline.broker.errors import BadMessage

from .answers import RedisAway, RedisKeyTaken, RedisRefusal, RedisUnfit, sound
from .connection import RedisLink
from .units import Command

_Answer = TypeVar("_Answer")

_CLEAR, _SEALED = b"1", b"2"  # versions of the layout
_SOON, _LATE = 0.02, 1.0  # seconds before it is tried again: the first time, and at most


class _Values(Protocol):
    """Form in which the values of hashes are kept. A name is that of a hash and a field."""

    def seal(self, name: bytes, text: bytes) -> bytes: ...

    def open(self, name: bytes, sealed: bytes) -> bytes: ...


class _ClearValues:
    """Values as they are."""

    def seal(self, name: bytes, text: bytes) -> bytes:
        """Return `text`."""
        return text

    def open(self, name: bytes, sealed: bytes) -> bytes:
        """Return `sealed`."""
        return sealed


def _values(run: str, secret: bytes) -> tuple[bytes, _Values]:
    """Return what the owner of a store begins with, and what becomes of its values."""
    if not secret:
        return _CLEAR, _ClearValues()
    from stageline.broker.keys.single_use import Vault  # its ciphers take 12 ms to load

    vault = Vault(secret, ("store", run), os.urandom)
    return _SEALED + b" " + vault.check.encode(), vault


class RedisStore:
    """`Store` of a run in a Redis server.

    A server that is away is waited for. Methods raise `StoreUnusable` if it stays away, if another broker has taken
    over the records, or if they are lost.
    """

    def __init__(
        self,
        url: str,
        name: str,
        kept_steps: int = KEPT_STEPS,
        patience: float = 60.0,
        waiting: Callable[[str], None] = lambda reason: None,
        secret: bytes = b"",
    ) -> None:
        """Connect to the server and check the format of the records there.

        Args:
            url: Address of the server.
            name: Name that tells apart the stores of one server.
            kept_steps: Steps whose times are kept for each stage.
            patience: Seconds that a server which is away is waited for.
            waiting: Called with the reason before each pause of that wait, of a second at most; may raise.
            secret: Secret that seals the records; b"" leaves them in clear.

        Raises:
            StoreUnusable: The server stays away or is not fit, or the records have another format, are sealed with
                another secret, or are sealed or in clear against expectation.
        """
        self._name = name
        self._waiting = waiting
        self._kept_steps = kept_steps
        self._patience = patience
        self._form, self._values = _values(name, secret)
        self._me = self._form + b" " + secrets.token_hex(8).encode()
        self._taken = False
        self._incomplete = False  # a key was replaced by another client
        self._owner, self._fact, self._step, self._loss = (
            f"stageline:{{{name}}}:store:{part}".encode() for part in ("owner", "fact", "step", "loss")
        )
        self._link = self._persist(lambda: RedisLink(url))
        self._persist(self._check_format)

    def append(self, records: Sequence[StepRecord], losses: Mapping[int, float | None]) -> None:
        """Add the records of finished steps, and the losses by step; a loss that is there stays."""
        new_losses = [
            (b"HSETNX", *self._sealed(self._loss, b"%d" % step, b"" if loss is None else repr(loss).encode()))
            for step, loss in losses.items()
        ]
        self._change(lambda: [*self._new_steps(records), *new_losses])

    def put(self, name: str, fact: Fact) -> None:
        """Set the fact called `name`."""
        self._change(lambda: [(b"HSET", *self._sealed(self._fact, name.encode(), msgspec.json.encode(fact)))])

    def load(self) -> StoredRun:
        """Return all that is kept of the run."""
        return self._persist(self._load)

    def record(self, stage: int, step: int) -> StepRecord | None:
        """Return the record of one step of a stage; None if it is not kept any more."""
        slot = self._slot(stage, step)
        found = self._persist(lambda: self._link.ask(b"HGET", self._step, slot))
        record = self._record(stage, slot, found) if found else None
        return record if record is not None and record.step == step else None

    def records(self, wanted: Sequence[tuple[int, int]]) -> list[StepRecord]:
        """Return the records of these stages and steps that are kept, in one round trip."""
        if not wanted:
            return []
        slots = [self._slot(stage, step) for stage, step in wanted]
        found = self._persist(lambda: self._link.ask(b"HMGET", self._step, *slots))
        records = (
            (step, self._record(stage, slot, sealed))
            for (stage, step), slot, sealed in zip(wanted, slots, found, strict=True)
            if sealed
        )
        return [record for step, record in records if record.step == step]

    def go_back(self, stages: Sequence[int], step: int) -> None:
        """Forget that these stages have finished `step` and later steps; losses stay."""

        def forgotten() -> list[Command]:
            fields = [field for field, record in self._records() if record.stage in stages and record.step >= step]
            return [(b"HDEL", self._step, *fields)] if fields else []

        self._change(forgotten)

    def begin(self) -> None:
        """Forget all records: the run begins."""
        self._change(lambda: [(b"DEL", self._fact, self._step, self._loss)])

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def _check_format(self) -> None:
        before = self._link.ask(b"GET", self._owner)
        written = (before or self._me).rpartition(b" ")[0]
        if written != self._form:
            there = f"the broker's records at {self._link.address}"
            raise StoreUnusable(f"{there} {_difference(written.decode('utf-8', 'replace'), self._form, self._name)}")

    def _load(self) -> StoredRun:
        facts = {name.decode(): msgspec.json.decode(text, type=Fact) for name, text in self._pairs(self._fact)}
        losses = {int(step): float(loss) if loss else None for step, loss in self._pairs(self._loss)}
        return StoredRun(facts, steps_finished(record for _, record in self._records()), losses)

    def _new_steps(self, records: Sequence[StepRecord]) -> list[Command]:
        newest = {self._slot(record.stage, record.step): record for record in sorted(records, key=lambda r: r.step)}
        if not newest:
            return []
        kept = self._link.ask(b"HMGET", self._step, *newest)
        fields = [
            word
            for (slot, record), old in zip(newest.items(), kept, strict=True)
            if old is None or self._record(record.stage, slot, old).step < record.step
            for word in self._sealed(self._step, slot, b"%d %b" % (record.step, record.times))[1:]
        ]
        return [(b"HSET", self._step, *fields)] if fields else []

    def _change(self, commands: Callable[[], list[Command]]) -> None:
        """Carry out the commands together, if this broker is still the owner."""

        def attempt() -> None:
            self._link.ask(b"WATCH", self._owner)
            if self._taken:
                self._check_owner(self._link.ask(b"GET", self._owner))
            (answers,) = self._link.exchange([[(b"SET", self._owner, self._me), *commands()]])
            sound(answers)
            self._taken = True

        self._persist(attempt)

    def _check_owner(self, owner: bytes | None) -> None:
        if owner is None:
            raise StoreUnusable(
                f"Redis at {self._link.address} has forgotten the broker's records: it was emptied. "
                "Start the broker again with the run's name, as --run: it asks the workers"
            )
        if owner != self._me:
            raise StoreUnusable(f"another broker has taken over the records at {self._link.address}: this one stops")

    def _records(self) -> Iterator[tuple[bytes, StepRecord]]:
        for field, value in self._pairs(self._step):
            yield field, _record(int(field.partition(b" ")[0]), value)

    def _record(self, stage: int, slot: bytes, sealed: bytes) -> StepRecord:
        return _record(stage, self._opened(self._step, slot, sealed))

    def _sealed(self, key: bytes, field: bytes, text: bytes) -> tuple[bytes, bytes, bytes]:
        return key, field, self._values.seal(key + b" " + field, text)

    def _opened(self, key: bytes, field: bytes, sealed: bytes) -> bytes:
        try:
            return self._values.open(key + b" " + field, sealed)
        except BadMessage as error:
            raise StoreUnusable(
                f"a record of the broker at {self._link.address} cannot be opened: another client changed it, so that "
                f"all count as lost. {_removal(self._name)}, and start the broker again with the run's name, as --run: "
                "it asks the workers"
            ) from error

    def _pairs(self, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        words = iter(self._link.ask(b"HGETALL", key))
        return ((field, self._opened(key, field, value)) for field, value in zip(words, words, strict=True))

    def _persist(self, attempt: Callable[[], _Answer]) -> _Answer:
        """Return the result of `attempt`, tried until patience is over. Two attempts must have the effect of one."""
        until, pause = monotonic() + self._patience, _SOON
        while True:
            try:
                answer = attempt()
                self._require_all()
                return answer
            except (RedisAway, RedisRefusal, RedisUnfit) as error:
                if isinstance(error, RedisUnfit) or monotonic() >= until:
                    raise StoreUnusable(f"the broker cannot keep its records: {error}") from error
                self._incomplete = self._incomplete or isinstance(error, RedisKeyTaken)
                self._waiting(str(error))
            Event().wait(pause)
            pause = min(2 * pause, _LATE)

    def _require_all(self) -> None:
        """Raise `StoreUnusable` if another client replaced a key.

        The other records are of no use without its content.
        """
        if self._incomplete:
            self._link.ask(b"DEL", self._owner, self._fact, self._step, self._loss)
            raise StoreUnusable(
                f"another client replaced records of the broker at {self._link.address}: they are lost. Start the "
                "broker again with the run's name, as --run: it asks the workers"
            )

    def _slot(self, stage: int, step: int) -> bytes:
        return b"%d %d" % (stage, step % self._kept_steps)


def _record(stage: int, value: bytes) -> StepRecord:
    step, _, times = value.partition(b" ")
    return StepRecord(stage, int(step), times)


def _difference(written: str, form: bytes, run: str) -> str:
    """Return how records that were written in one form differ from what this process expects, and the way out."""
    version, expected = written.partition(" ")[0].encode(), form.partition(b" ")[0]
    if version == expected:
        return (
            "are sealed with another key than this process has. Name the key file of the broker that wrote them in "
            "STAGELINE_KEY_FILE"
        )
    if version == _SEALED:
        return (
            "are sealed, and this process opens them without a key. Give the same address and the same "
            "broker.insecure as the broker that wrote them, and its key file"
        )
    if version == _CLEAR:
        return (
            "were written without a key, and the server may be on another machine: others can have changed them. If "
            f"that is not to be feared, set broker.insecure = true. To seal what comes: {_removal(run)}"
        )
    return f"have format {version.decode()}, this version reads formats {_CLEAR.decode()} and {_SEALED.decode()}"


def _removal(run: str) -> str:
    return f"redis-cli --scan --pattern 'stageline:{{{run}}}:store:*' | xargs redis-cli unlink"
