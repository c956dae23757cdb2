"""What a plan file becomes, who decides a key, and how a plan that cannot work is refused."""

import json
import re
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.pipeline.plan import Plan, PlanError, PlanRefused, differences, from_mapping, read_plan
from stageline.pipeline.plan.models import PlanTables, WorkerPlan, section
from stageline.pipeline.plan.tables import flat
from support.paths import DOCS, EXAMPLES

SMALLEST = """\
[run]
epochs = 2

[model]
factory = "model.py:build"
cut = [5]
loss = "torch.nn.functional.cross_entropy"

[data]
source = "data.py:batches"
batch_size = 64

[optimizer]
factory = "torch.optim.SGD"
lr = 0.1
"""

TABLES_OF_SMALLEST = {
    "run": {"epochs": 2},
    "model": {"factory": "model.py:build", "cut": [5], "loss": "torch.nn.functional.cross_entropy"},
    "data": {"source": "data.py:batches", "batch_size": 64},
    "optimizer": {"factory": "torch.optim.SGD", "lr": 0.1},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "digits" / "stageline.toml"
    path.parent.mkdir()
    path.write_text(SMALLEST)
    return path


def plan(**changes: object) -> Plan:
    """The smallest plan with keys changed: `plan(schedule__name="gpipe")`; None takes a key or table away."""
    tables: dict = deepcopy(TABLES_OF_SMALLEST)
    for name, value in changes.items():
        *path, last = name.split("__")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        if value is None:
            del table[last]
        else:
            table[last] = value
    return from_mapping(tables)


def refusal(**changes: object) -> list[PlanError]:
    with pytest.raises(PlanRefused) as refused:
        plan(**changes)
    return list(refused.value.errors)


def the_error(**changes: object) -> PlanError:
    errors = refusal(**changes)
    assert len(errors) == 1, [str(error) for error in errors]
    return errors[0]


# What a file becomes


def test_a_file_becomes_one_value_with_the_defaults_filled_in(file: Path) -> None:
    plan = read_plan(file)
    assert plan.as_mapping() == {
        "run": {"name": "digits", "seed": 0, "epochs": 2, "dir": "runs", "log_every": 10},
        "model": {
            "factory": "model.py:build",
            "options": {},
            "cut": [5],
            "stages": 2,
            "loss": "torch.nn.functional.cross_entropy",
            "metrics": [],
        },
        "data": {"source": "data.py:batches", "options": {}, "batch_size": 64},
        "schedule": {"name": "1f1b", "microbatches": 1, "mode": "sync"},
        "optimizer": {"factory": "torch.optim.SGD", "lr": 0.1},
        "queues": {"url": "ipc://", "retain_bytes": 2**30},
        "recovery": {"lease": 10.0, "snapshot_every": 20, "restarts": 5, "on_bad_microbatch": "halt", "record": "bad"},
        "broker": {"url": "tcp://127.0.0.1:5600", "store": "sqlite"},
        "workers": {
            "0": {"stages": [0], "device": "cpu", "threads": 1},
            "1": {"stages": [1], "device": "cpu", "threads": 1},
        },
    }
    assert plan.file == file
    assert plan.warnings == ()


def test_a_folder_stands_for_the_plan_in_it(file: Path) -> None:
    assert read_plan(file.parent) == read_plan(file)


def test_a_plan_that_an_editor_began_with_a_byte_order_mark_is_read(file: Path) -> None:
    file.write_text(SMALLEST, encoding="utf-8-sig")
    assert read_plan(file).data.batch_size == 64


def test_a_folder_whose_name_makes_no_run_name_is_adapted(tmp_path: Path) -> None:
    odd = tmp_path / "my plan (2)" / "stageline.toml"
    assert from_mapping(TABLES_OF_SMALLEST, file=odd).run.name == "my-plan-2"
    assert from_mapping(TABLES_OF_SMALLEST, file="/stageline.toml").run.name == "run"
    assert from_mapping(TABLES_OF_SMALLEST).run.name == "run"


def test_everything_a_file_can_say_arrives(file: Path) -> None:
    file.write_text("""\
[run]
name = "letters-2"
seed = 40
steps = 1_000
dir = "/data/runs"
log_every = 100
[model]
factory = "model.py:build"
options = { width = 128, deep = true, sizes = [1, 2.5, "x"] }
cut = [2, 4, 6]
loss = "model.py:loss"
metrics = ["model.py:accuracy", "sklearn.metrics.log_loss"]
[data]
source = "data.py:batches"
batch_size = 32
[data.options]
context = 64
nested.deeper = "yes"
[schedule]
name = "interleaved-1f1b"
microbatches = 8
[optimizer]
factory = "torch.optim.AdamW"
lr = 1e-3
betas = [0.9, 0.99]
[lr_scheduler]
factory = "torch.optim.lr_scheduler.StepLR"
step_size = 30
[queues]
url = "tcp://127.0.0.1:0"
retain_bytes = "64 MiB"
[recovery]
lease = "250ms"
snapshot_every = 5
[broker]
url = "tcp://127.0.0.1:7000"
[workers.0]
stages = [0, 2]
device = "cuda:0"
[workers.1]
stages = [1, 3]
threads = 4
""")
    plan = read_plan(file)
    assert (plan.run.name, plan.run.seed, plan.run.steps, plan.run.epochs) == ("letters-2", 40, 1000, None)
    assert (plan.run.dir, plan.run.log_every) == (Path("/data/runs"), 100)
    assert plan.model.options == {"width": 128, "deep": True, "sizes": [1, 2.5, "x"]}
    assert (plan.model.cut, plan.model.stages) == ((2, 4, 6), 4)
    assert plan.model.metrics == ("model.py:accuracy", "sklearn.metrics.log_loss")
    assert plan.data.options == {"context": 64, "nested": {"deeper": "yes"}}
    assert plan.optimizer.options == {"lr": 1e-3, "betas": [0.9, 0.99]}
    assert plan.lr_scheduler is not None
    assert plan.lr_scheduler.options == {"step_size": 30}
    assert (plan.queues.retain_bytes, plan.recovery.lease) == (64 * 2**20, 0.25)
    assert plan.workers == (
        WorkerPlan(stages=(0, 2), device="cuda:0", threads=1),
        WorkerPlan(stages=(1, 3), device="cpu", threads=4),
    )
    assert plan.placement == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("written", "bytes_"), [(1, 1), ("1B", 1), ("3KB", 3000), ("3 KiB", 3072), ("0.5MiB", 2**19), ("2GiB", 2**31)]
)
def test_sizes_are_bytes_or_have_a_unit(written: int | str, bytes_: int) -> None:
    assert plan(queues__retain_bytes=written).queues.retain_bytes == bytes_


