"""The queues that a worker's loop puts into: makes messages of what instructions give, and of replies to a script."""

from collections.abc import Callable, Mapping
from functools import cache

from stageline.broker.codec.codecs import Codec
from stageline.broker.codec.message import Flow, Message
from stageline.broker.codec.tensors import coded
from stageline.broker.queues.base import Depth, Outbound, QueueKey, Queues
from stageline.pipeline.tree import Tree

from .program.instruction import Instruction
from .program.run_queues import RunQueues


class OutboundQueues:
    """Those of one worker, of the run's queues `named`; each is opened when it is needed first. `run` and `incarnation`
    are written into the messages. `codecs` are those of queues that have one."""

    def __init__(
        self, queues: Queues, named: RunQueues, codecs: Mapping[QueueKey, Codec], *, run: str, incarnation: int
    ) -> None:
        self.opened: dict[str, Outbound] = {}  # by name
        self.of: Callable[[QueueKey], Outbound] = cache(self._open)
        self._queues = queues
        self._named = named
        self._codecs = codecs
        self._run = run
        self._incarnation = incarnation

    def depths(self) -> dict[str, Depth]:
        """What each of those that are open holds, by name."""
        return {name: outbound.depth() for name, outbound in self.opened.items()}

    def put(self, instruction: Instruction, result: Tree) -> None:
        """Puts what `instruction` gives into the queues that it gives it to."""
        if instruction.gives is not None:
            self._put(instruction, instruction.gives, result)
            for other in instruction.also:
                self._put(instruction, other, result)

    def put_reply(self, key: QueueKey, number: int, reply: Tree) -> None:
        """Puts the reply to a script's call, the one of this `number` in its queue."""
        self.of(key).put(Message(self._run, key.flow, number, 0, key.stage, self._incarnation, number, reply))

    def _put(self, instruction: Instruction, key: QueueKey, payload: Tree) -> None:
        step, microbatch, number = instruction.step, instruction.action.microbatch, instruction.number
        if key.part is not None:
            number = self._named.number_in(key, instruction)
        if key.flow is Flow.REPLAYED:  # one a step, without content
            microbatch, number, payload = 0, step, None
        elif (codec := self._codecs.get(key)) is not None:
            payload = coded(payload, codec)
        message = Message(self._run, key.flow, step, microbatch, key.stage, self._incarnation, number, payload)
        self.of(key).put(message)

    def _open(self, key: QueueKey) -> Outbound:
        self.opened[str(key)] = outbound = self._queues.outbound(key)
        return outbound
