"""examples/two_machines in the place that is named: `digits.py inline|processes|ADDRESS [resume]`, for 20 epochs."""

import sys
from functools import partial
from glob import glob

import model
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

from stageline import Line, Loader
from stageline.pipeline.digest import tensor_digests, weights_sha256

place, resumed = sys.argv[1], "resume" in sys.argv

digits = load_digits()
images = torch.from_numpy(digits.images).to(torch.float32).div(16).unsqueeze(1)
labels = torch.from_numpy(digits.target)
seen, _ = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)
loader = Loader(TensorDataset(images[seen], labels[seen]), batch_size=64, seed=0)

with Line(
    partial(model.build, width=24),
    cut=[6],
    loss=nn.functional.cross_entropy,
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    microbatches=8,
    workers="processes" if "://" in place else place,
    broker=place if "://" in place else None,
    resume=max(glob("runs/*")) if resumed else None,
) as line:
    for x, y in loader.batches(epochs=20, start=line.position):
        loss = line.step(x, y)
        if line.position % len(loader) == 0:
            print(f"epoch {line.position // len(loader)}: loss {loss:.4f}", flush=True)
print(weights_sha256(tensor_digests(line.state_dict())))
