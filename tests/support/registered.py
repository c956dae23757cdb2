"""Workers that register at a registry."""

from stageline.broker.control.messages import CONTROL_VERSION, Hello, Report
from stageline.broker.ledger.losses import Leases, WorkerLoss, losses
from stageline.broker.ledger.member import Member
from stageline.broker.ledger.registry import Registry

PLACEMENT = ((0, 2), (1,))
LEASE = 10.0
LEASES = Leases(silence=LEASE, action=20.0, loading=60.0)


def lost(registry: Registry, now: float) -> list[WorkerLoss]:
    return losses(registry.reachable(), LEASES, now)


def hello(name: str, *, pid: int = 1, claim: int | None = None, incarnation: int = 0, endpoint: str = "") -> Hello:
    return Hello(CONTROL_VERSION, "plan", name, "desk", pid, endpoint, claim, incarnation)


def progress_report(incarnation: int, actions: int, now: str = "1F3 of step 7") -> Report:
    return Report(incarnation, actions, now, since=0.0, idle=0.0)


def placed(registry: Registry, name: str, claim: int | None = None, now: float = 0.0) -> Member:
    member = registry.register(hello(name, claim=claim), name.encode(), now)
    assert isinstance(member, Member)
    return member


def introduced(registry: Registry, name: str, claim: int | None = None, now: float = 0.0) -> Member:
    member = placed(registry, name, claim, now)
    again = hello(name, claim=claim, incarnation=member.incarnation, endpoint=f"ipc://{name}")
    assert registry.register(again, name.encode(), now) is member
    return member
