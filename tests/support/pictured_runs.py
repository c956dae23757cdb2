"""Simulated runs of any size, told to a broker's core, whose answers a page is made of; and the page itself."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from stageline.broker.control.messages import Answer, Ask
from stageline.broker.control.queue_counts import Depth, Intake
from stageline.broker.control.records import EvaluationRecord, StepRecord
from stageline.broker.coordinator.run import RunConfig
from stageline.broker.ledger.milestones import Milestone
from stageline.broker.ledger.times import TimedAction, timed_actions
from stageline.pipeline.program import Costs, compile_program
from stageline.pipeline.program.timing import simulate
from stageline.pipeline.schedule import Schedule, make_schedule
from stageline.workers.extras.report.facts import sections
from stageline.workers.extras.report.page import page_of
from support.conversation import TERMS, Conversation, name, report
from support.packed import packed_times
from support.shapes import line
from support.slow_steps import EPOCH, SlowRun

_MANY = 16  # stages, of which a run goes as planned: its simulation takes no time

Facts = dict[str, Any]
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028'\"&amp;<!--"


class PicturedRun:
    """A run of `stages` stages and as many workers, of which stage 1 computes too long.

    Attributes:
        talk: Its broker's core.
    """

    def __init__(self, stages: int, microbatches: int, steps: int, run: str = "") -> None:
        schedule = make_schedule("1f1b", line(stages), microbatches)
        terms: RunConfig = replace(TERMS, schedule=schedule, log_every=1)
        self.talk = Conversation(now=EPOCH, terms=terms)
        if run:
            self.talk.core.run.id = run
        for worker in range(stages):
            self.talk.join(worker)
        forward = tuple(0.012 if stage == 1 else 0.004 + 0.0002 * (stage % 5) for stage in range(stages))
        slow = SlowRun(schedule, forward, (0.0004,) * (stages - 1), disk=0.03, every=5)
        for record in _planned(schedule, forward, steps) if stages > _MANY else slow.records(steps, 7):
            stage, last = record.stage, record.stage == stages - 1
            loss = 2.3 * 0.97**record.step + 0.01 * (record.step % 3) if last else None
            self.talk.now = max(self.talk.now, timed_actions(record)[-1][2])
            told = {
                "steps": [msgspec.structs.replace(record, loss=loss)],
                "memory": 2**28 + 2**22 * (record.step + stage),
            }
            self.talk.send(
                name(stage),
                report(
                    stage,
                    actions=record.step,
                    retained_bytes=2**18 * (1 + stage % 3),
                    **told,
                    **_counts(stage, stages, record.step),
                ),
            )
            if last:
                self.talk.core.keep_observation(self.talk.now + 2.0 * record.step)
        self._events(steps)

    def ask(self, what: str, **of: str) -> Facts:
        """Return the broker's answer."""
        ((_, answer),) = self.talk.send(b"me", Ask(what, of))
        assert isinstance(answer, Answer), answer
        return answer.facts

    def sections(self, folder: Path | None = None) -> Facts:
        """Return the data of the page."""
        return sections(self.ask, folder, "broker", self.talk.now)

    def page(self, **changed: Facts) -> str:
        """Return the page; `changed` sections stand in for those of the run."""
        return page_of(self.sections() | changed, self.talk.now)

    def _events(self, steps: int) -> None:
        ends = [at for _, at in self.ask("course")["ends"]]
        if steps < 4:
            return
        middle, run = len(ends) // 2, self.talk.core.run
        run.milestones.append(Milestone("checkpoint", ends[1], 2))
        run.milestones.append(Milestone("loss", ends[middle] - 0.02, middle, 1, "was killed by SIGKILL"))
        run.milestones.append(Milestone("return", ends[middle] + 0.05, middle, 1))
        run.milestones.append(Milestone("checkpoint", ends[-1], steps))
        for step in range(2, steps, max(2, steps // 4)):
            run.evaluations.add(EvaluationRecord(step, 64, 2.2 * 0.97**step, {"accuracy": 1 - 0.9**step}))


def _planned(schedule: Schedule, forward: tuple[float, ...], steps: int) -> list[StepRecord]:
    """The records of a run in which workers wait for nothing but what others compute."""
    hops, updates = (0.0004,) * (schedule.stages - 1), (0.001,) * schedule.stages
    timed, _ = simulate(compile_program(schedule), Costs(forward, forward, forward, updates, hops), range(steps), {})
    entries: dict[tuple[int, int], list[TimedAction]] = defaultdict(list)
    for each in timed:
        if each.action.kind in ("F", "B", "U"):
            entries[each.step, each.action.stage].append((each.action, EPOCH + each.start, EPOCH + each.end))
    return [StepRecord(stage, step, packed_times(times)) for (step, stage), times in sorted(entries.items())]


def _counts(stage: int, stages: int, step: int) -> Facts:
    done = step + 1
    puts = {
        f"forward-{stage + 1}": Depth(
            1, 2, 8, 8 * 2**14, 1.5, put=8 * done, sent=8 * done - 1, arrived=8 * done - 3, granted=8 * done + 4
        )
    }
    takes = {f"forward-{stage}": Intake(8 * done - 3, 8 * done - 4, 8 * done + 4)}
    return {"puts": puts if stage < stages - 1 else {}, "takes": takes if stage else {}}


def evil(value: object) -> object:
    """The same with markup in every text that is no key of the page's own."""
    if isinstance(value, dict):
        return {key: evil(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [evil(each) for each in value]
    return f"{value}{EVIL}" if isinstance(value, str) else value
