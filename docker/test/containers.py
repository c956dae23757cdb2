"""The containers of docker/compose.yaml as a test drives them, through the commands of Docker."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "stageline:test"
STAGES = ("stage-0", "stage-1", "stage-2")
BROKER = "redis://redis:6379/0#digits"
RUN = "digits"
Facts = dict[str, Any]

# Without what a user may have set for other runs.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("STAGELINE_")}
ENVIRONMENT["STAGELINE_IMAGE"] = IMAGE

# What an address is to a container: "open", "closed" (someone is there and refuses), "away" (no way leads there).
_LOOK = """
import socket, sys
host, port = sys.argv[1].rsplit(":", 1)
try:
    socket.create_connection((host, int(port)), 3).close()
    print("open")
except ConnectionRefusedError:
    print("closed")
except OSError:
    print("away")
"""
_KILL = "import os, signal, sys; os.kill(int(sys.argv[1]), signal.SIGKILL)"


class Failed(Exception):
    """A command failed, or what was looked for is not so."""


class Containers:
    """A run in containers, under a project's name of its own."""

    def __init__(self, project: str, secrets: Path) -> None:
        self._compose = (*compose(), "-p", project)
        ENVIRONMENT["STAGELINE_SECRETS"] = str(make_secrets(secrets))

    def up(self) -> None:
        """Starts them all."""
        self._call("up", "-d")

    def down(self) -> None:
        """Removes them, their networks and their volumes."""
        self._call("down", "--volumes", "--timeout", "0")

    def status(self) -> Facts | None:
        """Answer of the broker; None while it does not."""
        words = ("exec", "-T", "broker", "stageline", "status", "--json", f"/runs/{RUN}")
        done = run(*self._compose, *words)
        return _facts(done.stdout) if done.returncode == 0 else None

    def result(self) -> Facts:
        """Result that the broker has left in its volume."""
        reading = ("run", "--rm", "--no-deps", "-T", "--entrypoint", "cat", "broker")
        return _facts(self._call(*reading, f"/runs/{RUN}/result.json"))

    def kill(self, service: str) -> None:
        """kill -9 for the container's process, as the machine would: `docker kill` would count as a wish to stop.

        A container that sees the engine's processes does it, so that it works wherever the engine runs.
        """
        pid = self._inspect(service, "{{.State.Pid}}")
        seeing = ("--pid", "host", "--user", "0", "--entrypoint", "python")
        call("docker", "run", "--rm", *seeing, IMAGE, "-c", _KILL, pid)

    def restarts(self, service: str) -> int:
        """How often the engine has started the container again."""
        return int(self._inspect(service, "{{.RestartCount}}"))

    def ends(self) -> dict[str, int]:
        """The exit status of each stage's container, once it has ended."""
        return {stage: int(call("docker", "wait", self._id(stage))) for stage in STAGES}

    def has(self, service: str, path: str) -> bool:
        """True if there is such a file in the container of `service`."""
        return run(*self._compose, "exec", "-T", service, "test", "-e", path).returncode == 0

    def sees(self, service: str, address: str) -> str:
        """Address that `address` resolves to in the container of `service`."""
        return self._call("exec", "-T", service, "python", "-c", _LOOK, address)

    def address(self, service: str) -> str:
        """The container's address in the first of its networks."""
        found = self._inspect(service, "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}")
        return found.split()[0]

    def show_logs(self) -> None:
        """Prints what they said last."""
        print(self._call("logs", "--tail", "30"), file=sys.stderr)

    def _inspect(self, service: str, template: str) -> str:
        return call("docker", "inspect", "-f", template, self._id(service))

    def _id(self, service: str) -> str:
        return self._call("ps", "-a", "-q", service)

    def _call(self, *words: str) -> str:
        return call(*self._compose, *words)


def make_secrets(folder: Path) -> Path:
    """Makes the broker's key, and the line by which stages join, in a folder that is returned.

    All may read them, as where an engine gives secrets a mode of its own: the image makes a copy for its user alone.
    """
    key = folder / "broker.key"
    stageline = str(Path(sys.executable).with_name("stageline"))
    environment = {**ENVIRONMENT, "STAGELINE_KEY_FILE": str(key)}
    for words in (("new",), ("line", "--at", BROKER, "--run", RUN)):
        done = subprocess.run([stageline, "keys", *words], env=environment, capture_output=True, text=True, check=True)
    (folder / "join.txt").write_text(done.stdout)
    for each in (folder, key, folder / "join.txt"):
        each.chmod(0o755)
    return folder


def build() -> None:
    """Makes the images."""
    print("building the images; the first time it takes minutes", file=sys.stderr)
    call(*compose(), "build")


@cache
def compose() -> tuple[str, ...]:
    """The command for Compose with the project's files; the server is built, unless REDIS_IMAGE names one."""
    plugin = run("docker", "compose", "version").returncode == 0
    command = ("docker", "compose") if plugin else ("docker-compose",)
    files = ["docker/compose.yaml", *([] if "REDIS_IMAGE" in os.environ else ["docker/test/compose.yaml"])]
    return (*command, *(word for file in files for word in ("-f", file)))


def call(*words: str) -> str:
    """Text that a command prints. Raises `Failed` with its complaint."""
    done = run(*words)
    if done.returncode:
        raise Failed(f"`{' '.join(words)}` ended with {done.returncode}: {(done.stdout + done.stderr)[-4000:]}")
    return done.stdout.strip()


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end. Raises `Failed` if there is no such command."""
    try:
        return subprocess.run(words, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        raise Failed(f"{words[0]} is not installed") from None


def _facts(text: str) -> Facts:
    facts: Facts = json.loads(text)
    return facts
