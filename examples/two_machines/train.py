"""Trains digits on two workers of other machines: `python train.py tcp://0.0.0.0:7000`, or `redis://host:6379/0`.

The weights are, bit for bit, those of `stageline train examples/digits`. Only this machine has the images. The README
beside this file tells what to start on the others.
"""

import sys
from functools import partial

import model
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

from stageline import Line, Loader

broker, epochs = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20

digits = load_digits()
images = torch.from_numpy(digits.images).to(torch.float32).div(16).unsqueeze(1)
labels = torch.from_numpy(digits.target)
seen, held_out = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)
loader = Loader(TensorDataset(images[seen], labels[seen]), batch_size=64, seed=0)

with Line(
    partial(model.build, width=24),
    cut=[6],  # stage 1 begins with layer 6
    loss=nn.functional.cross_entropy,
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    microbatches=8,
    metrics=[model.accuracy],
    broker=broker,
) as line:
    for x, y in loader.batches(epochs=epochs):
        loss = line.step(x, y)
        if line.position % len(loader) == 0:
            print(f"epoch {line.position // len(loader)}: loss {loss:.4f}")
    print(line.evaluate([(images[held_out], labels[held_out])]))

trained = model.build()
trained.load_state_dict(line.state_dict())
