"""Where a plan comes from: a file, a mapping, the environment, --set; and how one that cannot be read is refused."""

import re
from pathlib import Path

import pytest

from stageline.pipeline.plan import PlanRefused, from_mapping, read_plan
from stageline.pipeline.plan.keys.deployment import WorkerPlan
from stageline.pipeline.plan.tables import flat
from support.small_plans import SMALLEST, TABLES_OF_SMALLEST


def test_a_file_becomes_one_value_with_the_defaults_filled_in(file: Path) -> None:
    plan = read_plan(file)
    assert plan.as_mapping() == {
        "features": [],
        "run": {"name": "digits", "seed": 0, "epochs": 2, "dir": "runs", "log_every": 10},
        "model": {
            "factory": "model.py:build",
            "options": {},
            "cut": [5],
            "stages": 2,
            "balance": "parameters",
            "loss": "torch.nn.functional.cross_entropy",
            "metrics": [],
        },
        "data": {"source": "data.py:batches", "options": {}, "batch_size": 64, "check": True},
        "schedule": {"name": "1f1b", "microbatches": 1, "accumulate": 1, "mode": "sync", "tied": "microbatch"},
        "optimizer": {"factory": "torch.optim.SGD", "lr": 0.1},
        "queues": {"url": "shm://", "retain_bytes": 2**30, "padding": "none"},
        "recovery": {
            "lease": 10.0,
            "loading": 300.0,
            "snapshot_every": 20,
            "restarts": 5,
            "on_bad_microbatch": "halt",
            "record": "bad",
        },
        "broker": {"url": "tcp://127.0.0.1:5600", "store": "sqlite", "insecure": False, "patience": 600.0},
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
    assert from_mapping(TABLES_OF_SMALLEST, file=tmp_path / "x²" / "stageline.toml").run.name == "x²"
    assert from_mapping(TABLES_OF_SMALLEST, file="/stageline.toml").run.name == "run"
    assert from_mapping(TABLES_OF_SMALLEST).run.name == "run"


def test_every_key_of_a_file_arrives(file: Path) -> None:
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


def test_a_file_that_is_not_toml_is_one_error_with_its_place(file: Path) -> None:
    file.write_text("[run]\nseed = = 3\n")
    with pytest.raises(PlanRefused, match=rf"^{re.escape(str(file))}: this is not TOML: .*line 2") as refused:
        read_plan(file, sets=["run.foo=3"])
    assert len(refused.value.errors) == 1


def test_a_file_that_is_not_text_is_refused(file: Path) -> None:
    file.write_bytes(b"[run]\n\xff")
    with pytest.raises(PlanRefused, match="byte 6 is not UTF-8"):
        read_plan(file)


def test_a_plan_in_a_folder_whose_path_is_not_utf8_is_refused_with_a_text_that_can_be_shown(tmp_path: Path) -> None:
    """Its path is in records, which are UTF-8: `train` in a script ended with a traceback of the encoder."""
    (folder := tmp_path / "odd\udcff").mkdir()
    (folder / "stageline.toml").write_text("")
    with pytest.raises(PlanRefused, match=r"odd\\udcff.*not UTF-8") as refused:
        read_plan(folder)
    assert str(refused.value).isprintable()


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PlanRefused, match=re.escape(f"{tmp_path}/none.toml: there is no such file")):
        read_plan(tmp_path / "none.toml")


def test_a_folder_without_a_plan_is_refused_by_the_name_of_the_file_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(PlanRefused, match=r"stageline\.toml: there is no such file; name a plan"):
        read_plan(tmp_path)


def test_a_path_that_cannot_be_read_is_refused_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(PlanRefused, match="it cannot be read: File name too long"):
        read_plan(tmp_path / ("x" * 300))


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


def test_what_only_the_model_tells_is_refused_at_the_line_of_the_key_too(file: Path) -> None:
    """The file alone was named, where what the plan itself tells is refused at a line."""
    lines = len(file.read_text().splitlines())
    with file.open("a") as more:
        more.write("\n[stage.1]\nreplicas = 2\n")
    plan = read_plan(file, sets=["schedule.microbatches=4"])

    def where(key: str) -> str:
        return plan.refused(key, "no").errors[0].where

    assert where("stage.1.replicas") == f"{file}:{lines + 3}"
    assert where("stage.1.share") == f"{file}:{lines + 2}"  # that of its table
    assert where("schedule.microbatches") == "--set"
    assert where("memory.recompute") == str(file)
    assert plan.resolved(2).refused("stage.1.replicas", "no").errors[0].where == f"{file}:{lines + 3}"


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


@pytest.mark.parametrize("in_file", ["steps", "epochs"])
@pytest.mark.parametrize("in_set", ["steps", "epochs"])
def test_steps_overrule_epochs_from_below_and_epochs_steps(file: Path, in_file: str, in_set: str) -> None:
    file.write_text(SMALLEST.replace("epochs", in_file))
    run = read_plan(file, sets=[f"run.{in_set}=20"]).run
    assert {"steps": run.steps, "epochs": run.epochs} == {"steps": None, "epochs": None, in_set: 20}


def test_a_number_of_stages_overrules_a_cut_from_below(file: Path) -> None:
    plan = read_plan(file, sets=["model.stages=3"])
    assert (plan.model.cut, plan.placement) == (None, ((0,), (1,), (2,)))


def test_a_dataset_overrules_a_source_from_below(file: Path) -> None:
    data = read_plan(file, sets=["data.dataset=data.py:train", "data.num_workers=2"]).data
    assert (data.source, data.dataset, data.num_workers) == (None, "data.py:train", 2)
    assert data.origin == data.origin_held_out == 'data.dataset = "data.py:train"'
    held_out = read_plan(file, sets=["data.dataset=data.py:train", "data.held_out=data.py:test"]).data
    assert held_out.origin_held_out == 'data.held_out = "data.py:test"'


@pytest.mark.parametrize("argument", ["run.seed", "=3", ".seed=3", "run.=3", ""])
def test_what_follows_set_has_a_key_and_a_value(file: Path, argument: str) -> None:
    with pytest.raises(PlanRefused, match=r"write section\.key=value, such as run\.steps=20"):
        read_plan(file, sets=[argument])
