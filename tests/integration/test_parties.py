"""Runs of two parties, whose queues the broker has no key of: on other disks, with another key, with other plans."""

import json
import os
import re
import signal
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from stageline.pipeline.errors import ExitCode
from support.answers import conforming
from support.fork_server import ForkServer
from support.parties import Parties, key_of
from support.redis_server import RedisServer
from support.relays import RunningRelay
from support.workspace import free_port, own_address, until

SCRIPT = """
import json, sys
from functools import partial

import model
import torch
from stageline import Line
from torch import nn

line = Line(model.build, cut=[2], loss=nn.functional.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1),
            microbatches=2, broker=sys.argv[2], settings=json.loads(sys.argv[1]))
with line:
    for step in range(3):
        line.step(torch.full((4, 4), float(step)), torch.tensor([0, 1, 0, 1]))
    print(sorted(line.state_dict()))
"""
BOTH = {"hospital": (0, 1), "lab": ()}
WAYS = ("tcp", "redis", "relay")


@pytest.fixture
def parties(tmp_path: Path, fork_server: ForkServer, stack: ExitStack) -> Parties:
    made = Parties(tmp_path, fork_server, stack)
    made.sets += ("--set", "queues.url=tcp://0.0.0.0:0")
    return made


@pytest.fixture(params=WAYS)
def over(request: pytest.FixtureRequest, tmp_path: Path, fork_server: ForkServer, stack: ExitStack) -> Parties:
    """Parties whose queues and broker are reached in either way."""
    made = Parties(tmp_path, fork_server, stack)
    url = "tcp://0.0.0.0:0"
    if request.param == "redis":
        url = f"redis://127.1:{stack.enter_context(RedisServer()).port}/0"  # which counts as another machine's
        made.bind = f"{url}#small"
    if request.param == "relay":
        url = made.bind = stack.enter_context(closing(RunningRelay())).url
    made.sets += ("--set", f"queues.url={url}")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("owned", [{"hospital": (0,), "lab": (1,)}, BOTH], ids=["two", "one"])
def test_a_worker_of_a_party_on_another_disk_takes_the_place_of_a_lost_one(
    over: Parties, owned: dict[str, Sequence[int]]
) -> None:
    """Also where one party has both places, and a queue has the party's key at both ends."""
    wanted = over.undisturbed()
    over.agree(owned)
    os.mkfifo(over.hospital.folder / "gate")
    second = over.hospital if 1 in owned["hospital"] else over.lab
    broker, address = over.broker()
    stays = over.worker(over.hospital, address, "--index", "0")
    lost = over.worker(second, address, "--index", "1", "--name", "lost", "--set", "run.dir=lost")
    over.until_present({0: "worker-0", 1: "lost"}, broker, stays, lost)
    lost.kill()
    lost.wait()
    again = over.worker(second, address, "--index", "1", "--name", "again", "--set", "run.dir=again")
    over.until_present({1: "again"}, broker, stays, again)
    assert "level 2, parties in the plan: hospital has worker" in over.desk.command("status").stdout
    (over.hospital.folder / "gate").write_text("")
    over.end(broker, stays, again)
    assert over.digest() == wanted


@pytest.mark.slow
def test_each_wrong_worker_is_told_what_is_wrong_with_it(parties: Parties) -> None:
    hospital, lab, desk = parties.hospital, parties.lab, parties.desk
    keys = {name: key_of(machine) for name, machine in (("hospital", hospital), ("lab", lab), ("desk", desk))}
    broker, address = parties.broker()

    def refusal(machine: object, *options: str, code: int = ExitCode.NOT_ADMITTED) -> str:
        worker = parties.worker(machine, address, *options, "--patience", "120")  # type: ignore[arg-type]
        assert worker.wait() == code
        return str(worker.stderr.read())

    said = refusal(lab, "--index", "0")
    assert "worker 0 is of party hospital" in said
    assert "start it with --index 1" in said
    assert f"the key of this machine, {keys['desk']}, is of no party in the plan" in refusal(desk, "--index", "1")
    parties.tell(lab, hospital=[keys["desk"]])
    said = refusal(lab, code=ExitCode.REFUSED)
    assert "other parties than the broker: party hospital (digest " in said
    assert f"its key is {keys['desk'][:11]}... here, {keys['hospital'][:11]}... there" in said
    parties.tell(lab, hospital=[keys["lab"]], lab=[keys["hospital"]])
    said = refusal(lab, "--index", "0")
    assert "is of party lab in the broker's plan, and asks for place 0, which is hospital's" in said
    lab.write("stageline.toml", (lab.folder / "stageline.toml").read_text().partition("[parties")[0])
    assert "this run has parties (hospital, lab), and the worker's plan does not tell of the key" in refusal(lab)
    parties.tell(desk, lab=[keys["desk"]])  # the broker keeps to the plan that it began with
    parties.agree()
    workers = parties.worker(hospital, address), parties.worker(lab, address)
    parties.end(broker, *workers)


