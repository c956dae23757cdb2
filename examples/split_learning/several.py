"""Several clients train with one server, each on images of its own: `python several.py turns`, or `parallel`.

turns      client-0  -- epoch with the server -->  weights  --> client-1  -- epoch with the server -->  weights --> ...

parallel   client-0  activation -->  server: each client's microbatch in turn, an update after each
           client-1  activation -->          |
           client-2  activation -->          gradients back; then all clients' parts are averaged, once per round

In turns is how split learning began (Gupta and Raskar, 2018, arXiv 1810.06060); in parallel with averaged clients'
parts is SplitFed (Thapa et al., 2022, arXiv 2004.12088, its second variant). The parts of the model travel between
clients, never to the server. Each client keeps its own optimizer's state.
"""

import sys
from functools import partial
from pathlib import Path

import data
import model
import torch
from by_hand import OPTIMIZER, built
from parties import Party, together
from safetensors.torch import save_file
from torch import Tensor, nn

from stageline import Stage

Weights = dict[str, Tensor]


def averaged(parts: list[Weights]) -> Weights:
    """The mean of several clients' weights, added up in the order of the clients."""
    return {name: sum((part[name] for part in parts[1:]), parts[0][name]) / len(parts) for name in parts[0]}


class Client:
    """Client `index` of `clients`: its images, and its copy of the first layers."""

    def __init__(self, party: Party, index: int, clients: int, batch_size: int, size: int) -> None:
        self.party = party
        self.source = data.batches(batch_size, seed=0, size=size, share=(index, clients))
        self.stage = Stage(built(size)[: model.CUT], optimizer=OPTIMIZER)

    def step(self, number: int) -> None:
        """On the next batch of its own: `number` counts those."""
        images, _ = self.source.batch(number)
        self.party.send("server", self.stage.forward(images, step=number))
        self.stage.backward(self.party.receive("server"))
        self.stage.update()

    @property
    def weights(self) -> Weights:
        """A copy: what is sent must stay as it is."""
        return {name: tensor.clone() for name, tensor in self.stage.state_dict().items()}

    def takes(self, weights: object) -> None:
        assert isinstance(weights, dict)
        self.stage.load_state_dict(weights)


def client_in_turns(party: Party, index: int, clients: int, folder: Path, rounds: int, steps: int, **kind: int) -> None:
    """Trains for `steps` steps when its turn comes, with the weights of the client before it."""
    own, before, after = Client(party, index, clients, **kind), (index - 1) % clients, (index + 1) % clients
    for turn in range(rounds):
        if clients > 1 and (turn, index) != (0, 0):
            own.takes(party.receive(f"client-{before}"))
        for step in range(steps):
            own.step(turn * steps + step)
        if clients > 1 and (turn, index) != (rounds - 1, clients - 1):
            party.send(f"client-{after}", own.weights)
    save_file(own.weights, folder / f"{party.name}.safetensors")


def client_in_parallel(
    party: Party, index: int, clients: int, folder: Path, rounds: int, steps: int, **kind: int
) -> None:
    """A round has `steps` steps. After it, client 0 takes the others' weights, and gives all the mean."""
    own, others = Client(party, index, clients, **kind), [f"client-{other}" for other in range(1, clients)]
    for step in range(rounds * steps):
        own.step(step)
        if clients == 1 or (step + 1) % steps:
            continue
        if index == 0:
            mean = averaged([own.weights, *[party.receive(other) for other in others]])
            for other in others:
                party.send(other, mean)
            own.takes(mean)
        else:
            party.send("client-0", own.weights)
            own.takes(party.receive("client-0"))
    save_file(own.weights, folder / f"{party.name}.safetensors")


def order(arrangement: str, clients: int, rounds: int, steps: int) -> list[tuple[int, int]]:
    """Whose batch the server computes, and the number of that batch among the client's."""
    if arrangement == "turns":
        return [(c, turn * steps + step) for turn in range(rounds) for c in range(clients) for step in range(steps)]
    return [(c, step) for step in range(rounds * steps) for c in range(clients)]


def server(
    party: Party, clients: int, folder: Path, batches: list[tuple[int, int]], batch_size: int, size: int
) -> None:
    labels = [data.labels(batch_size, seed=0, size=size, share=(index, clients)) for index in range(clients)]
    loss = nn.functional.cross_entropy
    stage = Stage(built(size)[model.CUT :], index=1, first_layer=model.CUT, optimizer=OPTIMIZER, loss=loss)
    for step, (index, number) in enumerate(batches):
        _, digits = labels[index].batch(number)
        value = stage.forward(party.receive(f"client-{index}"), digits, step=step)
        print(f"client {index}, its step {number}: loss {value:.4f}", flush=True)
        party.send(f"client-{index}", stage.backward())
        stage.update()
    save_file(stage.state_dict(), folder / "server.safetensors")


def main(
    arrangement: str,
    folder: Path,
    clients: int = 3,
    rounds: int = 2,
    steps: int = 2,
    batch_size: int = 512,
    size: int = 224,
) -> None:
    torch.set_num_threads(1)
    work = client_in_turns if arrangement == "turns" else client_in_parallel
    kind = {"batch_size": batch_size, "size": size}
    shared = {"clients": clients, "folder": folder, "rounds": rounds, "steps": steps, **kind}
    batches = order(arrangement, clients, rounds, steps)
    together(
        {
            **{f"client-{index}": partial(work, index=index, **shared) for index in range(clients)},
            "server": partial(server, clients=clients, folder=folder, batches=batches, **kind),
        }
    )


if __name__ == "__main__":
    if sys.argv[1:2] not in (["turns"], ["parallel"]):
        raise SystemExit("say how the clients train: python several.py turns, or parallel")
    out = Path(f"runs/{sys.argv[1]}")
    out.mkdir(parents=True, exist_ok=True)
    main(sys.argv[1], out, *map(int, sys.argv[2:]))
