"""Plan files, and what overrules them."""

import os

from misuse.case import Change, Ended, Misuse
from support.workspace import Workspace


def plan(what: str, before: str, after: str, *said: str, code: int = 78) -> Misuse:
    """A change to the plan file."""
    return Misuse(what, code, said, (Change("stageline.toml", before, after),))


def given(what: str, *words: str, said: tuple[str, ...], code: int = 78) -> Misuse:
    """`train` with more words."""
    return Misuse(what, code, said, command=("train", ".", *words))


def setting(what: str, value: str, *said: str, code: int = 78) -> Misuse:
    return given(what, "--set", value, said=said, code=code)


def _latin(workspace: Workspace) -> Ended:
    (workspace.folder / "stageline.toml").write_bytes('[run]\nname = "Übung"\n'.encode("latin-1"))
    return workspace.command("train", ".")


def _read_only(workspace: Workspace) -> Ended:
    (workspace.folder / "runs").mkdir(mode=0o500)
    try:
        return workspace.command("train", ".")
    finally:
        (workspace.folder / "runs").chmod(0o700)


def _runs_is_a_file(workspace: Workspace) -> Ended:
    workspace.write("runs", "")
    return workspace.command("train", ".")


def _unreadable(workspace: Workspace) -> Ended:
    (workspace.folder / "stageline.toml").unlink()
    (workspace.folder / "stageline.toml").mkdir()
    return workspace.command("train", ".")


ROWS = (
    given("a plan file that is not there", "--set", "run.steps=2", said=("no plan",), code=78),
    Misuse("a folder without a plan", 78, (), (Change("stageline.toml", None, None),)),
    Misuse("a plan that is not there", 78, (), command=("train", "nope.toml")),
    Misuse("a folder in the plan's place", 78, (), play=_unreadable),
    plan("a plan that is not TOML", "[run]", "[run"),
    Misuse("a plan that is not UTF-8", 78, (), play=_latin),
    plan("an unknown key", "steps = 6", "step = 6"),
    plan("an unknown section", "[data]", "[dta]"),
    plan("a number as text", "steps = 6", 'steps = "six"'),
    plan("true as a number", "steps = 6", "steps = true"),
    plan("a missing key", 'source = "data.py:batches"', ""),
    plan("no steps at all", "steps = 6", "steps = 0"),
    plan("a negative seed", "steps = 6", "steps = 6\nseed = -1"),
    plan("an absurd number of stages", "cut = [2]", "stages = 1000000000"),
    plan("an absurd number of microbatches", "microbatches = 3", "microbatches = 1000000000"),
    plan("an absurd number of steps", "steps = 6", "steps = 99999999999999999999"),
    plan("steps and epochs", "steps = 6", "steps = 6\nepochs = 2"),
    plan("a learning rate that is NaN", "lr = 0.1", "lr = nan"),
    plan("a cut outside the model", "cut = [2]", "cut = [3]"),
    plan("a descending cut", "cut = [2]", "cut = [2, 1]"),
    plan("cut and stages that disagree", "cut = [2]", "cut = [2]\nstages = 3"),
    plan("a stage without a worker", "[optimizer]", "[workers.0]\nstages = [0]\n\n[optimizer]"),
    plan("a stage that two workers own", "[optimizer]", "[workers.0]\nstages = [0, 1]\n[workers.1]\nstages = [1]\n\n[optimizer]"),
    plan("workers that are not numbered from 0", "[optimizer]", "[workers.1]\nstages = [0, 1]\n\n[optimizer]"),
    plan("a worker of a stage that is not there", "[optimizer]", "[workers.0]\nstages = [0, 1, 7]\n\n[optimizer]"),
    plan("a batch smaller than its microbatches", "batch_size = 6", "batch_size = 2"),
    plan("an unknown schedule", "[schedule]", '[schedule]\nname = "1f1"'),
    plan("a window that cannot run", "[schedule]", '[schedule]\nname = "window"\nwindow = [1, 2]'),
    plan("a window of the wrong length", "[schedule]", '[schedule]\nname = "window"\nwindow = [2]'),
    plan("a window for another schedule", "[schedule]", '[schedule]\nwindow = [2, 1]'),
    plan("asynchronous, with microbatches", "[schedule]", '[schedule]\nmode = "async"'),
    setting("too little room to retain messages", "queues.retain_bytes=100"),
    setting("record all without recovery", "recovery.record=all"),
    given("record all without recovery", "--set", "recovery.record=all", "--set", "recovery.restarts=0", said=()),
    setting("`--set` without a value", "run.steps", code=2),
    setting("`--set` of an unknown key", "run.stpes=3"),
    setting("`--set` of a section", "run=3"),
    Misuse("an unknown key in the environment", 78, (), environment={"STAGELINE_RUN__STPES": "3"}),
    Misuse("a wrong value in the environment", 78, (), environment={"STAGELINE_RUN__STEPS": "six"}),
    Misuse("an unknown section in the environment", 78, (), environment={"STAGELINE_RUM__STEPS": "6"}),
    setting("an unknown kind of address", "queues.url=http://localhost"),
    setting("a port that is none", "queues.url=tcp://127.0.0.1:99999"),
    setting("a host that has no address", "queues.url=tcp://no-such-host.invalid:0"),
    setting("a socket path", "queues.url=ipc:///tmp/x"),
    setting("a lease of nothing", "recovery.lease=0"),
    setting("a lease that is infinite", "recovery.lease=inf"),
    setting("a device that is not there", "workers.0.device=cuda:77"),
    setting("a device that torch does not know", 'workers.0.device="quantum"'),
    setting("a run name with a slash", "run.name=../up"),
    setting("a run name that is too long", f"run.name={'a' * 250}"),
    Misuse("`run.dir` is a file", 78, (), play=_runs_is_a_file),
    setting("`run.dir` cannot be made", "run.dir=/proc/x"),
    *([] if os.geteuid() == 0 else [Misuse("`run.dir` is read-only", 78, (), play=_read_only)]),
)
