"""An interrupted run saves its step and exits 75; the same command with --resume ends as if nothing had been."""

import json
import signal

from desk import until

RECOVERY = ("--set", "recovery.restarts=3", "--set", "recovery.snapshot_every=100")
STEPS = ("--set", "run.steps=1500", "--set", "run.log_every=250")


def result(text: str) -> dict:
    """What a run came to, without what every run has of its own."""
    found = json.loads(text.splitlines()[-1])
    return {key: found[key] for key in ("steps", "loss", "losses", "metrics", "weights_sha256")}


def test_an_interrupted_run_goes_on_where_it_was(desk):
    undisturbed = desk.command("train", ".", "--json", *STEPS)
    train = desk.start("train", ".", "--json", *STEPS, *RECOVERY)
    until(train.stderr, "running")
    train.send_signal(signal.SIGTERM)
    _, errors = train.communicate()
    assert train.returncode == 75, errors
    assert "steps is saved" in errors
    assert "failed" not in errors
    longer = desk.command("train", ".", "--resume", *STEPS, *RECOVERY, "--set", "run.steps=1501")
    assert longer.returncode == 78
    assert "run.steps: 1501 here, 1500 there" in longer.stderr
    resumed = desk.command("train", ".", "--json", "--resume", *STEPS, *RECOVERY)
    assert resumed.returncode == 0, resumed.stderr
    assert result(resumed.stdout) == result(undisturbed.stdout)


def test_there_must_be_a_run_to_resume(desk):
    nothing = desk.command("train", ".", "--resume")
    assert nothing.returncode == 2
    assert "leave out --resume" in nothing.stderr
    unknown = desk.command("train", ".", "--resume", "small-1")
    assert unknown.returncode == 2
    assert "there is no run small-1" in unknown.stderr
