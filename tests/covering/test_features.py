"""Every two features together have the bits of a plain loop; pairs that a plan refuses are those of its table.

A row is a plan with one value of each feature. It runs as a script's line, as a plan in one thread over queues in
memory, or as processes. The loop is plain torch over the unsplit model: it has each feature in a line or two of its
own, and none of the code of stages.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from stageline import Line, ModelRefused, Plan, PlanRefused, load_weights
from stageline.pipeline.plan import read_plan
from stageline.pipeline.plan import traits as having
from stageline.pipeline.plan.refusals import REFUSED
from stageline.pipeline.plan.traits import Trait
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import prepare
from support import covered
from support.covered import model as layers
from support.covered.data import batches
from support.covered.model import MODELS, CoveredModel
from support.fork_server import ForkServer
from support.pairwise import Choice, Row, covering_rows, pairs_of
from support.plain_codecs import cut_at
from support.plain_loop import PlainLoop, differing

FEATURES = {
    "run": ("plan", "script", "processes"),
    "model": ("linear", "transformer"),
    "schedule": (
        *("1f1b", "gpipe", "eager-1f1b", "window", "interleaved-1f1b", "looped-bfs", "zb-h1"),
        *("2bw", "pipedream"),
    ),
    "recompute": ("nothing", "stage", "layers", "patterns"),
    "trainable": ("all", "last stages", "first and last stage", "a norm between"),
    "optimizer": ("sgd", "adam"),
    "lr_scheduler": ("none", "every step", "every other step"),
    "accumulate": ("1", "2"),
    "clip_norm": ("none", "0.05"),
    "ema_decay": ("none", "0.9"),
    "groups": ("none", "biases"),
    "autocast": ("none", "bf16"),
    "evaluations": ("none", "between steps"),
    "codec": ("lossless", "bf16", "int8 and bf16"),
    "tied": ("nothing", "microbatch", "step"),
    "replicas": ("none", "of stage 1"),
    "processes": ("one", "a shard each of stage 1"),
    "offload": ("nothing", "activations and optimizer", "weights"),
    "taps": ("none", "of all layers"),
    "bad microbatches": ("halt", "skip"),
}

PLAINEST = {name: values[0] for name, values in FEATURES.items()} | {"run": "processes"}

STEPS, SEED = 3, 7
FOLDER = Path(next(iter(covered.__path__)))
GROUPS = [{"match": ["*.bias"], "weight_decay": 0.1}]
OPTIMIZERS: dict[str, dict[str, float]] = {"sgd": {"lr": 0.1, "momentum": 0.9}, "adam": {"lr": 0.01}}
EVERY = {"every step": 1, "every other step": 2}
CODECS = {"bf16": ("bf16", "bf16"), "int8 and bf16": ("int8", "bf16")}
LOOPED = ("interleaved-1f1b", "looped-bfs")

# The traits by which a plan's table knows the values, with the stages that they are about; None for all.
TRAITS: dict[Choice, tuple[tuple[Trait, frozenset[int] | None], ...]] = {
    ("run", "plan"): ((having.IN_MEMORY, None),),
    ("run", "script"): ((having.SCRIPT, None), (having.INLINE, None)),
    **{("schedule", name): ((having.FLUSHED, None),) for name in FEATURES["schedule"][1:6]},
    **{("schedule", name): ((having.FLUSHED, None), (having.UNREPLICATED, None)) for name in LOOPED},
    ("schedule", "zb-h1"): ((having.HALVED, None), (having.FLUSHED, None), (having.UNREPLICATED, None)),
    ("schedule", "2bw"): ((having.ASYNC, None), (having.TWO_VERSIONS, None), (having.UNREPLICATED, None)),
    ("schedule", "pipedream"): ((having.ASYNC, None), (having.PIPEDREAM, None)),
    **{("recompute", each): ((having.RECOMPUTED, None),) for each in FEATURES["recompute"][1:]},
    ("accumulate", "2"): ((having.ACCUMULATION, None),),
    ("clip_norm", "0.05"): ((having.CLIPPING, None),),
    ("ema_decay", "0.9"): ((having.AVERAGES, None),),
    ("evaluations", "between steps"): ((having.ROUNDS, None),),
    ("replicas", "of stage 1"): ((having.REPLICAS, frozenset({1})),),
    ("processes", "a shard each of stage 1"): (
        (having.GROUPS, frozenset({1})),
        (having.SHARD, frozenset({1})),
    ),
    ("offload", "activations and optimizer"): ((having.OFFLOAD, None),),
    ("offload", "weights"): ((having.OFFLOAD, None), (having.OFFLOADED_WEIGHTS, None)),
    ("taps", "of all layers"): ((having.TAPS, None),),
    ("bad microbatches", "skip"): ((having.SKIPPING, None),),
}


# Pairs that a plan allows, and a model with a parameter of several stages does not.
OF_TIED = (("schedule", "2bw"), ("schedule", "pipedream"), ("replicas", "of stage 1"))
REFUSED_OF_MODELS = [(other, ("tied", when)) for other in OF_TIED for when in FEATURES["tied"][1:]]


def is_refused(one: Choice, other: Choice) -> bool:
    """Return True if no run has both."""
    return {(one, other), (other, one)} & {*REFUSED_OF_MODELS} != set() or is_in_table(one, other)


def is_in_table(one: Choice, other: Choice) -> bool:
    return any(
        (row.trait, row.beside) in ((trait, beside), (beside, trait))
        and (row.anywhere or stages is None or others is None or bool(stages & others))
        for row in REFUSED
        for trait, stages in TRAITS.get(one, ())
        for beside, others in TRAITS.get(other, ())
    )


ROWS = covering_rows(FEATURES, is_refused)
IN_PROCESSES = [row for row in ROWS if row["run"] == "processes"]
MARKED = [pytest.param(row, marks=[pytest.mark.slow] if row in IN_PROCESSES[4:] else []) for row in ROWS]


@dataclass(frozen=True)
class RowResult:
    """Outcome of a row's run."""

    losses: list[float]
    norm: float | None  # of the last step
    state: Mapping[str, Tensor]
    averages: Mapping[str, Tensor] | None


