"""Keys of a plan that must agree with each other."""

import pytest

from stageline.pipeline.plan import PlanRefused
from support.small_plans import plan, refusal, the_error

DISAGREEING = [
    ({"run__steps": 3}, "run.steps", "epochs = 2 is given too; keep one of the two"),
    ({"run__epochs": None}, "run.steps", "set how long to train: steps = 1000, or epochs = 10"),
    ({"data__source": None}, "data.source", 'source = "data.py:batches", or dataset = "data.py:train"'),
    ({"data__dataset": "data.py:train"}, "data.dataset", 'source = "data.py:batches" is given too; keep one'),
    ({"data__num_workers": 2}, "data.num_workers", "only data.dataset uses it, and a source decides this itself"),
    ({"data__held_out": "data.py:test"}, "data.held_out", "only data.dataset uses it"),
    ({"model__cut": "auto"}, "model.cut", "set the number of stages: add stages = 2"),
    ({"model__stages": 3}, "model.stages", "cut = [5] makes 2 stages; leave stages out"),
    ({"model__cut": None, "model__balance": "time"}, "model.balance", "set the number of stages: add stages = 2"),
    ({"model__cut": None, "model__stage_memory": "1GiB"}, "model.stage_memory", "set the number of stages: add stag"),
    (
        {"data__batch_size": 3, "schedule__microbatches": 4},
        "data.batch_size",
        "expected a row for each of 4 microbatches, got 3; use",
    ),
    (
        {"schedule__mode": "async", "schedule__microbatches": 2},
        "schedule.microbatches",
        'mode = "async" updates after every microbatch; use microbatches = 1',
    ),
    ({"schedule__mode": "async", "schedule__name": "gpipe"}, "schedule.name", 'supports only name = "1f1b" and "2bw"'),
    ({"schedule__name": "2bw", "schedule__microbatches": 8}, "schedule.name", 'use mode = "async", or name = "1f1b"'),
    (
        {"schedule__name": "2bw", "schedule__mode": "async", "schedule__microbatches": 1},
        "schedule.microbatches",
        "too few for 1 microbatches a step on 2 stages; use 2 or more",
    ),
    (
        {
            "schedule__name": "2bw",
            "schedule__mode": "async",
            "schedule__microbatches": 2,
            "schedule__accumulate": 2,
        },
        "schedule.accumulate",
        "updates after each batch; use accumulate = 1, and larger batches with more microbatches",
    ),
    (
        {
            "schedule__name": "2bw",
            "schedule__mode": "async",
            "schedule__microbatches": 2,
            "model__prefix_cache": True,
        },
        "model.prefix_cache",
        'leave it out, or use name = "1f1b"',
    ),
    ({"queues__padding": "padme"}, "queues.padding", "only sealed messages are padded, and a queue at "),
    (
        {"queues__padding": "padme", "queues__url": "redis://127.0.0.1:6379/0"},
        "queues.padding",
        "a queue at redis://127.0.0.1:6379/0 has none; use queues.url",
    ),
    (
        {"queues__padding": "padme", "queues__url": "redis://host:6379/0", "broker__insecure": True},
        "queues.padding",
        "a run with broker.insecure = true has none",
    ),
    ({"schedule__name": "window"}, "schedule.window", 'name = "window" requires it: one number for each'),
    (
        {"schedule__window": [2, 1]},
        "schedule.window",
        '= "1f1b" does not use it; use schedule.name = "window"',
    ),
    (
        {"schedule__name": "zb-h1", "schedule__window": [2]},
        "schedule.window",
        "expected 2 values, one for each stage, got 1",
    ),
    (
        {"schedule__name": "window", "schedule__window": [2]},
        "schedule.window",
        "expected 2 values, one for each stage, got 1",
    ),
    (
        {"queues__codec": {"backward": "bf16", "backward-1": "int8"}},
        "queues.codec",
        '"backward-1" is not a queue between 2 stages; use forward-1, backward-0',
    ),
    ({"recovery__restarts": 2, "recovery__snapshot_every": 0}, "recovery.restarts", "use snapshot_every = 20, or rest"),
    (
        {"recovery__record": "all", "recovery__restarts": 0},
        "recovery.record",
        "use recovery.restarts = 5 and snapshot_every = 20, or record",
    ),
    (
        {"recovery__record": "all", "queues__url": "memory://"},
        "recovery.record",
        'queues.url = "memory://" does not support it; use',
    ),
    (
        {"workers": {"0": {"stages": [0], "weights": "a.pt"}, "1": {"stages": [1]}}},
        "workers.1.weights",
        "missing, though other workers read weights from files; give this one a path too, or set model.weights for all",
    ),
    ({"workers__0__stages": [0]}, "workers", "stage 1 is owned by no worker; give it to exactly one worker"),
    ({"workers__0__stages": [0, 1, 1]}, "workers", "stage 1 is owned by worker 0 and worker 0"),
    (
        {"workers__0__stages": [0, 1], "workers__1__stages": [1]},
        "workers",
        "stage 1 is owned by worker 0 and worker 1; give it to exactly one worker",
    ),
    ({"workers__0__stages": [0, 1, 2]}, "workers", "stage 2 is owned by worker 0, but there are 2 stages, 0 to 1"),
    (
        {"schedule__name": "interleaved-1f1b", "workers__0__stages": [1], "workers__1__stages": [0]},
        "schedule.name",
        "interleaved-1f1b",
    ),
]


SCRIPTED = {"run__epochs": None, "data__source": "script:batches"}

U_SHAPED = {
    "model__cut": [2, 4],
    "data__labels_stay": True,
    "workers": {"0": {"stages": [0, 2]}, "1": {"stages": [1]}},
}

