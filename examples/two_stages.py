"""The walk of a batch through a model in two stages, by hand: `python examples/two_stages.py`.

    first    F0 F1 F2 F3                    B0 B1 B2 B3  U      activations go over,
    last                 F0 B0 F1 B1 F2 B2 F3 B3         U      gradients with respect to them come back

What goes from hand to hand here goes through queues when the two stages live on two machines.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stageline import Stage, split_batch

STEPS, MICROBATCHES = 200, 4
optimizer = partial(torch.optim.SGD, lr=0.1)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def train_in_two_stages(model: nn.Sequential, x: Tensor, target: Tensor) -> None:
    first = Stage(model[:2], optimizer=optimizer)
    last = Stage(model[2:], first_layer=2, optimizer=optimizer, loss=mse_loss)
    for _ in range(STEPS):
        activations = [first.forward(part) for part in split_batch(x, MICROBATCHES)]
        gradients = []
        for activation, part in zip(activations, split_batch(target, MICROBATCHES), strict=True):
            last.forward(activation, part, share=1 / MICROBATCHES)
            gradients.append(last.backward())
        for gradient in gradients:
            first.backward(gradient)
        first.update()
        last.update()


def train_unsplit(model: nn.Sequential, x: Tensor, target: Tensor) -> None:
    updates = optimizer(model.parameters())
    for _ in range(STEPS):
        for part, wanted in zip(x.tensor_split(MICROBATCHES), target.tensor_split(MICROBATCHES), strict=True):
            torch.autograd.backward(mse_loss(model(part), wanted) / MICROBATCHES)
        updates.step()
        updates.zero_grad()


def main() -> None:
    in_two, whole = build(), build()
    x = torch.rand(64, 2)
    target = torch.sin(3 * x[:, :1]) * x[:, 1:]
    print(f"loss before training         {mse_loss(whole(x), target):.6f}")
    train_in_two_stages(in_two, x, target)
    train_unsplit(whole, x, target)
    print(f"loss, trained in two stages  {mse_loss(in_two(x), target):.6f}")
    print(f"loss, trained unsplit        {mse_loss(whole(x), target):.6f}")
    pairs = zip(in_two.parameters(), whole.parameters(), strict=True)
    print(f"the same weights, to the bit: {all(torch.equal(one, other) for one, other in pairs)}")


if __name__ == "__main__":
    main()
