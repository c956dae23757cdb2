"""`stageline plan`: what a plan results in."""

import json
import tomllib

import pytest

from stageline.pipeline import schedule
from stageline.pipeline.plan.tables import flat
from stageline.pipeline.program import check_schedule
from support.answers import conforming


def test_a_plan_is_shown_with_who_decided_each_key_and_what_the_stages_take(workspace, capsys):
    assert workspace.here("plan", ".", "--set", "run.steps=9") == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["run.steps"] == ["run.steps", "9", "--set"]
    assert rows["model.cut"] == ["model.cut", "[2]", "file"]
    assert rows["queues.url"] == ["queues.url", '"shm://"', "default"]
    assert "forward-1" in rows


def test_a_plans_forecast_counts_parameters_bytes_and_messages_as_they_are(workspace, capsys):
    assert workspace.here("plan", ".", "--json", "--set", "optimizer.factory=torch.optim.Adam") == 0
    found = conforming(capsys.readouterr().out)
    first, last = found["stages"]
    assert found["schema"] == "plan/1"
    assert [first["parameters"], last["parameters"]] == [4 * 8 + 8, 8 * 2 + 2]
    assert first["bytes"]["weights"] == first["bytes"]["gradients"] == 4 * first["parameters"]
    two_moments_and_a_step_count_for_each_of_two_tensors = 2 * first["bytes"]["weights"] + 2 * 4
    assert first["bytes"]["optimizer"] == two_moments_and_a_step_count_for_each_of_two_tensors
    assert (first["in_flight"], last["in_flight"]) == (2, 1)
    assert first["total"] == sum(first["bytes"].values())
    queues = {each["queue"]: each for each in found["queues"]}
    activation = 2 * 8 * 4  # rows, width, bytes of a float32
    assert activation < queues["forward-1"]["message"] < activation + 200  # and a header
    assert queues["forward-1"]["retained"] == 3 * 6 * queues["forward-1"]["message"]  # of 3 microbatches, all 6 steps
    assert found["idle"] == list(check_schedule(schedule.make_schedule("1f1b", [(0,), (1,)], 3)).idle)


def test_a_run_that_chooses_its_schedule_is_told_between_which_and_when_halves_of_backwards_are_refused(
    workspace, capsys
):
    auto = ("--set", "schedule.name=auto", "--set", "schedule.memory=1GiB")
    assert workspace.here("plan", ".", *auto) == 0
    printed = capsys.readouterr().out
    assert "auto: zb-h1 split each backward in two halves" in printed
    assert "rejected if they take over 1.15 times as long as the whole" in printed
    assert workspace.here("plan", ".", *auto, "--set", "memory.recompute=stage") == 0
    printed = capsys.readouterr().out
    assert "splits backwards in two halves, and stages 0, 1 cannot, since activations are recomputed there" in printed
    assert "auto: zb-h1" not in printed


def test_codecs_are_told_with_the_bytes_of_what_they_write(workspace, capsys):
    codec = ("--set", "queues.codec.forward=int8")
    assert workspace.here("plan", ".", "--json", *codec) == 0
    queues = {each["queue"]: each for each in conforming(capsys.readouterr().out)["queues"]}
    assert {name: each["codec"] for name, each in queues.items()} == {"forward-1": "int8", "backward-0": "lossless"}
    header = queues["backward-0"]["message"] - 2 * 8 * 4
    assert abs(queues["forward-1"]["message"] - header - (2 * 8 + 2 * 4)) <= 2  # 2 rows of 8, with scales
    assert workspace.here("plan", ".", *codec) == 0
    assert "codec" in capsys.readouterr().out.split("queues", 2)[2].splitlines()[1]


def test_of_a_stage_that_a_group_computes_the_memory_is_said_to_be_unknown(workspace, capsys):
    # Numbers of one process with the whole stage were shown as those of each process of the group.
    group = ("--set", "stage.0.shard=2")
    assert workspace.here("plan", ".", *group) == 0
    out = capsys.readouterr().out
    stages, workers = (out.split(title, 1)[1].splitlines() for title in ("\nstages\n", "beyond its program\n"))
    assert [line.split()[-1] == "unknown" for line in (*stages[1:3], *workers[1:3])] == [True, False, True, False]
    told = "computed by a group of 2 processes: what each of them takes is not known. Before it is split, each loads"
    assert told in out
    assert workspace.here("plan", ".", "--json", *group) == 0
    assert [each["group"] for each in conforming(capsys.readouterr().out)["stages"]] == [2, 1]


