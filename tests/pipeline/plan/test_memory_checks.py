"""A limit of memory in a plan: how it is written, and where it cannot be had."""

import pytest

from stageline.pipeline.plan import PlanRefused, read_plan
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
    with pytest.raises(PlanRefused, match=r'toml:1: memory.limit = "64XB": a size in bytes, .*; units are B, KB'):
        read_plan(file)


@pytest.mark.parametrize("size", ["0", "-1", '"-2GB"', '"2XB"', '"GiB"', "2.5", "true", '"1e9"'])
def test_what_is_no_size_is_refused_with_an_example(size: str) -> None:
    for key in ("memory", "memory.limit"):
        with pytest.raises(PlanRefused, match=r'memory.limit = .*: a size in bytes, such as 1048576 or "512MiB", is w'):
            read_plan(MLP, sets=[f"{key}={size}"])


@pytest.mark.parametrize(
    ("sets", "key", "reason"),
    [
        (("queues.url=memory://",), "memory.limit", "all workers are in one process"),
        (("schedule.name=auto", "schedule.memory=1GiB"), "memory.limit", "may change how many microbatches are in f"),
        (("stage.1.shard=2",), "memory.limit", "stage 1 is computed by several processes"),
        (
            ("model.stages=2", "workers.0.stages=[0]", "workers.1.stages=[1]", "workers.1.device=cuda:0"),
            "memory.limit",
            "worker 1 computes on cuda:0",
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
    assert plain.digest() == limited.digest() == chosen.digest()
