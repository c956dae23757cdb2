"""Split learning in two loops of your own, a process each: `python examples/split_learning/by_hand.py`.

    client   x -> stage.forward -> activation ----->  stage.forward -> loss      server, which has the labels
             stage.backward <---- its gradient <----  stage.backward

Nothing else travels. Both write their part of the weights into a folder of their own.
"""

import sys
from functools import partial
from pathlib import Path

import data
import model
import torch
from parties import Party, together
from safetensors.torch import save_file
from torch import nn

from stageline import Stage

OPTIMIZER = partial(torch.optim.Adam, lr=1e-4)


def built(size: int, seed: int = 0) -> nn.Sequential:
    """The model with the weights that all who know `seed` can make. One with a client's own is a better client."""
    torch.manual_seed(seed)
    return model.build(size)


def client(party: Party, folder: Path, steps: int, batch_size: int, size: int) -> None:
    source = data.batches(batch_size, seed=0, size=size)
    stage = Stage(built(size)[: model.CUT], optimizer=OPTIMIZER)
    for step in range(steps):
        images, _ = source.batch(step)
        party.send("server", stage.forward(images, step=step))
        stage.backward(party.receive("server"))
        stage.update()
    save_file(stage.state_dict(), folder / "client.safetensors")


def server(party: Party, folder: Path, steps: int, batch_size: int, size: int) -> None:
    source = data.labels(batch_size, seed=0, size=size)
    loss = nn.functional.cross_entropy
    stage = Stage(built(size)[model.CUT :], index=1, first_layer=model.CUT, optimizer=OPTIMIZER, loss=loss)
    for step in range(steps):
        _, digits = source.batch(step)
        print(f"step {step}: loss {stage.forward(party.receive('client'), digits, step=step):.4f}", flush=True)
        party.send("client", stage.backward())
        stage.update()
    save_file(stage.state_dict(), folder / "server.safetensors")


def main(folder: Path, steps: int = 10, batch_size: int = 512, size: int = 224) -> None:
    torch.set_num_threads(1)
    given = {"folder": folder, "steps": steps, "batch_size": batch_size, "size": size}
    together({"client": partial(client, **given), "server": partial(server, **given)})


if __name__ == "__main__":
    out = Path("runs/by_hand")
    out.mkdir(parents=True, exist_ok=True)
    main(out, *map(int, sys.argv[1:]))
