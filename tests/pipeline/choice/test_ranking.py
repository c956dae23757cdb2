"""The ranking: the fastest of the catalogue, a window as large as links need and memory allows, and why not others."""

from collections.abc import Sequence

import pytest

from stageline.pipeline.choice import MeasuredTimes, Ranking, StageBytes
from stageline.pipeline.schedule import Action, Kind, Placement, Schedule, make_schedule, schedule_names
from stageline.pipeline.schedule.check import Costs
from support.shapes import line, looped
from support.timed_steps import steps_of

PLENTY = 10**9
LINE = line(4)


def ranked(latency: float, *, limit: int = PLENTY, placement: Placement = LINE, microbatches: int = 32) -> Ranking:
    stages = sum(map(len, placement))
    costs = Costs.even(stages, forward=1, backward=2, latency=latency)
    times = MeasuredTimes.of(steps_of(make_schedule("1f1b", placement, microbatches), costs), placement)
    ranking = Ranking(placement, microbatches, times, {stage: StageBytes(100, 10) for stage in range(stages)}, limit)
    while ranking.advance():
        pass
    return ranking


@pytest.mark.parametrize(
    ("latency", "best"),
    [(0, "1f1b"), (0.25, "eager-1f1b"), (1.5, "eager-1f1b"), (3, "window 10,7,4,1"), (6, "window 16,11,6,1")],
)
def test_the_fastest_is_best_and_of_those_as_fast_the_one_with_the_least_memory(latency: float, best: str) -> None:
    ranking = ranked(latency)
    assert [each.name for each in ranking.found] == list(schedule_names())
    found = ranking.best()
    assert found is not None
    assert found.title == best
    assert found.seconds == pytest.approx((32 + 3) * 3 + 6 * latency)


def test_a_window_is_made_smaller_until_it_has_room() -> None:
    found = {each.name: each for each in ranked(6, limit=200).found}
    assert found["window"].window == (10, 10, 6, 1)
    assert found["window"].bytes == 200
    assert found["gpipe"].seconds is None
    assert found["gpipe"].reason == "a worker would take 420 bytes, more than schedule.memory"


def test_nothing_is_best_where_nothing_has_room() -> None:
    assert ranked(1, limit=50).best() is None


def test_schedules_that_do_not_accept_the_placement_say_why() -> None:
    found = {each.name: each for each in ranked(0, placement=((0, 1), (2, 3)), microbatches=4).found}
    assert found["interleaved-1f1b"].reason.startswith("its stages must loop over the workers")
    assert found["looped-bfs"].seconds is None


def test_stages_that_loop_over_workers_are_interleaved() -> None:
    ranking = ranked(0, placement=looped(4, 2), microbatches=8)
    best = ranking.best()
    assert best is not None
    assert best.name == "interleaved-1f1b"


def halving_its_backwards(name: str, placement: Placement, microbatches: int, **more: object) -> Schedule:
    """1F1B under any name, with backwards in halves under that of "gpipe"."""
    plain = make_schedule("1f1b", placement, microbatches)
    if name != "gpipe":
        return plain
    kinds = (Kind.INPUT, Kind.WEIGHT)

    def halves(action: Action) -> Sequence[Action]:
        return [action._replace(kind=kind) for kind in kinds] if action.kind is Kind.BACKWARD else [action]

    lists = tuple(tuple(half for action in actions for half in halves(action)) for actions in plain.workers)
    return Schedule(name, "sync", plain.placement, microbatches, lists)


@pytest.mark.parametrize(
    ("ratio", "reason"),
    [
        (1.1, ""),
        (1.2, "the halves of a backward take 1.20 times as long as the whole, more than 1.15"),
        (None, "it runs backwards in two halves, and what those take, or whether all layers can, is not known"),
    ],
)
def test_halves_that_take_much_longer_than_the_whole_or_were_not_measured_are_refused(
    ratio: float | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stageline.pipeline.choice.candidates.make_schedule", halving_its_backwards)
    one, whole = (1.0,) * 2, (2.0,) * 2
    half = (ratio,) * 2
    times = MeasuredTimes(one, whole, half, half, (0.0,) * 2, (0.0,), (0.0,), 1.0)
    ranking = Ranking(line(2), 4, times, {0: StageBytes(1, 1), 1: StageBytes(1, 1)}, PLENTY)
    assert ranking.advance()
    (gpipe,) = ranking.found
    assert (gpipe.seconds is None) == bool(reason)
    assert gpipe.reason == reason


def test_a_link_that_messages_keep_busy_bounds_every_schedule() -> None:
    whole = (2.0,) * 2
    times = MeasuredTimes((1.0,) * 2, whole, (None,) * 2, (None,) * 2, (0.0,) * 2, (5.0,), (5.0,), 1.0)
    ranking = Ranking(line(2), 8, times, {0: StageBytes(1, 1), 1: StageBytes(1, 1)}, PLENTY)
    while ranking.advance():
        pass
    assert min(each.seconds for each in ranking.found if each.seconds is not None) >= 40
