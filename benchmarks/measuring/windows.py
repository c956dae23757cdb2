"""Long runs that take turns every few seconds: while one goes on, the processes of the other are stopped by signals.

    plan    #####     #####     #####     #####
    script       #####     #####     #####

Other load on the machine that lasts for longer than a window, and a processor whose clock changes, affect both alike.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, suppress
from itertools import cycle, pairwise

import psutil

from benchmarks.workload import Timing

from .processes import CONTEXT
from .rounds import Spread

START_UP = 20.0  # seconds until both are past their start; they start at the same time
SETTLING = 0.2  # seconds of a window that do not count, while processes go on one after the other
LEAST = 4  # steps of a window that counts

Window = tuple[float, float]  # from, until; seconds of `time.time`


def take_turns(tasks: Mapping[str, Callable[[], Timing]], seconds: float) -> dict[str, tuple[float, ...]]:
    """The steps per second of two runs in each of their windows of `seconds`, without those that have hardly a step."""
    with ExitStack() as stack:
        pools = {name: stack.enter_context(ProcessPoolExecutor(1, mp_context=CONTEXT)) for name in tasks}
        processes = {name: psutil.Process(pool.submit(os.getpid).result()) for name, pool in pools.items()}
        running = {name: pools[name].submit(task) for name, task in tasks.items()}
        try:
            windows = _alternate(processes, running, seconds)
        finally:
            for process in processes.values():
                _send(process, signal.SIGCONT)
        ends = {name: future.result().ends for name, future in running.items()}
    return {name: rates_in(ends[name], windows[name]) for name in tasks}


def rates_in(ends: Sequence[float], windows: Sequence[Window]) -> tuple[float, ...]:
    """Steps per second in each of the `windows`, of a run whose steps ended at `ends`; 0 with less than `LEAST`."""
    inside = [[end for end in ends if low + SETTLING < end < high] for low, high in windows]
    return tuple((len(each) - 1) / (each[-1] - each[0]) if len(each) >= LEAST else 0.0 for each in inside)


def ratios(first: Sequence[float], second: Sequence[float]) -> Spread:
    """Each rate of `second` to the mean of the two of `first` before and after it. Both began in turn."""
    between = [(before + after) / 2 if before and after else 0.0 for before, after in pairwise(first)]
    return Spread(tuple(rate / mean for rate, mean in zip(second, between, strict=False) if rate and mean))


def _alternate(
    processes: Mapping[str, psutil.Process], running: "Mapping[str, Future[Timing]]", seconds: float
) -> dict[str, list[Window]]:
    """The windows that each run had while both were there."""
    windows: dict[str, list[Window]] = {name: [] for name in processes}
    time.sleep(START_UP)
    for name in processes:
        _send(processes[name], signal.SIGSTOP)
    for name in cycle(processes):
        _send(processes[name], signal.SIGCONT)
        begin = time.time()
        time.sleep(seconds)
        if any(future.done() for future in running.values()):
            return windows
        windows[name].append((begin, time.time()))
        _send(processes[name], signal.SIGSTOP)
    raise AssertionError("there are no runs")


def _send(process: psutil.Process, number: signal.Signals) -> None:
    """To the process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)
