"""Who takes from a queue, and who puts into it."""

import pytest

from stageline.broker.diagnosis.queue_routes import QueueRoute, RouteEnd, route_of
from stageline.pipeline.schedule import make_schedule

SCHEDULE = make_schedule("1f1b", ((0, 2), (1,)), 4)
SCRIPT = 2


@pytest.mark.parametrize(
    ("queue", "consumer", "producer"),
    [
        ("forward-0", RouteEnd(0, 0), None),
        ("forward-2", RouteEnd(0, 2), RouteEnd(1, 1)),
        ("backward-1", RouteEnd(1, 1), RouteEnd(0, 2)),
        ("backward-2", RouteEnd(0, 2), None),
        ("evaluation-1", RouteEnd(1, 1), RouteEnd(0, 0)),
        ("verdict-0", RouteEnd(0), RouteEnd(0, 2)),
        ("verdict-1", RouteEnd(1), RouteEnd(0, 2)),
        ("call-1", RouteEnd(1), RouteEnd(SCRIPT)),
        ("reply-0", RouteEnd(SCRIPT), RouteEnd(0)),
        ("loss-1", RouteEnd(SCRIPT), RouteEnd(1)),
    ],
)
def test_a_queue_has_a_consumer_and_a_producer(queue: str, consumer: RouteEnd, producer: RouteEnd | None):
    assert route_of(queue, SCHEDULE, SCRIPT) == QueueRoute(queue.rpartition("-")[0], consumer, producer)


@pytest.mark.parametrize(
    "queue",
    ["", "target-2", "call", "call-", "call-2", "verdict-2", "reply-9", "forward-3", "forward--1", "x-1", "call-١"],
)
def test_a_name_of_no_queue_has_none(queue: str):
    assert route_of(queue, SCHEDULE, SCRIPT) is None


def test_a_run_without_a_script_has_no_calls():
    assert route_of("call-1", SCHEDULE, None) is None


def test_a_queue_between_stages_that_share_parameters_has_the_producer_that_is_told():
    assert route_of("tied-0", SCHEDULE, None, 2) == QueueRoute("tied", RouteEnd(0, 0), RouteEnd(0, 2))
    assert route_of("total-1", SCHEDULE, None, 0) == QueueRoute("total", RouteEnd(1, 1), RouteEnd(0, 0))
    assert route_of("tied-0", SCHEDULE, None) is None
