"""Long runs that take turns every few seconds: while one goes on, the processes of the other are stopped by signals.

    plan    #####     #####     #####     #####
    script       #####     #####     #####

Other load on the machine that lasts for longer than a window, and a processor whose clock changes, affect both alike.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import cycle, pairwise

import psutil

from benchmarks.workload import Timing, demand_equal_work

from .processes import CONTEXT
from .rounds import PROGRESS, Spread
from .usage import Usage, nothing, tree, usage

START_UP = 6.0  # seconds that each run has alone until it is past its start
SETTLING = 0.2  # seconds of a window that do not count, while processes go on one after the other
LEAST = 4  # steps of a window that counts
FEWEST = 3  # windows of each run


class TooFewWindows(Exception):
    """A run had ended before all had taken their turns a few times."""


@dataclass(frozen=True, slots=True)
class Window:
    """From when until when a run went on, in seconds of `time.time`, and what its processes used meanwhile, as far as
    it can be read at once: the run goes on for a millisecond or two while it is."""

    begin: float
    end: float
    used: Usage


@dataclass(frozen=True, slots=True)
class Turns:
    """A run in its windows: `rates` in steps per second, 0 where there was hardly a step; `steps` of all windows, in
    `seconds`, and what its processes `used` for them."""

    rates: tuple[float, ...]
    steps: int
    seconds: float
    used: Usage


def take_turns(tasks: Mapping[str, Callable[[], Timing]], seconds: float) -> dict[str, Turns]:
    """The runs in each of their windows of `seconds`, until the first of them ends.

    Raises `TooFewWindows`, and `UnequalWork` if their losses are not about the same at the end.
    """
    with ExitStack() as stack:
        pools = {name: stack.enter_context(ProcessPoolExecutor(1, mp_context=CONTEXT)) for name in tasks}
        processes = {name: psutil.Process(pool.submit(os.getpid).result()) for name, pool in pools.items()}
        running: dict[str, Future[Timing]] = {}
        try:
            for name, task in tasks.items():
                running[name] = pools[name].submit(task)
                wait([running[name]], START_UP)
                _send(processes[name], signal.SIGSTOP)
            windows = _alternate(processes, running, seconds)
        finally:
            for process in processes.values():
                _send(process, signal.SIGCONT)
        timings = {name: future.result() for name, future in running.items()}
    demand_equal_work((name, timing.loss) for name, timing in timings.items())
    return {name: _turns(timings[name].ends, windows[name]) for name in tasks}


def rates_in(ends: Sequence[float], windows: Sequence[Window]) -> tuple[float, ...]:
    """Steps per second in each of the `windows`, of a run whose steps ended at `ends`; 0 with less than `LEAST`."""
    inside = [[end for end in ends if window.begin < end < window.end] for window in windows]
    return tuple((len(each) - 1) / (each[-1] - each[0]) if len(each) >= LEAST else 0.0 for each in inside)


def ratios(first: Sequence[float], second: Sequence[float]) -> Spread:
    """Each rate of `second` to the mean of the two of `first` before and after it. Both began in turn."""
    between = [(before + after) / 2 if before and after else 0.0 for before, after in pairwise(first)]
    return Spread(tuple(rate / mean for rate, mean in zip(second, between, strict=False) if rate and mean))


def _turns(ends: Sequence[float], windows: Sequence[Window]) -> Turns:
    before_end = [window for window in windows if window.end <= ends[-1]]
    steps = sum(window.begin < end < window.end for window in before_end for end in ends)
    seconds = sum(window.end - window.begin for window in before_end)
    return Turns(rates_in(ends, windows), steps, seconds, sum((window.used for window in before_end), nothing()))


def _alternate(
    processes: Mapping[str, psutil.Process], running: "Mapping[str, Future[Timing]]", seconds: float
) -> dict[str, list[Window]]:
    """The windows that each run had while all were there; the last round is not whole, and does not count."""
    rounds: list[dict[str, Window]] = [{}]
    for name in cycle(processes):
        if len(rounds[-1]) == len(processes):
            rounds.append({})
        _send(processes[name], signal.SIGCONT)
        time.sleep(SETTLING)
        before, begin = usage(processes[name]), time.time()
        time.sleep(seconds)
        end, after = time.time(), usage(processes[name])
        if any(future.done() for future in running.values()):
            if len(rounds) <= FEWEST:
                raise TooFewWindows(f"each run had {len(rounds) - 1} whole windows: measure with more --rounds")
            return {each: [window[each] for window in rounds[:-1]] for each in processes}
        rounds[-1][name] = Window(begin, end, after.since(before))
        PROGRESS.tell(f"window {len(rounds)}", name, seconds=end - begin)
        _send(processes[name], signal.SIGSTOP)
    raise AssertionError("there are no runs")


def _send(process: psutil.Process, number: signal.Signals) -> None:
    """To the process and all that it has started."""
    for each in tree(process):
        with suppress(psutil.NoSuchProcess):
            each.send_signal(number)
