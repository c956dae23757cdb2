"""Trains the classifier of handwritten digits from a script, on two processes: `python examples/script_digits.py`.

The weights are, bit for bit, those of `stageline train examples/digits`.
"""

from functools import partial

import torch
from digits.data import split
from digits.model import accuracy, build
from torch import nn
from torch.utils.data import TensorDataset

from stageline import Line, Loader

seen, held_out = split()
loader = Loader(TensorDataset(*seen), batch_size=64, seed=0)

with Line(
    build,
    cut=[6],  # stage 1 begins with layer 6
    loss=nn.functional.cross_entropy,
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    schedule="1f1b",
    microbatches=8,
    metrics=[accuracy],
) as line:
    for x, y in loader.batches(epochs=20):
        loss = line.step(x, y)
        if line.position % len(loader) == 0:
            print(f"epoch {line.position // len(loader)}: loss {loss:.4f}")
    print(line.evaluate([held_out]))

model = build()
model.load_state_dict(line.state_dict())
