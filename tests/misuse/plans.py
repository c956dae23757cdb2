"""Plan files, and what overrules them."""

from pathlib import Path

from misuse.case import Change, Ended, Misuse
from support.workspace import Workspace

PLAN = "stageline.toml"
WORKERS = "[optimizer]"  # tables of workers are put before it


def plan(what: str, before: str, after: str, *said: str) -> Misuse:
    """A change to the plan file, which is refused."""
    return Misuse(what, 78, said, (Change(PLAN, before, after),))


def workers(what: str, tables: str, *said: str) -> Misuse:
    return plan(what, WORKERS, f"{tables}\n\n{WORKERS}", *said)


def sets(what: str, values: tuple[str, ...], *said: str, code: int = 78) -> Misuse:
    """`train` with values after --set."""
    return Misuse(what, code, said, command=("train", ".", *(word for value in values for word in ("--set", value))))


def environment(what: str, name: str, value: str, *said: str) -> Misuse:
    return Misuse(what, 78, said, environment={name: value})


def _in_latin_1(workspace: Workspace) -> Ended:
    (workspace.folder / PLAN).write_bytes('[run]\nname = "Übung"\n'.encode("latin-1"))
    return workspace.command("train", ".")


def _a_folder(workspace: Workspace) -> Ended:
    (workspace.folder / PLAN).unlink()
    (workspace.folder / PLAN).mkdir()
    return workspace.command("train", ".")


def _runs_is_a_file(workspace: Workspace) -> Ended:
    workspace.write("runs", "")
    return workspace.command("train", ".")


def _too_deep(workspace: Workspace) -> Ended:
    deep = Path(workspace.temporary) / ("a" * 120)
    deep.mkdir()
    return workspace.command("train", ".", TMPDIR=str(deep))


