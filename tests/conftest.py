"""What all tests share."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from nursery import Nursery

# No deadline and no limit on slowness: how long an example takes says something of the machine, nothing of the code.
settings.register_profile("stageline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stageline")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Real runs, started quickly."""
    started = Nursery()
    yield started
    started.close()
