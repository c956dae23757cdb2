"""Any number of rows: a microbatch without rows is computed by no stage, and the result is that of a loop without."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stageline import Feature, Line
from stageline.pipeline.tree import Tree
from support import reference
from support.fork_server import ForkServer
from support.plain_loop import PlainLoop, differing
from support.workspace import Workspace

ROWS, HELD_OUT, SIZE, MICROBATCHES = 258, 66, 64, 4  # the last batches have 2 rows
ADAM = partial(torch.optim.Adam, lr=0.01)
LOOPED = {"cut": [1, 3, 4], "placement": [[0, 2], [1, 3]]}
TIED = Path(reference.__file__).parent / "tied"

pytestmark = pytest.mark.usefixtures("one_thread")


class Fussy(nn.Module):
    """Like a transformer's attention: it cannot compute a batch without rows. Its statistics count the microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(len(x), 5, 2, -1)  # refuses 0 elements
        return self.norm(heads.flatten(2).transpose(1, 2)).transpose(1, 2)


def build(*, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(17, 8), Fussy(), nn.Dropout(0.1), Fussy(), nn.Linear(8, 8), nn.Linear(8, 17))
    if tied:
        made[5].weight = made[0].weight
    return made


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.transpose(1, 2), targets)


def batches(rows: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    words = torch.randint(17, (rows, 6), generator=torch.Generator().manual_seed(seed))
    return [(part[:, :-1], part[:, 1:]) for part in words.split(SIZE)]


def evaluated(model: nn.Module, held_out: Sequence[tuple[Tensor, Tensor]], microbatches: int) -> float:
    total = 0.0
    model.eval()
    with torch.no_grad():
        for x, y in held_out:
            for xs, ys in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
                total += loss(model(xs), ys).item() * len(xs) if len(xs) else 0.0
    model.train()
    return total / sum(len(x) for x, _ in held_out)


def line(model: Any = None, **options: Any) -> Line:
    given = {"loss": loss, "optimizer": ADAM, "microbatches": MICROBATCHES, "workers": "inline", "cut": [2, 4]}
    return Line(model or build(), **{**given, **options})


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "tied"])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"schedule": "gpipe"},
        {"schedule": "zb-h1"},
        {"schedule": "interleaved-1f1b", **LOOPED},
        {"schedule": "1f1b", "cut": None, "stages": 1},
        {"schedule": "1f1b", "recompute": "stage"},
        {"schedule": "1f1b", "accumulate": 5},
    ],
    ids=lambda options: "-".join(map(str, options.values()))[:20],
)
def test_any_number_of_rows_is_trained_and_evaluated(options: dict[str, Any], *, tied: bool) -> None:
    """The first layer after an embedding raised for the microbatches without rows of the last batch."""
    given, held_out, model = batches(ROWS), batches(HELD_OUT, 2), build(tied=tied)
    assert [len(x) for x, _ in given + held_out] == [64, 64, 64, 64, 2, 64, 2]
    accumulate = options.get("accumulate", 1)
    plain = PlainLoop(model, loss, ADAM(model.parameters()), MICROBATCHES, accumulate, clip_norm=0.1).train(given * 2)
    with line(build(tied=tied), clip_norm=0.1, **options) as trained:
        fitted = trained.fit(given, epochs=2, held_out=held_out, evaluate_every="epoch")
        assert not differing(trained.state_dict(), plain.state())
        assert fitted.evaluations[fitted.steps] == {"loss": evaluated(model, held_out, MICROBATCHES * accumulate)}
        assert torch.equal(trained.predict(given[-1][0]), torch.cat([model.eval()(x) for x in given[-1][0].split(1)]))
    assert fitted.loss == plain.losses[-1]
    assert model[1].norm.num_batches_tracked == 2 * (4 * MICROBATCHES + 2)


def test_a_step_without_rows_changes_nothing() -> None:
    """Zeros as gradients let an optimizer with momentum or a decay of weights move."""
    given = batches(8)
    with line(cut=[2]) as trained:
        trained.fit(given)
        before = trained.state_dict()
        assert trained.step(given[0][0][:0], given[0][1][:0]).item() is None
        assert not differing(trained.state_dict(), before)
        assert trained.fit(given * 2).steps == 2


class Noted(Feature):
    """It notes which microbatches its stage computes."""

    computed: ClassVar[list[tuple[str, int]]] = []

    def around(self, stage: Any, kind: str, compute: Any) -> Any:
        def noted(operation: Any, received: Sequence[Tree]) -> Tree:
            if kind in "FB":
                self.computed.append((kind, operation.microbatch))
            return compute(operation, received)

        return noted


def test_features_see_no_microbatch_without_rows() -> None:
    Noted.computed.clear()
    with line(features=[Noted], cut=[2]) as trained:
        trained.step(*batches(2)[0])
    assert sorted(Noted.computed) == [(kind, number) for kind in "BF" for number in (0, 0, 1, 1)]


def test_a_traced_model_computes_no_microbatch_without_rows() -> None:
    from stageline import traced

    given = batches(2)[0]
    with line(traced(build().eval(), given[0][:1]), cut=None, stages=2) as trained:
        assert trained.step(*given).item() is not None
        assert trained.predict(given[0]).shape == (2, 5, 17)


SETS = ("data.batch_size=47", "schedule.microbatches=4", "run.steps=6")  # of 96 rows: batches of 47, 47 and 2


def plain_digest() -> str:
    return reference.reference_digest(TIED, batch_size=47, steps=6)


def test_a_plans_last_batch_may_have_fewer_rows_than_microbatches(workspace: Workspace, capsys: Any) -> None:
    sets = (*SETS, "queues.url=memory://", f"run.dir={workspace.folder}")
    assert workspace.here("train", str(TIED), "--json", *(word for each in sets for word in ("--set", each))) == 0
    assert json.loads(capsys.readouterr().out)["weights_sha256"] == plain_digest()


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("schedule.name=zb-h1", "queues.codec.forward=bf16")], ids=["1f1b", "zb-h1 bf16"])
def test_a_replaced_worker_leaves_the_same_microbatches_out(
    fork_server: ForkServer, workspace: Workspace, more: Sequence[str]
) -> None:
    def digest(name: str, kills: list[tuple[str, int]]) -> str:
        folder = workspace.folder / name
        sets = (*SETS, *more, f"run.dir={folder}")
        outcome = fork_server.train(TIED / "stageline.toml", *sets, folder=folder / "run", kills=kills)
        assert outcome["code"] == 0, outcome["reason"]
        assert outcome["not killed"] == []
        return str(outcome["facts"]["weights_sha256"])

    found = digest("killed", [("worker-1", 9 * 3 - 2), ("worker-3", 9 * 5 - 4)])
    assert found == (digest("whole", []) if more else plain_digest())
