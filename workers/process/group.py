"""Group of processes that compute a stage together: this one, which leads, and members that it forks.

    worker (the leader) ──forks──> member 1, member 2, ...     each with the model as it is, before anything is split
      ├── a socket to each: the calls of its stage (`group_calls.py`)
      ├── torch.distributed among all of them, on loopback: what their layers and their snapshots need
      └── a lifeline: the members end with the leader, however it ends

To the broker the group is one worker. If a member ends, or takes no part, the leader gives its place back and ends, and
a new group begins at the checkpoint, with a store and ports of its own.

A process's `GroupPlace` is where it meets the others before they compute a stage together.
"""

import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, cast

import torch

from stageline.broker.ledger.member import describe_status
from stageline.pipeline.errors import ExitCode, GroupLost, StageError, StagelineError, describe_error
from stageline.pipeline.features.offload import Offload
from stageline.pipeline.process.child import Fork
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.stage.stage_state import StageState
from stageline.pipeline.tree import Tree
from stageline.workers.runtime.forked_copy import without_copies
from stageline.workers.runtime.job import Job

from .group_calls import encode_call, receive_call, send_call

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DESCRIPTORS = "/proc/self/fd" if sys.platform.startswith("linux") else "/dev/fd"
_LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"


def _call(function: Callable[[], None]) -> None:
    function()


def call_unless(left: Callable[[], bool], function: Callable[[], None]) -> bool:
    """Call `function` in another thread, and return True if it has returned.

    Once `left()` is true, False is returned and the thread stays where it is: a thread that waits in a library cannot
    be ended. Raises any error that `function` raises.
    """
    raised: list[BaseException] = []
    thread = threading.Thread(target=_keeping, args=(function, raised), name="group", daemon=True)
    thread.start()
    while thread.is_alive() and not left():
        thread.join(_LOOK)
    for error in raised:
        raise error
    return not thread.is_alive()


def _keeping(function: Callable[[], None], raised: list[BaseException]) -> None:
    try:
        function()
    except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits
        raised.append(error)


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Place of one process in the group that computes a stage.

    Attributes:
        job: Job of the run.
        stage: Number of the stage's copy.
        rank: Number of the process in the group. The leader has 0.
        size: Number of processes in the group.
        store: Descriptor of the open file by which the processes meet.
        timeout: Seconds that the processes wait for each other at most.
    """

    job: Job
    stage: int
    rank: int
    size: int
    store: int
    timeout: float

    @property
    def device(self) -> str:
        """Device of the process: the plan's for the first process, the following devices for the others."""
        device = torch.device(self.job.device_of(self.stage))
        return str(device) if device.type == "cpu" else f"{device.type}:{(device.index or 0) + self.rank}"

    def make(self, watched: Callable[[Callable[[], None]], None] = _call) -> Stage:
        """Return this process's part of the stage, once all processes have met.

        Args:
            watched: Calls the function that waits for the other processes.
        """
        return self.job.stage(self.stage, device=self.device, mesh=self._join(watched))

    def _join(self, watched: Callable[[Callable[[], None]], None]) -> "DeviceMesh":
        """Meet the other processes. Sockets listen on loopback only, unless the environment names other interfaces."""
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh

        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, _LOOPBACK)
        device = torch.device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.backends.mha.set_fastpath_enabled(False)  # it takes weights, and would not gather what is split
        store = distributed.FileStore(f"{_DESCRIPTORS}/{self.store}", self.size)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=self.timeout))
        watched(
            partial(
                distributed.init_process_group,
                "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self.timeout),
            )
        )
        return init_device_mesh(device.type, (self.size,))


