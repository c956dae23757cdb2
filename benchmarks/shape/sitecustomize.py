"""Python imports this file first in each process of the traced run: it installs the traces of `ways.py`.

A trace is installed when the module that it watches has been imported.
"""

import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

WARM = 20  # heartbeats and steps that pass before the trace
TRACED = 1  # the worker, and its stage


class Way:
    """Collects the product's files in the order in which this thread first executes them, from `begin` to `end`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.files: dict[str, None] = {}
        self.open = self.done = False
        self.reports = 0  # of finished steps, before and on the way

    def begin(self) -> None:
        self.open = True
        frame: FrameType | None = sys._getframe(2)  # the caller of the method that is watched
        while frame is not None:
            frame.f_trace = self._line
            frame = frame.f_back
        sys.settrace(self._line)

    def end(self) -> None:
        sys.settrace(None)
        self.open, self.done = False, True
        root = os.environ["SHAPE_ROOT"]
        product = tuple(os.path.join(root, name) + os.sep for name in ("pipeline", "broker", "workers"))
        real = dict.fromkeys(map(os.path.realpath, self.files))
        ours = [os.path.relpath(name, root) for name in real if name.startswith(product)]
        with open(os.path.join(os.environ["SHAPE_OUT"], f"{self.kind}.txt"), "w") as file:
            file.write("\n".join(ours))

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if self.open and event in ("line", "call"):
            self.files[frame.f_code.co_filename] = None
        return self._line


def is_at(instruction: Any, kind: str) -> bool:
    """Whether it is this action of stage 1 on the microbatch that is traced. Executes nothing of the product."""
    if instruction is None or instruction.step != WARM:
        return False
    action = instruction.action
    return (action.stage, action.microbatch, str.__str__(action.kind)) == (TRACED, 2, kind)


def current(loop: Any) -> Any:
    """The instruction that `loop` is at; None at the end."""
    return getattr(loop._machine.command, "instruction", None)


def trace_microbatch(owner: Any) -> None:
    way, plain = Way("microbatch"), owner.poll

    def poll(self: Any, *arguments: Any, **options: Any) -> Any:
        before = current(self)
        if not way.open and not way.done and is_at(before, "F"):
            way.begin()
        result = plain(self, *arguments, **options)
        if way.open and is_at(before, "B") and current(self) is not before:
            way.end()
        return result

    owner.poll = poll


def trace_heartbeat_of_worker(owner: Any) -> None:
    """The module may have been imported before the worker was forked: which one it is, its session knows."""
    way, count = Way("heartbeat-worker"), 0
    plain_due, plain_receive = owner.due, owner.receive

    def due(self: Any, *arguments: Any) -> Any:
        nonlocal count
        count += self._assigned.index == TRACED
        if count >= WARM and not way.open and not way.done:
            way.begin()
        return plain_due(self, *arguments)

    def receive(self: Any, message: Any, *arguments: Any) -> Any:
        try:
            return plain_receive(self, message, *arguments)
        finally:
            if way.open and type(message).__name__ == "Confirmed":
                way.end()

    owner.due, owner.receive = due, receive


BROKER = Way("heartbeat-broker")


def trace_receiving_of_broker(owner: Any) -> None:
    plain = owner.receive

    def receive(self: Any, *arguments: Any) -> Any:
        if BROKER.reports >= WARM and not BROKER.open and not BROKER.done:
            BROKER.begin()
        return plain(self, *arguments)

    owner.receive = receive


def trace_deciding_of_broker(owner: Any) -> None:
    handled = 0
    plain_tick, plain_handle, plain_observe = owner.tick, owner.handle, owner.keep_observation

    def unasked(plain: Callable[..., Any]) -> Callable[..., Any]:
        """Work that is due without being asked is not on the way."""

        def due(self: Any, *arguments: Any) -> Any:
            open_, BROKER.open = BROKER.open, False
            try:
                return plain(self, *arguments)
            finally:
                BROKER.open = open_ and not BROKER.done

        return due

    plain_tick, plain_observe = unasked(plain_tick), unasked(plain_observe)

    def tick(self: Any, *arguments: Any) -> Any:
        if BROKER.open and handled > 30:
            BROKER.end()
        return plain_tick(self, *arguments)

    def handle(self: Any, sender: Any, message: Any, *arguments: Any) -> Any:
        nonlocal handled
        report = type(message).__name__ == "Report" and bool(message.steps) and not message.snapshots
        handled += BROKER.open and report
        BROKER.reports += report
        open_, BROKER.open = BROKER.open, BROKER.open and report
        try:
            return plain_handle(self, sender, message, *arguments)
        finally:
            BROKER.open = open_

    owner.tick, owner.handle, owner.keep_observation = tick, handle, plain_observe


# The classes of which methods are replaced, in their modules.
WATCHED: dict[str, tuple[str, Callable[[Any], None]]] = {
    "stageline.workers.runtime.loop": ("WorkerLoop", trace_microbatch),
    "stageline.workers.control.session": ("Session", trace_heartbeat_of_worker),
    "stageline.broker.transports.sockets.zeromq_channel": ("ZeroMQServerChannel", trace_receiving_of_broker),
    "stageline.broker.coordinator.coordinator": ("Coordinator", trace_deciding_of_broker),
}


class Installer:
    """A finder of modules that installs a trace once the module it watches has been executed."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in WATCHED:
            return None
        owner, install = WATCHED.pop(name)
        others = [each for each in sys.meta_path if each is not Installer]
        spec: ModuleSpec | None = next((s for each in others if (s := each.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                install(getattr(module, owner))

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


if "SHAPE_ROOT" in os.environ and PathFinder in sys.meta_path:
    sys.meta_path.insert(0, Installer)  # type: ignore[arg-type]
