"""Which origin sets a key, and what --set and the environment may write."""

from pathlib import Path

import pytest

from stageline.pipeline.plan import PlanRefused, read_plan
from stageline.pipeline.plan.tables import flat
from support.small_plans import SMALLEST

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


@pytest.mark.parametrize("argument", ["run.seed", "=3", ".seed=3", "run.=3", ""])
def test_what_follows_set_has_a_key_and_a_value(file: Path, argument: str) -> None:
    with pytest.raises(PlanRefused, match=r"write section\.key=value, such as run\.steps=20"):
        read_plan(file, sets=[argument])
