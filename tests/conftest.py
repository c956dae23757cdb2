"""Settings and fixtures of all tests."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from support.fork_server import ForkServer
from support.workspace import Workspace

if TYPE_CHECKING:
    from support.redis_server import RedisServer

# No deadline and no limit on slowness: how long an example takes says something of the machine, nothing of the code.
# Each run of the tests tries the same examples, so that a change is judged by what it changes; `make sweep` tries far
# more, others every time.
_ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("some", _ANY_MACHINE, max_examples=40, derandomize=True)
settings.register_profile("many", _ANY_MACHINE, max_examples=1000)
settings.load_profile("some")

# Before torch is imported, here and in every process that a test starts: pytest has a worker for each core.
os.environ["OMP_NUM_THREADS"] = "1"

# Keys of who runs the tests stay as they are: brokers and workers of tests have one that is made for them.
_KEYS = tempfile.mkdtemp(prefix="stageline-keys-")
os.environ["STAGELINE_KEY_FILE"] = f"{_KEYS}/own.key"
for _name in ("STAGELINE_KEY_PASSPHRASE_FILE", "STAGELINE_JOIN"):
    os.environ.pop(_name, None)
atexit.register(shutil.rmtree, _KEYS, ignore_errors=True)

# A parent may ignore SIGINT, as a shell does for what it starts with `&`. What is ignored is inherited: tests that
# interrupt this process, or one that it has started, would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # while tests are collected: thousands of them are made, and none is garbage


def pytest_collection_finish() -> None:
    """Else every collection of garbage would look through the tests themselves."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Starts real processes quickly."""
    started = ForkServer()
    yield started
    started.close()


@pytest.fixture
def workspace(tmp_path: Path, fork_server: ForkServer) -> Iterator[Workspace]:
    """A small plan in the test's folder, and a check afterwards that nothing was left behind."""
    with Workspace(tmp_path, fork_server) as workspace:
        yield workspace


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Resources that a test opens, closed in reverse order at its end."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def redis() -> Iterator["RedisServer"]:
    """A Redis server of the test's own."""
    from support.redis_server import RedisServer  # most tests do without

    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch with one thread: sums are added in one order."""
    import torch  # most tests do without, and it takes long to load

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
