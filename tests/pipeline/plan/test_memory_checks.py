"""A limit of memory in a plan: how it is written, and where it is refused."""

import pytest

from stageline.pipeline.plan import PlanRefused, from_mapping, read_plan
from support.paths import EXAMPLES
from support.workspace import Workspace

MLP = EXAMPLES / "mlp"


@pytest.mark.parametrize("given", ["memory=64MiB", "memory.limit=64MiB", 'memory.limit="64 MiB"', "memory=67108864"])
def test_a_limit_has_a_short_form(given: str) -> None:
    assert read_plan(MLP, sets=[given]).limit_of(0) == 64 << 20


def test_the_short_form_stands_above_the_first_table_of_a_file(workspace: Workspace) -> None:
    file = workspace.folder / "stageline.toml"
    text = file.read_text()
    file.write_text(f'memory = "64MiB"\n{text}')
    assert read_plan(file).limit_of(0) == 64 << 20
    file.write_text(f'memory = "64XB"\n{text}')
    with pytest.raises(PlanRefused, match=r'toml:1: memory.limit = "64XB": expected a size in bytes of .*; units are'):
        read_plan(file)


@pytest.mark.parametrize("size", ["0", "-1", '"-2GB"', '"2XB"', '"GiB"', "2.5", "true", '"1e9"'])
def test_what_is_no_size_is_refused_with_an_example(size: str) -> None:
    for key in ("memory", "memory.limit"):
        with pytest.raises(PlanRefused, match=r"memory.limit = .*: expected a size in bytes of at least 1, such as"):
            read_plan(MLP, sets=[f"{key}={size}"])


@pytest.mark.parametrize(("given", "meant"), [("2gb", "2GB"), ("1.5 gib", "1.5GiB"), ("512mIB", "512MiB")])
def test_a_unit_in_other_letters_is_recognized_and_not_guessed(given: str, meant: str) -> None:
    with pytest.raises(PlanRefused, match=rf'units are B, .*; did you mean "{meant}"\? \[SL101\]$'):
        read_plan(MLP, sets=[f"memory={given}"])


@pytest.mark.parametrize(
    ("sets", "key", "reason"),
    [
        (("queues.url=memory://",), "memory.limit", "all workers share one process"),
        (("schedule.name=auto", "schedule.memory=1GiB"), "memory.limit", "may change how many microbatches are in f"),
        (("stage.1.shard=2",), "memory.limit", "stage.1.shard = 2: several processes compute the stage"),
        (
            ("model.stages=2", "workers.0.stages=[0]", "workers.1.stages=[1]", "workers.1.device=cuda:0"),
            "memory.limit",
            'workers.1.device = "cuda:0", and a limit supports only the CPU',
        ),
    ],
)
def test_where_it_is_not_foreseen_it_is_refused(sets: tuple[str, ...], key: str, reason: str) -> None:
    with pytest.raises(PlanRefused) as refused:
        read_plan(MLP, sets=["memory.limit=1GiB", *sets])
    assert [each.key for each in refused.value.errors if reason in each.reason] == [key]


def test_a_limit_is_no_part_of_the_digest() -> None:
    workers = ("model.stages=2", "workers.0.stages=[0]", "workers.1.stages=[1]")
    plain, limited = (
        read_plan(MLP, sets=[*workers, *sets]) for sets in ((), ("memory.limit=1GiB", "workers.1.memory=2GiB"))
    )
    assert (limited.limit_of(0), limited.limit_of(1)) == (1 << 30, 2 << 30)
    chosen = limited.with_memory({"stage.0.recompute": "stage", "stage.0.offload": ["weights"]})
    assert chosen.offloaded_of(0) == ("weights",)
    assert chosen.undecided_memory(0) == ()
    assert chosen.undecided_memory(1) == ("stage.1.recompute", "stage.1.offload")
    tight = limited.with_memory({"memory.tight": [1]})
    assert plain.digest() == limited.digest() == chosen.digest() == tight.digest()


