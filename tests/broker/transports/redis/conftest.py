"""What tests of queues over Redis share."""

import pytest

from stageline.broker.transports.redis import sender_thread, threads


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Senders that check the server often, so that a test of what they find is short."""
    monkeypatch.setattr(sender_thread, "IDLE", 0.05)
    monkeypatch.setattr(sender_thread, "FITNESS", 0.05)
    monkeypatch.setattr(threads, "LONGEST_RETRY", 0.1)