NO_FILE = ("there is no such file", "`stageline init` writes one")
NO_FOLDER = ("the folder of the run, ", "cannot be made")
ROWS = (
    Misuse("a folder without a plan", 78, NO_FILE, (Change(PLAN, None, None),)),
    Misuse("a plan file that is not there", 78, ("nope.toml: ", *NO_FILE), command=("train", "nope.toml")),
    Misuse("a folder in the place of the file", 78, ("it cannot be read: Is a directory",), play=_a_folder),
    plan("a file that is not TOML", "[run]", "[run", "this is not TOML", "(at line 2, column 5)"),
    Misuse("a file that is not UTF-8", 78, ("byte 14 is not UTF-8",), play=_in_latin_1),
    plan("a key that does not exist", "steps = 6", "step = 6", ":4: run.step: ", 'did you mean "steps"?'),
    plan("a table that does not exist", "[data]", "[dta]", "dta: there is no such table", 'did you mean "data"?'),
    plan("a missing key", 'factory = "model.py:build"', "", "model.factory: missing", 'such as "model.py:build"'),
    plan("no data", 'source = "data.py:batches"', "", "data.source: say where the batches come from"),
    plan("text for a number", "steps = 6", 'steps = "six"', 'run.steps = "six": expected a whole number of at least 1'),
    plan("true for a number", "steps = 6", "steps = true", "run.steps = true", "got true or false"),
    plan("no steps", "steps = 6", "steps = 0", "run.steps = 0: expected a whole number of at least 1"),
    plan("a seed below 0", "steps = 6", "steps = 6\nseed = -1", "run.seed = -1: expected a whole number of at least 0"),
    plan("a learning rate that is no number", "lr = 0.1", "lr = nan", "optimizer.lr = NaN", "not a finite number"),
    plan(
        "a billion stages",
        "cut = [2]",
        "stages = 1000000000",
        "model.stages = 1000000000: expected a whole number from 1 to 1024",
    ),
    plan(
        "a billion microbatches",
        "microbatches = 3",
        "microbatches = 1000000000",
        "schedule.microbatches = 1000000000: expected a whole number from 1 to 65536",
    ),
    plan("steps and epochs", "steps = 6", "steps = 6\nepochs = 2", "epochs = 2 is given too; keep one of the two"),
    plan("a cut outside the model", "cut = [2]", "cut = [3]", "model.cut = [3]", "3 layers", "1 to 2"),
    plan(
        "a cut at a name that is none",
        "cut = [2]",
        'cut = ["h.2"]',
        'model.cut = ["h.2"]: no layer is named h.2; layers have names such as 2',
    ),
    plan("a cut that descends", "cut = [2]", "cut = [2, 1]", "model.cut = [2, 1]", "a list of ascending layer numbers"),
    plan(
        "a cut and another number of stages",
        "cut = [2]",
        "cut = [2]\nstages = 3",
        "model.stages = 3",
        "leave stages out",
    ),
    workers("a stage without a worker", "[workers.0]\nstages = [0]", "stage 1 is owned by no worker"),
    workers(
        "a stage with two workers",
        "[workers.0]\nstages = [0, 1]\n[workers.1]\nstages = [1]",
        "stage 1 is owned by worker 0 and worker 1; give it to exactly one worker",
    ),
    workers("workers with a gap", "[workers.1]\nstages = [0, 1]", "workers are numbered from 0 without gaps"),
    workers("a worker of a stage too many", "[workers.0]\nstages = [0, 1, 7]", "stage 7", "there are 2 stages, 0 to 1"),
    workers(
        "a device that is not there",
        '[workers.0]\nstages = [0, 1]\ndevice = "cuda:77"',
        'workers.0.device = "cuda:77"',
    ),
    plan(
        "a batch smaller than its microbatches",
        "batch_size = 6",
        "batch_size = 2",
        "expected a row for each of 3 microbatches, got 2",
    ),
    plan("a schedule that does not exist", "[schedule]", '[schedule]\nname = "1f1"', '"1f1"', 'did you mean "1f1b"?'),
    plan(
        "a window that blocks itself",
        "[schedule]",
        '[schedule]\nname = "window"\nwindow = [1, 2]',
        "stage 0 would wait for a gradient",
        "raise the window of stage 0 to 2",
    ),
    plan(
        "a window of another length",
        "[schedule]",
        '[schedule]\nname = "window"\nwindow = [2]',
        "schedule.window = [2]: expected 2 values, one for each stage, got 1",
    ),
    plan(
        "a window for 1f1b",
        "[schedule]",
        "[schedule]\nwindow = [2, 1]",
        'use schedule.name = "window", or leave it out',
    ),
    plan(
        "auto without a limit",
        "[schedule]",
        '[schedule]\nname = "auto"',
        "schedule.memory",
        "Set what a worker may take",
    ),
    sets(
        "a limit for auto that nothing fits",
        ("schedule.name=auto", "schedule.memory=10"),
        "schedule.memory = 10",
        "a worker takes",
        "with 1f1b, with which the run begins",
    ),
    plan("a limit without auto", "[schedule]", "[schedule]\nmemory = 10", 'does not use it; use name = "auto"'),
    plan("mode async with microbatches", "[schedule]", '[schedule]\nmode = "async"', "use microbatches = 1"),
    sets(
        "no room to retain messages",
        ("queues.retain_bytes=100",),
        "queues.retain_bytes = 100",
        'it would wait for ever. Use "1MiB" or more',
    ),
    sets(
        "a limit of memory that nothing fits",
        ("memory=1MiB",),
        "memory.limit = 1048576: worker 0 would take",
        "with the closest choice: stage 0 with recompute",
        'Use "17MiB" or more',
    ),
    sets(
        "a limit of memory in no unit",
        ("memory=2XB",),
        'memory.limit = "2XB": expected a size in bytes',
        "units are B, KB",
    ),
    sets(
        "recording without snapshots",
        ("recovery.record=all", "recovery.restarts=0"),
        'recovery.record = "all": a replay begins at a snapshot',
    ),
    sets("a lease of nothing", ("recovery.lease=0",), "recovery.lease = 0: expected a time in seconds"),
    sets("an endless lease", ("recovery.lease=inf",), "recovery.lease = Infinity: expected a time in seconds"),
    sets("`--set` without a value", ("run.steps",), "--set: run.steps: write section.key=value"),
    sets("`--set` of a key that does not exist", ("run.stpes=3",), "--set: run.stpes", 'did you mean "steps"?'),
    sets("`--set` of a whole table", ("run=3",), "--set: run = 3: this is a table"),
    environment("a variable for no key", "STAGELINE_RUN__STPES", "3", "STAGELINE_RUN__STPES", 'did you mean "steps"?'),
    environment("a variable for no table", "STAGELINE_RUM__STEPS", "6", "STAGELINE_RUM__STEPS", 'did you mean "run"?'),
    environment(
        "a variable of the wrong type", "STAGELINE_RUN__STEPS", "six", 'STAGELINE_RUN__STEPS: run.steps = "six"'
    ),
    sets("an address of no transport", ("queues.url=http://localhost",), 'queues.url = "http://localhost"', "expected"),
    sets("a port above 65535", ("queues.url=tcp://127.0.0.1:99999",), "a port is at most 65535"),
    sets(
        "a host that has no address",
        ("queues.url=tcp://no-such-host.invalid:0",),
        "cannot listen at tcp://no-such-host.invalid:0",
        "use one of its own, or 127.0.0.1",
        code=1,
    ),
    sets("a run's name with a slash", ("run.name=../up",), 'run.name = "../up": expected a name of letters, digits'),
    sets("a run's name that is too long", (f"run.name={'a' * 250}",), *NO_FOLDER, "File name too long"),
    Misuse("`run.dir` is a file", 78, (*NO_FOLDER, "Not a directory"), play=_runs_is_a_file),
    sets(
        "`run.dir` where nothing can be made", ("run.dir=/proc/x",), *NO_FOLDER, "give others, or remove what is there"
    ),
    Misuse(
        "a folder for temporary files too deep for sockets",
        1,
        ("is too long for sockets", "Set TMPDIR to a shorter folder"),
        play=_too_deep,
    ),
)
