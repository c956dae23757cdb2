"""Examines this machine, and a plan if there is one: can stageline work here, and will it compute the same bits?"""

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from enum import StrEnum
from functools import partial
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Protocol

import msgspec
import psutil
import torch
import zmq

from stageline.broker.keys.admission import ServerKeys
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.keys.parties import Parties
from stageline.broker.queues.secrets import PlacesAdmitted
from stageline.broker.transports.base import backend_of, open_server
from stageline.broker.transports.sockets.bind import listening
from stageline.pipeline.addresses import masked, needs_keys, parted
from stageline.pipeline.errors import StagelineError
from stageline.pipeline.plan import Plan
from stageline.workers.control.client import Client, KeyRefused
from stageline.workers.control.enrolling import address_of, is_join_line
from stageline.workers.disk.owned_folder import longest_socket_path
from stageline.workers.keys.key_file import key_path, read_pair
from stageline.workers.keys.keyring import pair_towards
from stageline.workers.keys.party_keys import NotOfParty, parties_here

from .trial_result import TriedPlan

NAME = "stageline"  # of the distribution, and of its one package
_LIBRARIES = (
    "torch",
    "numpy",
    "pyzmq",
    "msgspec",
    "redis",
    "safetensors",
    "zlib-ng",
    "cryptography",
    "pydantic",
    "psutil",
    "click",
    "rich",
    "structlog",
)
_ANSWER = 5.0  # seconds for a broker to answer
_OLDEST_TORCH = (2, 10)  # before it, even torch.load(weights_only=True) could be made to run code


class TryPlan(Protocol):
    """Function that tries a plan."""

    def __call__(self, plan: Plan, *, tell: Callable[[str], None]) -> TriedPlan:
        """Try `plan` and return the result.

        Args:
            plan: The plan to try.
            tell: Called with a text that says how two trials of the plan differ, "" if they do not.
        """


class Health(StrEnum):
    """Verdict of a check."""

    GOOD = "good"
    NOTE = "note"
    BAD = "bad"


class CheckResult(msgspec.Struct, frozen=True):
    """Finding of one check: its subject, its verdict, and the text for people."""

    what: str
    health: Health
    found: str


def examine(plan: Plan | None, folder: Path, trial: TryPlan) -> Iterator[CheckResult]:
    """Yield the findings about this machine, then about the plan.

    Args:
        plan: Plan to examine; None for the machine alone.
        folder: Empty folder, into which all files go.
        trial: Function that tries the plan.
    """
    yield CheckResult("python", Health.GOOD, f"{platform.python_version()}, {sys.executable}")
    yield from (*_libraries(), _package())
    memory, gib = psutil.virtual_memory(), 2**30
    yield CheckResult("memory", Health.GOOD, f"{memory.available / gib:.1f} of {memory.total / gib:.1f} GiB are free")
    yield from (*_sameness(), *_sockets(folder))
    if plan is not None:
        yield from _plan(plan, trial)


def _libraries() -> Iterator[CheckResult]:
    for name in _LIBRARIES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield CheckResult(name, Health.BAD, "is not installed; install stageline again")
            continue
        old = name == "torch" and tuple(map(int, version.split(".")[:2])) < _OLDEST_TORCH
        yield CheckResult(
            name, Health.BAD if old else Health.GOOD, f"{version}, but stageline needs 2.10" if old else version
        )


def _package() -> CheckResult:
    """Return the finding about where the package comes from: another distribution may bring one of the same name."""
    found = sorted(set(metadata.packages_distributions().get(NAME, [])))
    if found not in ([NAME], []):  # an editable install lists no package
        return CheckResult(f"package {NAME}", Health.BAD, f"comes from {' and '.join(found)}; use a fresh environment")
    return CheckResult(f"package {NAME}", Health.GOOD, str(Path(str(sys.modules[NAME].__file__)).parent))


def _sameness() -> Iterator[CheckResult]:
    """Yield the hardware and a fingerprint of it and the software.

    Machines with the same fingerprint compute the same bits, with one plan and deterministic operations.
    """
    hardware = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    yield CheckResult("hardware", Health.GOOD, f"{hardware}, {os.cpu_count()} cores, {device}")
    facts = (sys.version_info[:2], torch.__version__, torch.__config__.show(), hardware, device)
    digest = sha256(repr(facts).encode()).hexdigest()[:12]
    yield CheckResult("fingerprint", Health.GOOD, f"{digest}: machines with the same one compute the same bits")


def _sockets(folder: Path) -> Iterator[CheckResult]:
    yield _tried("tcp on this machine", lambda: _bound("tcp://127.0.0.1:*"))
    yield _tried("ipc sockets", lambda: _bound(f"ipc://{folder}/queues"))
    length, most = longest_socket_path(), zmq.IPC_PATH_MAX_LEN
    well = length <= most
    way_out = "" if well else "; point TMPDIR at a shorter folder"
    yield CheckResult("ipc paths", Health.GOOD if well else Health.BAD, f"{length} of {most} bytes{way_out}")


