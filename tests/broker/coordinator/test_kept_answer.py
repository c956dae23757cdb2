"""Answer to why a run is slow: given again for a while, with its age, but not once the run's situation has changed."""

from itertools import count

import msgspec
import pytest

from stageline.broker.control.messages import Answer, Ask
from stageline.broker.control.pace_answers import WhyFacts
from stageline.broker.control.pauses import HeldBack, PauseRun
from stageline.broker.control.records import ScheduleOrder
from stageline.broker.coordinator.kept_answer import LONGEST, TIMES, KeptAnswer
from stageline.broker.coordinator.run import RunConfig
from stageline.broker.ledger.milestones import Milestone
from support.conversation import TERMS, Conversation, name, report
from support.replacements import REPLACING, kill, replacement
from support.slow_steps import SlowRun

RUN = SlowRun(TERMS.schedule, (0.01, 0.04), (0.0001,), noise=0.01)
COST = 0.05  # seconds of the processor's time that an answer takes
KEPT = TIMES * COST


class Processor:
    """A clock of the processor's time, which is read before and after an answer is computed."""

    def __init__(self, cost: float) -> None:
        self._cost, self._time, self._computes = cost, 0.0, False

    def __call__(self) -> float:
        self._time += self._cost * self._computes
        self._computes = not self._computes
        return self._time


class SlowConversation(Conversation):
    """A run of two workers that goes on, and is asked why it is slow."""

    def __init__(self, terms: RunConfig = TERMS, *, steps: int = 30) -> None:
        super().__init__(terms=terms, spent=Processor(COST))
        self.join(0), self.join(1)
        self._records = iter(RUN.records(400, 0))
        self.incarnations = [1, 2]
        self.train(steps)

    def replaced(self) -> None:
        """Another process takes the place of worker 1."""
        self.send(b"new", replacement(1, 201))
        self.send(b"new", replacement(1, 201, 3, "ipc://new"))
        self.incarnations[1] = 3

    def lost(self) -> None:
        """Worker 1 is killed after the checkpoint of step 30."""
        for stage, incarnation in enumerate(self.incarnations):
            said = report(stage, actions=10, snapshots=[(stage, 30)])
            self.send(name(stage), msgspec.structs.replace(said, incarnation=incarnation))
        kill(self, 1, 101)

    def train(self, steps: int) -> None:
        """Each step is reported by both workers, a second after the one before."""
        for _ in range(steps):
            self.now += 1.0
            for stage, incarnation in enumerate(self.incarnations):
                said = report(stage, actions=10, steps=[next(self._records)])
                self.send(name(stage), msgspec.structs.replace(said, incarnation=incarnation))

    def why(self) -> dict:
        ((_, answer),) = self.send(b"me", Ask("why"))
        assert isinstance(answer, Answer)
        msgspec.convert(answer.facts, WhyFacts)
        return answer.facts

    def told(self) -> tuple[float, int]:
        """The age of the answer, and the last step that it is about."""
        facts = self.why()
        return facts["age"], facts["slow"]["steps"][1]


def test_an_answer_is_given_again_for_two_hundred_times_its_cost_with_its_age() -> None:
    talk = SlowConversation()
    seen = []
    for _ in range(25):
        seen.append(talk.told())
        talk.train(1)
    ages = [age for age, _ in seen]
    assert ages == pytest.approx([float(second % KEPT) for second in range(25)])
    assert [step for _, step in seen] == [*[29] * 10, *[39] * 10, *[49] * 5]


def test_a_lost_worker_is_told_at_once_and_after_its_return_the_answer_is_new() -> None:
    talk = SlowConversation(REPLACING)
    assert talk.told() == (0.0, 29)
    talk.lost()
    facts = talk.why()
    assert (facts["slow"], facts["age"]) == (None, 0.0)
    assert "was killed by SIGKILL" in facts["text"]
    talk.replaced()
    talk.train(2)
    assert talk.told() == (0.0, 31)


