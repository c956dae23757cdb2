"""Split learning: rows, labels and the client's weights stay, and the split model is the unsplit one, to the bit."""

import json
import signal
from collections.abc import Iterator
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from stageline.pipeline.model.load import load_object
from stageline.workers.extras.exchange.load import load
from support import reference
from support.byte_tap import RECORDING, ByteTap, bytes_of, found, recorded, rows_of
from support.paths import EXAMPLES, TESTS
from support.workspace import PLAN, Workspace, free_port, until

EXERCISE = EXAMPLES / "split_learning"
SMALL, WHOLE = (3, 48, 16), (2, 512, 224)  # steps, batch size, pixels

U_SHAPED = """
labels_stay = true
stays = [0, 2]

[workers.0]
stages = [0, 2]

[workers.1]
stages = [1]

[schedule]"""

# Labels that cannot be mistaken for anything: the class is the remainder by 10.
SECRETS = """
import torch
from stageline import Rows

def batches(batch_size, seed):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 64, generator=generator)
    y = torch.randint(2**60, 2**62, [40], generator=generator)
    return Rows(x[:32], y[:32], batch_size, seed, held_out=(x[32:], y[32:]))
"""

MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 10))

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets % 10)

def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets % 10).float().mean()
"""


@pytest.fixture
def secrets(workspace: Workspace) -> Workspace:
    plan = PLAN.replace("cut = [2]", "cut = [2, 4]").replace("\n[schedule]", U_SHAPED)
    workspace.write("stageline.toml", plan.replace("torch.nn.functional.cross_entropy", "model.py:loss"))
    workspace.write("data.py", SECRETS)
    workspace.write("model.py", MODEL)
    return workspace


def reference_of(file: str, steps: int, batch_size: int, size: int, microbatches: int = 1) -> reference.ReferenceResult:
    changes = {"data.options": {"size": size}, "model.options": {"size": size}}
    sizes = {"steps": steps, "batch_size": batch_size, "microbatches": microbatches}
    return reference.train(reference.recipe(EXERCISE, file=file, changes=changes, **sizes))


@pytest.mark.slow
def test_nothing_that_stays_is_among_the_bytes_between_the_processes(secrets: Workspace, tmp_path_factory) -> None:
    """All of them: between the workers, with the broker, and of commands that ask it."""
    taps = tmp_path_factory.mktemp("taps")
    secrets.write("model.py", MODEL + RECORDING.format(tests=str(TESTS), folder=str(taps)))
    url = f"tcp://127.0.0.1:{free_port()}"
    sets = ("--set", "queues.url=tcp://127.0.0.1:0", "--set", "recovery.snapshot_every=2")
    broker = secrets.start("broker", ".", "--bind", url, *sets)
    until(broker.stderr, "broker at")
    with ByteTap(url, taps) as tap:
        dialled = ("--broker", tap.endpoint)
        workers = [secrets.start("worker", ".", *dialled, *sets, "--index", str(index)) for index in range(2)]
        ended = [(worker.communicate()[1], worker.returncode) for worker in workers]
        assert [code for _, code in ended] == [0, 0], ended
        for question in (("status",), ("queue", "ls"), ("why",), ("story", "1/2")):
            asked = secrets.command(*question, ".", *dialled)
            assert asked.returncode == 0, asked.stderr
    broker.send_signal(signal.SIGTERM)
    assert broker.wait() == 0

    secrets.write("model.py", MODEL)  # without the recording: this process imports it
    source = load_object("data.py:batches", secrets.folder, "data")(32, 0)
    rows, labels = (torch.cat(pair) for pair in zip(source.batch(0), source.held_out(), strict=True))
    first = initial_weights(secrets)
    trained = load(secrets.runs()[0]).state_dict()
    weights = chain.from_iterable(map(rows_of, (*stay(first), *stay(trained))))
    assert not found(taps, chain(rows_of(rows), weights, labels_of(labels)))
    assert sum(map(len, recorded(taps))) > 20_000
    microbatch = source.held_out()[0][:2]
    activations = torch.tanh(nn.functional.linear(microbatch, trained["0.weight"], trained["0.bias"]))
    assert len(found(taps, map(bytes_of, activations))) == 2  # of rows held out, evaluated at the end


def stay(state: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The weights of stages 0 and 2, each with what can be looked for as its rows."""
    return state["0.weight"], state["0.bias"][None], state["4.weight"], state["4.bias"][None]


