"""Fixtures of tests of queues over Redis."""

import pytest

from stageline.broker.transports.redis import sender_thread, threads
from support import redis_queues


@pytest.fixture(params=["plain", pytest.param("sealed", marks=pytest.mark.slow)])
def each_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test with plain queues, and the same test with sealed ones."""
    monkeypatch.setattr(redis_queues, "SEALS", [request.param == "sealed"])


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Senders that check the server often, so that a test of what they find is short."""
    monkeypatch.setattr(sender_thread, "IDLE", 0.05)
    monkeypatch.setattr(sender_thread, "FITNESS", 0.05)
    monkeypatch.setattr(threads, "LONGEST_RETRY", 0.1)
