"""A broker that other machines can reach: they join by the line that it prints; who is revoked is gone; who knocks is
admitted. Machines are told apart by their key files."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from stageline.broker.keys.join_line import JoinLine, keyed
from stageline.pipeline.errors import ExitCode
from stageline.workers.keys.keyring import own_pair
from support.answers import conforming
from support.machines import here, line_in
from support.workspace import Command, Workspace, until, wait_for

BIND = ("--bind", "tcp://0.0.0.0:0")


class Machines:
    """A broker at a desk, and workers there and at a lab."""

    def __init__(self, workspace: Workspace, *sets: str) -> None:
        self._workspace = workspace
        self._sets = tuple(word for each in sets for word in ("--set", each))
        self.folder = workspace.folder

    def key(self, machine: str) -> dict[str, str]:
        return {"STAGELINE_KEY_FILE": str(self.folder / f"{machine}.key")}

    def public(self, machine: str) -> str:
        return own_pair(self.key(machine)).public.text

    def broker(self, *arguments: str) -> tuple[Command, JoinLine]:
        """A broker, and the line that it prints, with an address that is this machine's for certain."""
        broker = self._workspace.start("broker", ".", *(arguments or BIND), *self._sets, **self.key("desk"))
        return broker, line_in(until(broker.stderr, "start every worker with"))

    def worker(self, machine: str, line: str, *options: str) -> Command:
        arguments = ("worker", ".", "--join", line, *options, *self._sets)
        return self._workspace.start(*arguments, **self.key(machine))

    def end(self, broker: Command, *workers: Command) -> int:
        """The exit code of a broker whose workers have ended well; it would stay for half a minute to be asked."""
        assert [each.wait() for each in workers] == [0] * len(workers)
        broker.send_signal(signal.SIGTERM)
        return broker.wait()

    def says(self, *words: str, code: int = 0, **environment: str) -> str:
        """Text that a command prints at the desk, or elsewhere with the key of `environment`."""
        done = self._workspace.command(*words, **(environment or self.key("desk")))
        assert done.returncode == code, done.stderr
        return done.stdout + (done.stderr if code else "")

    def status(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.says("status", "--json"))
        return found

    def present(self) -> list[int]:
        return [each["index"] for each in self.status()["workers"] if each["standing"] == "present"]  # type: ignore

    def log(self) -> list[tuple[str, str]]:
        """The audit log: what became of which key."""
        text = (self._workspace.runs()[0] / "keys.log").read_text()
        return [(each["what"], each["key"]) for each in map(json.loads, text.splitlines())]


@pytest.fixture
def machines(workspace: Workspace) -> Machines:
    return Machines(workspace, "queues.url=tcp://127.0.0.1:0", "recovery.lease=2")


def weights(output: str) -> str:
    return re.findall(r"weights_sha256[ =]+([0-9a-f]{64})", output)[0]


@pytest.mark.slow
def test_machines_that_join_by_the_line_train_to_the_digest_of_a_run_on_one(
    machines: Machines, workspace: Workspace
) -> None:
    plain = json.loads(workspace.command("train", "--json", "--set", "run.dir=plain").stdout)
    broker, line = machines.broker()
    started = [machines.worker("desk", line.text), machines.worker("lab", line.text, "--name", "lab-1")]
    assert machines.end(broker, *started) == 0
    result = json.loads((workspace.runs()[0] / "result.json").read_text())
    assert result["weights_sha256"] == plain["weights_sha256"]
    assert ("enrolled", machines.public("lab")) in machines.log()
    assert line.text.rpartition(".")[0].rpartition(".")[2] not in (workspace.runs()[0] / "keys.log").read_text()


@pytest.mark.slow
def test_a_broker_that_is_started_again_knows_who_has_enrolled(machines: Machines, workspace: Workspace) -> None:
    broker, line = machines.broker()
    lab = machines.worker("lab", line.text)
    wait_for(lambda: machines.present() == [0])
    broker.kill()
    broker.wait()
    port = line.address.rpartition(":")[2]
    again, same = machines.broker("--bind", f"tcp://0.0.0.0:{port}", "--run", workspace.runs()[0].name)
    assert same == line
    desk = machines.worker("desk", keyed(line.address, line.broker))
    assert machines.end(again, lab, desk) == 0


@pytest.mark.slow
def test_a_revoked_worker_loses_its_place_and_comes_back_once_it_is_admitted(machines: Machines) -> None:
    broker, line = machines.broker()
    lab, key = machines.worker("lab", line.text), machines.public("lab")
    wait_for(lambda: machines.present() == [0])
    assert key in machines.says("keys", "revoke", key[:12])
    assert lab.wait() == ExitCode.NOT_ADMITTED
    assert f"keys admit {key}" in lab.stderr.read()
    wait_for(lambda: machines.present() == [])
    refused = machines.worker("lab", line.text, "--patience", "1")
    assert refused.wait() == ExitCode.NOT_ADMITTED
    assert "revoked" in refused.stderr.read()
    machines.says("keys", "admit", key)
    started = [machines.worker(machine, line.text) for machine in ("lab", "desk")]
    assert machines.end(broker, *started) == 0
    assert [what for what, who in machines.log() if who == key][:3] == ["enrolled", "revoked", "refused"]