def test_until_it_is_chosen_every_limit_is_tight() -> None:
    workers = ("model.stages=2", "workers.0.stages=[0]", "workers.1.stages=[1]", "workers.1.memory=2GiB")
    limited = read_plan(MLP, sets=workers)
    assert [limited.is_tight(worker) for worker in (0, 1)] == [False, True]
    assert limited.undecided_keys(0) == ("memory.tight",)
    chosen = limited.with_memory({"memory.tight": []})
    assert not chosen.is_tight(1)
    assert chosen.undecided_keys(0) == ()
    assert chosen.chooses_memory  # what stages do
    assert from_mapping(chosen.as_mapping()) == chosen


def test_decided_for_its_stages_alone_a_plan_has_still_to_be_chosen_for() -> None:
    said = ("memory.limit=1GiB", 'stage.0={recompute="nothing", offload=[]}', 'stage.1={recompute="stage", offload=[]}')
    undecided = read_plan(MLP, sets=["model.stages=2", *said])
    with pytest.raises(PlanRefused, match=r"memory.limit = 1073741824: .* is chosen once.*tight in \[memory\]"):
        undecided.demand_memory()
    read_plan(MLP, sets=["model.stages=2", *said, "memory.tight=[0]"]).demand_memory()


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        (("memory.limit=1GiB", "memory.tight=[2]"), "there is no worker 2: the plan has workers 0 to 1"),
        (("memory.tight=[0]",), "worker 0 has no limit; set memory.limit or workers.0.memory, or leave 0 out"),
        (("workers.1.memory=1GiB", "memory.tight=[0, 1]"), "worker 0 has no limit"),
        (("memory.limit=1GiB", "memory.tight=1"), r"expected a list of workers such as \[0, 2\]"),
        (("memory.limit=1GiB", "memory.tight=[-1]"), r"expected a list of workers such as \[0, 2\]"),
    ],
)
def test_only_the_limit_of_a_worker_that_has_one_is_tight(sets: tuple[str, ...], reason: str) -> None:
    workers = ("model.stages=2", "workers.0.stages=[0]", "workers.1.stages=[1]")
    with pytest.raises(PlanRefused, match=rf"^--set: memory.tight = .*: {reason}"):
        read_plan(MLP, sets=[*workers, *sets])


@pytest.mark.parametrize(
    ("sets", "named"),
    [
        (("memory.limit=1GiB",), "memory.limit = 1073741824"),
        (("workers.0.memory=1GiB", "workers.1.memory=512MiB"), "workers.0.memory = 1073741824"),
        (("memory.limit=1GiB", "workers.0.memory=4GiB"), ""),  # worker 0 has room for such a stage
        (("workers.1.memory=1GiB",), ""),  # worker 0 may take anything
        (("memory.limit=3GiB",), ""),
        (("schedule.name=auto", "schedule.memory=1GiB"), "schedule.memory = 1073741824"),
        (("schedule.name=auto", "schedule.memory=2GiB"), ""),
        ((), ""),
    ],
)
def test_stages_that_may_be_cut_larger_than_a_worker_are_warned_of_by_both_keys(
    sets: tuple[str, ...], named: str
) -> None:
    workers = ("model.stages=2", "workers.0.stages=[0]", "workers.1.stages=[1]", "model.stage_memory=2GiB")
    told = [each for each in read_plan(MLP, sets=[*workers, *sets]).warnings if "stage_memory" in each]
    assert bool(told) == bool(named)
    assert all("model.stage_memory = 2147483648 is " in each and named in each for each in told)


def test_limits_are_compared_before_the_workers_are_known() -> None:
    (told,) = read_plan(MLP, sets=["model.stages=2", "model.stage_memory=2GiB", "memory=2GiB"]).warnings
    assert "not less than memory.limit = 2147483648" in told
