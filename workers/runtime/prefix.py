"""Demands of a cached prefix on the plan's model and data, and the order of its samples.

Rows of a cached prefix are kept by sample, so their order has to travel to a worker that has no data.
"""

from collections.abc import Sequence

import torch

from stageline.broker.control.records import SampleOrder
from stageline.pipeline.data import Feed, Order
from stageline.pipeline.model.plan_stage import tapped_layers
from stageline.pipeline.model.segment import Segment
from stageline.pipeline.model.side_effects import impure_modules
from stageline.pipeline.plan import Plan, PlanError


def demand_prefix(plan: Plan, segments: Sequence[Segment], first_trainable: int) -> None:
    """Raise `PlanRefused` if the plan caches a prefix of stages that cannot be cached.

    Args:
        plan: The plan.
        segments: Segments of the model.
        first_trainable: Number of the first stage that trains. There must be frozen stages before it, none of which
            draws random numbers, counts, or is tapped.
    """
    key = "model.prefix_cache"
    if not plan.caches_prefix:
        return
    if not first_trainable:
        raise plan.refused(key, _no_prefix(segments))
    wrong = [PlanError(key, reason) for reason in impure_modules(segments[:first_trainable])]
    tapped = [
        layer for stage, layers in tapped_layers(plan, segments).items() if stage < first_trainable for layer in layers
    ]
    if tapped:
        wrong.append(PlanError("taps.layers", _tapped_prefix(tapped)))
    plan.demand_none(wrong)


def _tapped_prefix(layers: Sequence[str]) -> str:
    return (
        f"{', '.join(layers)}: in frozen first stages, which model.prefix_cache = true runs in the first epoch alone; "
        "tap layers after them, or leave model.prefix_cache out"
    )


def _no_prefix(segments: Sequence[Segment]) -> str:
    """Return the reason why nothing can be kept, with where to cut."""
    first, names = segments[0], segments[0].names
    at = next(place for place, layer in enumerate(first.layers) if any(p.requires_grad for p in layer.parameters()))
    if at == 0:
        return f"the first layer, {names[0]}, is trained, so no stage before it is frozen; leave it out"
    return (
        f"stage 0, of layers {names[0]} to {names[-1]}, trains layer {names[at]}; cut there, so that the stages before "
        f"it are frozen: model.cut = [{at}, ...]"
    )


def order_of(plan: Plan, feed: Feed) -> SampleOrder | None:
    """Return the order of samples in the batches; None for a source of the user's own, which may draw in any order.

    Returns None for a plan without a cached prefix: nothing asks for its order. Raises `PlanRefused` for a source that
    does not say which samples its batches have.
    """
    if not plan.caches_prefix:
        return None
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
    return SampleOrder(order.count, order.batch_size, order.seed, order.shuffle, order.drop_last)


def made_order(order: SampleOrder) -> Order:
    """Return the order that the record `order` describes."""
    return Order(order.count, order.batch_size, order.seed, shuffle=order.shuffle, drop_last=order.drop_last)


def cached_stages(plan: Plan, first_trainable: int) -> range:
    """Return the stages whose outputs the plan caches: those before `first_trainable`, or none."""
    return range(first_trainable if plan.caches_prefix else 0)