def test_the_places_of_parties_are_given_by_no_line_and_no_admission(parties: Parties) -> None:
    broker, _ = parties.broker()
    for words, text in [
        (("keys", "invite"), "the places of this run are its parties'"),
        (("keys", "invite", "--right", "look", "--worker", "1"), "the places of this run are its parties'"),
        (("keys", "admit", key_of(parties.desk)), "the places of this run are its parties'"),
        (("keys", "admit", key_of(parties.lab), "--right", "look"), "is a key of party lab"),
    ]:
        done = parties.desk.command(*words)
        assert done.returncode == ExitCode.USAGE
        assert text in done.stderr
    assert parties.desk.command("keys", "invite", "--right", "look").returncode == 0
    listed = parties.desk.command("keys", "ls").stdout
    assert key_of(parties.hospital)[:11] in listed
    assert [each["name"] for each in conforming(parties.desk.command("keys", "ls", "--json").stdout)["parties"]]
    reloaded = conforming(parties.desk.command("keys", "reload", "--json").stdout)
    assert (reloaded["changes"], reloaded["revoked"]) == ([], [])
    assert "parties" in listed
    assert "the plan has the same parties as before" in parties.desk.command("keys", "reload").stdout
    broker.send_signal(signal.SIGTERM)
    assert broker.wait() == ExitCode.INTERRUPTED


@pytest.mark.slow
def test_a_party_changes_its_key_while_the_run_goes_on(over: Parties) -> None:
    """The hospital says by name what it does not believe, and believes it once it was started with the new plan."""
    parties, wanted = over, over.undisturbed()
    hospital, lab, desk = parties.hospital, parties.lab, parties.desk
    new = {"STAGELINE_KEY_FILE": str(lab.folder / ".keys" / "new.key")}
    made = lab.command("keys", "new", **new).stdout.split()[1]
    both = [key_of(lab), made]
    os.mkfifo(hospital.folder / "gate")
    broker, address = parties.broker()
    stays = parties.worker(hospital, address, "--name", "old")
    first = parties.worker(lab, address, "--name", "first")
    parties.until_present({0: "old", 1: "first"}, broker, stays, first)
    parties.tell(desk, lab=both)
    assert "party lab" in desk.command("keys", "reload").stdout
    until(stays.stderr, "not believed: the broker has other parties: party lab")
    parties.agree(lab=both)
    stays.kill()
    stays.wait()
    stays = parties.worker(hospital, address, "--name", "new")
    parties.until_present({0: "new"}, broker, stays, first)
    first.kill()
    first.wait()
    second = parties.worker(lab, address, "--name", "second", **new)
    parties.until_present({1: "second"}, broker, stays, second)
    (hospital.folder / "gate").write_text("")
    parties.end(broker, stays, second)
    assert parties.digest() == wanted


@pytest.mark.slow
def test_a_key_that_the_plan_lists_no_more_is_shut_out_and_another_believed_by_none_that_does_not_list_it(
    parties: Parties,
) -> None:
    hospital, lab, desk = parties.hospital, parties.lab, parties.desk
    new = {"STAGELINE_KEY_FILE": str(lab.folder / ".keys" / "new.key")}
    made = lab.command("keys", "new", **new).stdout.split()[1]
    os.mkfifo(hospital.folder / "gate")
    broker, address = parties.broker()
    stays = parties.worker(hospital, address)
    old = parties.worker(lab, address)
    parties.until_present({0: "worker", 1: "worker"}, broker, stays, old)
    shown = desk.command("stack", "--all", "--json").stdout
    assert '"threading.py"' in shown  # functions, and neither lines of a party's code nor paths on its machine
    assert re.findall(r'"text": "[^"]|"file": "[^"]*/', shown) == []
    parties.tell(desk, lab=[made])
    said = desk.command("keys", "reload").stdout
    assert f"{key_of(lab)} is refused from now on" in said
    assert old.wait() == ExitCode.NOT_ADMITTED
    parties.tell(lab, lab=[made])
    other = parties.worker(lab, address, **new)
    until(stays.stderr, f"not believed: the broker tells that worker 1, of party lab, has the key {made}")
    assert other.wait() == ExitCode.REFUSED  # what the hospital has told is not for that key
    assert f"has told nothing that the key of this machine, {made}, opens" in other.stderr.read()
    for process in (stays, broker):
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_scripts_workers_believe_the_parties_of_their_own_machines(parties: Parties) -> None:
    """The script has the plan, its parties as well: what it says of these counts for its own machine alone."""
    hospital, lab, desk = parties.hospital, parties.lab, parties.desk
    owned = {"desk": (desk, []), "hospital": (hospital, [0]), "lab": (lab, [1])}
    settings = {"parties.desk.script": True}
    for name, (machine, workers) in owned.items():
        settings |= {f"parties.{name}.key": key_of(machine), f"parties.{name}.workers": workers}
    desk.write("script.py", SCRIPT)
    script = desk.start("script", "script.py", json.dumps(settings), f"tcp://0.0.0.0:{free_port()}")
    said = until(script.stderr, "--join")
    found = re.search(r"--join '?\S*?:(\d+#k1\.[\w-]{43})[' ,]", said)
    assert found is not None, said
    address = f"tcp://{own_address()}:{found[1]}"
    unsaid = lab.start("worker", "--join", address, "--index", "1")
    assert unsaid.wait() == ExitCode.REFUSED
    assert "the script's run has parties, whose keys each machine takes from its own settings" in unsaid.stderr.read()
    own = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    workers = [machine.start("worker", "--join", address, *own) for machine in (hospital, lab)]
    output, log = script.communicate()
    assert script.returncode == 0, log
    assert "0.weight" in output
    assert [worker.wait() for worker in workers] == [0, 0]