def microbatches(row: Row) -> int:
    return 1 if row["schedule"] == "pipedream" else 4


def shape(row: Row) -> CoveredModel:
    return MODELS[row["model"]]


def trainable(row: Row) -> list[str]:
    """Return patterns; a weight that stages share is trained in all of them."""
    of = shape(row)
    patterns = {"last stages": of.last, "first and last stage": of.outer, "a norm between": (of.inner,)}
    found = patterns.get(row["trainable"], ("*",))
    tied = [f"{layer}.weight" for layer in of.tied] if row["tied"] != "nothing" else []
    return [*found] if row["trainable"] == "all" else [*found, *tied]


def recomputed(row: Row) -> str | list[str] | None:
    patterns = [*shape(row).recomputed]
    return {"nothing": None, "patterns": patterns}.get(row["recompute"], row["recompute"])


def model(row: Row) -> nn.Sequential:
    torch.manual_seed(SEED)
    return layers.build(row["model"], tied=row["tied"] != "nothing")


def drawn(row: Row) -> list[tuple[Tensor, Tensor]]:
    return [batches(9, SEED, row["model"]).batch(number) for number in range(STEPS * int(row["accumulate"]))]


def plain(row: Row) -> PlainLoop:
    whole, prefixes = model(row), tuple(pattern.removesuffix("*") for pattern in trainable(row))
    copies = {}
    if row["tied"] == "step":
        one, other = shape(row).tied
        whole[other].weight = nn.Parameter(whole[one].weight.detach().clone())
        copies = {f"{other}.weight": f"{one}.weight"}
    if row["codec"] in CODECS:
        cut_at(whole, dict.fromkeys(shape(row).cut, CODECS[row["codec"]]))
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(name.startswith(prefixes))
    trained = [(name, each) for name, each in whole.named_parameters() if each.requires_grad and name not in copies]
    biases = [each for name, each in trained if name.endswith(".bias")]
    others = [each for name, each in trained if not name.endswith(".bias")]
    grouped = [{"params": others}, {"params": biases, "weight_decay": 0.1}]
    optimizer = optimizer_of(row)(grouped if row["groups"] == "biases" else [each for _, each in trained])
    all_of_step = range(microbatches(row) * int(row["accumulate"]))
    return PlainLoop(
        whole,
        layers.loss,
        optimizer,
        microbatches(row),
        accumulate=int(row["accumulate"]),
        clip_norm=number(row["clip_norm"]),
        lr_scheduler=StepLR(optimizer, step_size=1, gamma=0.5) if row["lr_scheduler"] in EVERY else None,
        lr_every=EVERY.get(row["lr_scheduler"], 1),
        autocast=row["autocast"] == "bf16",
        averaged=None
        if row["ema_decay"] == "none"
        else AveragedModel(whole, multi_avg_fn=get_ema_multi_avg_fn(float(row["ema_decay"]))),
        seed=SEED,
        cut=shape(row).cut,
        delays={"2bw": (1, 1, 1, 1), "pipedream": (3, 2, 1, 0)}.get(row["schedule"], ()),
        groups=()
        if row["replicas"] == "none"
        else ([all_of_step], [all_of_step[::2], all_of_step[1::2]], [all_of_step], [all_of_step]),
        copies=copies,
        left_out=layers.is_bad if row["bad microbatches"] == "skip" else lambda targets: False,
    ).train(drawn(row))