def meeting_file() -> int:
    """Return the descriptor of a new file without a name, which members inherit.

    Whichever process ends first, nothing is left of the file.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("group")
    file, path = tempfile.mkstemp()
    os.unlink(path)
    return file


PART_OF_ACTION = 0.8  # of the time that an action may take: the group names itself before the broker gives it up
END_TIMEOUT = 2.0  # seconds for a member to end by itself
SHOWS = 0.3  # seconds in which the end of a process shows, of which a connection has told
_STDERR = 2
_NOT_MET = "Wait timeout"  # in the error of torch's FileStore, of a process that waits for another there
_LOOK = 0.01  # seconds between two looks at the members, or at whether a call is to be left


@dataclass(slots=True)
class _Member:
    rank: int
    process: Fork
    connection: socket.socket


class StageGroups(AbstractContextManager["StageGroups"]):
    """Maker of a worker's stages; a stage of several processes gets a group. As a context, ends the groups."""

    def __init__(self, job: Job) -> None:
        """Prepare to make stages of `job`."""
        self._job = job
        self._groups: list[Group] = []

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """End all groups, at once after an error."""
        for group in self._groups:
            group.end(at_once=error is not None)

    def make(self, stage: int, offload: Offload) -> Stage:
        """Return the copy `stage`, computed by a group if the plan gives it several processes.

        Raises `GroupLost`, and every error of making a stage.

        Args:
            stage: Number of the copy.
            offload: Storage outside of the worker's memory, used only if one process computes the stage.
        """
        size = self._job.plan.stage_plan(self._job.schedule.replicas.stage(stage)).processes
        if size == 1:
            return self._job.stage(stage, offload=offload)
        from stageline.pipeline.stage import splitting  # noqa: F401  # loads torch.distributed: members have it too

        timeout = PART_OF_ACTION * self._job.plan.recovery.longest_action
        group = Group(GroupPlace(self._job, stage, 0, size, meeting_file(), timeout))
        self._groups.append(group)
        with group.together():
            return cast(Stage, LeadingStage(group.place.make(group.watch), group))


