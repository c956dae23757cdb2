"""The ranking: the fastest of the catalogue, a window as large as links need and memory allows, and why not others."""

import pytest

from stageline.pipeline.choice import MeasuredTimes, RankedSchedule, Ranking, StageBytes
from stageline.pipeline.program import Costs
from stageline.pipeline.schedule import Placement, make_schedule, schedule_names
from support.shapes import line, looped
from support.timed_steps import steps_of

PLENTY = 10**9
LINE = line(4)
EACH = StageBytes(100, 10)


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
    assert list(dict.fromkeys(each.name for each in ranking.found)) == list(schedule_names())
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


def ranking_of(
    *,
    halves: float | None,
    latency: float = 0.0,
    each: StageBytes = EACH,
    limit: int = PLENTY,
    microbatches: int = 32,
) -> Ranking:
    """Of four stages whose halves take so many times as long as the whole; None: they are not measured."""
    half = (halves,) * 4
    times = MeasuredTimes((1.0,) * 4, (2.0,) * 4, half, half, (0.0,) * 4, (latency,) * 3, (0.0,) * 3, 1.0)
    ranking = Ranking(LINE, microbatches, times, dict.fromkeys(range(4), each), limit)
    while ranking.advance():
        pass
    return ranking


def halved(halves: float | None, each: StageBytes = EACH, limit: int = PLENTY) -> dict[str, RankedSchedule]:
    return {found.title: found for found in ranking_of(halves=halves, each=each, limit=limit).found}


@pytest.mark.parametrize(
    ("ratio", "reason"),
    [
        (1.14, ""),
        (1.2, "the halves of a backward take 1.20 times as long as the whole, more than 1.15"),
        (None, "the halves of backwards are not measured; at best, a step takes 99 s"),
    ],
)
def test_halves_that_take_much_longer_than_the_whole_or_were_not_measured_are_refused(
    ratio: float | None, reason: str
) -> None:
    found = halved(ratio)["zb-h1"]
    assert (found.seconds is None) == bool(reason)
    assert found.reason == reason
    assert found.halves


def test_backwards_in_halves_are_fastest_where_no_message_takes_time() -> None:
    found = halved(1.0)
    assert found["zb-h1"].seconds == pytest.approx(32 * 3 + 3)  # (P - 1)(F + I - W), one forward for each stage
    assert found["1f1b"].seconds == pytest.approx((32 + 3) * 3)
    assert ranking_of(halves=1.0).best() == found["zb-h1"]


def test_a_schedule_in_halves_is_worth_measuring_only_if_at_best_it_is_the_fastest_by_far_enough() -> None:
    found = ranking_of(halves=None).worth_measuring(1.02)
    assert found is not None
    assert found.name == "zb-h1"
    assert found.at_best == pytest.approx(99)
    assert ranking_of(halves=None).worth_measuring(1.1) is None
    assert ranking_of(halves=None, microbatches=160).worth_measuring(1.02) is None
    assert ranking_of(halves=None, each=StageBytes(100, 10, halfway=PLENTY)).worth_measuring(1.02) is None
    assert ranking_of(halves=1.0).worth_measuring(1.0) is None


def test_what_waits_between_the_halves_counts_as_memory() -> None:
    found = halved(1.0, StageBytes(100, 10, halfway=1000))["zb-h1"]
    assert found.in_flight == (4, 4, 4, 4)
    assert found.bytes == 100 + 4 * 10 + 4 * 1000  # the last stage defers three, and runs the next I before W
    short = halved(1.0, StageBytes(100, 10, halfway=1000), limit=4139)["zb-h1"]
    assert short.reason == "a worker would take 4140 bytes, more than schedule.memory"


def test_over_slow_links_halves_have_a_window_too_which_is_made_smaller_until_it_has_room() -> None:
    found = ranking_of(halves=1.0, latency=1).best()
    assert found is not None
    assert found.title == "zb-h1 7,5,3,1"
    assert found.seconds == pytest.approx(1.062 * 96, abs=0.05)
    assert found.in_flight == (7, 7, 7, 7)
    farther = ranking_of(halves=1.0, latency=1.5).found
    spans = {each.title: round((each.seconds or 0) / 96, 3) for each in farther if each.name == "zb-h1"}
    assert spans == {"zb-h1": 1.635, "zb-h1 7,5,3,1": 1.125, "zb-h1 10,7,4,1": 1.078}
    small = ranking_of(halves=1.0, latency=1, limit=150).found
    assert [each.title for each in small if each.name == "zb-h1"] == ["zb-h1", "zb-h1 5,5,3,1", "zb-h1 5,5,4,1"]
    assert all(each.bytes <= 150 for each in small if each.name == "zb-h1")


def test_a_stage_that_cannot_split_its_backward_is_named() -> None:
    found = halved(None, StageBytes(100, 10, halfway=None))["zb-h1"]
    assert found.at_best is None
    assert found.reason == (
        "backwards of stages 0, 1, 2, 3 cannot be split in two halves, since activations are recomputed there"
    )


def test_a_link_that_messages_keep_busy_bounds_every_schedule() -> None:
    whole = (2.0,) * 2
    times = MeasuredTimes((1.0,) * 2, whole, (None,) * 2, (None,) * 2, (0.0,) * 2, (5.0,), (5.0,), 1.0)
    ranking = Ranking(line(2), 8, times, {0: StageBytes(1, 1), 1: StageBytes(1, 1)}, PLENTY)
    while ranking.advance():
        pass
    assert min(each.seconds for each in ranking.found if each.seconds is not None) >= 40
