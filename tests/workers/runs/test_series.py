"""Names, units and help texts of the series follow the conventions of Prometheus, and their number is bounded."""

import re

import msgspec
import pytest

from stageline.workers.runs.series import EMPTY, SeriesFamily, SeriesKind, families
from support.measured import measures

FAMILIES = {each.name: each for each in families(measures())}
UNITS = {"seconds", "bytes", "ratio"}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_series_is_named_as_prometheus_wants_it(family: SeriesFamily):
    assert re.fullmatch(r"stageline_[a-z_]*[a-z]", family.name)
    assert family.name.rpartition("_")[2] not in ("total", "count", "sum", "bucket")
    named = family.name.rpartition("_")[2]
    assert (named if named in UNITS else "") == family.unit
    assert (family.kind is SeriesKind.COUNTER) == family.shown.endswith("_total")
    assert family.text.endswith(".")
    assert len(family.text) > 10
    assert (family.kind is SeriesKind.HISTOGRAM) == (family.buckets is not None)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_values_differ_by_labels_that_the_plan_bounds(family: SeriesFamily):
    labels = [tuple(sample.labels.items()) for sample in family.samples]
    assert len(set(labels)) == len(labels)
    names = {tuple(sample.labels) for sample in family.samples}
    assert len(names) <= 1
    allowed = {"worker", "stage", "queue", "cause", "kind", "phase", "metric"}
    if family.name != "stageline_run_info":
        assert set(*names) <= allowed


def test_a_broker_that_does_not_answer_is_told_as_down():
    (found,) = families(None)
    assert (found.name, found.samples[0].value) == ("stageline_broker_up", 0.0)
    assert FAMILIES["stageline_broker_up"].samples[0].value == 1.0


def test_buckets_are_cumulative_and_end_with_all():
    buckets = FAMILIES["stageline_step_seconds"].buckets
    assert buckets is not None
    assert [count for _, count in buckets.bounds] == [1.0, 3.0, 3.0, 4.0]
    assert [bound for bound, _ in buckets.bounds] == ["0.5", "1.0", "25.0", "+Inf"]
    assert buckets.sum == 42.5


def test_every_number_of_the_measures_is_in_a_series():
    """A field that is added and not shown would be asked for in vain: each gets a number of its own here."""
    shown = {sample.value for family in FAMILIES.values() for sample in family.samples}
    told = dict(numbers(msgspec.to_builtins(measures())))
    assert {field for field, value in told.items() if value not in shown} <= {"took_seconds", "worker"}


def numbers(facts: object, field: str = ""):
    match facts:
        case dict():
            for name, value in facts.items():
                yield from numbers(value, name)
        case list():
            for value in facts if field not in ("bounds", "took") else ():
                yield from numbers(value, field)
        case bool() | str() | None:
            return
        case number:
            yield field, number


def test_what_is_not_known_has_no_value():
    found = {each.name: each for each in families(EMPTY)}
    assert found.keys() == FAMILIES.keys()
    assert found["stageline_loss"].samples == []
    assert [sample.value for sample in found["stageline_steps"].samples] == [0.0]
