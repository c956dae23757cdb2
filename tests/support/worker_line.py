"""Four workers in a line, whose reports are repeated while time passes."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from stageline.broker.control.messages import CONTROL_VERSION, Answer, Ask, Hello, Report
from stageline.broker.control.records import Event, Lack, StepRecord, Wait
from stageline.pipeline.program import Pass, Queue, SumExchange, compile_program
from stageline.pipeline.schedule import make_schedule
from support.conversation import PLAN, TERMS, Conversation

M = 8
LINE = replace(TERMS, schedule=make_schedule("1f1b", ((0,), (1,), (2,), (3,)), M))
Facts = dict[str, object]


class WorkerLine(Conversation):
    """Four workers, w0 to w3, with a stage each; what each says is said again and again while time passes."""

    def __init__(self, passes: Sequence[Pass] = (SumExchange(),), **terms: object) -> None:
        super().__init__(terms=replace(LINE, **terms))  # type: ignore[arg-type]
        self._passes = passes
        self.saying: dict[int, Report] = {}
        for index in range(4):
            self.hello(index)

    def hello(self, index: int, pid: int = 0) -> None:
        said = Hello(CONTROL_VERSION, PLAN, f"w{index}", "desk", pid or 100 + index, "", index)
        given = self.assigned(b"%d" % index, said)
        named = replace_hello(said, given.incarnation, f"ipc://{index}")
        self.send(b"%d" % index, msgspec.structs.replace(named, queues=self.queues(index)))
        self.saying[index] = Report(given.incarnation, 0, "waits for the other workers", 0.0, 0.0)

    def queues(self, index: int) -> tuple[Queue, ...]:
        return compile_program(self.core.run.config.schedule, self._passes).ends_of(index)

    def says(self, index: int, now: str, *waits: Wait, events: tuple[Event, ...] = (), **more: object) -> None:
        incarnation = self.saying[index].incarnation
        said = Report(incarnation, 5, now, 0.0, 0.0, events=list(events), waits=list(waits), **more)  # type: ignore[arg-type]
        self.saying[index] = said

    def waits(self, index: int, queue: str, step: int, microbatch: int, action: str = "", **more: object) -> None:
        wait = Wait(queue, self._number(index, queue, step, microbatch), action or f"{index}B{microbatch}", step, 0.0)
        self.says(index, f"waits for {queue} to run {wait.action} of step {step}", wait, **more)  # type: ignore[arg-type]

    def lacks_room(self, index: int, queue: str, step: int, microbatch: int) -> None:
        number = self._number(index, queue, step, microbatch)
        wait = Wait(queue, number, f"{index}F{microbatch}", step, 0.0, Lack.ROOM)
        self.says(index, f"waits for room in {queue} to put what {wait.action} of step {step} gives", wait)

    def _number(self, index: int, queue: str, step: int, microbatch: int) -> int:
        return next(each for each in self.queues(index) if each.name == queue).number(step, microbatch)

    def has_finished(self, stage: int, step: int) -> None:
        incarnation = self.saying[stage].incarnation
        record = StepRecord(stage, step, b"")
        self.send(b"%d" % stage, Report(incarnation, 5, "waits", 0.0, 0.0, [record], number=1))

    def passes(self, seconds: float, *silent: int) -> None:
        for _ in range(round(seconds * 2)):
            for index, report in self.saying.items():
                if index not in silent:
                    self.send(b"%d" % index, report)
            self.after(0.5)

    def why(self, **of: str) -> Facts:
        ((_, answer),) = self.send(b"me", Ask("why", of))
        assert isinstance(answer, Answer), answer
        assert answer.schema == "why/1"
        return answer.facts


def replace_hello(said: Hello, incarnation: int, endpoint: str) -> Hello:
    return Hello(said.version, said.plan, said.name, said.host, said.pid, endpoint, said.claim, incarnation)


def computing(stage: int, step: int, microbatch: int, state: str) -> Event:
    return Event(stage, step, microbatch, state, 1000.0)


def hang(line: WorkerLine, *silent: int) -> None:
    """Stage 3 hangs in the backward that all others wait for."""
    line.waits(0, "backward-0", 118, 5), line.waits(1, "backward-1", 118, 5), line.waits(2, "backward-2", 118, 5)
    line.says(3, "3B5 of step 118", events=(computing(3, 118, 5, "backward"),), layer="layers.30.mlp")
    line.passes(1.0)
    line.passes(3.0, *silent)
