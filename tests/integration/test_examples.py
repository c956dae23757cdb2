"""The examples learn what they are there to learn, before anything is cut, queued or scheduled."""

import json
from xml.etree import ElementTree

import pytest
import torch

from stageline.pipeline.model.cut import build_segments
from stageline.pipeline.model.load import load_function, load_source
from stageline.pipeline.plan import Plan, read_plan
from support.paths import EXAMPLES
from support.reference import ReferenceResult, recipe, train
from support.workspace import Workspace


def measured(plan: Plan, trained: ReferenceResult, metric: str) -> float:
    """`metric` of the trained, unsplit model over the rows its example holds out."""
    model = torch.nn.Sequential(*(layer for part in build_segments(plan) for layer in part.layers)).eval()
    model.load_state_dict(trained.state)
    held_out = load_source(plan).held_out()
    assert held_out is not None
    with torch.no_grad():
        return float(load_function(metric, EXAMPLES / plan.run.name, "metric")(model(held_out[0]), held_out[1]))


@pytest.mark.slow
def test_digits_are_recognised_with_every_epoch_ending_in_a_smaller_batch() -> None:
    plan, plain = read_plan(EXAMPLES / "digits"), recipe(EXAMPLES / "digits", steps=230)
    source = load_source(plan)
    sizes = {len(plain.batch(step)[0]) for step in range(source.steps_per_epoch)}
    assert sizes == {64, 29}
    assert measured(plan, train(plain), "model.py:accuracy") >= 0.97


@pytest.mark.slow
def test_a_few_steps_teach_chargpt_more_than_which_symbols_are_common() -> None:
    kept = {"data.options.keep_back_one_in": 1000}
    plan = read_plan(EXAMPLES / "chargpt", sets=[f"{key}={value}" for key, value in kept.items()])
    plain = recipe(EXAMPLES / "chargpt", steps=120, batch_size=8, microbatches=1, changes=kept)
    symbols = torch.cat([plain.batch(step)[1].flatten() for step in range(120)])
    shares = symbols.bincount().float() / len(symbols)
    by_frequency = -(shares * shares.clamp(min=1e-9).log2()).sum().item()
    assert measured(plan, train(plain), "model.py:bits_per_symbol") < by_frequency - 0.2


def test_the_walk_through_two_stages_by_hand_ends_at_the_unsplit_models_weights(workspace: Workspace) -> None:
    run = workspace.command("script", str(EXAMPLES / "two_stages.py"))
    assert run.returncode == 0, run.stderr
    *_, in_two, unsplit, verdict = run.stdout.splitlines()
    assert in_two.split()[-1] == unsplit.split()[-1]
    assert verdict == "the same weights, to the bit: True"


@pytest.mark.slow
def test_of_eighty_blocks_the_one_that_is_trained_is_where_a_probe_can_tell_the_answer(workspace: Workspace) -> None:
    trained = workspace.command("train", str(EXAMPLES / "one_layer_of_eighty"), "--json")
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout)["metrics"]["accuracy"] > 0.75
    words = ("--rows", "evaluation", "--layers", "block3?", "--layers", "block4?")
    probed = workspace.command("probe", str(workspace.runs()[0]), *words, "--json")
    scores = {each["layer"]: each["score"] for each in json.loads(probed.stdout)["layers"]}
    assert max(scores[f"block{place}"] for place in range(30, 40)) < 0.75
    assert min(scores[f"block{place}"] for place in range(40, 50)) > 0.95


def test_four_ways_of_no_steps_are_refused_before_a_run_begins(workspace: Workspace) -> None:
    run = workspace.command("script", str(EXAMPLES / "four_ways" / "compare.py"), "--steps", "0", "--out", "compared")
    assert run.returncode == 2
    assert run.stderr.endswith("error: --steps 0: a run has 1 or more\n")
    assert not (workspace.folder / "compared").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_model_in_four_ways_has_the_weights_of_plain_loops(workspace: Workspace) -> None:
    """With four microbatches two replicas add gradients in another order than one worker does."""
    sizes = ("--steps", "21", "--microbatches", "4", "--out", "compared")
    run = workspace.command("script", str(EXAMPLES / "four_ways" / "compare.py"), *sizes)
    assert run.returncode == 0, run.stderr
    digests = dict(line.split(": weights_sha256 ") for line in run.stdout.splitlines() if "weights_sha256" in line)
    plain = train(recipe(EXAMPLES / "four_ways", steps=21, microbatches=4))
    assert digests["single"] == digests["pipeline"] == plain.weights_sha256
    assert len(set(digests.values())) == 3
    assert [line[:3] for line in run.stdout.splitlines()[-4:]] == ["yes"] * 4
    drawing = ElementTree.fromstring((workspace.folder / "compared" / "four-ways.svg").read_text())  # noqa: S314
    lines = drawing.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len((line.get("points") or "").split()) for line in lines] == [21] * 4
