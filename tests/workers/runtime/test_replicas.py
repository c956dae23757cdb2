"""Sums of replicas are added in the replicas' order, and those that do not fit are refused."""

import pytest
import torch

from stageline.pipeline.errors import GradientMismatch
from stageline.workers.runtime.losses import MicrobatchLoss
from stageline.workers.runtime.replicas import ReplicaPart, changes_of, losses_of, total_of

BIG, SMALL = torch.tensor([1e8]), torch.tensor([1.0])


def test_sums_are_added_in_the_order_of_replicas_and_not_as_they_arrive() -> None:
    parts = [ReplicaPart({"w": each}) for each in (SMALL, BIG, -BIG)]
    assert torch.equal(total_of(parts, parts[0].gradients)["w"], (SMALL + BIG) - BIG)
    assert torch.equal(total_of(parts[::-1], parts[0].gradients)["w"], (-BIG + BIG) + SMALL)


def test_a_replica_without_a_gradient_adds_nothing_and_none_shares_memory_with_the_total() -> None:
    parts = [ReplicaPart({"w": None, "v": None}), ReplicaPart({"w": SMALL, "v": None})]
    total = total_of(parts, parts[0].gradients)
    assert total["v"] is None
    assert total["w"] is not None
    assert torch.equal(total["w"], SMALL)
    assert total["w"].data_ptr() != SMALL.data_ptr()


def test_what_is_sent_comes_back_and_losses_are_in_the_order_of_microbatches() -> None:
    first = ReplicaPart({"w": SMALL}, (MicrobatchLoss(0, SMALL[0], 2), MicrobatchLoss(2, None, 0)))
    second = ReplicaPart({"w": BIG}, (MicrobatchLoss(1, BIG[0], 3),))
    received = first.other(2, second.tree)
    assert received == second
    assert [each.microbatch for each in losses_of([first, received])] == [0, 1, 2]


@pytest.mark.parametrize(
    "given", [None, ({"v": SMALL}, ()), ({"w": 3}, ()), ({"w": SMALL}, ((0, SMALL),)), ({"w": SMALL}, None)]
)
def test_what_is_not_of_the_same_parameters_is_refused(given: object) -> None:
    with pytest.raises(GradientMismatch, match=r"stage 1 got .* from another replica; expected a dict of gradients"):
        ReplicaPart({"w": SMALL}).other(1, given)  # type: ignore[arg-type]


def test_a_tensor_that_is_written_to_or_replaced_has_changed() -> None:
    kept, written, replaced = (torch.zeros(2) for _ in range(3))
    before = changes_of({"kept": kept, "written": written, "replaced": replaced})
    written.add_(1)
    after = changes_of({"kept": kept, "written": written, "replaced": replaced + 1})
    assert [name for name in before if before[name] != after[name]] == ["written", "replaced"]
