"""Queues that a worker's loop puts into: messages are made of instructions' results, and of replies to a script."""

from collections.abc import Callable
from functools import cache

from stageline.broker.codec.codecs import Codec
from stageline.broker.codec.message import Message
from stageline.broker.codec.tensors import coded
from stageline.broker.queues.base import Depth, Outbound, Queues
from stageline.pipeline.program import Instruction, Program
from stageline.pipeline.tree import Tree

Put = Callable[[int, int, Tree], None]  # of a step and a microbatch, or whatever else the queue's messages are of


class OutboundQueues:
    """The queues that one worker puts into, by name. Each is opened when it is needed first.

    Attributes:
        opened: Queues that are open, by name.
        of: Returns the queue of this name.
    """

    def __init__(self, queues: Queues, program: Program, *, run: str, incarnation: int) -> None:
        """Open no queue yet.

        Args:
            queues: Opens the queues.
            program: Says which queues there are.
            run: Id of the run, written into the messages.
            incarnation: Incarnation of the worker, written into the messages.
        """
        self.opened: dict[str, Outbound] = {}
        self.of: Callable[[str], Outbound] = cache(self._open)
        self._queues = queues
        self._program = program
        self._run = run
        self._incarnation = incarnation
        self._putting: Callable[[str], Put] = cache(self._put_into)

    def depths(self) -> dict[str, Depth]:
        """Return the depth of each open queue, by name."""
        return {name: outbound.depth() for name, outbound in self.opened.items()}

    def put(self, instruction: Instruction, result: Tree) -> None:
        """Put the result of `instruction` into the queues that take it."""
        op = instruction.op
        for name in op.gives:
            self._putting(name)(instruction.step, op.action.microbatch, result)

    def put_reply(self, name: str, number: int, reply: Tree) -> None:
        """Put the reply to a script's call into a queue.

        Args:
            name: Name of the queue.
            number: Number of the reply in its queue.
            reply: The reply.
        """
        self._putting(name)(number, 0, reply)

    def _put_into(self, name: str) -> Put:
        """Return the function that puts into a queue. Data that all its messages share are looked up once."""
        queue, put = self._program.queues[name], self.of(name).put
        run, incarnation, count, codec = self._run, self._incarnation, queue.count, Codec[queue.codec.upper()]
        places = {microbatch: place for place, microbatch in enumerate(queue.microbatches)}

        def put_one(step: int, microbatch: int, payload: Tree) -> None:
            content = None if queue.signals else payload
            put(Message(run, name, step, incarnation, content))

        def put_of_microbatch(step: int, microbatch: int, payload: Tree) -> None:
            put(Message(run, name, step * count + places[microbatch], incarnation, payload))

        def put_coded(step: int, microbatch: int, payload: Tree) -> None:
            put_of_microbatch(step, microbatch, coded(payload, codec))

        if not queue.per.many:
            return put_one
        return put_of_microbatch if codec is Codec.LOSSLESS else put_coded

    def _open(self, name: str) -> Outbound:
        self.opened[name] = outbound = self._queues.outbound(self._program.queues[name])
        return outbound