@pytest.mark.parametrize(
    ("written", "seconds"), [(3, 3.0), (0.5, 0.5), ("250ms", 0.25), ("1.5s", 1.5), ("2min", 120.0), ("1h", 3600.0)]
)
def test_times_are_seconds_or_have_a_unit(written: float | str, seconds: float) -> None:
    assert plan(recovery__lease=written).recovery.lease == seconds


# Who decides a key

LAYERS = [
    ("default", SMALLEST, {}, (), 1),
    ("file", SMALLEST + "[schedule]\nmicrobatches = 2\n", {}, (), 2),
    ("environment", SMALLEST + "[schedule]\nmicrobatches = 2\n", {"STAGELINE_SCHEDULE__MICROBATCHES": "3"}, (), 3),
    (
        "--set",
        SMALLEST + "[schedule]\nmicrobatches = 2\n",
        {"STAGELINE_SCHEDULE__MICROBATCHES": "3"},
        ("schedule.microbatches=4",),
        4,
    ),
]


@pytest.mark.parametrize(("origin", "text", "environment", "sets", "value"), LAYERS)
def test_set_decides_over_environment_over_file_over_default(
    file: Path, origin: str, text: str, environment: dict[str, str], sets: tuple[str, ...], value: int
) -> None:
    file.write_text(text)
    plan = read_plan(file, sets=sets, environment=environment)
    assert plan.schedule.microbatches == value
    assert plan.origins["schedule.microbatches"] == origin


def test_of_two_sets_the_later_decides(file: Path) -> None:
    assert read_plan(file, sets=["run.seed=1", "run.seed=2"]).run.seed == 2


def test_every_key_has_an_origin(file: Path) -> None:
    plan = read_plan(
        file, sets=["optimizer.momentum=0.9"], environment={"STAGELINE_LR_SCHEDULER__FACTORY": "torch.x.Y"}
    )
    assert plan.origins.keys() == flat(plan.as_mapping()).keys()
    decided = {key: origin for key, origin in plan.origins.items() if origin != "default"}
    assert decided == {
        **dict.fromkeys(("run.epochs", "model.factory", "model.cut", "model.loss"), "file"),
        **dict.fromkeys(("data.source", "data.batch_size", "optimizer.factory", "optimizer.lr"), "file"),
        "optimizer.momentum": "--set",
        "lr_scheduler.factory": "environment",
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [("20", 20), ("1.5", 1.5), ("true", True), ("[1, 2]", [1, 2]), ('"quoted"', "quoted"), ("bare text", "bare text")],
)
def test_a_set_value_is_toml_or_else_text(file: Path, text: str, value: object) -> None:
    assert read_plan(file, sets=[f"model.options.it={text}"]).model.options == {"it": value}


