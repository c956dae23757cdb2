"""Which samples each batch has, as a value that travels: to a worker that has no data, and keeps rows by sample."""

import torch

from stageline.broker.control.records import SampleOrder
from stageline.pipeline.data import Feed, Order
from stageline.pipeline.plan import Plan


def order_of(plan: Plan, feed: Feed) -> SampleOrder | None:
    """None for a source of the user's own, which may draw samples in any order: only who has it knows that. Raises
    `PlanRefused` for one that does not say which samples its batches have."""
    if feed.numbered is None:
        raise plan.refused(
            "model.prefix_cache",
            f"{plan.data.origin} returned a source without samples(step), which says which samples a batch has, as "
            "int64 [rows]; add it, use stageline.Rows or data.dataset, or leave it out",
        )
    source, order = feed.numbered, getattr(feed.numbered, "order", None)
    batches = (0, source.steps_per_epoch)  # of two epochs
    if not isinstance(order, Order) or not all(torch.equal(order.rows(n), source.samples(n)) for n in batches):
        return None
    return SampleOrder(order.count, order.batch_size, order.seed, order.shuffle)


def made_order(order: SampleOrder) -> Order:
    """The order that was told of."""
    return Order(order.count, order.batch_size, order.seed, shuffle=order.shuffle)
