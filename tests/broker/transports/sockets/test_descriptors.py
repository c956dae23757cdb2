"""A process may have as many descriptors as the system lets it."""

import resource
import subprocess
import sys

from stageline.broker.transports.sockets.descriptors import ENOUGH, descriptor_limit
from support.paths import importing_tests

RAISE = (
    "import resource; from stageline.broker.transports.sockets.descriptors import *; "
    "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)); raise_descriptor_limit(); print(descriptor_limit())"
)


def test_the_limit_is_raised_to_what_is_allowed() -> None:
    said = subprocess.run([sys.executable, "-c", RAISE], env=importing_tests(), capture_output=True, text=True)
    assert said.stdout == "300\n", said.stderr


def test_the_limit_that_holds_is_known() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert descriptor_limit() == (ENOUGH if soft == resource.RLIM_INFINITY else soft)
