"""Schedules as data: a picture of each, then what holds for every shape, then what is refused and how."""

from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from stageline.pipeline.schedule import (
    Action,
    Kind,
    Mode,
    Schedule,
    ScheduleRefused,
    forward_only,
    make_schedule,
    schedule_names,
    window_for,
)
from stageline.pipeline.schedule.check import Timed, check_schedule
from support.shapes import accepted, drawn, line, looped, scattered


def picture(text: str) -> str:
    return "\n".join(row.strip() for row in text.strip().splitlines())


def lists(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule.workers]


def test_gpipe_runs_all_forwards_and_then_all_backwards() -> None:
    assert drawn(make_schedule("gpipe", line(3), 3)) == picture("""
        F0 F1 F2 .. .. .. .. .. .. B0 == B1 == B2 ==
        .. F0 F1 F2 .. .. .. B0 == B1 == B2 ==
        .. .. F0 F1 F2 B0 == B1 == B2 ==
    """)


def test_one_f_one_b_has_as_many_in_flight_as_there_are_stages_from_here_on() -> None:
    assert drawn(make_schedule("1f1b", line(4), 6)) == picture("""
        F0 F1 F2 F3 .. .. .. .. .. .. B0 == F4 B1 == F5 B2 == .. B3 == .. B4 == .. B5 ==
        .. F0 F1 F2 .. .. .. .. B0 == F3 B1 == F4 B2 == F5 B3 == .. B4 == .. B5 ==
        .. .. F0 F1 .. .. B0 == F2 B1 == F3 B2 == F4 B3 == F5 B4 == .. B5 ==
        .. .. .. F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 == F5 B5 ==
    """)


def test_one_f_one_b_needs_no_more_microbatches_than_one() -> None:
    assert drawn(make_schedule("1f1b", line(4), 2)) == picture("""
        F0 F1 .. .. .. .. .. .. .. .. B0 == .. B1 ==
        .. F0 F1 .. .. .. .. .. B0 == .. B1 ==
        .. .. F0 F1 .. .. B0 == .. B1 ==
        .. .. .. F0 B0 == F1 B1 ==
    """)


def test_eager_1f1b_warms_up_twice_as_long() -> None:
    assert drawn(make_schedule("eager-1f1b", line(3), 6)) == picture("""
        F0 F1 F2 F3 F4 .. .. B0 == F5 B1 == .. B2 == .. B3 == .. B4 == .. B5 ==
        .. F0 F1 F2 .. B0 == F3 B1 == F4 B2 == F5 B3 == .. B4 == .. B5 ==
        .. .. F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 == F5 B5 ==
    """)


def test_a_window_says_how_many_each_stage_has_in_flight() -> None:
    assert drawn(make_schedule("window", line(2), 6, window=(4, 1))) == picture("""
        F0 F1 F2 F3 B0 == F4 B1 == F5 B2 == .. B3 == .. B4 == .. B5 ==
        .. F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 == F5 B5 ==
    """)


def test_interleaving_sends_groups_round_the_workers() -> None:
    first, second = picture("""
        0F0 0F1 2F0 2F1 0F2 ... 2B0 === 0F3 2B1 === 2F2 0B0 === 2F3 0B1 === ... 2B2 === ... 2B3 === 0B2 === 0B3 ===
        ... 1F0 1F1 3F0 3B0 === 3F1 3B1 === 1F2 1B0 === 1F3 1B1 === 3F2 3B2 === 3F3 3B3 === 1B2 === 1B3 ===
    """).splitlines()
    assert drawn(make_schedule("interleaved-1f1b", looped(2, 2), 4)).splitlines() == [first, second]


def test_asynchronous_1f1b_never_drains_between_steps() -> None:
    assert drawn(make_schedule("1f1b", line(3), 1, mode="async"), steps=5) == picture("""
        F0 F1 F2 .. .. .. .. B0 == F3 B1 == F4 B2 == .. B3 == .. B4 ==
        .. F0 F1 .. .. B0 == F2 B1 == F3 B2 == F4 B3 == .. B4 ==
        .. .. F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 ==
    """)


def test_the_first_and_the_last_stage_may_share_a_worker() -> None:
    assert drawn(make_schedule("1f1b", ((0, 3), (1,), (2,)), 3)) == picture("""
        0F0 0F1 0F2 3F0 3B0 === 3F1 3B1 === 3F2 0B0 === 3B2 === 0B1 === ... ... 0B2 ===
        ... 1F0 1F1 1F2 ... ... ... ... 1B0 === ... 1B1 === ... ... ... 1B2 ===
        ... ... 2F0 2F1 ... ... 2B0 === 2F2 2B1 === ... ... ... 2B2 ===
    """)