def test_text_that_looks_like_a_number_is_text_where_text_is_wanted(file: Path) -> None:
    assert read_plan(file, sets=["run.name=7"]).run.name == "7"
    assert read_plan(file, environment={"STAGELINE_RUN__NAME": "true"}).run.name == "true"


def test_what_is_typed_as_not_a_number_is_text_where_text_is_wanted(file: Path) -> None:
    assert read_plan(file, sets=["run.name=nan"]).run.name == "nan"


def test_a_set_value_can_smuggle_in_no_other_key(file: Path) -> None:
    assert read_plan(file, sets=["model.options.a=1\nb = 2"]).model.options == {"a": "1\nb = 2"}


def test_a_set_value_may_hold_equals_signs(file: Path) -> None:
    assert read_plan(file, sets=["model.options.filter=a=b"]).model.options == {"filter": "a=b"}


def test_one_option_is_overruled_and_its_neighbours_stay(file: Path) -> None:
    file.write_text(SMALLEST + "[model.options]\nwidth = 8\ndepth = 2\n")
    assert read_plan(file, sets=["model.options.width=16"]).model.options == {"width": 16, "depth": 2}


def test_a_whole_table_of_options_is_overruled_and_nothing_of_it_stays(file: Path) -> None:
    file.write_text(SMALLEST + "[model.options]\nwidth = 8\ndepth = 2\n")
    assert read_plan(file, sets=["model.options={ size = 3 }"]).model.options == {"size": 3}


def test_an_option_gives_way_to_a_table_of_its_name(file: Path) -> None:
    file.write_text(SMALLEST + "[model.options]\nsize = 8\n")
    plan = read_plan(file, sets=["model.options.size.width=16"])
    assert plan.model.options == {"size": {"width": 16}}


def test_variables_that_name_no_key_are_left_alone(file: Path) -> None:
    environment = {"STAGELINE_LOG": "debug", "HOME": "/root", "OTHER__RUN__SEED": "1"}
    assert read_plan(file, environment=environment) == read_plan(file)


@pytest.mark.parametrize("file_says", ["steps", "epochs"])
@pytest.mark.parametrize("set_says", ["steps", "epochs"])
def test_steps_overrule_epochs_from_below_and_epochs_steps(file: Path, file_says: str, set_says: str) -> None:
    file.write_text(SMALLEST.replace("epochs", file_says))
    run = read_plan(file, sets=[f"run.{set_says}=20"]).run
    assert {"steps": run.steps, "epochs": run.epochs} == {"steps": None, "epochs": None, set_says: 20}


def test_a_number_of_stages_overrules_a_cut_from_below(file: Path) -> None:
    plan = read_plan(file, sets=["model.stages=3"])
    assert (plan.model.cut, plan.placement) == (None, ((0,), (1,), (2,)))


# How a plan is refused

BAD = """\
colour = 3
[run]
seed = "four"
epochs = 2
steps = 3

[shedule]
name = "1f1b"
[model]
factory = "model"
width = 3
cut = [4, 2]
[data]
batchsize = 4
source = 3
[schedule]
name = "1f1bb"
microbatches = 0
[workers.0]
stages = []
[workers.2]
stages = [0]
"""


def test_all_that_is_wrong_is_said_at_once_each_with_its_line(file: Path) -> None:
    file.write_text(BAD)
    with pytest.raises(PlanRefused) as refused:
        read_plan(file, sets=["run", "run.foo=3"], environment={"STAGELINE_RUN__LOG_EVERY": "0"})
    found = {(error.where.removeprefix(f"{file}"), error.key) for error in refused.value.errors}
    assert found == {
        (":1", "colour"),
        (":3", "run.seed"),
        (":5", "run.steps"),
        (":8", "shedule"),
        (":10", "model.factory"),
        (":11", "model.width"),
        (":12", "model.cut"),
        (":9", "model.loss"),
        (":14", "data.batchsize"),
        (":13", "data.batch_size"),
        (":15", "data.source"),
        (":17", "schedule.name"),
        (":18", "schedule.microbatches"),
        ("", "optimizer.factory"),
        (":20", "workers.0.stages"),
        (":20", "workers"),
        ("--set", "run"),
        ("--set", "run.foo"),
        ("STAGELINE_RUN__LOG_EVERY", "run.log_every"),
    }
    assert str(refused.value).splitlines() == [str(error) for error in refused.value.errors]


