"""A plan is tried in processes that are watched: whatever the user's code does, it is named, and nothing hangs."""

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import pytest

from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.plan import read_plan
from stageline.workers.extras.preflight.trial_result import TriedPlan
from stageline.workers.extras.preflight.trials import TrialFailed, try_plan
from support.fork_server import ForkedCommand, ForkServer
from support.workspace import DATA, MODEL, Workspace


class TrialStarter:
    """Tries the plan of a workspace; the processes that it started are `started`."""

    def __init__(self, workspace: Workspace, fork_server: ForkServer) -> None:
        self.started: list[ForkedCommand] = []
        self._folder = workspace.folder
        self._fork_server = fork_server

    def __call__(self, *sets: str) -> TriedPlan:
        arguments = [str(self._folder), *(argument for each in sets for argument in ("--set", each))]
        return try_plan(read_plan(self._folder, sets=sets), arguments, self._spawn)

    def _spawn(self, arguments: Sequence[str], log: TextIO) -> ForkedCommand:
        process = self._fork_server.spawn(arguments, log)
        self.started.append(process)
        return process


@pytest.fixture
def tried(workspace: Workspace, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> TrialStarter:
    monkeypatch.chdir(workspace.folder)
    return TrialStarter(workspace, fork_server)


def line_of(file: Path, text: str) -> int:
    return next(number for number, line in enumerate(file.read_text().splitlines(), 1) if text in line)


FORWARD = """
import os, signal, sys, ctypes
from time import sleep

class Odd(nn.Linear):
    def forward(self, x):
        {code}
        return super().forward(x)
"""
EXITS = {
    "exit 0": ("os._exit(0)", "ended without a result (status 0)"),
    "exit 3": ("os._exit(3)", "ended without a result (status 3)"),
    "a crash": ("ctypes.string_at(0)", "was killed by SIGSEGV"),
    "a kill": ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
}


def odd_forward(workspace: Workspace, code: str) -> None:
    model = MODEL.replace("nn.Linear(8, 2)", "Odd(8, 2)")
    workspace.write("model.py", model + FORWARD.format(code=code))


@pytest.mark.parametrize("how", EXITS)
def test_a_process_that_ends_without_a_result_is_named_with_what_it_did(
    how: str, workspace: Workspace, tried: TrialStarter
) -> None:
    code, end = EXITS[how]
    odd_forward(workspace, code)
    with pytest.raises(TrialFailed) as failed:
        tried()
    assert f"{end} in the trial of one microbatch: stage 1, forward" in str(failed.value)
    if how != "a kill":  # which leaves no time to tell
        file = workspace.folder / "model.py"
        place = f"at forward ({file}, line {line_of(file, code)})"
        assert place in str(failed.value)
    assert failed.value.exit_code == 78


@pytest.mark.slow
@pytest.mark.parametrize("code", ["while True: sleep(0.01)", "ctypes.PyDLL(None).sleep(100)"])
def test_a_hang_is_named_with_the_users_line_and_ended_even_if_it_holds_the_interpreter(
    code: str, workspace: Workspace, tried: TrialStarter
) -> None:
    odd_forward(workspace, code)
    with pytest.raises(TrialFailed) as failed:
        tried("recovery.loading=2")
    file = workspace.folder / "model.py"
    line = line_of(file, code)
    assert str(failed.value) == (
        "the trial of the plan was still in the trial of one microbatch: stage 1, forward after 2 s, at forward "
        f"({file}, line {line}). If that may take this long, raise recovery.loading. Nothing was trained [SL109]"
    )
    assert all(process.poll() is not None for process in tried.started)


PLACES = {
    "model.factory": ("model.py", "def build():\n", "def build():\n    {code}\n"),
    "data.source": ("data.py", "def batches(batch_size, seed):\n", "def batches(batch_size, seed):\n    {code}\n"),
}


@pytest.mark.parametrize("key", PLACES)
@pytest.mark.parametrize("code", ["__import__('os')._exit(0)", "raise SystemExit(0)", "raise KeyboardInterrupt"])
def test_whatever_ends_a_factory_is_an_error_of_the_users_code(
    code: str, key: str, workspace: Workspace, tried: TrialStarter
) -> None:
    name, before, after = PLACES[key]
    workspace.write(name, (workspace.folder / name).read_text().replace(before, after.format(code=code)))
    with pytest.raises(ModelRefused) as refused:
        tried()
    assert key in str(refused.value)
    assert f"{name}, line {line_of(workspace.folder / name, code)}" in str(refused.value)
    assert refused.value.exit_code == 78


def test_what_the_users_code_prints_is_shown_once_and_where_it_fails(
    workspace: Workspace, tried: TrialStarter, capfd: pytest.CaptureFixture[str]
) -> None:
    workspace.write("model.py", MODEL.replace("def build():", "def build():\n    print('makes the model')"))
    tried()
    assert capfd.readouterr().err == "makes the model\n"
    odd_forward(workspace, "print('says this', end='', flush=True) or os._exit(1)")
    with pytest.raises(TrialFailed):
        tried()
    assert capfd.readouterr().err.count("says this") >= 1


UNLIKE = """
import os
GOES_ON = torch.Generator().manual_seed(1)

class Unlike(Rows):
    def batch(self, step):
        inputs, targets = super().batch(step)
        {change}
        return inputs, targets

def unlike(batch_size, seed):
    made = batches(batch_size, seed)
    made.__class__ = Unlike
    return made
"""
DRAWS = {
    "the global generator": ("inputs[3] += torch.rand(()).item()", "when it was called again: row 3 of inputs."),
    "a generator that goes on": ("inputs[2:] += torch.rand(1, generator=GOES_ON)", "called again: row 2 of inputs."),
    "the process": ("inputs[1] = os.getpid()", "in another process: row 1 of inputs."),
}


@pytest.mark.parametrize("what", DRAWS)
def test_a_source_that_draws_otherwise_is_refused_and_the_row_named(
    what: str, workspace: Workspace, tried: TrialStarter
) -> None:
    change, told = DRAWS[what]
    workspace.write("data.py", DATA + UNLIKE.format(change=change))
    with pytest.raises(ModelRefused) as refused:
        tried('data.source="data.py:unlike"')
    assert told in str(refused.value)
    assert "data.check = false" in str(refused.value)
    assert tried('data.source="data.py:unlike"', "data.check=false").first_trainable == 0
    assert len(tried.started) == 3


def test_weights_that_no_seed_decides_are_refused_and_named(workspace: Workspace, tried: TrialStarter) -> None:
    """Two forks of one process draw the same numbers, unless each begins for itself."""
    unseeded = "import random\n" + MODEL.replace(
        "    return nn.Seq", "    import torch\n    torch.manual_seed(random.randrange(10**9))\n    return nn.Seq"
    )
    workspace.write("model.py", unseeded)
    with pytest.raises(ModelRefused, match=r"at first in 0\.weight of stage 0 as model\.factory made it"):
        tried()


def test_a_batch_that_is_no_pair_is_refused_with_the_users_line(workspace: Workspace, tried: TrialStarter) -> None:
    workspace.write("data.py", DATA + UNLIKE.format(change="raise ValueError('no file')"))
    line = line_of(workspace.folder / "data.py", "no file")
    with pytest.raises(DataError, match=rf"ValueError: no file \(/.*/data\.py, line {line}, in batch\)"):
        tried('data.source="data.py:unlike"')


def test_a_signal_ends_the_trials_at_once_and_then_does_what_it_did_before(
    workspace: Workspace, tried: TrialStarter
) -> None:
    os.mkfifo(workspace.folder / "gate")
    odd_forward(workspace, "open('gate').read()")

    def interrupt() -> None:
        with (workspace.folder / "gate").open("w"):  # opens once a trial reads
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        tried()
    thread.join()
    assert all(process.poll() is not None for process in tried.started)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
