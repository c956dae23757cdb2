"""Trains one model in four ways, prints their losses side by side, and says which are equal to the bit.

    python examples/four_ways/compare.py        about six minutes; --steps 21 for a look

Each way is the plan in this folder with the keys in `WAYS` on top. What their results must equal is computed by
`plain.py`, in plain torch. The curves are drawn into four-ways.svg in the folder that --out names.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import plain
import plot
import torch

from stageline import Trained, train

WAYS: dict[str, tuple[str, ...]] = {
    "single": (),
    "data-parallel": ("stage.0.replicas=2",),
    "tensor-parallel": ("stage.0.tensor=2", 'stage.0.styles={"0"="colwise", "2"="rowwise"}'),
    "pipeline": ("model.cut=[2]",),
}
REPLICAS = 2
CLOSE = 1e-3  # a difference by rounding, of losses and weights, that 10,000 steps may make
Weights = Mapping[str, torch.Tensor]


def trained(way: str, steps: int, microbatches: int, out: Path) -> Trained:
    """The run of one way. Of its losses about a hundred are kept, and those of the table are among them."""
    sizes = (f"run.steps={steps}", f"run.log_every={max(1, steps // 100)}", f"schedule.microbatches={microbatches}")
    return train(Path(__file__).parent, *sizes, f"run.dir={out / 'runs'}", *WAYS[way])


def table(runs: Mapping[str, Trained], steps: int) -> str:
    """The losses after each fifth of the run, and how long all of it took."""
    fifths = {(steps - 1) * fifth // 5 for fifth in range(6)}
    at = sorted(fifths & curve(runs["single"]).keys())
    head = ["step", *map(str, at), "time of the run"]
    rows = [[way, *_losses(run, at), f"{run.result.seconds:.0f} s"] for way, run in runs.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _losses(run: Trained, at: list[int]) -> list[str]:
    return [f"{run.result.losses[str(step)]:.3f}" for step in at]


def verdicts(runs: Mapping[str, Trained], steps: int, microbatches: int) -> dict[str, bool]:
    """Claims, and whether each holds. Weights and losses are equal to the bit, except where it says otherwise."""
    loop = plain.train(steps, [range(microbatches)], microbatches)
    in_groups = plain.train(steps, [range(first, microbatches, REPLICAS) for first in range(REPLICAS)], microbatches)
    found = {way: plain.PlainResult(dict(run.state_dict()), curve(run)) for way, run in runs.items()}
    loss, weight = farthest(found["tensor-parallel"], found["single"])
    return {
        "single = plain loop": same(found["single"], loop),
        "pipeline = plain loop": same(found["pipeline"], loop),
        "data-parallel = plain loop that adds gradients in two groups": same(found["data-parallel"], in_groups),
        f"tensor-parallel = single within {CLOSE}: losses within {loss:.1e}, weights within {weight:.1e}": (
            max(loss, weight) <= CLOSE
        ),
    }


def curve(run: Trained) -> dict[int, float]:
    """The losses that were kept, by step. One without rows has none; there is none here."""
    return {int(step): loss for step, loss in run.result.losses.items() if loss is not None}


def same(found: plain.PlainResult, wanted: plain.PlainResult) -> bool:
    """Whether weights are equal to the bit, and losses wherever `found` has one."""
    return (
        found.weights.keys() == wanted.weights.keys()
        and all(torch.equal(found.weights[name], wanted.weights[name]) for name in wanted.weights)
        and all(loss == wanted.losses[step] for step, loss in found.losses.items())
    )


def farthest(found: plain.PlainResult, wanted: plain.PlainResult) -> tuple[float, float]:
    """The largest differences of losses and of weights."""
    weights = [(found.weights[name] - wanted.weights[name]).abs().max().item() for name in wanted.weights]
    return max(abs(loss - wanted.losses[step]) for step, loss in found.losses.items()), max(weights)


def main() -> bool:
    """Runs all four in turn; whether everything holds that must."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_001, help="of each run; the last is number STEPS - 1")
    parser.add_argument("--microbatches", type=int, default=2, help="slices of each batch, 2 or more")
    parser.add_argument("--out", type=Path, default=Path("runs/four_ways"), help="folder of the runs and the picture")
    given = parser.parse_args()
    if given.steps < 1:
        parser.error(f"--steps {given.steps}: a run has 1 or more")
    if given.microbatches < REPLICAS:
        parser.error(f"--microbatches {given.microbatches}: {REPLICAS} replicas need {REPLICAS} or more")
    torch.set_num_threads(1)  # as each worker has: more of them add in another order
    runs = {way: trained(way, given.steps, given.microbatches, given.out) for way in WAYS}
    print(table(runs, given.steps))
    holds = verdicts(runs, given.steps, given.microbatches)
    for way, run in runs.items():
        print(f"{way}: weights_sha256 {run.result.weights_sha256}")
    for what, true in holds.items():
        print(f"{'yes' if true else 'NO '}  {what}")
    (given.out / "four-ways.svg").write_text(plot.drawn({way: curve(run) for way, run in runs.items()}))
    return all(holds.values())


if __name__ == "__main__":
    raise SystemExit(not main())