def optimizer_of(row: Row) -> Any:
    return partial(SGD, **OPTIMIZERS["sgd"]) if row["optimizer"] == "sgd" else partial(Adam, **OPTIMIZERS["adam"])


def number(value: str) -> float | None:
    return None if value == "none" else float(value)


def settings_of(row: Row) -> dict[str, Any]:
    """Return keys of a plan of the row; None where it leaves one out."""
    given: dict[str, Any] = {
        "schedule.name": "1f1b" if row["schedule"] == "pipedream" else row["schedule"],
        "schedule.mode": "async" if row["schedule"] in ("2bw", "pipedream") else None,
        "schedule.microbatches": microbatches(row),
        "schedule.window": [4, 3, 2, 1] if row["schedule"] == "window" else None,
        "schedule.accumulate": int(row["accumulate"]),
        "schedule.tied": None if row["tied"] == "nothing" else row["tied"],
        "workers.0.stages": [0, 2] if row["schedule"] in LOOPED else None,
        "workers.1.stages": [1, 3] if row["schedule"] in LOOPED else None,
        "model.cut": [*shape(row).cut],
        "model.options.kind": row["model"],
        "model.options.tied": row["tied"] != "nothing",
        "model.options.in_files": row["offload"] != "nothing",
        "model.trainable": trainable(row),
        "data.options.kind": row["model"],
        "model.autocast": None if row["autocast"] == "none" else row["autocast"],
        "model.loss": "model.py:picky" if row["bad microbatches"] == "skip" else "model.py:loss",
        "memory.recompute": recomputed(row),
        "memory.offload": None if row["offload"] == "nothing" else row["offload"].split(" and "),
        "optimizer.factory": {"sgd": "torch.optim.SGD", "adam": "torch.optim.Adam"}[row["optimizer"]],
        **{f"optimizer.{name}": value for name, value in OPTIMIZERS[row["optimizer"]].items()},
        "optimizer.clip_norm": number(row["clip_norm"]),
        "optimizer.ema_decay": number(row["ema_decay"]),
        "evaluation.every": None if row["evaluations"] == "none" else 1,
        "stage.1.replicas": None if row["replicas"] == "none" else 2,
        "stage.1.shard": None if row["processes"] == "one" else 2,
        "taps.layers": None if row["taps"] == "none" else ["*"],
        "taps.every": None if row["taps"] == "none" else 1,
        "recovery.on_bad_microbatch": row["bad microbatches"],
    }
    if row["lr_scheduler"] in EVERY:
        scheduler = {"factory": "torch.optim.lr_scheduler.StepLR", "step_size": 1, "gamma": 0.5}
        scheduler["every"] = EVERY[row["lr_scheduler"]]
        given |= {f"lr_scheduler.{name}": value for name, value in scheduler.items()}
    return given


def sets(row: Row) -> Iterator[str]:
    """Yield what the plan of the row sets."""
    yield from (f"{key}={json.dumps(value)}" for key, value in settings_of(row).items() if value is not None)
    if row["groups"] == "biases":
        yield 'optimizer.groups=[{ match = ["*.bias"], weight_decay = 0.1 }]'
    if row["codec"] in CODECS:
        yield "queues.codec={{ forward = '{}', backward = '{}' }}".format(*CODECS[row["codec"]])


def planned(row: Row) -> Plan:
    url = ["queues.url=memory://"] if row["run"] == "plan" else []
    return read_plan(FOLDER, sets=[*sets(row), *url], environment={})


def run_plan(row: Row, folder: Path) -> RowResult:
    outcome = run_memory(prepare(planned(row)), "covered", folder)
    assert outcome.code == 0, outcome.reason
    return told(row, outcome.facts, folder)


def run_processes(row: Row, folder: Path, fork_server: ForkServer) -> RowResult:
    given = [*sets(row), f"run.dir={folder.parent}"]
    outcome = fork_server.train(FOLDER / "stageline.toml", *given, folder=folder)
    assert outcome["code"] == 0, outcome["reason"]
    return told(row, outcome["facts"], folder)