def test_a_loss_that_no_question_met_makes_the_answer_new() -> None:
    talk = SlowConversation(REPLACING)
    assert talk.told() == (0.0, 29)
    talk.lost()
    talk.replaced()
    talk.train(2)
    assert talk.told() == (0.0, 31)


def test_a_pause_is_told_at_once_and_after_its_end_the_answer_is_new() -> None:
    talk = SlowConversation()
    assert talk.told() == (0.0, 29)
    order = next(message for to, message in talk.send(b"me", PauseRun("ada", "a backup")) if to == name(0))
    for index in (0, 1):
        talk.send(name(index), report(index, actions=10, held=HeldBack(order.number, 30)))
    talk.after(0.1)
    assert "pause" in talk.why()["text"]
    assert talk.why()["slow"] is None
    talk.send(b"me", PauseRun("ada", resumes=True))
    talk.train(6)
    age, step = talk.told()
    assert (age, step) == (0.0, 35)


def test_once_a_step_has_another_schedule_no_answer_about_the_one_before_is_given() -> None:
    """An order is known before its first step: an answer of the steps in between was kept beyond that step."""
    talk = SlowConversation()
    talk.core.run.orders.orders = [ScheduleOrder(33, "gpipe")]
    assert talk.told() == (0.0, 29)
    talk.train(2)
    assert talk.told() == (2.0, 29)
    talk.train(1)
    assert talk.why()["slow"] is None
    talk.train(6)
    assert talk.told() == (0.0, 38)


def test_a_loss_makes_the_answer_new_although_the_clock_of_the_broker_before_was_ahead() -> None:
    """The newest milestone by its time was one of the broker before, whatever came after it."""
    talk = SlowConversation(REPLACING)
    talk.core.run.milestones.append(Milestone("broker", talk.now + 3600.0, 0))
    assert talk.told() == (0.0, 29)
    talk.lost()
    talk.replaced()
    talk.train(2)
    assert talk.told() == (0.0, 31)


def test_a_run_of_too_few_steps_is_explained_as_soon_as_there_are_enough() -> None:
    talk = SlowConversation(steps=0)
    found = []
    for _ in range(6):
        talk.train(1)
        found.append(talk.why()["slow"] is not None)
    assert found == [*[False] * 4, *[True] * 2]  # step 0 does not count


def test_after_the_end_of_the_run_the_answer_has_its_last_steps() -> None:
    talk = SlowConversation()
    assert talk.told() == (0.0, 29)
    talk.train(3)
    assert talk.told() == (3.0, 29)
    kill(talk, 1, 101)
    assert talk.core.run.outcome is not None
    assert talk.told() == (0.0, 32)


def test_a_run_that_is_stuck_is_never_explained_by_an_old_answer() -> None:
    talk = SlowConversation()
    assert talk.told() == (0.0, 29)
    for second in range(60):
        talk.now += 1.0
        talk.send(name(0), report(0, actions=10, now="waits for backward-0 message 0"))
        facts = talk.why()
        assert facts["reports"] or facts["slow"] is not None
        if second > 20:
            assert facts["slow"] is None
    assert facts["root"]["worker"]["index"] == 1


def test_one_that_costs_nothing_is_always_computed_and_none_is_kept_for_long() -> None:
    numbers = count()

    def facts() -> dict[str, object]:
        return {"number": next(numbers)}

    free = KeptAnswer()
    assert [free.given("here", facts, 5.0)["number"] for _ in range(3)] == [0, 1, 2]
    dear = KeptAnswer(Processor(1000.0))
    told = [dear.given("here", facts, now)["number"] for now in (0.0, LONGEST - 1, LONGEST, LONGEST + 1)]
    assert told == [3, 3, 4, 4]


def test_of_a_clock_that_was_set_back_no_answer_is_of_the_future() -> None:
    kept = KeptAnswer(Processor(COST))
    assert kept.given("here", dict, 100.0) == {"age": 0.0}
    assert kept.given("here", dict, 101.0) == {"age": 1.0}
    assert kept.given("here", dict, 50.0) == {"age": 0.0}