def test_stages_below_the_first_trainable_run_forward_only_and_still_end_their_step() -> None:
    assert lists(make_schedule("1f1b", line(3), 3, first_trainable=1)) == [
        "0F0 0F1 0F2 0U",
        "1F0 1F1 1B0 1F2 1B1 1B2 1U",
        "2F0 2B0 2F1 2B1 2F2 2B2 2U",
    ]


def test_every_worker_ends_its_step_with_the_updates_of_its_stages() -> None:
    for name in schedule_names():
        schedule = make_schedule(name, looped(2, 2), 4, window=(4, 3, 2, 1) if name == "window" else None)
        assert [actions[-2:] for actions in schedule.workers] == [
            (Action(Kind.UPDATE, 0), Action(Kind.UPDATE, 2)),
            (Action(Kind.UPDATE, 1), Action(Kind.UPDATE, 3)),
        ]


def test_evaluation_runs_every_microbatch_forward_and_updates_nothing() -> None:
    assert lists(forward_only(((0, 2), (1,)), 2)) == ["0F0 0F1 2F0 2F1", "1F0 1F1"]


@pytest.mark.parametrize("first_trainable", [0, 1, 2])
@pytest.mark.parametrize("name", schedule_names())
def test_backward_runs_in_ascending_order_whatever_the_shape(name: str, first_trainable: int) -> None:
    for placement in (line(1), line(2), line(5), looped(2, 2), looped(3, 4), scattered(5, seed=1)):
        stages = sum(map(len, placement))
        window = tuple(range(stages + 2, 2, -1)) if name == "window" else None
        for schedule in accepted(name, placement, 16, window=window, first_trainable=min(first_trainable, stages)):
            for stage in range(min(first_trainable, stages), stages):
                actions = schedule.workers[schedule.owner(stage)]
                order = [each.microbatch for each in actions if (each.kind, each.stage) == (Kind.BACKWARD, stage)]
                assert order == list(range(schedule.microbatches))


@given(st.builds(Action, st.sampled_from("FBIW").map(Kind), st.integers(0, 99), st.integers(0, 9999)))
def test_an_action_reads_what_it_writes(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_actions_are_written_as_people_say_them() -> None:
    assert str(Action(Kind.FORWARD, 2, 0)) == "2F0"
    assert str(Action(Kind.UPDATE, 2)) == "2U"
    assert Action.parse("2U") == Action(Kind.UPDATE, 2)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2U3", "-1F0", "2F0 ", "٢F0"])
def test_what_is_not_an_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="written like 2F0"):
        Action.parse(text)


def test_a_synchronous_program_repeats_the_step() -> None:
    schedule = make_schedule("1f1b", line(2), 1)
    assert [(step, str(action)) for step, action in schedule.program(1, range(7, 9))] == [
        (7, "1F0"),
        (7, "1B0"),
        (7, "1U"),
        (8, "1F0"),
        (8, "1B0"),
        (8, "1U"),
    ]


def test_an_asynchronous_program_updates_right_after_each_backward() -> None:
    schedule = make_schedule("1f1b", line(2), 1, mode="async")
    assert [f"{action} {step}" for step, action in schedule.program(0, range(3, 6))] == [
        *("0F0 3", "0F0 4", "0B0 3", "0U 3", "0F0 5", "0B0 4", "0U 4", "0B0 5", "0U 5")
    ]