def _plan(plan: Plan, trial: TryPlan) -> Iterator[CheckResult]:
    yield from (CheckResult("exposure", Health.NOTE, warning) for warning in plan.warnings)
    wanted, there = sum(worker.threads for worker in plan.workers), os.cpu_count() or 1
    health = Health.NOTE if wanted > there else Health.GOOD
    yield CheckResult("threads", health, f"the plan's workers use {wanted}, this machine has {there} cores")
    if not parted(plan.broker.url)[1]:  # else it is a broker elsewhere, which `examine_keys` asks
        yield _tried("broker.url", lambda: f"{_free(plan.broker.url)} is free")
    servers = {"queues.url": plan.queues.url, "broker.store": plan.broker.store}
    backends = ((key, url, backend_of(url)) for key, url in servers.items())
    yield from (_tried(key, partial(each.check_server, url)) for key, url, each in backends if each.is_shared)
    yield _tried("run.dir", lambda: _writable(plan.run.dir))
    differences: list[str] = []
    yield _tried("plan", lambda: _works(trial(plan, tell=differences.append)))
    if differences:
        same = "one microbatch, computed in two processes, gave the same bits"
        health = Health.BAD if differences[0] else Health.GOOD
        yield CheckResult("determinism", health, differences[0] or same)


def examine_keys(
    broker: str, *, insecure: bool, environment: Mapping[str, str], parties: Parties = ()
) -> Iterator[CheckResult]:
    """Yield the findings about keys: of the libraries, of this user, and of the broker, which is asked if it has some.

    The check enrols no key.

    Args:
        broker: Address of the broker, or a join line.
        insecure: `broker.insecure` of the plan.
        environment: Variables, which may say where the key file is.
        parties: Parties of the plan.
    """
    has_curve = zmq.has("curve")
    found = f"ZeroMQ {zmq.zmq_version()} {'has' if has_curve else 'lacks'} it"
    yield CheckResult("CURVE", Health.GOOD if has_curve else Health.BAD, found)
    path = key_path(None, environment)
    if path.exists():
        yield _tried("own key", lambda: f"{read_pair(path).public.text}, in {path}, which others cannot read")
    else:
        yield CheckResult("own key", Health.NOTE, f"there is none yet; it is made in {path} when it is first needed")
    if parties:
        yield _tried("party", lambda: _party(parties, environment))
    if is_join_line(broker) or parted(broker)[1]:
        yield _tried("broker", lambda: _known(broker, environment))
    else:
        yield _unkeyed(broker, insecure)


def _party(parties: Parties, environment: Mapping[str, str]) -> str:
    """Return the parties whose keys this machine has. Raises `NotOfParty` if it has none."""
    here = parties_here(parties, environment)
    if not here:
        known = ", ".join(f"{each.name} ({each.shown})" for each in parties)
        raise NotOfParty(f"this machine has the key of none of them: {known}. A broker's machine may have none")
    return "; ".join(f"{party.name}, which has {party.workers}, by the key in {path}" for party, path in here)


def _unkeyed(broker: str, insecure: bool) -> CheckResult:
    """Return the finding about a broker whose address has no key."""
    if needs_keys(broker, insecure=insecure):
        found = (
            "has no key. That is right where the broker is started, which prints its join line; on every other machine "
            "give that line, with --broker"
        )
        return CheckResult("broker", Health.NOTE, f"{masked(broker)} {found}")
    if needs_keys(broker):
        found = "goes without keys, as broker.insecure says: anyone who reaches it can read and change the run"
        return CheckResult("broker", Health.NOTE, f"{masked(broker)} {found}")
    return CheckResult("broker", Health.GOOD, f"{masked(broker)} is for this machine alone, and needs no keys")


def _known(broker: str, environment: Mapping[str, str]) -> str:
    """Return that the broker has the key of its address and admits that of this machine. Raises `StagelineError`."""
    url = address_of(broker)
    with Client(url, pair=pair_towards(url, environment)) as client, suppress(ValueError):  # the right to ask it lacks
        try:
            client.ask("status", _ANSWER)
        except KeyRefused as error:
            if url == broker or not error.refusal.may_pass:
                raise
            return f"{masked(url)} has the key of the line, with which this machine has yet to join"
    return f"{masked(url)} has the key of its address, and admits that of this machine"


def _tried(what: str, look: Callable[[], str]) -> CheckResult:
    try:
        return CheckResult(what, Health.GOOD, look())
    except (StagelineError, OSError) as error:
        return CheckResult(what, Health.BAD, str(error))


def _bound(url: str) -> str:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket, listening(socket, url) as endpoint:
        return endpoint


def _free(url: str) -> str:
    keys = ServerKeys(KeyPair.generate(), PlacesAdmitted(frozenset())) if needs_keys(url) else None
    with closing(open_server(url, keys)) as channel:
        return masked(parted(channel.endpoint)[0])


def _writable(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder):
        return f"{folder} can be written to"


def _works(found: TriedPlan) -> str:
    estimate = found.estimate
    return f"{len(estimate.stages)} stages, {estimate.steps} steps; digest {estimate.digest[:12]}"