def told(row: Row, facts: Mapping[str, Any], folder: Path) -> RowResult:
    averages = None if row["ema_decay"] == "none" else load_weights(folder, ema=True)
    norm = None if row["clip_norm"] == "none" else facts["gradient_norm"]["norm"]
    return RowResult([facts["losses"][str(step)] for step in range(STEPS)], norm, load_weights(folder), averages)


def line(row: Row) -> Line:
    settings: dict[str, Any] = {}
    if row["tied"] != "nothing":
        settings["schedule.tied"] = row["tied"]
    if row["codec"] in CODECS:
        settings |= zip(("queues.codec.forward", "queues.codec.backward"), CODECS[row["codec"]], strict=True)
    refused = ("schedule.mode", "stage.1.replicas", "stage.1.shard", "memory.offload", "recovery.on_bad_microbatch")
    settings |= {key: value for key, value in settings_of(row).items() if key in refused and value is not None}
    given = {
        "placement": [[0, 2], [1, 3]] if row["schedule"] in LOOPED else None,
        "window": [4, 3, 2, 1] if row["schedule"] == "window" else None,
        "lr_scheduler": partial(StepLR, step_size=1, gamma=0.5) if row["lr_scheduler"] in EVERY else None,
        "clip_norm": number(row["clip_norm"]),
        "ema_decay": number(row["ema_decay"]),
        "autocast": None if row["autocast"] == "none" else row["autocast"],
    }
    return Line(
        model(row),
        cut=shape(row).cut,
        loss=layers.loss,
        optimizer=optimizer_of(row),
        lr_every=EVERY.get(row["lr_scheduler"], 1),
        groups=GROUPS if row["groups"] == "biases" else None,
        trainable=trainable(row),
        recompute=recomputed(row),
        schedule=row["schedule"],
        microbatches=microbatches(row),
        accumulate=int(row["accumulate"]),
        seed=SEED,
        workers="inline",
        taps=None if row["taps"] == "none" else ["*"],
        settings=settings,
        **given,
    )


def run_script(row: Row) -> RowResult:
    given, of_step = drawn(row), int(row["accumulate"])
    with line(row) as stages:
        losses = []
        for first in range(0, len(given), of_step):
            x, y = zip(*given[first : first + of_step], strict=True)
            losses.append(stages.step(x, y) if of_step > 1 else stages.step(x[0], y[0]))
            if row["evaluations"] != "none":
                stages.evaluate(given[:2])
        averages = None if row["ema_decay"] == "none" else stages.state_dict(ema=True)
        norm = None if row["clip_norm"] == "none" else losses[-1].gradient_norm
        return RowResult([loss.item() for loss in losses], norm, stages.state_dict(), averages)


def test_rows_have_every_pair_that_is_not_refused() -> None:
    had = {frozenset(pair) for row in ROWS for pair in combinations(row.items(), 2)}
    assert had == {frozenset(pair) for pair in pairs_of(FEATURES) if not is_refused(*pair)}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("row", MARKED, ids=lambda row: "-".join(row.values()).replace(" ", "_"))
def test_features_together_have_the_bits_of_a_plain_loop(row: Row, fork_server: ForkServer, tmp_path: Path) -> None:
    expected = plain(row)
    match row["run"]:
        case "script":
            trained = run_script(row)
        case "plan":
            trained = run_plan(row, tmp_path / "run")
        case _:
            trained = run_processes(row, tmp_path / "run", fork_server)
    assert trained.losses == expected.losses
    assert trained.norm == (expected.norms[-1] if expected.norms else None)
    assert not differing(dict(trained.state), expected.state())
    if trained.averages is not None:
        assert not differing(dict(trained.averages), expected.averages())


@pytest.mark.parametrize("pair", [pair for pair in pairs_of(FEATURES) if is_in_table(*pair)], ids=str)
def test_a_pair_of_the_table_is_refused(pair: tuple[Choice, Choice]) -> None:
    row = {**PLAINEST, **dict(pair)}
    begin = line if row["run"] == "script" else planned
    with pytest.raises(PlanRefused):
        begin(row)


@pytest.mark.parametrize("pair", REFUSED_OF_MODELS, ids=str)
def test_a_pair_that_no_model_can_have_is_refused(pair: tuple[Choice, Choice]) -> None:
    plan = planned({**PLAINEST, **dict(pair)})
    with pytest.raises((ModelRefused, PlanRefused), match="share a parameter"):
        prepare(plan)
