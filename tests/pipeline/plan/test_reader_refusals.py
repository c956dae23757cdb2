"""How a plan is refused: every error at once, each with place, key, value and what would be right."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.pipeline.plan import PlanRefused, from_mapping, read_plan
from stageline.pipeline.plan.keys.models import TABLES, section
from support.small_plans import SMALLEST, VALUES, the_error

QUEUES = '"memory://", "shm://", "ipc://", "tcp://127.0.0.1:5600", "relay://'

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


def test_a_variable_with_one_underscore_in_place_of_two_is_refused(file: Path) -> None:
    given = {"STAGELINE_BROKER_URL": "redis://desk", "STAGELINE_RECOVERY_SNAPSHOT_EVERY": "5", "STAGELINE_RUN": "third"}
    with pytest.raises(PlanRefused) as refused:
        read_plan(file, environment=given)
    assert [str(error) for error in refused.value.errors] == [
        "STAGELINE_BROKER_URL: broker.url: expected two underscores: STAGELINE_BROKER__URL",
        "STAGELINE_RECOVERY_SNAPSHOT_EVERY: recovery.snapshot_every: expected two underscores: "
        "STAGELINE_RECOVERY__SNAPSHOT_EVERY",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a = " + 2000 * "[" + 2000 * "]", "32 in one another"),
        ("a = " + 60 * "[" + 60 * "]", "32 in one another"),
        (".".join(60 * ["a"]) + " = 1", "32 in one another"),
        ("[" + ".".join(5000 * ["a"]) + "]", "32 in one another"),
        ("a = " + 5000 * "1", "thousands of digits"),
        (SMALLEST + "#" * 2**20, "more than 1048576 bytes"),
    ],
    ids=["lists", "some lists", "keys", "tables", "digits", "long"],
)
def test_a_file_that_is_nested_too_deeply_or_has_no_end_is_refused_by_its_name(
    file: Path, text: str, told: str
) -> None:
    """They ended in a RecursionError, a MemoryError, or a minute of silence."""
    file.write_text(text)
    with pytest.raises(PlanRefused) as refused:
        read_plan(file)
    assert str(refused.value).startswith(f"{file}: ")
    assert told in str(refused.value)


def test_a_plan_that_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stageline.toml")
    for odd in (tmp_path, Path("/dev/zero")):
        with pytest.raises(PlanRefused, match=r"^/.*(stageline\.toml|zero): it is no regular file"):
            read_plan(odd)
    with pytest.raises(PlanRefused, match="cannot be read: File name too long"):
        read_plan(tmp_path / ("a" * 300))


def test_of_very_many_unknown_keys_some_are_named_and_all_are_counted(file: Path) -> None:
    """Each of them was compared with all others."""
    file.write_text("\n".join([SMALLEST, "[recovery]", *(f"key{number} = 1" for number in range(60_000))]))
    with pytest.raises(PlanRefused) as refused:
        read_plan(file)
    named, more = refused.value.errors[:-1], refused.value.errors[-1]
    assert {error.key.rstrip("0123456789") for error in named} == {"recovery.key"}
    assert str(60_000 - len(named)) in more.reason


def test_a_value_that_is_typed_with_too_many_brackets_is_text(file: Path) -> None:
    with pytest.raises(PlanRefused, match=r"--set: run\.seed = \"\[\[\["):
        read_plan(file, sets=["run.seed=" + 2000 * "["])
    assert read_plan(file, sets=["run.seed=3"]).run.seed == 3


def test_all_that_is_wrong_is_reported_at_once_each_with_its_line(file: Path) -> None:
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
    assert refused.value.args[0].splitlines() == [str(error) for error in refused.value.errors]


WRONG = [
    ({"run__epochs": True}, "run.epochs", "expected a whole number of at least 1, got true or false"),
    ({"model__options": {"width": None}}, "model.options", "width: None cannot be sent to workers"),
    ({"schedule": {"window": None}}, "schedule.window", "such as [4, 2], got None"),
    ({"run__epochs": 1.5}, "run.epochs", "expected a whole number of at least 1, got a number"),
    ({"run__epochs": [1]}, "run.epochs", "expected a whole number of at least 1, got a list"),
    ({"run__epochs": {"a": 1}}, "run.epochs", "expected a whole number of at least 1, got a table"),
    ({"run__epochs": 0}, "run.epochs", "expected a whole number of at least 1"),
    ({"run__epochs": 2**63}, "run.epochs", "expected a whole number of at least 1"),
    (
        {"memory": {"offload": ["weights", "optimiser"]}},
        "memory.offload",
        'got "optimiser"; did you mean "',
    ),
    ({"memory": {"offload": ["x"]}}, "memory.offload", 'got "x"'),
    ({"run__seed": -1}, "run.seed", "expected a whole number of at least 0"),
    ({"run__name": "../up"}, "run.name", "expected a name of letters, digits and - _ ."),
    ({"run": 5}, "run", "this is a table: write [run], and its keys below"),
    ({"workers": [1]}, "workers", "this is a table: write [workers.0], and its keys below"),
    ({"workers": {"0": 1}}, "workers.0", "this is a table: write [workers.0], and its keys below"),
    ({"run__sede": 1}, "run.sede", 'there is no such key; did you mean "seed"?'),
    ({"run__microbatches": 1}, "run.microbatches", "there is no such key; did you mean schedule.microbatches?"),
    ({"run__features": ["noise.py:Noise"]}, "run.features", "write features before the first table of the plan"),
    ({"data__colour": 1}, "data.colour", "there is no such key; arguments for the factory go into [data.options]"),
    ({"broker__colour": 1}, "broker.colour", "there is no such key; there are url"),
    ({"shedule__name": "1f1b"}, "shedule", 'there is no such table; did you mean "schedule"?'),
    ({"model__factory": None}, "model.factory", "missing; expected a name in a file or a package, such as"),
    ({"model__factory": "build"}, "model.factory", 'such as "model.py:build" or "torch.optim.SGD"'),
    ({"model__metrics": "a.b"}, "model.metrics", ", got text"),
    ({"model__metrics": [3]}, "model.metrics", "got a whole number"),
    ({"model__trainable": "head.*"}, "model.trainable", 'expected a list of patterns such as ["encoder.layer.40.*"]'),
    ({"model__trainable": []}, "model.trainable", 'expected a list of patterns such as ["encoder.layer.40.*"]'),
    ({"model__trainable": ["a.*", 3]}, "model.trainable", "a list of patterns such as"),
    ({"model__cut": [4, 2]}, "model.cut", '"auto" or a list of ascending layer numbers from 1 on'),
    ({"model__cut": [2, 2]}, "model.cut", '"auto" or a list of ascending layer numbers from 1 on'),
    ({"model__cut": [0, 2]}, "model.cut", '"auto" or a list of ascending layer numbers from 1 on'),
    ({"model__cut": []}, "model.cut", '"auto" or a list of ascending layer numbers from 1 on'),
    ({"model__cut": "half"}, "model.cut", '"auto" or a list of ascending layer numbers from 1 on'),
    ({"model__cut": 2}, "model.cut", ", got a whole number"),
    ({"model__cut": ["h.3", ""]}, "model.cut", 'or of layer names, such as ["encoder.layer.6"]'),
    ({"model__cut": ["h.3", 4, 2]}, "model.cut", "of ascending layer numbers"),
    ({"model__stages": 10**9}, "model.stages", "expected a whole number from 1 to 1024"),
    ({"workers__0__stages": [0, 10**9]}, "workers.0.stages", "expected a whole number from 0 to 1023"),
    ({"schedule__microbatches": 10**9}, "schedule.microbatches", "expected a whole number from 1 to 65536"),
    ({"schedule__name": "1f1bb"}, "schedule.name", 'such as "mine.py:reverse"; did you mean "1f1b"?'),
    ({"schedule__mode": "asink"}, "schedule.mode", 'expected "sync" or "async"; did you mean'),
    (
        {"schedule__name": "window", "schedule__window": [2, 0]},
        "schedule.window",
        "expected a whole number of at least 1",
    ),
    ({"optimizer": None}, "optimizer.factory", "missing; expected a name in a file or a package"),
    ({"lr_scheduler__gamma": 0.1}, "lr_scheduler.factory", "missing; expected a name in a file or a package"),
    ({"optimizer__lr": float("nan")}, "optimizer.lr", "nan is not a finite number"),
    ({"optimizer__big": 2**64}, "optimizer.big", "a whole number has at most 64 bits"),
    (
        {"model__options": {"at": {"x": Path("x")}}},
        "model.options",
        "at: x: an object of type PosixPath cannot be sent to workers: write it as text, and parse it in the factory",
    ),
    ({"queues__url": "http://h"}, "queues.url", QUEUES),
    ({"queues__url": "tcp"}, "queues.url", QUEUES),
    ({"queues__url": "tcp://h"}, "queues.url", "tcp:// goes with a host and a port"),
    ({"broker__url": "tcp://h:65536"}, "broker.url", "a port is at most 65535"),
    ({"queues__url": "redis://h:65536/0"}, "queues.url", "a port is 0 to 65535"),
    ({"queues__url": "redis://[::1/0"}, "queues.url", "an IPv6 address stands in []"),
    ({"queues__url": "redis://:6379/0"}, "queues.url", "a host is missing"),
    ({"queues__url": "redis://h/abc"}, "queues.url", "'/abc', is not the number of a database"),
    ({"queues__url": "unix://"}, "queues.url", "the path of a socket is missing"),
    ({"broker__url": "memory://"}, "broker.url", '"tcp://127.0.0.1:5600", "relay://'),
    ({"queues__retain_bytes": "3 bytes"}, "queues.retain_bytes", "units are B, KB, MB, GB, KiB, MiB, GiB"),
    (
        {"queues__retain_bytes": 0},
        "queues.retain_bytes",
        'expected a size in bytes of at least 1, such as 1048576 or "512MiB"',
    ),
    ({"queues__codec": "int4"}, "queues.codec", '"lossless", "bf16" or "int8", or a table such as'),
    ({"queues__codec": "in8"}, "queues.codec", 'is not a codec; did you mean "int8"?'),
    ({"queues__codec": 8}, "queues.codec", ", got a whole number"),
    ({"queues__codec": {"forward": 8}}, "queues.codec", "forward = 8 is not a codec"),
    ({"queues__codec": {"forwards": "int8"}}, "queues.codec", '"forwards" is neither forward, backward nor a queue'),
    ({"queues__codec": {"reply-0": "int8"}}, "queues.codec", "nor a queue such as forward-1 or backward-0"),
    ({"recovery__lease": "soon"}, "recovery.lease", "units are ms, s, min, h"),
    ({"recovery__lease": 0}, "recovery.lease", 'expected a time in seconds, such as 10, "10s" or "250ms"'),
    ({"recovery__lease": float("inf")}, "recovery.lease", "a time in seconds"),
    ({"recovery__on_bad_microbatch": "stop"}, "recovery.on_bad_microbatch", 'expected "halt" or "skip"'),
    ({"workers__0__stages": [0, 1], "workers__0__device": "gpu 1"}, "workers.0.device", 'such as "cpu" or "cuda:0"'),
    (
        {"workers__0__stages": [0, 1], "workers__0__threads": 2**40},
        "workers.0.threads",
        "a whole number from 1 to 1024",
    ),
    ({"workers__0__threads": 2}, "workers.0.stages", "missing; expected a list of stages such as [0, 2]"),
    ({"workers__1__stages": [0, 1]}, "workers", "workers are numbered from 0 without gaps: [workers.0]"),
]


@pytest.mark.parametrize(("changes", "key", "reason"), WRONG)
def test_what_is_wrong_is_named_with_what_would_be_right(changes: dict[str, object], key: str, reason: str) -> None:
    error = the_error(**changes)
    assert error.key == key
    assert reason in error.reason


def test_nan_at_top_level_is_refused_and_named(file: Path) -> None:
    """The check whether a typed number stands where text is expected looked up a table of this name, and crashed."""
    with pytest.raises(PlanRefused) as typed:
        read_plan(file, sets=["colour=nan"])
    file.write_text(f"colour = nan\n{SMALLEST}")
    with pytest.raises(PlanRefused) as written:
        read_plan(file)
    found = [(error.key, error.where) for refused in (typed, written) for error in refused.value.errors]
    assert found == [("colour", "--set"), ("colour", f"{file}:1")]


MODELS = [(table, section(table)) for table in TABLES]


SECTIONS = st.sampled_from((*TABLES, "other"))


KEYS = st.sampled_from(sorted({key for _, keys in MODELS for key in keys.model_fields} | {"0", "1", "stages", ""}))


JUNK = st.none() | st.just(b"bytes") | st.floats() | st.integers() | VALUES


JUNK_TABLES = st.dictionaries(KEYS, JUNK | st.dictionaries(KEYS, JUNK, max_size=3), max_size=4)


@given(st.dictionaries(SECTIONS, JUNK | JUNK_TABLES, max_size=6), st.lists(st.text(max_size=9), max_size=2))
def test_any_tables_become_a_plan_or_are_refused_with_reasons(tables: dict, sets: list[str]) -> None:
    with pytest.raises(PlanRefused) as refused:
        from_mapping({**tables, "other": {}}, sets=sets)
    assert all(error.reason for error in refused.value.errors)
