"""Trains LayoutLM on two machines, each with its own part of the weights: `python train.py tcp://0.0.0.0:7000`.

Only this machine has the pages, and of the two workers, only that of stage 0 gets them. The README beside this file
says what to start on the others.
"""

import sys
from functools import partial

import model
import torch
from pages import Pages

from stageline import Line, Loader

broker, epochs = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10

loader = Loader(Pages(640), batch_size=32, seed=0)
held_out = Loader(Pages(64, first=10_000), batch_size=64, seed=0)

with Line(
    model.build,
    weights="part-0.safetensors",  # each worker names its own
    cut=model.CUT,
    loss=model.loss,
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    microbatches=4,
    metrics=[model.accuracy],
    broker=broker,
    name="documents",
) as line:
    for x, y in loader.batches(epochs=epochs):
        loss = line.step(x, y)
        if line.position % len(loader) == 0:
            print(f"epoch {line.position // len(loader)}: loss {loss:.3f}")
    print(line.evaluate(held_out.batches(epochs=1)))

trained = model.build()
trained.load_state_dict(line.state_dict())
trained.save_pretrained("documents")
