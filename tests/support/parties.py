"""Parties of a run, each in a folder of its own with a key of its own, and a broker of another."""

import json
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from stageline.workers.keys.keyring import own_pair
from support.fork_server import ForkServer
from support.machines import GATED
from support.workspace import PLAN, Command, Workspace, own_address, until, wait_for

OWNED = {"hospital": (0,), "lab": (1,)}


def key_of(machine: Workspace) -> str:
    return own_pair({"STAGELINE_KEY_FILE": str(machine.key)}).public.text


class Parties:
    """A hospital, a lab, and a desk with the broker, which has the key of neither.

    Attributes:
        sets: Options of all commands.
        bind: Address at which the broker is to be reached.
    """

    def __init__(self, folder: Path, fork_server: ForkServer, stack: ExitStack) -> None:
        names = ("desk", "hospital", "lab")
        machines = (stack.enter_context(_machine(folder / name, fork_server)) for name in names)
        self.desk, self.hospital, self.lab = machines
        sets = ("recovery.lease=10", "recovery.action=600", "recovery.snapshot_every=100")
        self.sets = tuple(word for each in sets for word in ("--set", each))
        self.bind = "tcp://0.0.0.0:0"
        self.agree()

    def agree(self, owned: Mapping[str, Sequence[int]] = OWNED, **keys: Sequence[str]) -> None:
        """All have the plan with these parties."""
        for machine in (self.desk, self.hospital, self.lab):
            self.tell(machine, owned, **keys)

    def tell(self, machine: Workspace, owned: Mapping[str, Sequence[int]] = OWNED, **changed: Sequence[str]) -> None:
        """Writes the plan of one of them.

        Args:
            machine: Whose plan it is.
            owned: Workers by party.
            changed: Keys by party, where they are others than the parties'.
        """
        keys = {"hospital": [key_of(self.hospital)], "lab": [key_of(self.lab)], **changed}
        tables = (
            f"\n[parties.{name}]\nkey = '{keys[name][0]}'\nworkers = {list(workers)}\n"
            + "".join(f"next_key = '{each}'\n" for each in keys[name][1:])
            for name, workers in owned.items()
        )
        machine.write("stageline.toml", PLAN + "".join(tables))

    def broker(self, *more: str) -> tuple[Command, str]:
        """A broker, and the address that it prints, as it is dialled on this machine."""
        broker = self.desk.start("broker", ".", "--bind", self.bind, *self.sets, *more)
        said = until(broker.stderr, "start every worker with")
        if self.bind.startswith("relay:"):  # which has a secret, and is not shown
            return broker, f"{self.bind}#{key_of(self.desk)}"
        printed = re.search(r"--join '?([^\s']*)", said)
        assert printed is not None
        address = printed[1]
        assert re.search(r"#k1\.[\w-]{43}$", address), "it has no secret"
        if address.startswith("tcp:"):
            address = re.sub(r"//.*:(\d+#)", rf"//{own_address()}:\1", address)
        return broker, address

    def worker(self, machine: Workspace, address: str, *options: str, **environment: str) -> Command:
        return machine.start("worker", ".", "--join", address, *options, *self.sets, **environment)

    def digest(self) -> str:
        """That of the run, which must have ended well."""
        (folder,) = self.desk.runs()
        return str(json.loads((folder / "result.json").read_text())["weights_sha256"])

    def undisturbed(self) -> str:
        """The digest of the plan, trained on one machine."""
        done = self.desk.command("train", "--json", *self.sets[:6], "--set", "run.dir=plain")
        return str(json.loads(done.stdout)["weights_sha256"])

    def present(self) -> dict[int, str]:
        """The names of the workers that are there, by index; none before all have their queues."""
        facts = json.loads(self.desk.command("status", "--json").stdout)
        if facts["phase"] != "running":
            return {}
        return {row["index"]: row["name"] for row in facts["workers"] if row["standing"] == "present"}

    def until_present(self, names: Mapping[int, str], *commands: Command) -> None:
        """Waits for workers by index and name. `commands` tell what has happened in place of that."""
        try:
            wait_for(lambda: names.items() <= self.present().items())
        except AssertionError as error:
            for each in commands:
                each.kill()
            raise AssertionError("\n---\n".join(each.stderr.read() for each in commands)) from error

    def end(self, broker: Command, *workers: Command) -> None:
        for each in workers:
            if each.wait():
                broker.kill()
                raise AssertionError(f"{each.stderr.read()}\nthe broker said:\n{broker.stderr.read()}")
        broker.send_signal(signal.SIGTERM)
        broker.wait()


@contextmanager
def _machine(folder: Path, fork_server: ForkServer) -> Iterator[Workspace]:
    folder.mkdir()
    with Workspace(folder, fork_server) as workspace:
        workspace.write("model.py", GATED)
        yield workspace
