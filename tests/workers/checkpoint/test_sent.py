"""Snapshots that workers on other machines send to their script."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from stageline.broker.codec.message import Message, decode, encode
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.reader import from_mapping
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree
from stageline.workers.checkpoint.directory import SnapshotDirectory
from stageline.workers.checkpoint.saved import NotSaved
from stageline.workers.checkpoint.sent import sent_stages, write_sent


def plan() -> Plan:
    return from_mapping(
        {
            "model": {"factory": "script:model", "loss": "script:loss", "stages": 1},
            "data": {"source": "script:batches", "batch_size": 1},
            "optimizer": {"factory": "script:optimizer"},
        }
    ).resolved(1)


def trained() -> Stage:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    stage = Stage(model, optimizer=torch.optim.AdamW, loss=nn.functional.mse_loss)
    stage.forward(torch.ones(4, 2), target=torch.zeros(4, 2), step=0, microbatch=0)
    stage.backward(step=0, microbatch=0)
    stage.update()
    return stage


def carried(reply: Tree) -> Tree:
    return decode(encode(Message("r", "reply-0", 0, 1, reply))).payload


def test_what_a_worker_sends_is_the_snapshot_that_it_would_write_and_does_not_depend_on_the_time(
    tmp_path: Path,
) -> None:
    stage = trained()
    reply = carried(sent_stages({0: stage}))
    write_sent(tmp_path, plan(), "line-1", 1, {0: reply})
    snapshot = SnapshotDirectory.of(tmp_path, "line-1", plan()).load(0, 1)
    other = trained()
    other.restore(snapshot.state)
    for went_on in (stage, other):
        went_on.forward(torch.ones(4, 2), target=torch.ones(4, 2), step=1, microbatch=0)
        went_on.backward(step=1, microbatch=0)
        went_on.update()
    assert all(torch.equal(stage.state_dict()[name], found) for name, found in other.state_dict().items())
    first, second = (encode(Message("r", "reply-0", 0, 1, sent_stages({0: trained()}))) for _ in range(2))
    assert list(map(bytes, first)) == list(map(bytes, second))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda reply: None, "worker 0 sent None in place of its stages' state"),
        (lambda reply: (), r"worker 0 sent the state of stages \[\], not of \[0\]"),
        (lambda reply: ({**reply[0], "stage": 3},), r"sent the state of stages \[3\], not of \[0\]"),
        (lambda reply: ({**reply[0], "weights": {"0.weight": 3}},), "something else in place of tensors by name"),
        (lambda reply: ({**reply[0], "training": "{"},), "worker 0 sent a state that cannot be read"),
        (lambda reply: ({**reply[0], "further": {}},), "worker 0 sent a state that cannot be read: .*further"),
        (lambda reply: ({"stage": 0, "lacks": "no"},), "worker 0 could not send the state of stage 0: no"),
    ],
)
def test_another_reply_is_refused_by_the_name_of_its_worker(
    spoil: Callable[..., Tree], said: str, tmp_path: Path
) -> None:
    reply = carried(sent_stages({0: trained()}))
    with pytest.raises(NotSaved, match=said):
        write_sent(tmp_path, plan(), "line-1", 1, {0: spoil(reply)})