def test_an_error_reads_as_one_sentence_with_place_key_value_and_what_is_wanted(file: Path) -> None:
    file.write_text(SMALLEST.replace("64", '"many"'))
    with pytest.raises(PlanRefused) as refused:
        read_plan(file)
    wanted = f'{file}:11: data.batch_size = "many": a whole number from 1 on is wanted, this is text'
    assert str(refused.value) == wanted


WRONG = [
    ({"run__epochs": True}, "run.epochs", "a whole number from 1 on is wanted, this is true or false"),
    ({"model__options": {"width": None}}, "model.options", "width: None does not travel"),
    ({"schedule": {"window": None}}, "schedule.window", "is wanted, this is None"),
    ({"run__epochs": 1.5}, "run.epochs", "a whole number from 1 on is wanted, this is a number"),
    ({"run__epochs": [1]}, "run.epochs", "a whole number from 1 on is wanted, this is a list"),
    ({"run__epochs": {"a": 1}}, "run.epochs", "a whole number from 1 on is wanted, this is a table"),
    ({"run__epochs": 0}, "run.epochs", "a whole number from 1 on is wanted"),
    ({"run__epochs": 2**63}, "run.epochs", "a whole number from 1 on is wanted"),
    ({"run__seed": -1}, "run.seed", "a whole number from 0 on is wanted"),
    ({"run__name": "../up"}, "run.name", "a name of letters, digits and - _ . is wanted"),
    ({"run__steps": 3}, "run.steps", "epochs = 2 is given too; keep one of the two"),
    ({"run__epochs": None}, "run.steps", "set how long to train: steps = 1000, or epochs = 10"),
    ({"run": 5}, "run", "this is a table: write [run], and its keys below"),
    ({"workers": [1]}, "workers", "this is a table: write [workers.0], and its keys below"),
    ({"workers": {"0": 1}}, "workers.0", "this is a table: write [workers.0], and its keys below"),
    ({"run__sede": 1}, "run.sede", 'there is no such key; did you mean "seed"?'),
    ({"run__microbatches": 1}, "run.microbatches", "there is no such key; did you mean schedule.microbatches?"),
    ({"data__colour": 1}, "data.colour", "there is no such key; arguments for the factory go into [data.options]"),
    ({"broker__colour": 1}, "broker.colour", "there is no such key; there are url"),
    ({"shedule__name": "1f1b"}, "shedule", 'there is no such table; did you mean "schedule"?'),
    ({"model__factory": None}, "model.factory", "missing; a name in a file or a package, such as"),
    ({"model__factory": "build"}, "model.factory", 'such as "model.py:build" or "torch.optim.SGD", is wanted'),
    ({"model__metrics": "a.b"}, "model.metrics", "is wanted, this is text"),
    ({"model__metrics": [3]}, "model.metrics", "this is a whole number"),
    ({"model__cut": [4, 2]}, "model.cut", '"auto" or a list of ascending layer numbers from 1 on'),
    ({"model__cut": [2, 2]}, "model.cut", '"auto" or a list of ascending layer numbers from 1 on'),
    ({"model__cut": [0, 2]}, "model.cut", '"auto" or a list of ascending layer numbers from 1 on'),
    ({"model__cut": []}, "model.cut", '"auto" or a list of ascending layer numbers from 1 on'),
    ({"model__cut": "half"}, "model.cut", '"auto" or a list of ascending layer numbers from 1 on'),
    ({"model__cut": 2}, "model.cut", "is wanted, this is a whole number"),
    ({"model__cut": "auto"}, "model.cut", "set the number of stages: add stages = 2"),
    ({"model__stages": 3}, "model.stages", "cut = [5] makes 2; leave stages out"),
    ({"model__stages": 10**9}, "model.stages", "a whole number from 1 to 1024 is wanted"),
    ({"workers__0__stages": [0, 10**9]}, "workers.0.stages", "a whole number from 0 to 1023 is wanted"),
    ({"schedule__microbatches": 10**9}, "schedule.microbatches", "a whole number from 1 to 65536 is wanted"),
    ({"data__batch_size": 3, "schedule__microbatches": 4}, "data.batch_size", "3 rows make no 4 microbatches; use"),
    ({"schedule__name": "1f1bb"}, "schedule.name", 'is wanted; did you mean "1f1b"?'),
    ({"schedule__mode": "asink"}, "schedule.mode", '"sync" or "async" is wanted; did you mean'),
    (
        {"schedule__mode": "async", "schedule__microbatches": 2},
        "schedule.microbatches",
        'mode = "async" updates after every microbatch; use microbatches = 1',
    ),
    ({"schedule__mode": "async", "schedule__name": "gpipe"}, "schedule.name", 'is defined for name = "1f1b"'),
    ({"schedule__name": "window"}, "schedule.window", 'name = "window" needs it: one K for each stage'),
    ({"schedule__window": [2, 1]}, "schedule.window", 'name = "1f1b" takes none; use name = "window"'),
    ({"schedule__name": "window", "schedule__window": [2]}, "schedule.window", "1 values for 2 stages"),
    ({"schedule__name": "window", "schedule__window": [2, 0]}, "schedule.window", "a whole number from 1 on is wanted"),
    ({"optimizer": None}, "optimizer.factory", "missing; a name in a file or a package"),
    ({"lr_scheduler__gamma": 0.1}, "lr_scheduler.factory", "missing; a name in a file or a package"),
    ({"optimizer__lr": float("nan")}, "optimizer.lr", "nan is not a finite number"),
    ({"optimizer__big": 2**64}, "optimizer.big", "a whole number has at most 64 bits"),
    (
        {"model__options": {"at": {"x": Path("x")}}},
        "model.options",
        "at: x: a PosixPath does not travel: write it as text, and read it in the factory",
    ),
    (
        {"queues__url": "http://h"},
        "queues.url",
        '"memory://", "ipc://", "tcp://127.0.0.1:5600", "redis://127.0.0.1:6379/0"',
    ),
    ({"queues__url": "tcp"}, "queues.url", '"memory://", "ipc://", "tcp://127.0.0.1:5600", "redis://127.0.0.1:6379/0"'),
    ({"queues__url": "tcp://h"}, "queues.url", "tcp:// goes with a host and a port"),
    ({"broker__url": "tcp://h:65536"}, "broker.url", "a port is at most 65535"),
    ({"queues__url": "redis://h:65536/0"}, "queues.url", "a port is 0 to 65535"),
    ({"queues__url": "redis://[::1/0"}, "queues.url", "an IPv6 address stands in []"),
    ({"queues__url": "redis://:6379/0"}, "queues.url", "a host is missing"),
    ({"queues__url": "redis://h/abc"}, "queues.url", "'/abc', is not the number of a database"),
    ({"queues__url": "unix://"}, "queues.url", "the path of a socket is missing"),
    ({"broker__url": "memory://"}, "broker.url", '"tcp://127.0.0.1:5600", "redis://'),
    ({"queues__retain_bytes": "3 bytes"}, "queues.retain_bytes", "units are B, KB, MB, GB, KiB, MiB, GiB"),
    ({"queues__retain_bytes": 0}, "queues.retain_bytes", 'a size in bytes, such as 1048576 or "512MiB", is wanted'),
    ({"recovery__lease": "soon"}, "recovery.lease", "units are ms, s, min, h"),
    ({"recovery__lease": 0}, "recovery.lease", 'a time in seconds, such as 10, "10s" or "250ms", is wanted'),
    ({"recovery__lease": float("inf")}, "recovery.lease", "a time in seconds"),
    ({"recovery__restarts": 2, "recovery__snapshot_every": 0}, "recovery.restarts", "use snapshot_every = 20, or rest"),
    ({"recovery__on_bad_microbatch": "stop"}, "recovery.on_bad_microbatch", '"halt" or "skip" is wanted'),
    (
        {"recovery__record": "all", "recovery__restarts": 0},
        "recovery.record",
        "use recovery.restarts = 5 and snapshot_every = 20, or record",
    ),
    ({"recovery__record": "all", "queues__url": "memory://"}, "recovery.record", "nothing is recorded in passing; use"),
    ({"workers__0__stages": [0, 1], "workers__0__device": "gpu 1"}, "workers.0.device", 'such as "cpu" or "cuda:0"'),
    ({"workers__0__threads": 2}, "workers.0.stages", "missing; a list of stages such as [0, 2] is wanted"),
    ({"workers__0__stages": [0]}, "workers", "stage 1 is owned by no worker; give it to exactly one worker"),
    ({"workers__0__stages": [0, 1, 1]}, "workers", "stage 1 is owned by worker 0 and worker 0"),
    (
        {"workers__0__stages": [0, 1], "workers__1__stages": [1]},
        "workers",
        "stage 1 is owned by worker 0 and worker 1; give it to exactly one worker",
    ),
    ({"workers__0__stages": [0, 1, 2]}, "workers", "stage 2 is owned by worker 0, but there are 2 stages, 0 to 1"),
    ({"workers__1__stages": [0, 1]}, "workers", "workers are numbered from 0 without gaps: [workers.0]"),
    (
        {"schedule__name": "interleaved-1f1b", "workers__0__stages": [1], "workers__1__stages": [0]},
        "schedule.name",
        "interleaved-1f1b",
    ),
]


