"""A relay for one measurement, in a process of its own."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def running() -> Iterator[str]:
    """The address that brokers and workers use it by."""
    words = [sys.executable, "-P", "-m", "stageline", "relay", "--bind", "tcp://127.0.0.1:0"]
    with tempfile.TemporaryDirectory(prefix="relay-") as folder:
        environment = {**os.environ, "STAGELINE_KEY_FILE": f"{folder}/own.key"}
        with subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as relay:
            try:
                assert relay.stdout is not None
                yield relay.stdout.readline().strip().partition("=")[2]
            finally:
                relay.kill()
