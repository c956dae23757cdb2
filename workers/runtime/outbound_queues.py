"""The queues that a worker's loop puts into: makes messages of what instructions give, and of replies to a script."""

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
    """Those of one worker, by name; each is opened when it is needed first. `run` and `incarnation` are written into
    the messages."""

    def __init__(self, queues: Queues, program: Program, *, run: str, incarnation: int) -> None:
        self.opened: dict[str, Outbound] = {}
        self.of: Callable[[str], Outbound] = cache(self._open)
        self._queues = queues
        self._program = program
        self._run = run
        self._incarnation = incarnation
        self._putting: Callable[[str], Put] = cache(self._put_into)

    def depths(self) -> dict[str, Depth]:
        """What each of those that are open holds, by name."""
        return {name: outbound.depth() for name, outbound in self.opened.items()}

    def put(self, instruction: Instruction, result: Tree) -> None:
        """Puts what `instruction` gives into the queues that it gives it to."""
        op = instruction.op
        for name in op.gives:
            self._putting(name)(instruction.step, op.action.microbatch, result)

    def put_reply(self, name: str, number: int, reply: Tree) -> None:
        """Puts the reply to a script's call, the one of this `number` in its queue."""
        self._putting(name)(number, 0, reply)

    def _put_into(self, name: str) -> Put:
        """Return what puts into a queue: all that does not change from message to message is looked up once."""
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
