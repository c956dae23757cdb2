"""A whole run of the tiny plan, with real processes, which a test watches and disturbs while it goes on."""

import contextlib
import io
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from torch import nn

from stageline.workers.cli.app import run
from stageline.workers.control.client import Client
from stageline.workers.runs import folder as runs
from support import action_log, reference
from support.action_log import Entry
from support.fork_server import ForkServer, Kill

TINY = Path(__file__).parent / "tiny"
PATIENCE = 50.0  # seconds in which anything that a test waits for has happened


@cache
def expected(steps: int, folder: Path = TINY) -> str:
    """The digest of the weights that plain torch comes to with the model in `folder`."""
    recipe = reference.recipe(folder, steps=steps)

    def quick() -> nn.Sequential:
        model = recipe.build()
        for layer in model:
            layer.seconds = 0  # the layers that sleep
        return model

    return reference.train(replace(recipe, build=quick)).weights_sha256


def plan_in(home: Path) -> Path:
    """A copy of the tiny plan, to be changed."""
    return Path(shutil.copytree(TINY, home / "plan", dirs_exist_ok=True)) / "stageline.toml"


class WholeRun:
    """A run of `plan` that goes on in the background."""

    def __init__(
        self,
        fork_server: ForkServer,
        plan: Path,
        *sets: str,
        kills: Sequence[Kill] = (),
        resume: bool = False,
        spares: int = 0,
    ) -> None:
        self.folder = plan.parent.parent / "runs" / "tiny"
        self._outcome: dict[str, Any] = {}
        options = {"kills": kills, "resume": resume, "spares": spares}
        self._thread = threading.Thread(target=self._train, args=(fork_server, plan, sets, options))
        self._thread.start()

    @property
    def goes_on(self) -> bool:
        """False once its processes have ended."""
        return self._thread.is_alive()

    def entries(self) -> list[Entry]:
        """Actions of its processes so far."""
        return action_log.read(self.folder) if (self.folder / action_log.FILE).exists() else []

    def until(self, what: Callable[[Entry], bool]) -> Entry:
        """The first entry of which `what` is true, as soon as it is there."""
        return self.wait_for(lambda: next(filter(what, self.entries()), None))

    def until_checkpoint(self, step: int) -> None:
        self.until(lambda entry: entry.what == action_log.CHECKPOINT and entry.step >= step)

    def wait_for(self, look: Callable[[], Any]) -> Any:
        """Result of `look` as soon as it is true."""
        deadline = monotonic() + PATIENCE
        while monotonic() < deadline and self._thread.is_alive():
            if found := look():
                return found
            sleep(0.02)
        raise AssertionError(f"that did not happen. {self._outcome or 'The run goes on'}")

    def ask(self, command: str, *arguments: str) -> str:
        """Text that a command prints of the run."""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            run([command, str(self.folder), *arguments])
        return printed.getvalue()

    def facts(self, what: str) -> dict[str, Any]:
        """Answer of the broker to a query."""
        with self._client() as client:
            return client.ask(what, PATIENCE)

    def pids(self) -> set[int]:
        """The processes that are members of the run."""
        return {row["pid"] for row in self.facts("status")["workers"] if "pid" in row}

    def stop(self, *, at_step_end: bool = True) -> None:
        """Asks it to end at the end of a step that no stage has passed by then, or at once."""
        with self._client() as client:
            client.stop_run("interrupted", at_step_end=at_step_end)

    def end(self) -> dict[str, Any]:
        """How it ended; it has left nothing behind."""
        self._thread.join()
        assert "error" not in self._outcome, self._outcome["error"]
        assert self._outcome["orphans"] == self._outcome["left"] == []
        return self._outcome

    def digest(self) -> str:
        """The same, of a run that must have ended well: the digest of its weights."""
        outcome = self.end()
        assert outcome["code"] == 0, outcome["reason"]
        return str(outcome["facts"]["weights_sha256"])

    def log(self, process: str) -> str:
        """The log of a process."""
        return (self.folder / f"{process}.log").read_text()

    def _client(self) -> Client:
        broker = runs.read_broker_url(self.folder)
        if broker is None:
            self._thread.join()
            raise AssertionError(f"the run has ended: {self._outcome}")
        return Client(broker, lambda: runs.read_control_secret(self.folder))

    def _train(self, fork_server: ForkServer, plan: Path, sets: tuple[str, ...], options: dict[str, Any]) -> None:
        try:
            sets = (f"run.dir={self.folder.parent}", *sets)
            self._outcome = fork_server.train(plan, *sets, folder=self.folder, **options)
        except RuntimeError as error:
            self._outcome = {"error": str(error)}
