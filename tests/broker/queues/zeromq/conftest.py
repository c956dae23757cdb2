"""What tests of queues over ZeroMQ share."""

import pytest

from stageline.broker.queues import requests


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers that do not wait long before they ask again, so that a test of it is short."""
    monkeypatch.setattr(requests, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(requests, "LONGEST_PAUSE", 0.2)