@pytest.mark.parametrize(("changes", "key", "reason"), WRONG)
def test_what_is_wrong_is_named_with_what_would_be_right(changes: dict[str, object], key: str, reason: str) -> None:
    error = the_error(**changes)
    assert error.key == key
    assert reason in error.reason


def test_a_long_value_is_shown_shortened() -> None:
    error = the_error(run__epochs=list(range(1000)))
    assert error.value.endswith("...")
    assert len(error.value) == 60


def test_a_key_without_a_value_spares_the_checks_that_would_read_it() -> None:
    assert the_error(schedule__microbatches="many").key == "schedule.microbatches"
    assert the_error(schedule="1f1b").key == "schedule"
    assert {error.key for error in refusal(model=3, workers__0__stages=[7])} == {"model"}


def test_a_file_that_is_not_toml_is_one_error_with_its_place(file: Path) -> None:
    file.write_text("[run]\nseed = = 3\n")
    with pytest.raises(PlanRefused, match=rf"^{re.escape(str(file))}: this is not TOML: .*line 2") as refused:
        read_plan(file, sets=["run.foo=3"])
    assert len(refused.value.errors) == 1


def test_a_file_that_is_not_text_is_refused(file: Path) -> None:
    file.write_bytes(b"[run]\n\xff")
    with pytest.raises(PlanRefused, match="byte 6 is not UTF-8"):
        read_plan(file)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PlanRefused, match=re.escape(f"{tmp_path}/none.toml: there is no such file")):
        read_plan(tmp_path / "none.toml")


