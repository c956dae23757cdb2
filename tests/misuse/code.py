"""How a user's code is put in the workspace: lines that run when the model is loaded, built, computed with, or fed."""

from textwrap import dedent, indent

from misuse.case import Change

MODEL, DATA, PLAN = "model.py", "data.py", "stageline.toml"
IMPORTS = "import ctypes, os, random, signal, sys, threading, time, torch\n"
ONCE = '''
def once():
    """True for the process that asks first, in the whole run."""
    try:
        os.close(os.open("once", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

'''


def in_module(lines: str) -> tuple[Change, ...]:
    """Runs when model.py is loaded."""
    return (Change(MODEL, "def build", f"{IMPORTS}{ONCE}{dedent(lines)}\ndef build"),)


def in_build(lines: str) -> tuple[Change, ...]:
    """Runs in the model's factory."""
    return (*in_module(""), Change(MODEL, "    return nn.Seq", f"{_body(lines)}    return nn.Seq"))


def in_forward(lines: str) -> tuple[Change, ...]:
    """Runs in the forward of a layer of stage 0, with its input `x`."""
    layer = f"class Odd(nn.Module):\n    def forward(self, x):\n{_body(lines, 8)}        return x\n"
    return (*in_module(layer), Change(MODEL, "nn.ReLU()", "Odd()"))


def in_loss(lines: str) -> tuple[Change, ...]:
    """Runs in the loss, with its `outputs` and `targets`."""
    loss = f"def loss(outputs, targets):\n{_body(lines)}    return nn.functional.cross_entropy(outputs, targets)\n"
    return (*in_module(loss), Change(PLAN, "torch.nn.functional.cross_entropy", "model.py:loss"))


def in_metric(lines: str) -> tuple[Change, ...]:
    return (*in_module(""), Change(MODEL, "    return (outputs", f"{_body(lines)}    return (outputs"))


def in_source(lines: str) -> tuple[Change, ...]:
    """Runs where the data source is made."""
    return (*_data(), Change(DATA, "    x = torch.randn", f"{_body(lines)}    x = torch.randn"))


def in_batch(lines: str) -> tuple[Change, ...]:
    """Runs when a batch is asked for, of `step`: `x, y` are its inputs and targets, which it may change."""
    head = "class Odd(Rows):\n    def batch(self, step):\n        x, y = super().batch(step)\n"
    odd = f"{head}{_body(lines, 8)}        return x, y\n"
    return (*_data(odd), Change(DATA, "return Rows", "return Odd"))


def in_dataset(lines: str, readers: int) -> tuple[Change, ...]:
    """Runs when a sample is drawn from the plan's dataset: `x` is its input, of row `index`."""
    odd = (
        "class Odd(torch.utils.data.Dataset):\n    def __len__(self):\n        return 32\n"
        f"    def __getitem__(self, index):\n        x = torch.ones(4)\n{_body(lines, 8)}        return x, index % 2\n"
    )
    named = f'dataset = "data.py:Odd"\nnum_workers = {readers}'
    return (*_data(odd), Change(PLAN, 'source = "data.py:batches"', named))


def _data(more: str = "") -> tuple[Change, ...]:
    return (
        Change(DATA, "import torch\n", IMPORTS),
        Change(DATA, "def batches", f"{ONCE}{more}\ndef batches"),
    )


def _body(lines: str, depth: int = 4) -> str:
    return indent(dedent(lines).strip("\n") + "\n", " " * depth)
