"""`make shape` traces a real run, at methods of the product that it names."""

from importlib import import_module

import pytest

from support.paths import ROOT


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


def test_the_methods_that_make_shape_traces_are_there() -> None:
    from benchmarks.shape.sitecustomize import WATCHED

    assert WATCHED
    for module, (name, trace) in WATCHED.items():
        watched = getattr(import_module(module), name)
        copy = type(name, (watched,), {})  # the product's class stays as it is
        trace(copy)
        replaced = [method for method in vars(copy) if not method.startswith("__")]
        assert replaced
        assert all(vars(copy)[method] is not getattr(watched, method) for method in replaced)


@pytest.mark.slow
def test_make_shape_finds_the_ways_of_a_microbatch_and_of_a_heartbeat_in_a_real_run() -> None:
    from benchmarks.shape.ways import ways

    found = {way: {*files} for way, files in ways(ROOT).items()}
    takes, computes = {"workers/runtime/loop.py", "broker/queues/delivery.py"}, {"pipeline/stage/stage.py"}
    assert takes | computes <= found["microbatch"]
    worker = {"workers/control/control_thread.py", "workers/control/session.py"}
    broker = {"workers/process/broker_process.py", "broker/coordinator/coordinator.py"}
    assert worker | broker <= found["heartbeat"]
