"""Packed documents: a document's scores do not depend on its row, and a line trains them like a plain loop."""

import re
import runpy
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from stageline import Line
from support.paths import EXAMPLES
from support.workspace import Workspace


@pytest.fixture(scope="module")
def example() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / "packed" / "train.py")))


def test_a_documents_scores_do_not_depend_on_the_documents_beside_it(example: SimpleNamespace) -> None:
    model = example.build(width=32, blocks=2).eval()
    one, other = b"one document of a row", b"another one, which stands behind it"
    rows = [example.row_of(texts) for texts in ([one, other], [one, other[::-1]], [one])]
    names = ("tokens", "documents", "places")
    scores = model({name: torch.stack([row[name] for row in rows]) for name in names})[:, : len(one)]
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[0], scores[2])


def test_every_document_is_in_one_row_whole(example: SimpleNamespace) -> None:
    texts = example.documents()
    rows = example.packed(texts)
    assert sorted(text for row in rows for text in row) == sorted(texts)
    assert all(sum(map(len, row)) <= example.CONTEXT for row in rows)
    assert len(rows) < len(texts)


def test_a_line_trains_packed_rows_like_a_plain_loop(example: SimpleNamespace) -> None:
    optimizer, settings = partial(torch.optim.AdamW, lr=2e-3), {"width": 32, "blocks": 2}
    plain = example.build(**settings)
    update = optimizer(plain.parameters())
    for x, y in example.batches(2):
        shares = zip(*(each.tensor_split(4) for each in (*x.values(), y)), strict=True)
        for *inputs, targets in shares:
            given = dict(zip(x, inputs, strict=True))
            (example.next_token_loss(plain(given), targets) * (len(targets) / len(y))).backward()
        update.step()
        update.zero_grad()
    line = Line(
        example.build(**settings),
        stages=3,
        loss=example.next_token_loss,
        optimizer=optimizer,
        microbatches=4,
        workers="inline",
    )
    with line:
        for x, y in example.batches(2):
            line.step(x, y)
        trained = line.state_dict()
    assert all(torch.equal(trained[name], tensor) for name, tensor in plain.state_dict().items())


@pytest.mark.slow
def test_the_script_runs_on_two_processes(workspace: Workspace) -> None:
    ended = workspace.command("script", str(EXAMPLES / "packed" / "train.py"), "--steps", "24")
    assert ended.returncode == 0, ended.stderr
    first, last = map(float, re.findall(r"\d\.\d{4}", ended.stdout))
    assert last < first
