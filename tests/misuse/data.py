"""Data sources."""

from misuse.case import Change, Misuse, train_with
from misuse.code import DATA, PLAN, in_batch, in_dataset, in_source


def source(what: str, lines: str, *said: str) -> Misuse:
    return Misuse(what, 78, ("data.source", *said), in_source(lines))


def batch(what: str, lines: str, *said: str) -> Misuse:
    return Misuse(what, 78, said, in_batch(lines))


def dataset(what: str, lines: str, *said: str, readers: int = 0) -> Misuse:
    return Misuse(what, 78, said, in_dataset(lines, readers))


BATCH_0 = "the data source's batch(0)"
NO_SOURCE = "expected an object with batch(step), held_out() and steps_per_epoch"
DRAWN = "torch.seed()\nreturn Rows(torch.randn(32, 4), torch.zeros(32).long(), batch_size, seed)"
OTHER = ("data.source: batch(0) gave other values when it was called again", "row 0 of inputs", "data.check = false")
OTHER_SAMPLE = ("data.dataset: batch(0) gave other values", "row 0 of inputs", "seed a generator of your own from them")
ROWS = (
    Misuse(
        "a source that is not in its file",
        78,
        ("data.source", "data.py has no 'batchs'. It has: Rows, batches"),
        (Change(PLAN, "data.py:batches", "data.py:batchs"),),
    ),
    source("a source that raises", "raise OSError('no such disk')", "OSError: no such disk (/", "/data.py, line "),
    source("a source that returns nothing", "return None", "returned an object of type NoneType", NO_SOURCE),
    source("a generator as the source", "return (step for step in range(3))", "of type generator", NO_SOURCE),
    source("a list as the source", "return [(torch.zeros(6, 4), torch.zeros(6))]", "of type list", NO_SOURCE),
    source(
        "a source without rows",
        "return Rows(torch.zeros(0, 4), torch.zeros(0).long(), batch_size, seed)",
        "the data source holds 0 rows",
    ),
    Misuse(
        "more inputs than targets",
        78,
        ("data.source", "(float32 [32, 4], int64 [30]) have no common number of rows"),
        (Change(DATA, "y[:32]", "y[:30]"),),
    ),
    Misuse(
        "a source that takes no seed",
        78,
        ("data.source", "unexpected keyword argument 'seed'"),
        (Change(DATA, "batch_size, seed):", "batch_size):"),),
    ),
    batch("a batch that raises", "raise OSError('no disk')", BATCH_0, "OSError: no disk (/", "/data.py, line "),
    batch("a batch that is nothing", "return None", BATCH_0, "of type NoneType; expected two: (inputs, targets)"),
    batch("a batch of three parts", "return x, y, x", BATCH_0, "expected two: (inputs, targets)"),
    batch(
        "a batch with other rows",
        "x = torch.cat([x, x])",
        BATCH_0,
        "(float32 [12, 4], int64 [6]) have no common number of rows",
    ),
    batch("inputs without rows", "x = torch.tensor(1.0)", BATCH_0, "Make dimension 0 count rows"),
    batch("inputs that are an array", "x = x.numpy()", BATCH_0, "no tensor is there, only ndarray. Give tensors"),
    batch("targets that are text", "y = 'yes'", BATCH_0, "no tensor is there, only str. Give tensors"),
    batch("inputs of another width", "x = x[:, :3]", "layer 0", "(2x3 and 4x8)"),
    batch("inputs of another dtype", "x = x.double()", "layer 0", "but got Double and Float"),
    batch("targets that are no class", "y = y + 7", "stage 1", "the loss: IndexError: Target 8 is out of bounds"),
    batch(
        "inputs that are not numbers", "x = x * float('nan')", "the loss of microbatch 0 of step 0 is nan on stage 1"
    ),
    source("`os._exit(0)` in the source", "os._exit(0)", "/data.py, line "),
    Misuse(
        "a source that sleeps for ever",
        78,
        ('in data.source = "data.py:batches" after 1.5 s, at batches (/', "/data.py, line ", "raise recovery.loading"),
        in_source("time.sleep(10**6)"),
        train_with(("recovery.loading=1.5",)),
    ),
    source(
        "rows that differ in each process", DRAWN, "batch(0) gave other values in another process", "row 0 of inputs"
    ),
    batch("inputs that differ each time", "x = x + random.random()", *OTHER),
    batch("numpy's numbers without a seed", "import numpy\nx = x + numpy.random.rand()", *OTHER),
    batch(
        "another order each time",
        "order = random.sample(range(len(x)), len(x))\nx, y = x[order], y[order]",
        *(OTHER[0], "of inputs", OTHER[2]),
    ),
    dataset(
        "a sample that raises",
        "raise OSError('no disk')",
        BATCH_0,
        "dataset[",
        "OSError: no disk (/",
        "/data.py, line ",
    ),
    dataset("a generator of the dataset's own", "x = x * random.Random().random()", *OTHER_SAMPLE),
    dataset("a sample that ends its reader", "os._exit(3)", "ended with status 3; so did the one before it", readers=1),
)
