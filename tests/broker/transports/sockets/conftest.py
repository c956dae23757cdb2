"""Fixtures of tests of queues over sockets."""

import os
import socket
import threading
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from stageline.broker.queues import requests
from stageline.broker.transports.sockets import shm_queues as queues


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers that do not wait long before they ask again, so that a test of it is short."""
    monkeypatch.setattr(requests, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(requests, "LONGEST_PAUSE", 0.2)


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how many seconds each poll would have waited."""
    found: list[float] = []
    ready = queues.ShmQueues._ready

    def counted(self: queues.ShmQueues, watched: dict[Any, int], seconds: float) -> Collection[Any]:
        found.append(seconds)
        return ready(self, watched, seconds)

    monkeypatch.setattr(queues.ShmQueues, "_ready", counted)
    return found


@pytest.fixture
def nothing_left_open() -> Iterator[None]:
    """To be named before what opens something: that is closed first."""
    before = _open_files(), threading.active_count()
    yield
    assert (_open_files(), threading.active_count()) == before


def _open_files() -> list[str]:
    with socket.socket():  # the descriptor with which the folder is listed is the same each time
        return sorted(os.listdir("/proc/self/fd"))
