"""The plan as a value: its stages once the model is known, its warnings, its digest."""

import json
import re

import pytest
from hypothesis import given

from stageline.pipeline.plan import Plan, PlanRefused, from_mapping
from stageline.pipeline.plan.tables import flat
from support.small_plans import plan, tables


def unresolved(**changes: object) -> Plan:
    return plan(model__cut=None, **changes)


def test_a_plan_without_snapshots_is_read_back_as_it_was():
    """The folder of such a run could not be read: `restarts` was refused as if it had been given."""
    found = plan(recovery={"snapshot_every": 0})
    assert from_mapping(found.as_mapping()) == found


def test_a_plan_without_a_number_of_stages_waits_for_the_model() -> None:
    waiting = unresolved()
    assert (waiting.model.stages, waiting.workers) == (None, ())
    resolved = waiting.resolved(stages=3)
    assert (resolved.model.stages, resolved.placement) == (3, ((0,), (1,), (2,)))
    assert resolved.digest() == unresolved(model__stages=3).digest() != waiting.digest()


def test_a_plan_that_knows_its_stages_is_resolved_already() -> None:
    assert plan().resolved(stages=2) == plan()


def test_a_model_of_another_number_of_stages_is_refused() -> None:
    with pytest.raises(PlanRefused, match=r"model\.stages = 2: the model has 3 stages"):
        plan().resolved(stages=3)


def test_workers_that_do_not_fit_the_model_are_refused_once_it_is_known() -> None:
    waiting = unresolved(workers__0__stages=[1, 0])
    assert waiting.placement == ((1, 0),)
    with pytest.raises(PlanRefused, match="stage 2 is owned by no worker"):
        waiting.resolved(stages=3)


def test_a_schedule_that_does_not_fit_the_model_is_refused_once_it_is_known() -> None:
    waiting = unresolved(schedule__name="window", schedule__window=[2, 1], schedule__microbatches=4)
    assert waiting.resolved(stages=2).placement == ((0,), (1,))
    with pytest.raises(PlanRefused, match="expected 3 values, one for each stage, got 2"):
        waiting.resolved(stages=3)


@pytest.mark.parametrize("url", ["tcp://0.0.0.0:5600", "tcp://*:5600", "tcp://broker.example:5600", "tcp://[::]:5600"])
def test_an_address_that_others_can_reach_gives_a_warning_if_its_keys_are_renounced(url: str) -> None:
    (warning,) = plan(broker__url=url, broker__insecure=True).warnings
    assert f'broker.url = "{url}" can be reached from other machines' in warning
    assert plan(broker__url=url, queues__url="tcp://0.0.0.0:0").warnings == ()
    (of_queues,) = plan(queues__url=url).warnings
    assert f'queues.url = "{url}" can be reached from other machines' in of_queues


@pytest.mark.parametrize("key", ["queues.url", "broker.url", "broker.store"])
def test_a_redis_server_on_the_network_without_password_or_tls_gives_a_warning(key: str) -> None:
    name = key.replace(".", "__")
    (both,) = plan(**{name: "redis://10.0.0.9:6379/0"}).warnings
    assert all(fact in both for fact in (f'{key} = "redis://10.0.0.9:6379/0"', "a password", "TLS", "rediss://"))
    (clear,) = plan(**{name: "redis://:secret@10.0.0.9:6379/0"}).warnings
    assert "without TLS" in clear
    assert "secret" not in clear
    assert plan(**{name: "rediss://:secret@10.0.0.9:6379/0"}).warnings == ()


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:*", "tcp://localhost:0", "tcp://[::1]:5600", "ipc:///tmp/x"])
def test_an_address_of_this_machine_gives_none(url: str) -> None:
    assert plan(queues__url=url).warnings == ()


def test_a_digest_is_64_hexadecimal_digits() -> None:
    assert re.fullmatch("[0-9a-f]{64}", plan().digest())


def test_an_explicit_default_changes_nothing() -> None:
    explicit = plan(model__stages=2, schedule__name="1f1b", workers={"0": {"stages": [0]}, "1": {"stages": [1]}})
    assert explicit == plan()
    assert explicit.digest() == plan().digest()


def test_the_order_of_keys_does_not_matter() -> None:
    one, other = {"a": 1, "b": [{"c": 2, "d": 3}]}, {"b": [{"d": 3, "c": 2}], "a": 1}
    assert plan(model__options=one).digest() == plan(model__options=other).digest()


@given(tables())
def test_a_plan_written_as_a_mapping_and_read_again_is_the_same(tables: dict[str, dict]) -> None:
    plan = from_mapping(tables)
    written = json.loads(json.dumps(plan.as_mapping(), allow_nan=False))
    again = from_mapping(written)
    assert again == plan
    assert again.digest() == plan.digest()
    assert plan.origins.keys() == flat(plan.as_mapping()).keys()
