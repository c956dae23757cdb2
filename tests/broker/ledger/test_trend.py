"""Memory and retained messages over a run: bounded, at even distances, and the same after a restart of the broker."""

import json

import msgspec

from stageline.broker.control.messages import Report
from stageline.broker.ledger.trend import MOST, STORED, Trend


def told(memory: int) -> Report:
    return Report(1, 0, "", 0.0, 0.0, retained_bytes=memory // 2, memory=memory)


def test_samples_are_a_second_apart_and_have_each_worker() -> None:
    trend = Trend(2)
    for at in (10.0, 10.5, 11.0, 12.0):
        trend.note([told(round(at * 10)), None], at)
    found = trend.facts()
    assert found.at == [10.0, 11.0, 12.0]
    assert found.memory == [[100, 110, 120], [None] * 3]
    assert found.retained == [[50, 55, 60], [None] * 3]


def test_a_long_run_has_few_samples_at_even_distances_and_keeps_its_beginning() -> None:
    trend = Trend(1)
    for second in range(5000):
        trend.note([told(second + 1)], float(second))
    found = trend.facts()
    assert MOST / 2 <= len(found.at) <= MOST
    assert found.at[0] == 0
    assert {after - before for before, after in zip(found.at, found.at[1:], strict=False)} == {found.every}


def test_without_processes_there_is_nothing_to_keep_or_to_store() -> None:
    trend = Trend(2)
    assert not any(trend.note([None, None], float(second)) for second in range(100))
    assert trend.facts().at == []


def test_samples_are_stored_once_in_a_while_from_the_first_on() -> None:
    trend = Trend(1)
    stored = [second for second in range(30) if trend.note([told(1)], float(second))]
    assert stored == [0, STORED, 2 * STORED]


def test_what_is_stored_goes_on_after_a_restart_and_what_does_not_fit_is_left_out() -> None:
    before = Trend(2)
    for second in range(700):
        before.note([told(second + 1), told(3)], float(second))
    stored = json.loads(json.dumps(msgspec.to_builtins(before.facts())))
    again = Trend.of(2, stored)
    assert again.facts() == before.facts()
    again.note([told(9), None], 1000.0)
    assert again.facts().at[-1] == 1000.0
    for damaged in (
        None,
        {},
        {"at": [1.0]},
        {"at": "never"},
        {**stored, "at": stored["at"][1:]},
        {**stored, "every": 0.0},
    ):
        assert Trend.of(2, damaged).facts() == Trend(2).facts()
    assert Trend.of(3, stored).facts() == Trend(3).facts()
