"""Trials of a plan before its run, in processes that are watched: the user's code may hang, crash, exit, or be random.

train ──starts──> trial A, trial B        at once; on other devices than the CPU, whose memory they share, in turn
  │ <── log ───── what each does, what the user's code prints, the result
  ├── one ends without a result, or takes too long: named with the user's line, and the plan is refused
  └── both have a result: the transcripts must agree

A trial also measures a plan's layers, by which `fitted` chooses the machines of its stages.
"""

import fcntl
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import TextIO, cast

from msgspec.structs import replace

from stageline.broker.control.messages import Exited
from stageline.broker.ledger.member import describe_exit
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.layer_costs import LayerRanges
from stageline.pipeline.plan import Plan
from stageline.pipeline.process import last_line
from stageline.pipeline.process.child import Child, Spawn
from stageline.pipeline.process.signals import Signals
from stageline.workers.extras.fitting import HostFit, LayerTimes, fit, read_hosts

from .trial_result import (
    ChosenMemory,
    MeasuredCut,
    MeasuredLayers,
    Outcome,
    TrialLog,
    TrialRefusal,
    TriedPlan,
    agrees,
    repeats,
)

POLL = 0.02  # seconds between two looks at the processes
TO_ANSWER = 1.0  # seconds for a process that hangs to tell its line
TO_EXIT = 0.5  # seconds for a process with a result to exit
_NOTHING = "Nothing was trained"


class TrialFailed(ModelRefused):
    """Error that the trial of a plan ended without a result, or took too long.

    Mend: Raise `recovery.loading` if loading takes long. If memory ran out, set `data.check = false`, which runs one
    trial instead of two; the log above has what the model or the data printed.

    Example: the trial of the plan was still in the model after 600 s. If that may take this long, raise
    recovery.loading. Nothing was trained
    """

    error_code = "SL109"


def try_plan(
    plan: Plan,
    arguments: Sequence[str],
    spawn: Spawn,
    *,
    tell: Callable[[str], None] | None = None,
    layouts: bool = False,
) -> TriedPlan:
    """Try a plan in processes, and return the result.

    If the plan's cut is to be measured, that is done first, once. If it has a limit of memory, what stages recompute
    and offload is chosen next. The user's output goes to stderr. SIGINT and SIGTERM end the trials, and then have their
    former effect.

    Args:
        plan: Plan to try.
        arguments: Arguments that name the plan on a command line.
        spawn: Starts the processes.
        tell: Called with the difference between two trials, "" if there is none; then they are compared even if
            `data.check` is false. Without it, a difference refuses the plan.
        layouts: The result has the layouts of the stages.

    Raises:
        PlanRefused, ModelRefused, DataError: The plan cannot work.
    """
    if plan.measures_cut:
        measured = cast(MeasuredCut, _carried_out(plan, arguments, spawn, 1)[0])
        cut = list(measured.cut)
        found = try_plan(plan.with_cut(cut), [*arguments, *cut_arguments(cut)], spawn, tell=tell, layouts=layouts)
        return replace(found, estimate=replace(found.estimate, seconds=measured.seconds), cut=measured.cut)
    if plan.chooses_memory:
        memory = cast(ChosenMemory, _carried_out(plan, arguments, spawn, 1)[0])
        words = [*arguments, *memory_arguments(memory.keys)]
        found = try_plan(plan.with_memory(memory.keys), words, spawn, tell=tell, layouts=layouts)
        warnings = (*found.estimate.warnings, *(f"memory: {why}" for why in memory.left_out))
        estimate = replace(found.estimate, memory=memory.stages, warnings=warnings)
        return replace(found, estimate=estimate, memory=memory.keys)
    compared = plan.data.check or tell is not None
    wanted = [*arguments, *(["--layouts"] if layouts else [])]
    tried = cast(list[TriedPlan], _carried_out(plan, wanted, spawn, 2 if compared else 1))
    difference = (repeats(tried[0].transcript) or agrees(tried[0].transcript, tried[1].transcript)) if compared else ""
    if tell is not None:
        tell(difference)
    elif difference:
        raise ModelRefused(difference)
    return tried[0]


def cut_arguments(cut: Sequence[int]) -> list[str]:
    """Return a measured cut as arguments of commands, whose plans have it from then on."""
    return ["--set", f"model.cut={list(cut)}"]