def initial_weights(workspace: Workspace) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return dict(load_object("model.py:build", workspace.folder, "model")().state_dict())


def labels_of(labels: Tensor) -> Iterator[bytes]:
    for label in labels:
        yield from (bytes_of(label), bytes_of(label.double()), str(int(label)).encode())
        yield int(label).to_bytes(8, "big")  # as msgpack has it
    for start in range(0, len(labels), 2):  # a microbatch's classes
        for dtype in (torch.int64, torch.int32, torch.float32):
            yield bytes_of((labels[start : start + 4] % 10).to(dtype))


def test_what_a_stage_that_stays_passes_on_unchanged_is_found_before_the_run(secrets: Workspace) -> None:
    secrets.write("model.py", MODEL.replace("nn.Sequential(", "nn.Sequential(nn.Flatten(), nn.Identity(), "))
    refused = secrets.command("train", ".")
    assert refused.returncode == 78, refused.stderr
    assert (
        "data.stays = [0, 2]: what stage 0 gives to stage 1 at worker 1 has a row of the data in it" in refused.stderr
    )


@pytest.mark.slow
def test_a_worker_with_the_last_stage_alone_reads_labels_and_no_rows(workspace: Workspace) -> None:
    sizes = ("data.options={size=16}", "model.options={size=16}", "data.batch_size=48", "run.steps=3")
    sets = [word for each in sizes for word in ("--set", each)]
    noted = workspace.folder / "drawn"
    for name in ("data.py", "images.py", "model.py", "stageline.toml"):
        workspace.write(name, (EXERCISE / name).read_text())
    workspace.write(
        "images.py",
        (workspace.folder / "images.py").read_text()
        + f"\nimport os\ndraw_ = draw\ndef draw(*given):\n    open({str(noted)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "    return draw_(*given)\n",
    )
    ended = workspace.command("train", ".", "--json", *sets, "--set", "data.check=false")
    assert ended.returncode == 0, ended.stderr
    drawing = set(noted.read_text().split())
    assert len(drawing) == 2  # worker 0, and the trial


@pytest.mark.parametrize("sizes", [SMALL, WHOLE], ids=["small", "whole"])
@pytest.mark.slow
def test_the_plans_have_the_unsplit_models_weights(
    sizes: tuple[int, int, int], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXERCISE)
    steps, batch_size, size = sizes
    for file, microbatches in (("stageline.toml", 1), ("u_shaped.toml", 4)):
        words = (f"run.steps={steps}", f"data.batch_size={batch_size}", f"data.options={{size={size}, count=1024}}")
        words += (f"model.options={{size={size}}}", "model.metrics=[]", "data.check=false")
        sets = [word for each in words for word in ("--set", each)]
        ended = workspace.command("train", str(EXERCISE / file), "--json", *sets)
        assert ended.returncode == 0, ended.stderr
        changes = {"data.options": {"size": size, "count": 1024}, "model.options": {"size": size}}
        recipe = reference.recipe(
            EXERCISE, file=file, changes=changes, steps=steps, batch_size=batch_size, microbatches=microbatches
        )
        assert json.loads(ended.stdout)["weights_sha256"] == reference.train(recipe).weights_sha256


@pytest.mark.parametrize("script", ["by_hand.py", "several.py turns", "several.py parallel"])
@pytest.mark.parametrize("sizes", [SMALL, WHOLE], ids=["small", "whole"])
@pytest.mark.slow
def test_by_hand_one_client_has_the_unsplit_models_weights(
    script: str, sizes: tuple[int, int, int], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXERCISE)
    steps, batch_size, size = sizes
    file, *arrangement = script.split()
    words = (*arrangement, 1, 1, steps, batch_size, size) if arrangement else (steps, batch_size, size)
    ended = workspace.command("script", str(EXERCISE / file), *map(str, words))
    assert ended.returncode == 0, ended.stderr
    wanted = reference_of("stageline.toml", steps, batch_size, size).state
    trained = {
        name: tensor for path in workspace.folder.rglob("*.safetensors") for name, tensor in load_file(path).items()
    }
    assert trained.keys() == wanted.keys()
    assert all(torch.equal(trained[name], wanted[name]) for name in wanted)


