"""Messages of a run in another layout that cannot begin where it should."""

from dataclasses import replace

from stageline.broker.ledger.recovery import EarlierRun

EARLIER = EarlierRun(120, "runs/digits-1", "runs/digits-1-at120-5e1d03")
PLACEMENT = ((0, 2), (1, 3), ())  # with the place of a script


def test_stage_step_folder_and_command_of_what_is_missing_are_named() -> None:
    said = EARLIER.refusal(PLACEMENT, [1])
    assert said.startswith("the run goes on from step 120 of runs/digits-1, and does not begin below it.")
    assert "stage 1 must have runs/digits-1-at120-5e1d03/checkpoints/stage-1/step-0000000120. " in said
    assert "`stageline checkpoint split runs/digits-1 --step 120 --worker 1 --write`, with this run's plan" in said
    assert "--worker 0 --write` and `stageline" in EARLIER.refusal(PLACEMENT, [0, 3])


def test_what_is_not_known_on_this_machine_is_left_open() -> None:
    said = replace(EARLIER, source="").refusal(PLACEMENT)
    assert "stages 0, 1, 2 and 3 must have" in said
    assert "split RUN --step 120 --write` (of several machines on each, with its --worker)" in said
    assert 'Line.resume("runs/digits-1", ...)' in replace(EARLIER, scripted=True).remedy(PLACEMENT)