def memory_arguments(chosen: Mapping[str, object]) -> list[str]:
    """Return the choice for a limit as arguments of commands, whose plans have it from then on."""
    return [word for key, value in chosen.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def _carried_out(plan: Plan, arguments: Sequence[str], spawn: Spawn, count: int) -> list[Outcome]:
    bound = plan.recovery.loading
    each = 1 if any(worker.device != "cpu" for worker in plan.workers) else count  # other devices' memory is shared
    found: list[Outcome] = []
    with _interruptible() as interrupted:
        while len(found) < count:
            with ExitStack() as stack:
                trials = [
                    stack.enter_context(_TrialProcess(arguments, spawn, bound, shows=number == 0))
                    for number in range(len(found), len(found) + each)
                ]
                while any(trial.result is None for trial in trials):
                    interrupted()
                    for trial in trials:
                        trial.follow()
                    sleep(POLL)
                found += [cast(Outcome, trial.result) for trial in trials]  # any other was raised
    return found


@contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """Return a context that SIGINT or SIGTERM ends when its function is called, which is to be called often.

    After the context, the signal is raised once more, for the handler from before.
    """
    with Signals(on_first=lambda number: received.append(number)) as signals:
        received: list[int] = []

        def demand_none() -> None:
            if signals.count:
                raise _Interrupted

        try:
            yield demand_none
            return
        except _Interrupted:
            pass
    signal.raise_signal(received[0])
    raise KeyboardInterrupt


class _Interrupted(BaseException):
    """Exception: a signal has come."""


class _TrialProcess(AbstractContextManager["_TrialProcess"]):
    """Trial in a process of its own, which is ended on leaving the context.

    With `shows`, output of the user's code is shown as it comes. `bound`: seconds that the trial may take.
    """

    def __init__(self, arguments: Sequence[str], spawn: Spawn, bound: float, *, shows: bool) -> None:
        self._bound = bound
        self._shows = shows
        self._hidden = b""
        mark = secrets.token_hex(8)
        self._file: TextIO = tempfile.TemporaryFile("w+")  # noqa: SIM115  # without a name: nothing of it stays behind
        fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)
        self._log = TrialLog(mark, self._read, self._print)
        self._began: float | None = None  # when its process started
        own = ("--mark", mark, "--bound", str(bound))
        self._process: Child = spawn(["trial", *arguments, *own], self._file)

    def __exit__(self, *_: object) -> None:
        self._process.end(0.0 if self.result is None else TO_EXIT)
        self._file.close()

    @property
    def result(self) -> Outcome | TrialRefusal | None:
        return self._log.result

    def follow(self) -> None:
        """Read the log so far. Raises `TrialFailed`, or the refusal of the plan that it holds."""
        ended = self._process.poll()  # first: what it has written until then is in the log
        self._log.follow()
        if self.result is None and ended is not None:
            how = describe_exit(Exited(0, self._process.pid, ended, self._process.result))
            why = "What a plan names has to return, so this is a failure"
            if ended == -signal.SIGKILL:
                why = "If memory ran out: two trials run at once, data.check = false runs one"
            self._fail(f"{how} in {self._log.doing}{self._line()}. {why}. {_NOTHING}")
        if self._began is None and self._process.pid:
            self._began = monotonic()
        if self.result is None and self._began is not None and monotonic() - self._began > self._bound:
            self._fail(
                f"was still in {self._log.doing} after {self._bound:g} s{self._asked_line()}. If that may take this "
                f"long, raise recovery.loading. {_NOTHING}"
            )
        if isinstance(self.result, TrialRefusal):
            self._reveal()
            raise self.result.error

    def _fail(self, how: str) -> None:
        self._reveal()
        raise TrialFailed(f"the trial of the plan {how}")

    def _line(self) -> str:
        line = last_line.read(Path(f"/dev/fd/{self._file.fileno()}"))
        return f", at {line}" if line else ""

    def _asked_line(self) -> str:
        if self._process.pid:
            last_line.ask(self._process.pid)
        until = monotonic() + TO_ANSWER
        while not (line := self._line()) and monotonic() < until:
            sleep(POLL)
        return line

    def _reveal(self) -> None:
        """Show output that was hidden so far."""
        self._log.follow()
        hidden, self._hidden, self._shows = self._hidden, b"", True
        self._print(hidden)

    def _print(self, text: bytes) -> None:
        if self._shows:
            sys.stderr.write(text.decode(errors="replace"))
            sys.stderr.flush()
        else:
            self._hidden += text

    def _read(self, offset: int) -> bytes:
        size = os.fstat(self._file.fileno()).st_size
        return os.pread(self._file.fileno(), size - offset, offset)


def fitted(plan: Plan, arguments: Sequence[str], spawn: Spawn, hosts: Path) -> HostFit:
    """Return the stages of `plan` for the machines in the file `hosts`.

    Args:
        plan: Plan to place.
        arguments: Arguments that name the plan on a command line.
        spawn: Starts the process that measures.
        hosts: File of machines.

    Raises:
        PlanRefused, ModelRefused, DataError: The plan or the file cannot work.
        NoFit: No stages have room on the machines.
    """
    machines = read_hosts(hosts)
    measured = cast(MeasuredLayers, _carried_out(plan, [*arguments, "--costs"], spawn, 1)[0])
    return fit(_layers(measured), machines, measured.microbatches)


def _layers(measured: MeasuredLayers) -> LayerTimes:
    ranges = LayerRanges(measured.costs)

    def taken(begin: int, end: int, in_flight: int) -> int:
        held, _, saved = ranges.bytes(begin, end)
        return held + saved * in_flight

    seconds = [max(cost.nanoseconds, 1) / 1e9 for cost in measured.costs]
    return LayerTimes(measured.names, seconds, [sum(cost.output.values()) for cost in measured.costs], taken)
