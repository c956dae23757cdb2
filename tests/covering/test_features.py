"""Every two features together have the bits of a plain loop; pairs that a plan refuses are those of its table.

The stages are workers in one thread, over queues in memory. The loop is plain torch over the unsplit model: it has
each feature in a line or two of its own, and none of the code of stages.
"""

from functools import partial
from itertools import combinations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from stageline import Line, PlanRefused
from stageline.pipeline.plan.refusals import REFUSED
from stageline.pipeline.plan.traits import HALVED, RECOMPUTED, Trait
from support.pairwise import Choice, Row, covering_rows, pairs_of
from support.plain_loop import PlainLoop

FEATURES = {
    "schedule": ("1f1b", "gpipe", "eager-1f1b", "window", "interleaved-1f1b", "looped-bfs", "zb-h1"),
    "recompute": ("nothing", "stage", "layers", "patterns"),
    "trainable": ("all", "last stages", "first and last stage"),
    "optimizer": ("sgd", "adam"),
    "lr_scheduler": ("none", "every step", "every other step"),
    "accumulate": ("1", "2"),
    "clip_norm": ("none", "0.05"),
    "ema_decay": ("none", "0.9"),
    "groups": ("none", "biases"),
    "autocast": ("none", "bf16"),
    "calls": ("steps", "evaluations between steps"),
}
TRAITS: dict[Choice, Trait] = {
    ("schedule", "zb-h1"): HALVED,
    **{("recompute", each): RECOMPUTED for each in FEATURES["recompute"][1:]},
}

MICROBATCHES, STEPS, SEED = 4, 3, 7
CUT = [2, 4, 7]
PATTERNS = {"last stages": ["4.*", "7.*", "9.*"], "first and last stage": ["0.*", "7.*", "9.*"]}
GROUPS = [{"match": ["*.bias"], "weight_decay": 0.1}]
OPTIMIZERS = {"sgd": partial(SGD, lr=0.1, momentum=0.9), "adam": partial(Adam, lr=0.01)}
EVERY = {"every step": 1, "every other step": 2}
SCHEDULER = partial(StepLR, step_size=1, gamma=0.5)
RECOMPUTED_AS = {"nothing": None, "stage": "stage", "layers": "layers", "patterns": ["0", "7"]}


def is_refused(one: Choice, other: Choice) -> bool:
    traits = TRAITS.get(one), TRAITS.get(other)
    return any(traits in ((row.trait, row.beside), (row.beside, row.trait)) for row in REFUSED)


ROWS = covering_rows(FEATURES, is_refused)


def model() -> nn.Sequential:
    torch.manual_seed(SEED)
    first = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.25)]
    return nn.Sequential(
        *first, nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def batches(row: Row) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(SEED)
    count = STEPS * int(row["accumulate"])
    return [
        (torch.randn(9, 6, generator=draw), torch.randint(0, 3, (9,), generator=draw)) for _ in range(count)
    ]  # microbatches of 3, 2, 2 and 2 rows


def line(row: Row) -> Line:
    schedule = row["schedule"]
    given = {
        "placement": [[0, 2], [1, 3]] if schedule in ("interleaved-1f1b", "looped-bfs") else None,
        "window": [4, 3, 2, 1] if schedule == "window" else None,
        "lr_scheduler": SCHEDULER if row["lr_scheduler"] in EVERY else None,
        "clip_norm": None if row["clip_norm"] == "none" else float(row["clip_norm"]),
        "ema_decay": None if row["ema_decay"] == "none" else float(row["ema_decay"]),
        "autocast": None if row["autocast"] == "none" else row["autocast"],
    }
    return Line(
        model(),
        cut=CUT,
        loss=nn.functional.cross_entropy,
        optimizer=OPTIMIZERS[row["optimizer"]],
        lr_every=EVERY.get(row["lr_scheduler"], 1),
        groups=GROUPS if row["groups"] == "biases" else None,
        trainable=PATTERNS.get(row["trainable"]),
        recompute=RECOMPUTED_AS[row["recompute"]],
        schedule=schedule,
        microbatches=MICROBATCHES,
        accumulate=int(row["accumulate"]),
        seed=SEED,
        workers="inline",
        **given,
    )


def plain(row: Row) -> PlainLoop:
    whole = model()
    prefixes = tuple(pattern.removesuffix("*") for pattern in PATTERNS.get(row["trainable"], ["*"]))
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(name.startswith(prefixes))
    trained = [(name, each) for name, each in whole.named_parameters() if each.requires_grad]
    biases = [each for name, each in trained if name.endswith(".bias")]
    others = [each for name, each in trained if not name.endswith(".bias")]
    grouped = [{"params": others}, {"params": biases, "weight_decay": 0.1}]
    optimizer = OPTIMIZERS[row["optimizer"]](grouped if row["groups"] == "biases" else [each for _, each in trained])
    return PlainLoop(
        whole,
        nn.functional.cross_entropy,
        optimizer,
        MICROBATCHES,
        accumulate=int(row["accumulate"]),
        clip_norm=None if row["clip_norm"] == "none" else float(row["clip_norm"]),
        lr_scheduler=SCHEDULER(optimizer) if row["lr_scheduler"] in EVERY else None,
        lr_every=EVERY.get(row["lr_scheduler"], 1),
        autocast=row["autocast"] == "bf16",
        averaged=None
        if row["ema_decay"] == "none"
        else AveragedModel(whole, multi_avg_fn=get_ema_multi_avg_fn(float(row["ema_decay"]))),
        seed=SEED,
    )


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_rows_have_every_pair_that_is_not_refused() -> None:
    had = {frozenset(pair) for row in ROWS for pair in combinations(row.items(), 2)}
    assert had == {frozenset(pair) for pair in pairs_of(FEATURES) if not is_refused(*pair)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.values()).replace(" ", "_"))
def test_features_together_have_the_bits_of_a_plain_loop(row: Row) -> None:
    given, expected = batches(row), plain(row)
    expected.train(given)
    of_step = int(row["accumulate"])
    with line(row) as stages:
        losses = []
        for first in range(0, len(given), of_step):
            x, y = zip(*given[first : first + of_step], strict=True)
            losses.append(stages.step(x, y) if of_step > 1 else stages.step(x[0], y[0]))
            if row["calls"] != "steps":
                stages.evaluate(given[:2])
        assert [loss.item() for loss in losses] == expected.losses
        if row["clip_norm"] != "none":
            assert [loss.gradient_norm for loss in losses] == expected.norms
        assert equal(stages.state_dict(), expected.state())
        if row["ema_decay"] != "none":
            assert equal(stages.state_dict(ema=True), expected.averages())


@pytest.mark.parametrize("pair", [pair for pair in pairs_of(FEATURES) if is_refused(*pair)], ids=str)
def test_a_pair_of_the_table_is_refused(pair: tuple[Choice, Choice]) -> None:
    plainest = {name: values[0] for name, values in FEATURES.items()}
    with pytest.raises(PlanRefused):
        line({**plainest, **dict(pair)})