class Group:
    """A group as its leader has it."""

    def __init__(self, place: GroupPlace) -> None:
        """Fork the members of the group whose leader has the place `place`."""
        self.place = place
        self._members: list[_Member] = []
        self._left = False  # a thread is left that waits for the members to meet
        for rank in range(1, place.size):
            self._members.append(self._fork(rank))

    @contextmanager
    def call(self, name: str, arguments: "Sequence[Tree | StageState]", options: Tree) -> Iterator[None]:
        """Return a context in which this process makes a call that the members are sent, too. Raises `GroupLost`.

        Args:
            name: Name of a method of the stage.
            arguments: Positional arguments.
            options: Keyword arguments, a dict.
        """
        with self.together():
            frames = encode_call(name, [options, *arguments])
            for member in self._members:
                send_call(member.connection, frames)
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Return a context in which the members are needed. Raises `GroupLost` if one has ended, or does not answer."""
        try:
            yield
        except Exception as error:
            if not _is_of_group(error):
                raise
            raise GroupLost(self._why_lost(error)) from error

    def watch(self, meet: Callable[[], None]) -> None:
        """Call `meet`, which waits for the members.

        Raises:
            ConnectionError: A member has ended, or not all have met in time. The error comes at once: gloo would dial a
                lost member five times, for `timeout` seconds each.
        """
        deadline = monotonic() + self.place.timeout
        self._left = not call_unless(lambda: bool(self._ended) or monotonic() > deadline, meet)
        if self._left:
            raise ConnectionError("not all of them have met")

    @property
    def _ended(self) -> "list[_Member]":
        return [each for each in self._members if each.process.poll() is not None]

    def end(self, *, at_once: bool) -> None:
        """End the members: at once, or when they have done the calls that they were sent."""
        for member in self._members:
            member.connection.close()
        for member in self._members:
            member.process.end(0.0 if at_once else END_TIMEOUT)
        if not self._left:  # else a thread may still write to what is open by this number
            os.close(self.place.store)

    def _fork(self, rank: int) -> _Member:
        ours, theirs = socket.socketpair()
        place = GroupPlace(
            self.place.job, self.place.stage, rank, self.place.size, self.place.store, self.place.timeout
        )
        with theirs:
            process = Fork(partial(serve_as_member, place, theirs), _STDERR, [theirs.fileno()], dies_with_parent=True)
        return _Member(rank, process, ours)

    def _why_lost(self, error: Exception) -> str:
        deadline = monotonic() + SHOWS
        while not (ended := self._ended):
            if monotonic() > deadline:
                pids = " and ".join(str(each.process.pid) for each in self._members)
                first = str(error).partition("\n")[0]
                return (
                    f"the group of stage {self.place.stage} does not go on: process {pids} took no part within "
                    f"{self.place.timeout:g} s, or not as the others did ({first})"
                )
            sleep(_LOOK)
        first_ended = ended[0]
        return (
            f"the group of stage {self.place.stage} is lost: its process {first_ended.rank} "
            f"(pid {first_ended.process.pid}) {describe_status(first_ended.process.poll() or 0)}"
        )


HANDED = (
    "forward",
    "backward",
    "norms",
    "update",
    "evaluate",
    "evaluated",
    "state_dict",
    "snapshot",
    "state",
    "restore",
)


class LeadingStage:
    """The leader's stage, whose calls the members make, too. The leader has the queues, reports and snapshots."""

    def __init__(self, stage: Stage, group: Group) -> None:
        """Wrap `stage`, the leader's own part, and send its calls to `group`."""
        self._stage = stage
        self._group = group

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stage; calls of the methods in `HANDED` are sent to the members, too."""
        found = getattr(self._stage, name)
        return partial(self._together, name, found) if name in HANDED else found

    def clip(self, total: Tree = None) -> Tree:
        """Clip gradients as `Stage.clip` does; the members clip by the norm that the leader has found."""
        found = self._stage.clip(total)
        with self._group.call("clip", (found,), {}):
            return found

    def _together(self, name: str, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self._group.call(name, arguments, {key: each for key, each in options.items() if key != "roots"}):
            return method(*arguments, **options)


def make_call(stage: Stage, name: str, arguments: Sequence[Any]) -> None:
    """Make a call that the leader has sent to this member. The result is dropped: the leader has it, too.

    Args:
        stage: This member's part of the stage.
        name: Name of a method of the stage.
        arguments: Keyword arguments as a dict, then the positional arguments.

    Raises:
        StageError: Members make no call of this name.
    """
    options, *given = arguments
    if name not in (*HANDED, "clip"):
        raise StageError(f"there is no call {name} of a group")
    owned = {"owned": True} if "owned" in options else {}  # the call has arrived in memory of its own
    getattr(stage, name)(*given, **options | owned)


def serve_as_member(place: GroupPlace, connection: socket.socket) -> int:
    """Make the calls that the leader sends, until it ends the group or is gone. Returns the exit code."""
    failed, call = False, without_copies(make_call)
    try:
        stage = place.make()
        while (received := receive_call(connection)) is not None:
            name, arguments = received
            if failed and name != "state":  # the leader has not failed: no more can be computed together
                return ExitCode.FAILED
            try:
                call(stage, name, arguments)
            except Exception as error:  # noqa: BLE001  # user code may raise anything; the leader's raises it too, and says so
                if _is_of_group(error):
                    return ExitCode.FAILED
                _tell(place, error)
                failed = True
    except (StagelineError, OSError, RuntimeError) as error:  # the leader is gone, or says what is wrong
        if not _is_of_group(error):
            _tell(place, error)
        return ExitCode.FAILED
    return ExitCode.OK


def _tell(place: GroupPlace, error: Exception) -> None:
    print(f"process {place.rank} of the group of stage {place.stage}: {describe_error(error)}", file=sys.stderr)


def _is_of_group(error: Exception) -> bool:
    """Return True if another process of the group is the cause of `error`.

    Errors of gloo, and of the file by which the processes meet, have no class of their own: their text decides.
    """
    from torch import distributed

    if isinstance(error, ConnectionError | distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in ("gloo", _NOT_MET))