@pytest.mark.slow
def test_a_key_that_knocks_is_shown_and_joins_once_it_is_admitted(machines: Machines) -> None:
    broker, line = machines.broker()
    stranger = machines.worker("lab", keyed(line.address, line.broker))
    command = f"stageline keys admit {machines.public('lab')}"
    wait_for(lambda: command in machines.says("status"))
    assert machines.status()["keys"] == {
        "insecure": False,
        "admitted": 0,
        "knocks": [machines.public("lab")],
        "level": 1,
        "parties": [],
    }
    assert machines.public("lab") in machines.says("keys", "ls")
    machines.says(*command.split()[1:])
    desk = machines.worker("desk", line.text)
    assert machines.end(broker, stranger, desk) == 0
    assert machines.log()[:2] == [("refused", machines.public("lab")), ("admitted", machines.public("lab"))]


@pytest.mark.slow
def test_lines_are_made_for_one_machine_for_one_place_or_to_look_on(machines: Machines) -> None:
    broker, _ = machines.broker()
    printed = machines.says("keys", "invite", "--once", "--worker", "1", "--as", "lab").strip()
    once = here(JoinLine.parse(printed)).text
    wrong = machines.worker("lab", once, "--index", "0")
    assert wrong.wait() == ExitCode.NOT_ADMITTED
    assert "worker 1 alone" in wrong.stderr.read()
    other = machines.worker("home", once)
    assert other.wait() == ExitCode.NOT_ADMITTED
    assert "for one machine" in other.stderr.read()
    facts = conforming(machines.says("keys", "invite", "--right", "look", "--for", "1h", "--json"))
    assert (facts["rights"], facts["serial"]) == (["look"], 2)
    assert facts["key"] in machines.says("keys", "revoke", facts["key"], "--successors")
    started = [machines.worker("lab", once, "--index", "1"), machines.worker("desk", once)]
    assert machines.end(broker, *started) == 0


def test_what_commands_about_keys_print_as_json_has_the_published_schemas(machines: Machines) -> None:
    broker, line = machines.broker()

    def told(*words: str) -> dict[str, Any]:
        return conforming(machines.says("keys", *words, "--json"))

    invited, lab = told("invite", "--once"), told("admit", machines.public("lab"))
    assert (JoinLine.parse(told("line")["line"]).secret, lab["rights"]) == (line.secret, ["work"])
    assert {each["key"] for each in told("ls")["invitations"]} >= {invited["key"]}
    assert "ends" in told("revoke", invited["key"])
    assert "since" in told("revoke", lab["key"])
    assert [each["revoked"] is None for each in told("ls")["keys"]] == [False]
    assert machines.end(broker) == ExitCode.INTERRUPTED


def test_orders_about_keys_need_a_broker_with_this_users_key(machines: Machines, workspace: Workspace) -> None:
    broker = workspace.start("broker", ".", "--bind", "tcp://127.0.0.1:0", **machines.key("desk"))
    until(broker.stderr, "start every worker")
    assert "has no keys" in machines.says("keys", "invite", code=ExitCode.USAGE)
    assert "has no keys" in machines.says("keys", "ls", code=ExitCode.USAGE)
    assert machines.end(broker) == ExitCode.INTERRUPTED


def test_another_user_gives_no_orders_about_a_brokers_keys(machines: Machines, workspace: Workspace) -> None:
    broker, line = machines.broker()
    refused = workspace.command("keys", "invite", **machines.key("lab"))
    assert refused.returncode == ExitCode.REFUSED
    assert f"has the key {line.broker.text}, and yours is {machines.public('lab')}" in refused.stderr
    assert machines.end(broker) == ExitCode.INTERRUPTED


def test_without_keys_a_broker_says_so_at_its_start_and_in_status(machines: Machines, workspace: Workspace) -> None:
    broker = workspace.start("broker", ".", *BIND, "--set", "broker.insecure=true", **machines.key("desk"))
    until(broker.stderr, "broker.insecure = true")
    assert "--join" not in until(broker.stderr, "start every worker with")
    assert machines.status()["keys"] == {"insecure": True}
    assert "insecure" in machines.says("status")
    assert machines.end(broker) == ExitCode.INTERRUPTED


@pytest.mark.slow
def test_the_line_is_printed_again_and_a_machine_that_has_joined_by_it_rotates_its_key(machines: Machines) -> None:
    broker, line = machines.broker()
    again = JoinLine.parse(machines.says("keys", "line"))
    assert (again.broker, again.secret) == (line.broker, line.secret)
    lab = machines.worker("lab", line.text)
    wait_for(lambda: machines.present() == [0])
    before, address = machines.public("lab"), keyed(line.address, line.broker)
    file = Path(machines.key("lab")["STAGELINE_KEY_FILE"])
    text = file.read_text()
    machines.says("keys", "rotate", "--broker", address, **machines.key("lab"))
    assert machines.public("lab") != before
    assert file.with_name(f"{file.name}.former").read_text() == text  # brokers of its own user may have it
    assert machines.present() == [0]  # it goes on with the key that it has
    assert ("succeeded", machines.public("lab")) in machines.log()
    file.with_name(f"{file.name}.former").unlink()
    refused = machines.says("keys", "rotate", "--broker", address, code=ExitCode.NOT_ADMITTED, **machines.key("lab"))
    assert "0 of 1 brokers have confirmed" in refused
    assert f"keys revoke {before}" in refused
    machines.says("keys", "revoke", before)
    assert lab.wait() == ExitCode.NOT_ADMITTED
    started = [machines.worker(machine, address) for machine in ("lab", "desk")]
    assert machines.end(broker, *started) == 0
