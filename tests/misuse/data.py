"""Data sources."""

from misuse.case import Change, Misuse
from misuse.code import DATA, PLAN, in_batch, in_source


def source(what: str, lines: str, *said: str, code: int = 78) -> Misuse:
    return Misuse(what, code, said, in_source(lines))


def batch(what: str, lines: str, *said: str, code: int = 78) -> Misuse:
    return Misuse(what, code, said, in_batch(lines))


ROWS = (
    Misuse("a source that is not there", 78, (), (Change(PLAN, "data.py:batches", "data.py:batchs"),)),
    source("a source that raises", "raise OSError('no such disk')"),
    source("a source that returns nothing", "return None"),
    source("a source that is a generator", "return (i for i in range(3))"),
    source("a source that is a list", "return [(torch.zeros(6, 4), torch.zeros(6).long())]"),
    source("a source without rows", "return Rows(torch.zeros(0, 4), torch.zeros(0).long(), batch_size, seed)"),
    Misuse("inputs and targets of different lengths", 78, (), (Change(DATA, "y[:32]", "y[:30]"),)),
    Misuse("a source that takes no seed", 78, (), (Change(DATA, "batch_size, seed):", "batch_size):"),)),
    source("a source that sleeps for ever", "time.sleep(10**6)"),
    source("a source with os._exit(0)", "os._exit(0)"),
    source("rows that differ in each process", "torch.seed(); return Rows(torch.randn(32, 4), torch.zeros(32).long(), batch_size, seed)"),
    batch("a batch that raises", "raise OSError('no such disk')"),
    batch("a batch that is None", "return None"),
    batch("a batch of three", "return x, y, x"),
    batch("a batch with more rows of inputs than of targets", "x = torch.cat([x, x])"),
    batch("a batch without rows dimension", "x = torch.tensor(1.0)"),
    batch("inputs of another width", "x = x[:, :3]"),
    batch("inputs of float64", "x = x.double()"),
    batch("targets out of range", "y = y + 7"),
    batch("targets that are text", "y = 'yes'"),
    batch("a batch that is numpy", "x = x.numpy()"),
    batch("inputs that are NaN", "x = x * float('nan')", code=1),
    batch("a batch that changes between two calls", "x = x + random.random()"),
    batch("another order for targets than for inputs", "order = list(range(len(x))); random.shuffle(order); x, y = x[order], y[order]"),
    batch("a source that ends early", "if step == 3:\n    raise StopIteration", code=1),
    batch("a batch that is larger at step 3", "if step == 3:\n    x = torch.cat([x, x])", code=1),
    batch("a batch of step 3 that is another in each process", "if step == 3:\n    x = x + random.random()", code=0),
)
