"""What SIGINT and SIGTERM do to this process."""

import signal

from stageline.workers.process.system.signals import Signals


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
