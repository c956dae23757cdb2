"""Settings that may differ between two machines of one run, and the names of those that may not."""

import pytest
from hypothesis import given

from stageline.pipeline.plan import differences
from support.small_plans import OPTIONS, plan

UNCOUNTED_CHANGES = [
    {"run__name": "other"},
    {"run__dir": "/elsewhere"},
    {"run__log_every": 3},
    {"queues__url": "tcp://127.0.0.1:0"},
    {"queues__retain_bytes": "2GiB"},
    {"recovery__lease": 3},
    {"recovery__restarts": 3},
    {"broker__url": "tcp://127.0.0.1:7"},
    {"broker__insecure": True},
]


COUNTED_CHANGES = [
    ({"run__seed": 3}, "run.seed"),
    ({"run__epochs": 3}, "run.epochs"),
    ({"model__factory": "model.py:other"}, "model.factory"),
    ({"model__options": {"width": 3}}, "model.options.width"),
    ({"model__cut": [3]}, "model.cut"),
    ({"model__trainable": ["0.*"]}, "model.trainable"),
    ({"model__loss": "model.py:loss"}, "model.loss"),
    ({"model__metrics": ["model.py:accuracy"]}, "model.metrics"),
    ({"data__source": "data.py:other"}, "data.source"),
    ({"data__source": None, "data__dataset": "data.py:train"}, "data.dataset"),
    ({"data__options": {"shuffle": False}}, "data.options.shuffle"),
    ({"data__batch_size": 3}, "data.batch_size"),
    ({"schedule__name": "gpipe"}, "schedule.name"),
    ({"schedule__microbatches": 3}, "schedule.microbatches"),
    ({"schedule__mode": "async"}, "schedule.mode"),
    ({"optimizer__factory": "torch.optim.AdamW"}, "optimizer.factory"),
    ({"optimizer__lr": 0.2}, "optimizer.lr"),
    ({"lr_scheduler__factory": "torch.optim.lr_scheduler.StepLR"}, "lr_scheduler.factory"),
    ({"recovery__snapshot_every": 3}, "recovery.snapshot_every"),
    ({"workers__0__stages": [0, 1]}, "workers.0.stages"),
    ({"workers": {"0": {"stages": [0], "device": "cuda"}, "1": {"stages": [1]}}}, "workers.0.device"),
    ({"workers": {"0": {"stages": [0], "threads": 2}, "1": {"stages": [1]}}}, "workers.0.threads"),
]


@pytest.mark.parametrize("changes", UNCOUNTED_CHANGES)
def test_machines_may_differ_in_keys_that_the_digest_leaves_out(changes: dict[str, object]) -> None:
    assert plan(**changes).as_mapping() != plan().as_mapping()
    assert plan(**changes).digest() == plan().digest()
    assert differences(plan(**changes).as_mapping(), plan().as_mapping()) == ()


@pytest.mark.parametrize(("changes", "key"), COUNTED_CHANGES)
def test_machines_may_not_differ_in_keys_that_it_counts(changes: dict[str, object], key: str) -> None:
    assert plan(**changes).digest() != plan().digest()
    assert key in {each.key for each in differences(plan(**changes).as_mapping(), plan().as_mapping())}


def test_machines_may_have_their_weights_at_other_paths_but_all_have_them_in_files() -> None:
    here, there = plan(model__weights="/data/model"), plan(model__weights="model.safetensors")
    own = {str(k): {"stages": [k], "weights": f"/data/part-{k}.pt"} for k in range(2)}
    assert here.digest() == there.digest()
    assert plan(workers=own).digest() == plan(workers=own, model__weights="/data/model").digest()
    assert {each.key for each in differences(here.as_mapping(), plan().as_mapping())} == {"model.weights"}
    assert here.digest() != plan().digest()


def test_machines_may_draw_a_dataset_with_other_numbers_of_readers() -> None:
    here = plan(data__source=None, data__dataset="data.py:train")
    assert plan(data__source=None, data__dataset="data.py:train", data__num_workers=2).digest() == here.digest()


def test_a_difference_names_the_key_and_both_values() -> None:
    here, there = plan(schedule__microbatches=4), plan(schedule__microbatches=8, optimizer__momentum=0.9)
    assert [str(each) for each in differences(here.as_mapping(), there.as_mapping())] == [
        "optimizer.momentum: not set here, 0.9 there",
        "schedule.microbatches: 4 here, 8 there",
    ]


@pytest.mark.parametrize(("one", "other"), [({"a": 1}, {"a": 1.0}), ({"a.b": 1}, {"a": {"b": 1}})])
def test_options_that_only_look_alike_differ(one: dict[str, object], other: dict[str, object]) -> None:
    first, second = plan(model__options=one), plan(model__options=other)
    assert first.digest() != second.digest()
    assert differences(first.as_mapping(), second.as_mapping())


@given(OPTIONS, OPTIONS)
def test_plans_have_one_digest_if_and_only_if_they_have_no_differences(one: dict, other: dict) -> None:
    first, second = plan(model__options=one), plan(model__options=other)
    assert (first.digest() == second.digest()) == (not differences(first.as_mapping(), second.as_mapping()))


def test_who_stands_in_for_a_lost_replica_is_not_counted_and_how_many_there_are_is() -> None:
    mapping = [
        plan(stage={"1": {"replicas": 2, **more}}, schedule__microbatches=2).as_mapping()
        for more in ({}, {"elastic": True})
    ]
    assert differences(*mapping) == ()
    other = plan(stage={"1": {"replicas": 2, "share": [2, 1]}}, schedule__microbatches=4).as_mapping()
    assert "stage.1.share" in [each.key for each in differences(mapping[0], other)]
