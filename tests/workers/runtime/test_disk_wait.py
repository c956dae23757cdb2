"""A compute loop that waits for the disk says so, and for what."""

import threading
from contextlib import closing

from stageline.workers.control.reporter import Reporter
from stageline.workers.disk.background_writer import BackgroundWriter
from stageline.workers.runtime.progress import Progress
from stageline.workers.runtime.worker_feature import has_room


def test_while_it_waits_for_room_the_reports_name_what_is_to_be_written() -> None:
    progress, gate = Progress(), threading.Event()
    seen: list[str] = []

    class Watching(BackgroundWriter):
        """Looks at a report while the loop waits."""

        def has_room(self, key: object = None, timeout: float | None = 0.0) -> bool:
            if progress.writes:
                seen.append(Reporter(progress, 1, 10).report(0.0).now)
                gate.set()
                return super().has_room(key, 30)
            return super().has_room(key, 0.0)

    with closing(Watching("test", limit=1)) as writer:
        writer.submit(lambda: gate.wait(30) and None)
        writer.submit(lambda: None, "taps", 1)
        progress.waits = False
        assert has_room(writer, "taps", progress, "what was tapped is", 30)
    assert seen == ["waits until what was tapped is written"]
    assert (progress.waits, progress.writes) == (False, "")


def test_a_loop_that_finds_room_does_not_wait() -> None:
    progress = Progress()
    progress.waits = False
    with closing(BackgroundWriter("test", limit=1)) as writer:
        assert has_room(writer, "taps", progress, "what was tapped is", 30)
    assert not progress.waits