def test_a_folder_without_a_plan_is_refused_by_the_name_of_the_file_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(PlanRefused, match=r"stageline\.toml: there is no such file; name a plan"):
        read_plan(tmp_path)


def test_a_path_that_cannot_be_read_is_refused_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(PlanRefused, match="it cannot be read: File name too long"):
        read_plan(tmp_path / ("x" * 300))


@pytest.mark.parametrize("argument", ["run.seed", "=3", ".seed=3", "run.=3", ""])
def test_what_follows_set_has_a_key_and_a_value(file: Path, argument: str) -> None:
    with pytest.raises(PlanRefused, match=r"write section\.key=value, such as run\.steps=20"):
        read_plan(file, sets=[argument])


# Stages that only the loaded model can count


def ready_stages(**changes: object) -> Plan:
    return plan(model__cut=None, **changes)


def test_a_plan_without_a_number_of_stages_waits_for_the_model() -> None:
    waiting = ready_stages()
    assert (waiting.model.stages, waiting.workers) == (None, ())
    resolved = waiting.resolved(stages=3)
    assert (resolved.model.stages, resolved.placement) == (3, ((0,), (1,), (2,)))
    assert resolved.digest() == ready_stages(model__stages=3).digest() != waiting.digest()


def test_a_plan_that_knows_its_stages_is_resolved_already() -> None:
    assert plan().resolved(stages=2) == plan()


def test_a_model_of_another_number_of_stages_is_refused() -> None:
    with pytest.raises(PlanRefused, match=r"model\.stages = 2: the model has 3 stages"):
        plan().resolved(stages=3)


def test_workers_that_do_not_fit_the_model_are_refused_once_it_is_known() -> None:
    waiting = ready_stages(workers__0__stages=[1, 0])
    assert waiting.placement == ((1, 0),)
    with pytest.raises(PlanRefused, match="stage 2 is owned by no worker"):
        waiting.resolved(stages=3)


def test_owners_that_fit_no_model_are_refused_before_it_is_known() -> None:
    with pytest.raises(PlanRefused, match="stage 1 is owned by no worker"):
        ready_stages(workers__0__stages=[0, 2])


def test_a_schedule_that_does_not_fit_the_model_is_refused_once_it_is_known() -> None:
    waiting = ready_stages(schedule__name="window", schedule__window=[2, 1], schedule__microbatches=4)
    assert waiting.resolved(stages=2).placement == ((0,), (1,))
    with pytest.raises(PlanRefused, match="2 values for 3 stages"):
        waiting.resolved(stages=3)


# Warnings


