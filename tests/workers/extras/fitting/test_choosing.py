"""Which options of stages are taken: the cheapest that fit, of all combinations there are."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.workers.extras.fitting import (
    StageLoad,
    StageOption,
    Switches,
    WorkerRoom,
    cheapest,
    shortfalls,
    tight_workers,
)
from stageline.workers.extras.fitting.memory_load import ample_limit_for, foreseen_within, limit_for

MIB = 1 << 20
NOTHING, RECOMPUTES, OFFLOADS = Switches(), Switches("stage"), Switches("nothing", ("activations",))


def option(switches: Switches, nanoseconds: int, held: int, **rest: int) -> StageOption:
    """Of a stage on worker 0, in MiB."""
    return StageOption(switches, nanoseconds, {0: StageLoad(held * MIB, **{key: n * MIB for key, n in rest.items()})})


STAGE = (
    option(NOTHING, 0, 1000),
    option(RECOMPUTES, 30, 400, working=200),
    option(OFFLOADS, 10, 700, offloaded=300),
    option(Switches("stage", ("weights",)), 50, 200, working=200),
)


@pytest.mark.parametrize(
    ("stages", "limit", "wanted"),
    [
        (1, None, (0,)),
        (1, 1200, (0,)),  # 1050 are left of it
        (1, 1100, (2,)),  # 962 are left, and 700 with 128 on their way take 828
        (1, 900, (1,)),  # 787 are left, and 400 with 200 take 600
        (1, 500, (3,)),
        (1, 450, None),
        (2, 2400, (0, 0)),
        (2, 2100, (0, 2)),  # 1837 are left: one of two alike is enough, and 1000 + 700 + 128 take 1828
        (2, 1700, (1, 2)),  # 1487 are left: too little for two that offload, 1528, but not for 400 + 700 + 200 + 128
        (2, 1500, (1, 1)),  # 1312 are left; (2, 3) would fit too, and take as long
        (2, 1100, (1, 3)),
    ],
)
def test_the_cheapest_that_fits_is_taken(stages: int, limit: int | None, wanted: tuple[int, ...] | None) -> None:
    room = WorkerRoom(under_way=128 * MIB, limit=None if limit is None else limit * MIB)
    found = cheapest([STAGE] * stages, [room])
    assert found == (None if wanted is None else tuple(STAGE[place] for place in wanted))


@pytest.mark.parametrize("dearer", [{"working": 500}, {"copied": 500}, {"offloaded": 100}])
def test_what_has_room_alone_but_not_beside_a_later_stage_does_not_hide_what_has(dearer: dict[str, int]) -> None:
    large, small = option(NOTHING, 0, 10, **dearer), option(OFFLOADS, 5, 10)
    rest = option(NOTHING, 0, 1000 - max(dearer.values()))
    room = WorkerRoom(under_way=128 * MIB, limit=-(-1010 * 8 // 7) * MIB - 8 * MIB)
    assert cheapest([[large, small]], [room]) == (large,)
    assert cheapest([[large, small], [rest]], [room]) == (small, rest)


def test_more_than_four_stages_of_a_worker_do_the_same_as_far_as_they_may() -> None:
    fixed = STAGE[:1]
    room = WorkerRoom(under_way=128 * MIB, limit=4000 * MIB)
    assert cheapest([STAGE, STAGE, fixed, STAGE, STAGE], [room]) == (STAGE[1], STAGE[1], fixed[0], STAGE[1], STAGE[1])
    (short,) = shortfalls([STAGE] * 5, [WorkerRoom(under_way=128 * MIB, limit=1000 * MIB)])
    assert {str(each) for each in short.switches} == {'recompute = "stage", offload = ["weights"]'}


def test_stages_of_other_workers_do_not_matter() -> None:
    elsewhere = tuple(StageOption(each.switches, each.nanoseconds, {1: each.loads[0]}) for each in STAGE)
    rooms = [WorkerRoom(under_way=128 * MIB, limit=limit * MIB) for limit in (500, 1200)]
    assert cheapest([STAGE, elsewhere], rooms) == (STAGE[3], elsewhere[0])


def test_replicas_do_the_same_on_the_worker_that_has_least_room_too() -> None:
    replicated = tuple(
        StageOption(each.switches, each.nanoseconds, {0: each.loads[0], 1: each.loads[0]}) for each in STAGE
    )
    rooms = [WorkerRoom(under_way=128 * MIB, limit=limit * MIB) for limit in (4000, 900)]
    assert cheapest([replicated], rooms) == (replicated[1],)


def test_where_nothing_fits_the_least_limit_is_told_and_is_enough() -> None:
    room = WorkerRoom(messages=3 * MIB, under_way=128 * MIB, limit=450 * MIB)
    (short,) = shortfalls([STAGE], [room])
    assert (short.worker, short.stages, short.switches) == (0, (0,), (STAGE[3].switches,))
    assert short.foreseen == 403 * MIB
    assert 'Use "461MiB" or more, or more stages' in str(short)
    assert 'stage 0 with recompute = "stage", offload = ["weights"]' in str(short)
    assert cheapest([STAGE], [WorkerRoom(messages=3 * MIB, under_way=128 * MIB, limit=461 * MIB)])
    assert not cheapest([STAGE], [WorkerRoom(messages=3 * MIB, under_way=128 * MIB, limit=460 * MIB)])


def test_a_model_that_is_made_as_a_whole_is_named() -> None:
    (short,) = shortfalls([STAGE], [WorkerRoom(model=5000 * MIB, limit=4000 * MIB)])
    assert "the model as a whole while it is made" in str(short)
    assert "model.weights, from which a worker reads its own stages alone" in str(short)


@pytest.mark.parametrize(("limit", "tight"), [(300, []), (299, [0]), (None, [])])
def test_a_limit_is_tight_where_less_than_a_third_of_it_would_be_left(limit: int | None, tight: list[int]) -> None:
    """The worker's memory where it gives nothing back decides, not the memory that fits."""
    stage = StageOption(NOTHING, 0, {0: StageLoad(100 * MIB)}, {0: StageLoad(150 * MIB, copied=45 * MIB)})
    room = WorkerRoom(messages=5 * MIB, limit=None if limit is None else limit * MIB)
    assert cheapest([[stage]], [room]) == (stage,)
    assert tight_workers([stage], [room]) == tight


