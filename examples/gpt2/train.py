"""Trains a small GPT-2 on three processes, and writes with it: `python examples/gpt2/train.py`, with transformers.

The text is Python's own: files of the standard library. The trained model is saved as transformers does, in ./gpt2.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import model
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from stageline import Line, Loader

FILES = ("argparse", "difflib", "inspect", "optparse", "pdb", "pydoc", "subprocess", "tarfile", "typing")

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=300)
arguments.add_argument("--workers", default="processes", help="processes, or inline")
arguments.add_argument("--out", default="gpt2", help="folder for the trained model")


def windows(names: tuple[str, ...]) -> Tensor:
    """The bytes of those files, int64 [rows, CONTEXT]."""
    folder = Path(os.__file__).parent
    text = b"\n".join((folder / f"{name}.py").read_bytes() for name in names)
    rows = len(text) // model.CONTEXT
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)[: rows * model.CONTEXT].reshape(rows, -1).long()


def main(steps: int, workers: str, out: str) -> None:
    text = windows(FILES)
    loader = Loader(TensorDataset(text, text), batch_size=16, seed=0)
    held_out = windows(("doctest",))
    with Line(
        model.build,
        cut=["transformer.h.2", "transformer.h.4"],
        loss=model.next_byte_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        microbatches=4,
        metrics=[model.bits_per_byte],
        workers=workers,
        name="gpt2",
    ) as line:
        for x, y in loader.batches(epochs=1 + steps // len(loader)):
            loss = line.step(x, y)
            if line.position % 50 == 0:
                print(f"step {line.position}: loss {loss:.3f}")
            if line.position == steps:
                break
        print(f"held out: {line.evaluate([(held_out, held_out)])['bits_per_byte']:.3f} bits per byte")
    trained = model.build()
    trained.load_state_dict(line.state_dict())
    trained.save_pretrained(out)
    start = torch.tensor([list(b"    def ")])
    written = trained.eval().generate(start, max_new_tokens=100, do_sample=True)[0]
    print(bytes(written.tolist()).decode("utf-8", "replace"))


if __name__ == "__main__":
    given = arguments.parse_args()
    main(given.steps, given.workers, given.out)
