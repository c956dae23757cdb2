"""Commands: wrong words, wrong places, and processes of a run that do not belong together."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

from misuse.case import Change, Ended, Misuse, interrupted
from misuse.code import PLAN
from support.workspace import Command, Workspace, free_port, until

FOR_EVER = ("--set", "run.steps=1000000")
WRONG_CUT = (Change(PLAN, "cut = [2]", "cut = [3]"),)


def words(what: str, *command: str, said: tuple[str, ...], code: int = 2, changes: tuple[Change, ...] = ()) -> Misuse:
    return Misuse(what, code, said, changes, command)


def played(
    what: str,
    play: Callable[[Workspace], Ended],
    *said: str,
    code: int = 1,
    finishes: bool = False,
    slow: bool = False,
) -> Misuse:
    return Misuse(what, code, said, play=play, finishes=finishes, slow=slow)


def after_a_run(*command: str) -> Callable[[Workspace], Ended]:
    """Runs a command once a run has finished; RUN in it is the run's folder."""

    def play(workspace: Workspace) -> Ended:
        assert workspace.command("train", ".").returncode == 0
        (folder,) = workspace.runs()
        return workspace.command(*(word.replace("RUN", f"runs/{folder.name}") for word in command))

    return play


def beside_a_run(*command: str) -> Callable[[Workspace], Ended]:
    """Runs a command while the run of the folder goes on; RUN in it is the run's name."""

    def play(workspace: Workspace) -> Ended:
        train = workspace.start("train", ".", *FOR_EVER)
        until(train.stderr, "running")
        (folder,) = workspace.runs()
        found = workspace.command(*(word.replace("RUN", folder.name) for word in command))
        interrupted(train)
        return found

    return play


def after_an_interrupt(*command: str) -> Callable[[Workspace], Ended]:
    """Runs a command once a run was interrupted and saved; RUN in it is the run's name."""

    def play(workspace: Workspace) -> Ended:
        train = workspace.start("train", ".", *FOR_EVER)
        until(train.stderr, "running")
        (folder,) = workspace.runs()
        assert interrupted(train).returncode == 75
        return workspace.command(*(word.replace("RUN", folder.name) for word in command))

    return play


def beside_a_broker(*command: str) -> Callable[[Workspace], Ended]:
    """Runs a command while a broker waits for its workers; URL in it is the broker's address."""

    def play(workspace: Workspace) -> Ended:
        broker, url = _broker(workspace)
        found = workspace.command(*(word.replace("URL", url) for word in command))
        interrupted(broker)
        return found

    return play


def beside_a_website(*command: str) -> Callable[[Workspace], Ended]:
    """Runs a command beside a web server; PORT in it is its port."""

    def play(workspace: Workspace) -> Ended:
        with _website() as port:
            return workspace.command(*(word.replace("PORT", str(port)) for word in command))

    return play


def _taken_index(workspace: Workspace) -> Ended:
    broker, url = _broker(workspace)
    first = workspace.start("worker", ".", "--broker", url, "--index", "0", "--name", "first")
    until(first.stderr, "assigned")
    second = workspace.command("worker", ".", "--broker", url, "--index", "0", "--name", "second")
    interrupted(broker)
    interrupted(first)
    return second


def _broker(workspace: Workspace) -> tuple[Command, str]:
    broker = workspace.start("broker", ".", "--bind", f"tcp://127.0.0.1:{free_port()}")
    return broker, until(broker.stderr, "broker at").split("broker at ")[1].split(",")[0]


def _port_in_use(workspace: Workspace) -> Ended:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        return workspace.command("broker", ".", "--bind", f"tcp://127.0.0.1:{taken.getsockname()[1]}")


