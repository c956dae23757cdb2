"""Fixtures of tests of the broker package."""

from contextlib import ExitStack

import pytest

from support.redis_server import PROGRAMS, RedisServer


@pytest.fixture(params=PROGRAMS)
def server(request: pytest.FixtureRequest, stack: ExitStack) -> RedisServer:
    """A server of the test's own, which it may kill."""
    return stack.enter_context(RedisServer(request.param))
