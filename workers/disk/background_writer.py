"""Background writer: writes to the disk while the compute loop goes on, by one thread with a bounded backlog.

compute loop  --submit(job, key, size)-->  backlog, at most `limit` for each key  -->  thread
                                              ^                                          |
                                              +-- a job that a fault stopped: in a while +
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import monotonic

from stageline.pipeline.errors import Bug, StagelineError
from stageline.pipeline.retry import Note, Retry, lacks_memory

LONGEST_WRITE = 120.0  # seconds that a compute loop waits for the disk before the run fails


class WriteFailed(StagelineError):
    """Error that a file of the run could not be written.

    Mend: Make room on the disk or make the folder writable, and resume the run; docs/reference/resources.md says how
    long each is waited for.

    Example: activations could not be written to /scratch/offload: No space left on device
    """

    error_code = "SL407"


@dataclass(slots=True, eq=False)
class _Job:
    run: Callable[[], None]
    key: Hashable
    size: int
    what: str
    retry: Retry


class BackgroundWriter:
    """Thread that runs jobs one after the other, with a bounded backlog.

    The jobs that wait under one key are limited: a key has room while their sizes add up to less than the limit, or to
    less than it was granted.

    A job that is stopped by a fault that may pass runs again, for a minute at most. Another exception of a job is the
    `failure` that ends the writing: no other job runs, later ones are dropped.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        failed: Callable[[Exception], None] = lambda error: None,
        *,
        note: Note = lambda fault: None,
        patience: bool = True,
    ) -> None:
        """Start the thread.

        Args:
            name: Name of the thread.
            limit: Total size of the jobs that wait under one key from which on the key has no room.
            failed: Called from the thread with the error that ends the writing.
            note: Called with a fault that may pass, and with None when it has passed or ended the writing.
            patience: Without it, a fault ends the writing once a job has to wait for room.
        """
        self.failure: Exception | None = None
        self.tried = 0.0  # seconds for which the job that failed was tried
        self.doing = ""  # what the newest job does, continuing "cannot"
        self._limit = limit
        self._limits: dict[Hashable, int] = {}
        self._failed = failed
        self._note = note
        self._patience = patience
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._sizes: Counter[Hashable] = Counter()  # of the waiting jobs, by key
        self._job: _Job | None = None  # the one that runs
        self._faulty = False  # the first job waits to be tried again
        self._given_up = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def grant(self, key: Hashable, limit: int) -> None:
        """Give `key` a limit of its own."""
        self._limits[key] = limit

    def has_room(self, key: Hashable = None, timeout: float | None = 0.0) -> bool:
        """Return True if a job can be submitted under `key` without waiting; waits for that up to `timeout` seconds.

        Also returns True after a failure: nothing waits any more.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self.failure or not self._is_full(key), timeout) is not False

    def is_done(self, key: Hashable, timeout: float | None = 0.0) -> bool:
        """Return True if no job waits or runs under `key`; waits for that up to `timeout` seconds.

        Also returns True after a failure: nothing runs any more.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self.failure or key not in self._unfinished(), timeout) is not False

    def submit(
        self, job: Callable[[], None], key: Hashable = None, size: int = 0, *, first: bool = False, what: str = "write"
    ) -> None:
        """Queue a job; wait until `key` has room, unless the job has no size. Ignored after a failure or `close`.

        Args:
            job: Function to run; it may be run several times.
            key: Key whose limit the job counts towards.
            size: Size of the job, in the unit of the limit.
            first: Queue the job before all that wait.
            what: Verb phrase that continues "cannot", for messages.
        """
        with self._changed:
            if size:
                self._wait_for_room(key)
            if self.failure is not None or self._closing:
                return
            put = self._jobs.appendleft if first else self._jobs.append
            put(_Job(job, key, size, what, Retry(what)))
            self._sizes[key] += size
            self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Return True if all jobs are done; waits for that up to `timeout` seconds, at most until a failure."""
        with self._changed:
            done = self._changed.wait_for(lambda: self.failure or not self._unfinished(), timeout)
            return done is True

    def close(self, timeout: float | None = None, *, drop: bool = True) -> None:
        """End the thread once all jobs are done or one failed; waits for that up to `timeout` seconds.

        Jobs that have not begun by then are dropped or, without `drop`, done as long as the process lives.
        """
        if drop:
            self.flush(timeout)
        with self._changed:
            self._closing = True
            if drop:
                self._drop()
            self._changed.notify_all()
        self._thread.join(timeout)

    def demand(self, done: bool, waited: float, failed: type[WriteFailed] = WriteFailed) -> None:
        """Raise the error that ended the writing, or `failed` if the awaited jobs are not done.

        Args:
            done: Result of the wait.
            waited: Seconds of the wait, for the message.
            failed: Class of the error.
        """
        match self.failure:
            case WriteFailed() as error if self.tried:
                raise type(error)(f"{error.args[0]}. It was tried for {self.tried:.0f} s") from error
            case WriteFailed() as error:
                raise error
            case Exception() as error if lacks_memory(error):
                raise error
            case Exception() as bug:
                text = f"a bug in stageline while it wrote files: {type(bug).__name__}: {bug}"
                raise failed(Bug.coded(text)) from bug
        if not done:
            raise failed(f"the disk is still busy after {waited:g} s: the worker could not {self.doing}")

    def _is_full(self, key: Hashable) -> bool:
        return self._sizes[key] >= self._limits.get(key, self._limit)

    def _unfinished(self) -> set[Hashable]:
        """Return the keys of the jobs that wait or run. The caller holds `_changed`."""
        return {job.key for job in (*self._jobs, self._job) if job is not None}

    def _wait_for_room(self, key: Hashable) -> None:
        """Wait until `key` has room or the writing has failed. The caller holds `_changed`."""

        def done() -> bool:
            self._given_up = self._faulty and not self._patience and self._is_full(key)
            if self._given_up:
                self._changed.notify_all()
            return self.failure is not None or not self._is_full(key)

        self._changed.wait_for(done)

    def _drop(self) -> None:
        self._jobs.clear()
        self._sizes.clear()
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._do_next():
                pass
        except Exception as error:  # noqa: BLE001  # handed to the owner: a thread must not end in silence
            with self._changed:
                self.failure = error
                self._drop()
            self._note(None)
            self._failed(error)

    def _do_next(self) -> bool:
        """Do the next job and return True; return False if there is none. A finished job's data are released."""
        job = self._next()
        if job is not None:
            self._attempt(job)
        return job is not None

    def _attempt(self, job: _Job) -> None:
        try:
            job.run()
        except Exception as error:
            now = monotonic()
            if (pause := job.retry.failed(error, now)) is None:
                self.tried = now - job.retry.fault.since if job.retry.fault is not None else 0.0
                raise
            self._note(job.retry.fault)
            if self._put_back(job, pause):
                raise
        else:
            if job.retry.fault is not None:
                self._note(None)

    def _put_back(self, job: _Job, pause: float) -> bool:
        """Wait `pause` seconds before `job` is run again; return True to give up.

        The wait ends early if another job comes before it, which may mend the fault.
        """
        with self._changed:
            self._jobs.appendleft(job)
            self._job, self._faulty = None, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._given_up or job not in list(self._jobs)[:1], pause)
            self._faulty = False
            return self._given_up

    def _next(self) -> _Job | None:
        with self._changed:
            self._job = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._jobs or self._closing)
            if not self._jobs:
                return None
            job = self._jobs.popleft()
            self._sizes[job.key] -= job.size if job.retry.fault is None else 0  # its part was taken off before
            self._job, self.doing = job, job.what
            self._changed.notify_all()
            return job