def test_an_untrained_stage_of_an_asynchronous_program_ends_its_steps_with_the_forward() -> None:
    schedule = make_schedule("1f1b", line(2), 1, mode="async", first_trainable=1)
    assert [f"{action} {step}" for step, action in schedule.program(0, range(2))] == ["0F0 0", "0U 0", "0F0 1", "0U 1"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_stages_of_one_worker_go_by_their_start_on_workers_of_their_own(name: str) -> None:
    for seed in range(60):
        stages, microbatches = 2 + seed % 6, 1 + seed % 9
        alone = check_schedule(make_schedule(name, line(stages), microbatches)).timed
        placed = make_schedule(name, scattered(stages, seed), microbatches)
        for worker, own in enumerate(placed.placement):
            mine = [each for each in alone if each.action.stage in own and each.action.kind is not Kind.UPDATE]
            order = [str(each.action) for each in sorted(mine, key=by_start)]
            assert [str(action) for action in placed.workers[worker] if action.kind is not Kind.UPDATE] == order


def by_start(each: Timed) -> tuple[float, bool, int]:
    """Ties go to backwards, then to the lower microbatch."""
    return each.start, each.action.kind is Kind.FORWARD, each.action.microbatch


def test_asynchronous_stages_of_one_worker_keep_their_own_lists() -> None:
    alone = make_schedule("1f1b", line(4), 1, mode="async")
    for seed in range(20):
        placed = make_schedule("1f1b", scattered(4, seed), 1, mode="async")
        for stage in range(4):
            merged = [run for run in placed.program(placed.owner(stage), range(9)) if run[1].stage == stage]
            assert merged == list(alone.program(stage, range(9)))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("placement", [line(3), ((0, 2), (1,))])
def test_a_program_begins_at_once_however_long_the_run(placement: tuple[tuple[int, ...], ...], mode: Mode) -> None:
    program = make_schedule("1f1b", placement, 1, mode=mode).program(0, range(10**15))
    assert len(list(islice(program, 30))) == 30


def test_a_stage_has_one_owner() -> None:
    schedule = make_schedule("1f1b", ((0, 3), (1,), (2,)), 3)
    assert [schedule.owner(stage) for stage in range(schedule.stages)] == [0, 1, 2, 0]
    with pytest.raises(ValueError, match="no worker owns stage 4: stages are numbered 0 to 3"):
        schedule.owner(4)


def test_window_for_gives_the_known_windows_at_their_latencies() -> None:
    assert window_for([0, 0, 0], forward=1, backward=2) == (4, 3, 2, 1)
    assert window_for([1.5, 1.5, 1.5], forward=1, backward=2) == (7, 5, 3, 1)
    assert [window_for([c] * 3, 1, 2)[0] for c in (0, 0.25, 0.5, 1, 1.5, 3, 6)] == [4, 7, 7, 7, 7, 10, 16]
    assert window_for([3, 0], forward=1, backward=2) == (5, 2, 1)
    assert window_for([], forward=1, backward=2) == (1,)


def test_rounding_costs_no_microbatch() -> None:
    assert 1 + 2 * 0.8 / (0.1 + 0.7) > 3
    assert window_for([0.8], forward=0.1, backward=0.7) == (4, 1)


@pytest.mark.parametrize(("latencies", "forward"), [([1], 0), ([-1], 1)])
def test_window_for_wants_stages_that_take_time(latencies: list[float], forward: float) -> None:
    with pytest.raises(ValueError, match="stages must take time"):
        window_for(latencies, forward, 0)


def ours(schedule: Schedule, worker: int) -> list[str]:
    return [str(action) for action in schedule.workers[worker] if action.kind is not Kind.UPDATE]


def torchs(order: list[Any]) -> list[str]:
    """torch's compute-only list without its padding and the reduction at its end."""
    return [str(action) for action in order if action is not None and action.microbatch_index is not None]


def torch_order(kind: type, stages: int, microbatches: int) -> dict[int, list[Any]]:
    schedule = object.__new__(kind)  # its own constructor wants a process group
    schedule._num_stages, schedule._n_microbatches = stages, microbatches
    order: dict[int, list[Any]] = schedule._get_pipeline_order()
    return order


def torch_interleaved(worker: int, schedule: Schedule) -> list[Any]:
    workers = len(schedule.placement)
    theirs = object.__new__(torch_schedules.ScheduleInterleaved1F1B)
    theirs.pp_group_size, theirs.n_local_stages = workers, schedule.stages // workers
    theirs._n_microbatches = schedule.microbatches
    theirs.microbatches_per_round = schedule.microbatches // max(1, schedule.microbatches // workers)
    order: list[Any] = theirs._calculate_single_rank_operations(worker)
    return order


@pytest.mark.parametrize("stages", range(1, 6))
def test_gpipe_is_torchs(stages: int) -> None:
    for schedule in accepted("gpipe", line(stages), 16):
        order = torch_order(torch_schedules.ScheduleGPipe, stages, schedule.microbatches)
        for worker in range(stages):
            assert ours(schedule, worker) == torchs(order[worker])


@pytest.mark.parametrize("stages", range(2, 6))
def test_one_f_one_b_is_torchs_but_for_the_last_rank_which_torch_has_wrong(stages: int) -> None:
    for microbatches in range(stages, 17):
        schedule = make_schedule("1f1b", line(stages), microbatches)
        order = torch_order(torch_schedules.Schedule1F1B, stages, microbatches)
        for worker in range(stages - 1):
            assert ours(schedule, worker) == torchs(order[worker])


@pytest.mark.parametrize("workers", range(1, 6))
@pytest.mark.parametrize("turns", range(1, 5))
def test_interleaving_is_torchs(workers: int, turns: int) -> None:
    for schedule in accepted("interleaved-1f1b", looped(workers, turns), 16):
        for worker in range(workers):
            assert ours(schedule, worker) == torchs(torch_interleaved(worker, schedule))


def test_interleaving_accepts_the_numbers_that_divide_into_groups() -> None:
    numbers = [schedule.microbatches for schedule in accepted("interleaved-1f1b", looped(4, 2), 16)]
    assert numbers == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16]


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        (("1f2b", line(2), 4), {}, "no schedule named '1f2b'; did you mean 1f1b?"),
        (("interleaved", line(2), 4), {}, "did you mean interleaved-1f1b?"),
        (("zigzag", line(2), 4), {}, "no schedule named 'zigzag'; the names are: gpipe, 1f1b"),
        (("gpipe", line(2), 0), {}, "gpipe cannot run 2 stages on 2 workers with 0 microbatches: .* at least one"),
        (("gpipe", (), 1), {}, "no worker"),
        (("gpipe", ((0,), ()), 1), {}, "worker 1 owns no stage"),
        (("gpipe", ((0,), (2,)), 1), {}, "own stages 0, 2, but each of 0 to 2 needs exactly one owner"),
        (("gpipe", ((0, 1), (1,)), 1), {}, "own stages 0, 1, 1, but each of 0 to 1 needs exactly one owner"),
        (("gpipe", line(2), 4), {"first_trainable": 3}, "first trainable stage is 3; use one of 0 to 2"),
        (("gpipe", line(2), 4), {"mode": "later"}, 'no mode \'later\'; use "sync" or "async"'),
        (("gpipe", line(2), 1), {"mode": "async"}, 'gpipe cannot .* for 1f1b alone .* or mode = "sync"'),
        (("1f1b", line(2), 4), {"mode": "async"}, "with 4 microbatches: .* set microbatches = 1"),
        (("1f1b", line(2), 4), {"window": (2, 1)}, 'for the schedule "window" alone'),
        (("window", line(3), 4), {}, "one number for each stage, and none is given; 1F1B's would be 3, 2, 1"),
        (("window", line(3), 4), {"window": (2, 1)}, "one number for each stage, and there are 2"),
        (("window", line(2), 4), {"window": (1, 0)}, "window of stage 1 is 0"),
        (("window", line(2), 4), {"window": (1, 3)}, "stage 0 would wait .* raise the window of stage 0 to 3"),
        (("interleaved-1f1b", ((0, 1), (2, 3)), 4), {}, r"place the stages as \[\[0, 2\], \[1, 3\]\], or use 1f1b"),
        (("interleaved-1f1b", ((0, 2), (1,)), 4), {}, "use a multiple of 2 stages, or use 1f1b"),
        (("interleaved-1f1b", looped(4, 2), 9), {}, "9 microbatches: .* 2 equal groups; .* on 4 workers are 8 and 10"),
    ],
)
def test_a_refusal_says_what_and_why_and_the_way_out(
    arguments: tuple[Any, ...], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ScheduleRefused, match=says):
        make_schedule(*arguments, **options)


def test_a_window_is_cut_to_the_microbatches_there_are() -> None:
    assert make_schedule("window", line(2), 3, window=(3, 9)).workers == make_schedule("gpipe", line(2), 3).workers


def test_a_window_of_an_untrained_stage_means_nothing() -> None:
    schedule = make_schedule("window", line(2), 3, window=(1, 3), first_trainable=1)
    assert lists(schedule) == ["0F0 0F1 0F2 0U", "1F0 1F1 1F2 1B0 1B1 1B2 1U"]


def test_evaluation_wants_every_stage_owned_too() -> None:
    with pytest.raises(ScheduleRefused, match="forward-only cannot run 1 stage on 1 worker with 1 microbatch"):
        forward_only(((1,),), 1)
