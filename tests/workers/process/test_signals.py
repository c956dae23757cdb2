"""What SIGINT and SIGTERM do to this process."""

import signal

from stageline.workers.process.signals import Signals


def test_each_signal_is_counted_and_the_first_one_remembered() -> None:
    called: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with Signals(lambda: called.append("first"), lambda: called.append("second")) as signals:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            signal.raise_signal(number)
    assert (signals.count, signals.first) == (3, signal.SIGTERM)
    assert called == ["first", "second", "second"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_with_once_the_second_signal_goes_to_the_handlers_before() -> None:
    with Signals() as outer, Signals(once=True) as inner:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert (outer.count, inner.count) == (1, 1)