@pytest.mark.parametrize("url", ["tcp://0.0.0.0:5600", "tcp://*:5600", "tcp://broker.example:5600", "tcp://[::]:5600"])
def test_an_address_that_others_can_reach_gives_a_warning(url: str) -> None:
    (warning,) = plan(broker__url=url).warnings
    assert f'broker.url = "{url}" can be reached from other machines' in warning


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:*", "tcp://localhost:0", "tcp://[::1]:5600", "ipc:///tmp/x"])
def test_an_address_of_this_machine_gives_none(url: str) -> None:
    assert plan(queues__url=url).warnings == ()


# Digest and differences

UNCOUNTED_CHANGES = [
    {"run__name": "other"},
    {"run__dir": "/elsewhere"},
    {"run__log_every": 3},
    {"queues__url": "tcp://127.0.0.1:0"},
    {"queues__retain_bytes": "2GiB"},
    {"recovery__lease": 3},
    {"recovery__restarts": 3},
    {"broker__url": "tcp://127.0.0.1:7"},
]
COUNTED_CHANGES = [
    ({"run__seed": 3}, "run.seed"),
    ({"run__epochs": 3}, "run.epochs"),
    ({"model__factory": "model.py:other"}, "model.factory"),
    ({"model__options": {"width": 3}}, "model.options.width"),
    ({"model__cut": [3]}, "model.cut"),
    ({"model__loss": "model.py:loss"}, "model.loss"),
    ({"model__metrics": ["model.py:accuracy"]}, "model.metrics"),
    ({"data__source": "data.py:other"}, "data.source"),
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
def test_machines_may_differ_in_what_decides_neither_the_computation_nor_its_parts(changes: dict[str, object]) -> None:
    assert plan(**changes).as_mapping() != plan().as_mapping()
    assert plan(**changes).digest() == plan().digest()
    assert differences(plan(**changes).as_mapping(), plan().as_mapping()) == ()


@pytest.mark.parametrize(("changes", "key"), COUNTED_CHANGES)
def test_machines_may_not_differ_in_what_does(changes: dict[str, object], key: str) -> None:
    assert plan(**changes).digest() != plan().digest()
    assert key in {each.key for each in differences(plan(**changes).as_mapping(), plan().as_mapping())}


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "+nan"])
def test_a_number_that_is_not_finite_is_no_text_when_it_is_typed(number: str) -> None:
    with pytest.raises(PlanRefused, match="is not a finite number") as refused:
        from_mapping(plan().as_mapping(), sets=[f"optimizer.lr={number}"])
    (error,) = refused.value.errors
    assert (error.key, error.where) == ("optimizer.lr", "--set")
    assert from_mapping(plan().as_mapping(), sets=[f"optimizer.lr='{number}'"]).optimizer.options["lr"] == number


def test_a_difference_names_the_key_and_both_values() -> None:
    here, there = plan(schedule__microbatches=4), plan(schedule__microbatches=8, optimizer__momentum=0.9)
    assert [str(each) for each in differences(here.as_mapping(), there.as_mapping())] == [
        "optimizer.momentum: not set here, 0.9 there",
        "schedule.microbatches: 4 here, 8 there",
    ]


def test_a_digest_is_64_hexadecimal_digits() -> None:
    assert re.fullmatch("[0-9a-f]{64}", plan().digest())


def test_saying_a_default_changes_nothing() -> None:
    spoken = plan(model__stages=2, schedule__name="1f1b", workers={"0": {"stages": [0]}, "1": {"stages": [1]}})
    assert spoken == plan()
    assert spoken.digest() == plan().digest()


def test_the_order_of_keys_is_nobodys_business() -> None:
    one, other = {"a": 1, "b": [{"c": 2, "d": 3}]}, {"b": [{"d": 3, "c": 2}], "a": 1}
    assert plan(model__options=one).digest() == plan(model__options=other).digest()


@pytest.mark.parametrize(("one", "other"), [({"a": 1}, {"a": 1.0}), ({"a.b": 1}, {"a": {"b": 1}})])
def test_options_that_only_look_alike_differ(one: dict[str, object], other: dict[str, object]) -> None:
    first, second = plan(model__options=one), plan(model__options=other)
    assert first.digest() != second.digest()
    assert differences(first.as_mapping(), second.as_mapping())


# For every plan