NOT_STAYING = [
    ({"data__stays": [1]}, "data.stays", "the rows enter at stage 0; use stays = [0, 1]"),
    ({"data__stays": [0, 2]}, "data.stays", "there is no stage 2: the plan has stages 0 to 1"),
    ({"data__stays": [0]}, "data.stays", "worker 1 has the last stage, 1, and would open data.source"),
    ({"data__labels_stay": True}, "data.labels_stay", "set which stages stay, such as stays = [0]"),
    (
        {"data__stays": [0], "data__labels_stay": True},
        "data.labels_stay",
        "worker 1 has the last stage, 1, which computes the loss and reads the labels; give it to worker 0, which has",
    ),
    (
        {"data__stays": [0, 1], "data__targets": "data.py:labels"},
        "data.stays",
        "stage 1 is at worker 1, and the rows are at worker 0, which has stage 0; give both to one worker: workers.0.s",
    ),
    (
        {**U_SHAPED, "data__stays": [0], "data__targets": "data.py:labels"},
        "data.targets",
        "worker 0 has the first stage and the last: its batches have targets; leave it out",
    ),
    (
        {"data__source": None, "data__dataset": "data.py:train", "data__drop_last": True, "model__prefix_cache": True},
        "model.prefix_cache",
        "the rows that the first epoch leaves out would have no cached rows for later epochs; use a data.batch_size",
    ),
    (
        {**U_SHAPED, "data__stays": [0], "model__prefix_cache": True},
        "model.prefix_cache",
        "a worker that lost its cache draws the rows itself, on any machine; leave it out, or leave data.stays out",
    ),
    (
        {
            "data__stays": [0],
            "data__targets": "data.py:labels",
            "schedule__microbatches": 2,
            "stage": {"0": {"replicas": 2}},
        },
        "stage.0.replicas",
        "the stage stays at one worker (data.stays); leave the table out",
    ),
    (
        {**SCRIPTED, "data__stays": [0]},
        "data.stays",
        "a script sends the rows to its workers, and fetches the weights of all stages; leave it out",
    ),
    ({**SCRIPTED, "data__labels_stay": True}, "data.labels_stay", "a script sends the labels to its workers; leave"),
    ({**SCRIPTED, "data__targets": "data.py:labels"}, "data.targets", "a script gives the targets itself; leave it"),
    (
        {**U_SHAPED, "data__labels_stay": False, "data__targets": "data.py:labels"},
        "data.targets",
        "worker 0 has the first stage and the last: its batches have targets; leave it out",
    ),
]


TWO = {"schedule__microbatches": 2}

NOT_FOR_SCRIPTS = [
    ({"run__steps": 3}, "run.steps", "the script decides how long it trains; leave it out"),
    ({"run__epochs": 3}, "run.epochs", "the script decides how long it trains; leave it out"),
    ({"model__balance": "time"}, "model.balance", "a script has no batch to measure before the run; set model.cut"),
    ({"model__stage_memory": 9}, "model.stage_memory", "a script has no batch to measure before the run"),
    ({"schedule__mode": "async"}, "schedule.mode", 'a script trains batch by batch; use mode = "sync"'),
    (
        {"recovery__record": "all"},
        "recovery.record",
        'a replay cannot load the objects of a script; use record = "none"',
    ),
    (
        {"model__metrics": ["model.py:loss"]},
        "model.metrics",
        "every evaluation returns loss already; rename the function",
    ),
    (
        {"schedule__name": "2bw", **TWO},
        "schedule.name",
        "a script has no asynchronous mode; use another",
    ),
]


def test_a_scripted_run_has_no_length() -> None:
    assert plan(**SCRIPTED).scripted
    assert not plan().scripted


@pytest.mark.parametrize(("changes", "key", "reason"), NOT_FOR_SCRIPTS)
def test_a_scripted_run_has_nothing_that_needs_its_data_beforehand(
    changes: dict[str, object], key: str, reason: str
) -> None:
    error = the_error(**(SCRIPTED | changes))
    assert error.key == key
    assert reason in error.reason


@pytest.mark.parametrize(("changes", "key", "reason"), DISAGREEING)
def test_keys_that_disagree_are_named_with_the_way_out(changes: dict[str, object], key: str, reason: str) -> None:
    error = the_error(**changes)
    assert error.key == key
    assert reason in error.reason


def test_a_key_without_a_value_spares_the_checks_that_would_read_it() -> None:
    assert the_error(schedule__microbatches="many").key == "schedule.microbatches"
    assert the_error(schedule="1f1b").key == "schedule"
    assert {error.key for error in refusal(model=3, workers__0__stages=[7])} == {"model"}


def test_owners_that_fit_no_model_are_refused_before_it_is_known() -> None:
    with pytest.raises(PlanRefused, match="stage 1 is owned by no worker"):
        plan(model__cut=None, workers__0__stages=[0, 2])


@pytest.mark.parametrize(("changes", "key", "reason"), NOT_STAYING)
def test_a_placement_that_breaks_what_stays_is_refused(changes: dict[str, object], key: str, reason: str) -> None:
    error = the_error(**changes)
    assert error.key == key
    assert reason in error.reason


def test_rows_and_labels_stay_in_a_u_shape_and_labels_may_be_where_the_last_stage_is() -> None:
    assert plan(**U_SHAPED, data__stays=[0, 2]).data.labels_stay
    assert plan(data__stays=[0], data__targets="data.py:labels").data.stays == (0,)
    assert plan(data__stays=[0, 1], workers={"0": {"stages": [0, 1]}}).data.stays == (0, 1)