class PlainClients:
    """The unsplit models of three clients, in plain torch: each has first layers of its own, and all share the rest."""

    def __init__(self, batch_size: int, size: int, count: int = 3) -> None:
        torch.manual_seed(0)
        model = load_object("model.py:build", EXERCISE, "model")(size)
        self.rest = model[3:]
        self.first = [load_object("model.py:build", EXERCISE, "model")(size)[:3] for _ in range(count)]
        for first in self.first:
            first.load_state_dict(model[:3].state_dict())
        self.updates = [torch.optim.Adam(first.parameters(), lr=1e-4) for first in self.first]
        self.update_of_rest = torch.optim.Adam(self.rest.parameters(), lr=1e-4)
        images = load_object("data.py:batches", EXERCISE, "data")
        self.sources = [images(batch_size, 0, size=size, share=(index, count)) for index in range(count)]

    def step(self, index: int, number: int) -> None:
        x, y = self.sources[index].batch(number)
        nn.functional.cross_entropy(self.rest(self.first[index](x)), y).backward()
        for each in (self.updates[index], self.update_of_rest):
            each.step()
            each.zero_grad()

    def hand_on(self, index: int, to: int) -> None:
        self.first[to].load_state_dict(self.first[index].state_dict())

    def average(self) -> None:
        states = [first.state_dict() for first in self.first]
        mean = {name: (states[0][name] + states[1][name] + states[2][name]) / 3 for name in states[0]}
        for first in self.first:
            first.load_state_dict(mean)


def train_plain(clients: PlainClients, arrangement: str, rounds: int, steps: int) -> None:
    for turn in range(rounds):
        if arrangement == "turns":
            for index in range(3):
                if (turn, index) != (0, 0):
                    clients.hand_on((index - 1) % 3, index)
                for step in range(steps):
                    clients.step(index, turn * steps + step)
        else:
            for step in range(steps):
                for index in range(3):
                    clients.step(index, turn * steps + step)
            clients.average()


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", ["turns", "parallel"])
def test_three_clients_have_the_weights_of_plain_torch_and_only_activations_pass(
    arrangement: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path_factory
) -> None:
    monkeypatch.syspath_prepend(EXERCISE)
    taps = tmp_path_factory.mktemp("taps")
    workspace.write(
        "tapped.py", TAPPED.format(exercise=str(EXERCISE), tests=str(TESTS), taps=str(taps), of=arrangement)
    )
    ended = workspace.command("script", "tapped.py")
    assert ended.returncode == 0, ended.stderr
    clients = PlainClients(batch_size=24, size=16)
    train_plain(clients, arrangement, rounds=2, steps=2)
    parts = [clients.first[0].state_dict(), clients.first[1].state_dict(), clients.first[2].state_dict()]
    for index, part in enumerate(parts):
        own = load_file(workspace.folder / f"client-{index}.safetensors")
        assert all(torch.equal(own[name], part[name]) for name in part)
    rest = load_file(workspace.folder / "server.safetensors")
    assert all(torch.equal(rest[name], tensor) for name, tensor in clients.rest.state_dict().items())
    rows = torch.cat([source.batch(number)[0] for source in clients.sources for number in range(4)]).flatten(1)
    assert not found(taps, rows_of(rows))
    assert sum(map(len, recorded(taps))) > 24 * 128 * 4 * 12


TAPPED = """
import sys
from functools import partial
from pathlib import Path

sys.path[:0] = [{exercise!r}, {tests!r}]

import several
from support.byte_tap import ByteTap

several.together = partial(several.together, dialled=lambda endpoint: ByteTap(endpoint, Path({taps!r})).endpoint)
several.main({of!r}, Path(), clients=3, rounds=2, steps=2, batch_size=24, size=16)
"""


def test_a_run_whose_data_stay_is_not_laid_out_in_another_way(secrets: Workspace) -> None:
    trained = secrets.command("train", ".", "--set", "run.steps=2")
    assert trained.returncode == 0, trained.stderr
    refused = secrets.command("checkpoint", "split", str(secrets.runs()[0]), "--set", "model.cut=[1, 4]")
    assert refused.returncode == 78, refused.stderr
    assert "has data.stays, and this plan lays it out in another way" in refused.stderr


@pytest.mark.slow
def test_a_worker_for_any_place_is_refused_where_data_stay(secrets: Workspace) -> None:
    refused = secrets.command("worker", ".")
    assert refused.returncode == 2, refused.stderr
    assert "say which worker this process is, with --index" in refused.stderr