MODELS = [(table, section(table)) for table in PlanTables.model_fields]
NAMES = st.text(min_size=1, max_size=8)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
OPTIONS = st.dictionaries(NAMES.filter(lambda name: name != "factory"), VALUES, max_size=3)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, dict]:
    stages = draw(st.integers(1, 5))
    owners = [draw(st.integers(0, stages - 1)) for _ in range(stages)]
    owned = [[stage for stage in range(stages) if owners[stage] == worker] for worker in sorted(set(owners))]
    # A window that grows along the line would let a stage wait for itself, which the schedule refuses.
    windows = st.lists(st.integers(1, 9), min_size=stages, max_size=stages).map(lambda ks: sorted(ks, reverse=True))
    window = draw(st.none() | windows)
    microbatches = draw(st.integers(1, 9))
    names = ("gpipe", "1f1b", "eager-1f1b")
    schedule = {"name": draw(st.sampled_from(names))} if window is None else {"name": "window", "window": window}
    return {
        "run": {"seed": draw(st.integers(0, 2**63 - 1)), draw(st.sampled_from(("steps", "epochs"))): 3},
        "model": {"factory": "model.py:build", "loss": "a.b", "stages": stages, "options": draw(OPTIONS)},
        "data": {"source": "data.py:batches", "batch_size": microbatches + 3, "options": draw(OPTIONS)},
        "schedule": {**schedule, "microbatches": microbatches},
        "optimizer": {"factory": "torch.optim.SGD", **draw(OPTIONS)},
        "recovery": {"lease": draw(st.floats(0.001, 1e6))},
        "workers": {str(index): {"stages": stages} for index, stages in enumerate(owned)},
    }


@given(tables())
def test_a_plan_written_as_a_mapping_and_read_again_is_the_same(tables: dict[str, dict]) -> None:
    plan = from_mapping(tables)
    written = json.loads(json.dumps(plan.as_mapping(), allow_nan=False))
    again = from_mapping(written)
    assert again == plan
    assert again.digest() == plan.digest()
    assert plan.origins.keys() == flat(plan.as_mapping()).keys()


SECTIONS = st.sampled_from((*PlanTables.model_fields, "other"))
KEYS = st.sampled_from(sorted({key for _, keys in MODELS for key in keys.model_fields} | {"0", "1", "stages", ""}))
JUNK = st.none() | st.just(b"bytes") | st.floats() | st.integers() | VALUES
JUNK_TABLES = st.dictionaries(KEYS, JUNK | st.dictionaries(KEYS, JUNK, max_size=3), max_size=4)


@given(st.dictionaries(SECTIONS, JUNK | JUNK_TABLES, max_size=6), st.lists(st.text(max_size=9), max_size=2))
def test_whatever_stands_in_a_plan_it_becomes_a_plan_or_is_refused_in_words(tables: dict, sets: list[str]) -> None:
    with pytest.raises(PlanRefused) as refused:
        from_mapping({**tables, "other": {}}, sets=sets)
    assert all(error.reason for error in refused.value.errors)


@given(OPTIONS, OPTIONS)
def test_plans_have_one_digest_if_and_only_if_they_have_no_differences(one: dict, other: dict) -> None:
    first, second = plan(model__options=one), plan(model__options=other)
    assert (first.digest() == second.digest()) == (not differences(first.as_mapping(), second.as_mapping()))


# The page about it


def documented() -> dict[str, str]:
    page = DOCS / "plan.md"
    rows = re.findall(r"^\| `([\w.]+)` \|[^|]+\| ([^|]+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    return dict(rows)


def test_every_key_is_documented_and_nothing_else() -> None:
    keys = {f"{table}.{key}" for table, keys in MODELS for key in keys.model_fields}
    assert documented().keys() == {key.replace("workers.", "workers.N.") for key in keys}


def test_the_documented_defaults_are_the_defaults() -> None:
    defaults = {key.replace("workers.0", "workers.N"): value for key, value in flat(plan().as_mapping()).items()}
    written = {key: cell.strip("`") for key, cell in documented().items() if cell.startswith("`")}
    assert written["queues.retain_bytes"] == '"1GiB"'
    assert written["recovery.lease"] == '"10s"'
    for key in written.keys() - {"queues.retain_bytes", "recovery.lease"}:
        assert json.loads(written[key]) == defaults[key]


def test_what_is_documented_as_needed_is_needed() -> None:
    needed = {key.replace(".N", "") for key, cell in documented().items() if cell.startswith("needed")}
    fields = [(table, key, field) for table, keys in MODELS for key, field in keys.model_fields.items()]
    assert needed == {f"{table}.{key}" for table, key, field in fields if field.is_required()}


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*/stageline.toml")))
def test_every_example_has_a_plan_without_warnings(example: Path) -> None:
    plan = read_plan(example)
    assert plan.warnings == ()
    assert all(before < after for before, after in pairwise(plan.model.cut or ()))
