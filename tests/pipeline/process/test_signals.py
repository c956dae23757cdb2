"""Effects of SIGINT and SIGTERM on this process."""

import signal
import subprocess
import sys

from stageline.pipeline.process.signals import Signals
from support.paths import importing_tests

IGNORING = 'trap \'\' INT; exec "$0" "$@"'  # as a shell does for what it starts with `&`


def test_each_signal_is_counted_and_the_callbacks_get_its_number() -> None:
    called: list[tuple[str, int]] = []
    before = signal.getsignal(signal.SIGTERM)
    first, second = (lambda number, name=name: called.append((name, number)) for name in ("first", "second"))
    with Signals(first, second) as signals:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            signal.raise_signal(number)
    assert signals.count == 3
    assert called == [("first", signal.SIGTERM), ("second", signal.SIGINT), ("second", signal.SIGINT)]
    assert signal.getsignal(signal.SIGTERM) == before


def test_with_once_the_second_signal_goes_to_the_handlers_before() -> None:
    with Signals() as outer, Signals(once=True) as inner:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert (outer.count, inner.count) == (1, 1)


def test_a_signal_that_the_parent_ignores_is_counted_all_the_same_and_ignored_afterwards() -> None:
    code = (
        "import signal\n"
        "from stageline.pipeline.process.signals import Signals\n"
        "with Signals() as signals:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "signal.raise_signal(signal.SIGINT)\n"
        "print(signals.count, signal.getsignal(signal.SIGINT) is signal.SIG_IGN)\n"
    )
    assert started_by_one_that_ignores_interrupts(code) == "1 True"


def test_the_suite_interrupts_itself_also_where_its_parent_ignores_that() -> None:
    """Two tests failed under `nohup make test &`: the process inherited that SIGINT is ignored."""
    code = "import conftest, signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert started_by_one_that_ignores_interrupts(code) == "True"


def started_by_one_that_ignores_interrupts(code: str) -> str:
    command = ["sh", "-c", IGNORING, sys.executable, "-c", code]
    return subprocess.run(command, env=importing_tests(), check=True, capture_output=True, text=True).stdout.strip()