def test_of_a_small_limit_32_mib_are_left_at_least() -> None:
    assert not WorkerRoom(limit=40 * MIB).is_tight(StageLoad(8 * MIB))
    assert WorkerRoom(limit=40 * MIB).is_tight(StageLoad(8 * MIB + 1))


def test_what_all_stages_of_a_worker_take_decides_and_of_each_worker_by_itself() -> None:
    stages = [StageOption(NOTHING, 0, {}, {0: StageLoad(100 * MIB), 1: StageLoad(100 * MIB)}) for _ in range(2)]
    rooms = [WorkerRoom(limit=limit * MIB) for limit in (299, 300)]
    assert tight_workers(stages, rooms) == [0]


@given(st.integers(0, 1 << 50))
def test_the_ample_limit_for_what_is_foreseen_is_the_least_that_is_not_tight(foreseen: int) -> None:
    limit, load = ample_limit_for(foreseen), StageLoad(foreseen)
    assert not WorkerRoom(limit=limit).is_tight(load)
    assert WorkerRoom(limit=limit - 1).is_tight(load)
    assert limit > limit_for(foreseen)


@given(st.integers(0, 1 << 50))
def test_the_limit_for_what_is_foreseen_is_the_least_that_allows_it(foreseen: int) -> None:
    limit = limit_for(foreseen)
    assert foreseen_within(limit) >= foreseen > foreseen_within(limit - 1)


LOADS = st.builds(StageLoad, *[st.integers(0, 3).map(lambda n: n * 20 * MIB)] * 4)
LIMITS = st.none() | st.integers(4, 20).map(lambda n: n * 20 * MIB)
ROOMS = st.builds(
    WorkerRoom,
    messages=st.integers(0, 3).map(lambda n: n * MIB),
    under_way=st.just(20 * MIB),
    limit=LIMITS,
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[StageOption]], list[WorkerRoom]]:
    """Up to four stages, some with replicas, on up to three workers; several of them on one."""
    rooms = draw(st.lists(ROOMS, min_size=1, max_size=3))
    stages = []
    for _ in range(draw(st.integers(1, 4))):
        owners = draw(st.sets(st.integers(0, len(rooms) - 1), min_size=1, max_size=2))
        options = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
        stages.append(
            [
                StageOption(Switches(str(place)), cost, {worker: draw(LOADS) for worker in owners})
                for place, cost in enumerate(options)
            ]
        )
    return stages, rooms


@given(problems())
def test_it_fits_whenever_any_combination_does_and_no_cheaper_one_does(
    problem: tuple[list[list[StageOption]], list[WorkerRoom]],
) -> None:
    stages, rooms = problem
    fitting = [each for each in product(*stages) if fits(each, rooms)]
    found = cheapest(stages, rooms)
    assert (found is None) == (not fitting)
    if found is not None:
        assert fits(found, rooms)
        assert total(found) == min(map(total, fitting))
    short = list(shortfalls(stages, rooms))
    assert bool(short) == (found is None)
    for each in short:
        assert each.foreseen > foreseen_within(rooms[each.worker].limit or 0)


def fits(chosen: Sequence[StageOption], rooms: Sequence[WorkerRoom]) -> bool:
    """Counted without the code that is tested: all of a worker added up, and the largest of what is of one stage."""
    for worker, room in enumerate(rooms):
        loads = [each.loads[worker] for each in chosen if worker in each.loads]
        if room.limit is None or not loads:
            continue
        taken = sum(load.held for load in loads) + room.messages + max(load.working for load in loads)
        taken += min(sum(load.offloaded for load in loads), room.under_way) + sum(load.copied for load in loads)
        if taken > room.limit - max(room.limit // 8, 16 * MIB):
            return False
    return True


def total(chosen: Sequence[StageOption]) -> int:
    return sum(each.nanoseconds for each in chosen)
