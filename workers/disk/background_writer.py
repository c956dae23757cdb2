"""Writes to the disk while the compute loop goes on: one thread, and a bounded backlog before it.

compute loop  --submit(job, key, size)-->  backlog, at most `limit` for each key  -->  thread
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable


class BackgroundWriter:
    """Runs jobs one after the other on a thread called `name`.

    The jobs that wait under one key are limited: a key has room while their sizes add up to less than `limit`. The
    first exception of a job is the `failure` that ends the writing: no other job runs, later ones are dropped.
    `failed(error)` is called from the thread then.
    """

    def __init__(self, name: str, limit: int, failed: Callable[[Exception], None] = lambda error: None) -> None:
        self.failure: Exception | None = None
        self._limit = limit
        self._failed = failed
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], Hashable, int]] = deque()  # job, key, size
        self._sizes: Counter[Hashable] = Counter()  # of the waiting jobs, by key
        self._running = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def has_room(self, key: Hashable = None, timeout: float | None = 0.0) -> bool:
        """Whether a job can be submitted under `key` without waiting; waits for that up to `timeout` seconds.

        True after a failure: nothing waits any more.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self.failure or self._sizes[key] < self._limit, timeout) is not False

    def submit(self, job: Callable[[], None], key: Hashable = None, size: int = 0, *, first: bool = False) -> None:
        """Queues a job, before all that wait if `first`. Waits until `key` has room, unless the job has no size."""
        with self._changed:
            if size:
                self.has_room(key, None)
            if self.failure is not None or self._closing:
                return
            put = self._jobs.appendleft if first else self._jobs.append
            put((job, key, size))
            self._sizes[key] += size
            self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Whether all jobs are done; waits for that up to `timeout` seconds, and no longer than to a failure."""
        with self._changed:
            done = self._changed.wait_for(lambda: self.failure or not (self._jobs or self._running), timeout)
            return done is True

    def close(self, timeout: float | None = None, *, drop: bool = True) -> None:
        """Ends the thread once all jobs are done or one failed; waits for that up to `timeout` seconds.

        Jobs that have not begun by then are dropped, or, without `drop`, done as long as the process lives.
        """
        if drop:
            self.flush(timeout)
        with self._changed:
            self._closing = True
            if drop:
                self._drop()
            self._changed.notify_all()
        self._thread.join(timeout)

    def _drop(self) -> None:
        self._jobs.clear()
        self._sizes.clear()
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                job()
        except Exception as error:  # noqa: BLE001  # handed to the owner: a thread must not end in silence
            with self._changed:
                self.failure = error
                self._drop()
            self._failed(error)

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._running = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._jobs or self._closing)
            if not self._jobs:
                return None
            job, key, size = self._jobs.popleft()
            self._sizes[key] -= size
            self._running = True
            self._changed.notify_all()
            return job