class _Quiet(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _website() -> Iterator[int]:
    """The port of a web server."""
    with HTTPServer(("127.0.0.1", 0), _Quiet) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


NO_PLAN = ("there is no such file; name a plan, or a folder that holds a stageline.toml",)
NO_ANSWER = "no broker answered at tcp://127.0.0.1:"
OUT_OF_RANGE = ("model.cut = [3]: 3 is out of range",)
PLACE = ("--stage", "0", "--step", "0")
SHAPE = ("--stages", "2", "--microbatches", "2")
ROWS = (
    words("a command that does not exist", "trian", ".", said=("there is no command trian; did you mean train?",)),
    words("an option that does not exist", "train", ".", "--stpes", "3", said=("no such option", "--stpes")),
    words(
        "a path that is not UTF-8",
        *("plan", "plans-\udcff"),
        said=("the argument, 'plans-\\udcff', is not UTF-8",),
    ),
    words("a word for a number", "train", ".", "--spares", "two", said=("invalid value for '--spares': 'two'",)),
    words(
        "spares where nothing is replaced",
        *("train", ".", "--spares", "1", "--set", "recovery.restarts=0"),
        said=("a spare has nothing to wait for", "add --set recovery.restarts=5"),
    ),
    words(
        "`--resume` where no run is",
        "train",
        ".",
        "--resume",
        said=("no unfinished run of small", "leave out --resume"),
    ),
    words(
        "`--resume` of a run that is not there", "train", ".", "--resume", "small-1", said=("there is no run small-1",)
    ),
    words("`--resume` of a folder above", "train", ".", "--resume", "../..", said=("'../..' is no run's id",)),
    played(
        "`--resume` with another plan",
        after_an_interrupt("train", ".", "--resume", "RUN", "--set", "run.seed=5"),
        "was begun with another plan: ",
        "run.seed: 5 here, 0 there",
        code=78,
        slow=True,
    ),
    played(
        "`--resume` of a run that is going on",
        beside_a_run("train", ".", "--resume", "RUN", *FOR_EVER),
        "is going on: stageline train, pid ",
        "Wait for its end or stop that process",
    ),
    words(
        "`status` where no broker is", "status", "--broker", "tcp://127.0.0.1:9", said=(NO_ANSWER, "Is the run"), code=3
    ),
    words("`status` of a folder without a run", "status", "/usr", said=NO_PLAN, code=78),
    words("`status` of what is not there", "status", "nope", said=("nope does not exist", "folder of a run"), code=78),
    words(
        "`status` at an address of no kind",
        *("status", "--broker", "localhost:5600"),
        said=("'localhost:5600' is not an address of a broker", "write ipc:///tmp/stageline or tcp://"),
    ),
    played(
        "`status` at a web server",
        beside_a_website("status", "--broker", "tcp://127.0.0.1:PORT"),
        NO_ANSWER,
        "is this its broker?",
        code=3,
        slow=True,
    ),
    played(
        "a worker at a web server",
        beside_a_website("worker", ".", "--broker", "tcp://127.0.0.1:PORT", "--patience", "1"),
        NO_ANSWER,
        "within 1 s",
        code=3,
    ),
    words(
        "a worker where no broker is",
        *("worker", ".", "--broker", "tcp://127.0.0.1:9", "--patience", "0.3"),
        said=(NO_ANSWER, "Start one with `stageline broker`"),
        code=3,
    ),
    words("`story` of no microbatch", "story", "12", said=("'12' is not STEP/MICROBATCH: write 118/5",)),
    played("`story` of a step too many", beside_a_run("story", "9999999/1"), "there is no step 9999999", code=2),
    played(
        "`story` of a microbatch too many",
        beside_a_run("story", "0/99"),
        "there is no microbatch 99",
        code=2,
        slow=True,
    ),
    played("`why` of a stage too many", beside_a_run("why", "--stage", "9"), "there is no stage 9", code=2, slow=True),
    words("`queue` with a wrong word", "queue", "lss", said=("there is no command queue lss; did you mean ls?",)),
    words("`replay` without a microbatch", "replay", ".", *PLACE, said=("missing option '--microbatch'",)),
    words("`replay` of a folder without a run", "replay", "/usr", *PLACE, "--microbatch", "0", said=NO_PLAN, code=78),
    played(
        "`replay` of what was not recorded",
        after_a_run("replay", "RUN", *PLACE, "--microbatch", "0"),
        "has recorded nothing",
        'recovery.record = "bad" records what stops a run',
        code=2,
        slow=True,
        finishes=True,
    ),
    played(
        "a worker with another plan",
        beside_a_broker("worker", ".", "--broker", "URL", "--set", "run.seed=5"),
        "another plan than the broker: run.seed: 5 here, 0 there",
        code=78,
    ),
    played(
        "a worker with an index too high",
        beside_a_broker("worker", ".", "--broker", "URL", "--index", "7"),
        "there is no worker 7: the plan has workers 0 to 1",
        code=2,
    ),
    played(
        "a worker with an index that is taken",
        _taken_index,
        "stage 0 is claimed by worker first",
        "start this one without --index or stop the other",
    ),
    played("a broker at a port that is taken", _port_in_use, "it is in use by pid ", "listen at another port"),
    words(
        "a broker at another machine's address",
        *("broker", ".", "--bind", "tcp://192.0.2.1:5600"),
        said=("cannot listen at tcp://192.0.2.1:5600: this machine has no such address",),
        code=1,
    ),
    words("a run's id that is a path", "broker", ".", "--run", "../x", said=("'../x' is no run's id",)),
    words("`init` where a plan is", "init", ".", said=("already holds stageline.toml", "nothing is overwritten")),
    words(
        "`schedule show` of none that exists",
        "schedule",
        "show",
        "1f1",
        *SHAPE,
        said=("there is no schedule 1f1", "1f1b?"),
    ),
    words("`plan` of a plan that cannot work", "plan", ".", said=OUT_OF_RANGE, code=78, changes=WRONG_CUT),
    words("`doctor` of a plan that cannot work", "doctor", ".", said=OUT_OF_RANGE, code=1, changes=WRONG_CUT),
    words("`worker` of a plan that cannot work", "worker", ".", said=OUT_OF_RANGE, code=78, changes=WRONG_CUT),
)