def test_the_bytes_of_what_is_tapped_are_told_before_the_run(workspace, capsys):
    taps = ("--set", 'taps.layers=["1", "2"]', "--set", "taps.every=4")
    assert workspace.here("plan", ".", *taps) == 0  # 3 microbatches of 2 rows; steps 0 and 4
    told = (
        "taps: stage 0 64 B, stage 1 16 B a microbatch; 240 B a stored step, and 480 B in the 2 steps that are stored"
    )
    assert told in capsys.readouterr().out.splitlines()
    assert workspace.here("plan", ".") == 0
    assert "taps" not in capsys.readouterr().out


def test_a_plan_tells_what_copies_of_snapshots_take_and_which_stages_have_none(workspace, capsys):
    copies = ("--set", "recovery.copies=1", "--set", "recovery.copy_bandwidth=160")
    assert workspace.here("plan", ".", *copies) == 0  # 40 numbers of 4 bytes, without optimizer state
    told = capsys.readouterr().out
    assert "worker 0 sends 160 B to worker 1 every 20 steps, which takes 1.0 s by recovery.copy_bandwidth" in told
    assert workspace.here("plan", ".", "--set", "recovery.copies=1", "--set", "workers.0.stages=[0, 1]") == 0
    told = capsys.readouterr().out
    assert "stage 0 has no copy" in told
    assert "stage 1 has no copy" in told


@pytest.mark.parametrize("command", ["plan", "train"])
def test_messages_that_have_no_room_until_a_checkpoint_lets_them_go_are_refused(command, workspace, capsys):
    assert workspace.here("plan", ".", "--json", "--set", "recovery.restarts=0") == 0
    step = max(each["retained"] for each in conforming(capsys.readouterr().out)["queues"])
    words = (command, ".", "--set", "run.steps=50", "--set", "recovery.snapshot_every=9")
    tight = f"queues.retain_bytes={10 * step // 5 - 1}"
    assert workspace.here(*words, "--set", tight, "--set", "recovery.restarts=1") == 78
    said = capsys.readouterr().err
    assert "the messages of 10 steps (recovery.snapshot_every is 9)" in said
    assert 'Use "1MiB" or more, or a smaller recovery.snapshot_every' in said
    assert workspace.runs() == []
    off = ("--set", "recovery.restarts=0")  # then a step's messages are enough
    assert workspace.here("plan", ".", *words[2:], *off, "--set", tight) == 0
    capsys.readouterr()
    assert workspace.here(*words, *off, "--set", f"queues.retain_bytes={step // 5 - 1}") == 78
    assert "the messages of one step" in capsys.readouterr().err


def test_messages_that_just_have_room_until_a_checkpoint_are_not_refused(workspace, capsys):
    assert workspace.here("plan", ".", "--json", "--set", "recovery.restarts=0") == 0
    step = max(each["retained"] for each in conforming(capsys.readouterr().out)["queues"])
    words = ("--set", "run.steps=50", "--set", "recovery.snapshot_every=9", "--set", "recovery.restarts=1")
    assert workspace.here("plan", ".", *words, "--set", f"queues.retain_bytes={2 * step}") == 0


MACHINES = """
[hosts.here]
memory = "{memory}B"

[hosts.there]
memory = "{memory}B"

[[links]]
between = ["here", "there"]
latency = "10s"
bandwidth = "10GB/s"
"""


def test_stages_are_found_for_machines_and_the_plan_takes_the_printed_lines(workspace, capsys):
    def fitted(memory: int, *more: str) -> str:
        workspace.write("hosts.toml", MACHINES.format(memory=memory))
        assert workspace.here("plan", ".", "--fit", str(workspace.folder / "hosts.toml"), *more) == 0
        return capsys.readouterr().out

    found = conforming(fitted(10**6, "--json"))
    assert found["schema"] == "fit/1"
    (whole,) = found["stages"]  # ten seconds are more than this model takes
    assert "cut" not in (lines := tomllib.loads(fitted(10**6).split("In the plan:")[1]))["model"]
    lines = tomllib.loads(fitted(whole["bytes"] - 1).split("In the plan:")[1])
    sets = [f"--set={key}={json.dumps(value)}" for key, value in flat(lines).items()]
    assert workspace.here("plan", ".", "--json", *sets) == 0
    stages = conforming(capsys.readouterr().out)["stages"]
    assert [stage["layers"][0] for stage in stages] == ["0", *map(str, lines["model"]["cut"])]


def test_machines_without_room_are_refused_by_what_is_in_the_way(workspace, capsys):
    workspace.write("hosts.toml", '[hosts.here]\nmemory = "9B"\n')
    machines = workspace.folder / "hosts.toml"
    assert workspace.here("plan", ".", "--fit", str(machines)) == 78
    assert "memory: no cut and no order of machines fits" in capsys.readouterr().err
