"""A terminal of a page: what is typed there is carried out, and what comes out is compared with what the page shows."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

from stageline.pipeline.process.child import Child
from support.fork_server import ForkServer

LIMIT = 100  # seconds for what is waited for
_INTERRUPT = "^C"  # as a terminal shows the key
_ASKING = {"status", "why", "story", "queue", "run"}  # commands that a reader repeats until they show what is awaited
_UNITS = "µs|ms|s|min|h|bytes|B|kB|MB|GB|KiB|MiB|GiB"
_TOKEN = re.compile(
    rf"""(?P<line>[^\s']+\#k1\.\.\.\.)|(?P<gap>\s*(?:\.\.\.|…)\s*)|(?P<space>\s+)|(?P<run>\b[\w.]+(?:-[\w.]+)*-\d{{8}}-\d{{6}}-[0-9a-f]{{4}}(?:-at\d+-[0-9a-f]{{6}})?\b)
    |(?P<digest>\b[0-9a-f]{{16,}}\b|\b[0-9a-f]{{4,}}…)|(?P<process>(?<=pid\ )\d+|(?<=process\ )\d+)
    |(?P<amount>\b\d[\d.]*\s(?:{_UNITS})\b)|(?P<number>\d+(?:[.,]\d+)*(?:e[-+]?\d+)?)|(?P<other>.)""",
    re.DOTALL | re.VERBOSE,
)
_PATTERNS = {
    "line": r"\S+\#k1\.[\w.-]+",
    "gap": ".*?",
    "space": r"\s+",
    "run": r"([\w.]+(?:-[\w.]+)*-\d{8}-\d{6}-[0-9a-f]{4}(?:-at\d+-[0-9a-f]{6})?)",
    "digest": "([0-9a-f]{16,})",
    "process": r"(\d+)",
    "amount": rf"[\d.]+\s(?:{_UNITS})",
    "number": r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?",
}
_NAMED = ("run", "digest", "process")


@dataclass(frozen=True, slots=True)
class Typed:
    """A command, and the output that the page shows for it."""

    command: str
    shown: str

    @property
    def interrupted(self) -> bool:
        return _INTERRUPT in self.shown.split()


def typed(text: str) -> Iterator[Typed]:
    """The commands of a block. A line that begins with "$ " is one; what follows is its output, without comments."""
    for part in re.split(r"^\$ ", re.sub(r"\\\n\s*", "", text), flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield Typed(command, re.sub(r"^#.*\n", "", shown, flags=re.MULTILINE))


class Names(dict[str, str]):
    """The runs and processes of a page, by which it calls them, and by which they are called here."""

    def here(self, text: str) -> str:
        for theirs in sorted(self, key=len, reverse=True):
            text = re.sub(rf"(?<!\w){re.escape(theirs)}(?!\w)", self[theirs], text)
        return text

    def learn(self, shown: str, output: str, *, varies: bool) -> bool:
        """Compares; returns False if the output differs from what is shown."""
        parts = list(_TOKEN.finditer(_beginnings(shown) if varies else shown.strip()))
        pattern = "".join(self._pattern(part) for part in parts)
        found = re.fullmatch(rf"\s*{pattern}\s*", output, re.DOTALL)
        if found is None:
            return False
        named = (part.group() for part in parts if part.lastgroup in _NAMED and part.group() not in self.values())
        self.update(zip(named, found.groups(), strict=True))
        return True

    def _pattern(self, part: re.Match[str]) -> str:
        """Meaning of `part` of an output shown: a name that is known by now, for the thing that had it before."""
        known = part.group() in self.values()
        return re.escape(part.group()) if known else _PATTERNS.get(part.lastgroup or "", re.escape(part.group()))


def _beginnings(shown: str) -> str:
    """Three words of each line, and a process that is named after them."""
    lines = [line.split(maxsplit=3) for line in shown.splitlines() if line.strip()]
    return "\n".join(" ".join(words[:3]) + "".join(_rest(word) for word in words[3:]) for words in lines)


def _rest(words: str) -> str:
    process = re.search(r"pid \d+", words)
    return f" ... {process.group()} ..." if process else " ..."


@dataclass
class PageTerminal:
    """A shell in `folder`. The last command of a block may go on while other terminals are used."""

    folder: Path
    environment: MutableMapping[str, str]
    fork_server: ForkServer
    names: Names
    varies: bool = False
    going: "Going | None" = field(default=None, init=False)

    def type(self, one: Typed, *, again: bool) -> None:
        """Waits for the command before, and starts this one. With `again` it asks until that is answered."""
        self.finish()
        command, one = self.names.here(one.command), Typed(one.command, one.shown)
        words = shlex.split(command, comments=True)
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            self.environment[name] = os.path.expandvars(value)
            return
        self.going = self._start(words, command, one)
        if again and (words[0] == "tail" or (words[0] == "stageline" and words[1] in _ASKING)):
            self._ask_until_shown(words, command, one)

    def finish(self) -> None:
        """Waits for the command that goes on, and compares its output."""
        if self.going is not None:
            self.going.finish(self.names, varies=self.varies)
            self.going = None

    def _ask_until_shown(self, words: list[str], command: str, one: Typed) -> None:
        deadline = monotonic() + LIMIT
        while self.going is not None and not self.going.shows(self.names, varies=self.varies):
            assert monotonic() < deadline, self.going.difference()
            sleep(0.05)
            self.going = self._start(words, command, one)
        self.going = None

    def _start(self, words: list[str], command: str, one: Typed) -> "Going":
        descriptor, log = tempfile.mkstemp(prefix=".output-", dir=self.folder)
        with open(descriptor, "w") as output:
            process = self._process(words, command, output.fileno())
        return Going(one, process, Path(log))

    def _process(self, words: list[str], command: str, output: int) -> "Child | subprocess.Popen[bytes]":
        plain = not set("|&;<>$`") & set(command)
        if plain and words[0] == "stageline":
            return self.fork_server.start_logged(words[1:], self.folder, self.environment, output)
        if plain and words[0] == "python" and words[1].endswith(".py"):
            return self.fork_server.start_logged(["script", *words[1:]], self.folder, self.environment, output)
        found = f"{Path(sys.executable).parent}{os.pathsep}{self.environment['PATH']}"
        return subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env={**self.environment, "PATH": found},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


@dataclass
class Going:
    """A command that has been started."""

    typed: Typed
    process: "Child | subprocess.Popen[bytes]"
    log: Path

    def finish(self, names: Names, *, varies: bool) -> None:
        if self.typed.interrupted:
            self._interrupt_when_it_shows(names)
        elif self.typed.command.startswith("stageline broker"):  # it would wait half a minute for questions
            self._until(lambda: self._matches(names, varies=varies))
            self.process.send_signal(signal.SIGTERM)
        assert self.shows(names, varies=varies), self.difference()

    def shows(self, names: Names, *, varies: bool) -> bool:
        code = self.process.wait(LIMIT)
        if not self.typed.shown.strip():
            return code == 0
        return self._matches(names, varies=varies)

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def difference(self) -> str:
        return f"$ {self.typed.command}\nshows:\n{self.typed.shown}\nprints:\n{self.output()}"

    def _matches(self, names: Names, *, varies: bool) -> bool:
        shown = names.here(self.typed.shown).replace(_INTERRUPT, "")
        return not shown.strip() or names.learn(shown, self.output(), varies=varies)

    def _interrupt_when_it_shows(self, names: Names) -> None:
        before = f"{self.typed.shown.partition(_INTERRUPT)[0]}..."
        self._until(lambda: names.learn(names.here(before), self.output(), varies=False))
        os.killpg(self.process.pid, signal.SIGINT)

    def _until(self, look: Callable[[], bool]) -> None:
        deadline = monotonic() + LIMIT
        while not look():
            ended = self.process.poll() is not None
            assert look() or (not ended and monotonic() < deadline), self.difference()
            sleep(0.02)
