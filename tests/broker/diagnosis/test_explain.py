"""Why a run waits, in the broker's words: chains of who waits for whom, and what is at their root."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.broker.control.protocol import (
    CONTROL_VERSION,
    Answer,
    Ask,
    Event,
    Exited,
    Hello,
    Refused,
    Report,
    StepRecord,
    StopRun,
    Wait,
)
from stageline.broker.diagnosis.wait_graph import LATE, QUIET
from stageline.broker.membership.failure_detector import EXIT_GRACE
from stageline.pipeline.schedule import make_schedule
from support.conversation import PLAN, TERMS, Talk

M = 8
LINE = replace(TERMS, schedule=make_schedule("1f1b", ((0,), (1,), (2,), (3,)), M))
Facts = dict[str, object]


class WorkerLine(Talk):
    """Four workers, w0 to w3, with a stage each; what each says is said again and again while time passes."""

    def __init__(self, **terms: object) -> None:
        super().__init__(terms=replace(LINE, **terms))  # type: ignore[arg-type]
        self.saying: dict[int, Report] = {}
        for index in range(4):
            self.hello(index)

    def hello(self, index: int, pid: int = 0) -> None:
        said = Hello(CONTROL_VERSION, PLAN, f"w{index}", "desk", pid or 100 + index, "", index)
        given = self.assigned(b"%d" % index, said)
        named = replace_hello(said, given.incarnation, f"ipc://{index}")
        self.say(b"%d" % index, named)
        self.saying[index] = Report(given.incarnation, 0, "waits for the other workers", 0.0, 0.0)

    def says(self, index: int, now: str, *waits: Wait, events: tuple[Event, ...] = (), **more: object) -> None:
        incarnation = self.saying[index].incarnation
        said = Report(incarnation, 5, now, 0.0, 0.0, events=list(events), waits=list(waits), **more)  # type: ignore[arg-type]
        self.saying[index] = said

    def waits(self, index: int, queue: str, step: int, microbatch: int, action: str = "", **more: object) -> None:
        wait = Wait(queue, step * M + microbatch, action or f"{index}B{microbatch}", step, 0.0)
        self.says(index, f"waits for {queue} to run {wait.action} of step {step}", wait, **more)  # type: ignore[arg-type]

    def lacks_room(self, index: int, queue: str, step: int, microbatch: int) -> None:
        wait = Wait(queue, step * M + microbatch, f"{index}F{microbatch}", step, 0.0, room=True)
        self.says(index, f"waits for room in {queue} to put what {wait.action} of step {step} gives", wait)

    def has_finished(self, stage: int, step: int) -> None:
        incarnation = self.saying[stage].incarnation
        record = StepRecord(stage, step, b"")
        self.say(b"%d" % stage, Report(incarnation, 5, "waits", 0.0, 0.0, [record], number=1))

    def passes(self, seconds: float, *silent: int) -> None:
        for _ in range(round(seconds * 2)):
            for index, report in self.saying.items():
                if index not in silent:
                    self.say(b"%d" % index, report)
            self.after(0.5)

    def why(self, **of: str) -> Facts:
        ((_, answer),) = self.say(b"me", Ask("why", of))
        assert isinstance(answer, Answer), answer
        assert answer.schema == "why/1"
        return answer.facts


def replace_hello(said: Hello, incarnation: int, endpoint: str) -> Hello:
    return Hello(said.version, said.plan, said.name, said.host, said.pid, endpoint, said.claim, incarnation)


def computing(stage: int, step: int, microbatch: int, state: str) -> Event:
    return Event(stage, step, microbatch, state, 1000.0)


@pytest.fixture
def line() -> WorkerLine:
    return WorkerLine()


def hang(line: WorkerLine, *silent: int) -> None:
    """Stage 3 hangs in the backward that all others wait for."""
    line.waits(0, "backward-0", 118, 5), line.waits(1, "backward-1", 118, 5), line.waits(2, "backward-2", 118, 5)
    line.says(3, "3B5 of step 118", events=(computing(3, 118, 5, "backward"),), layer="layers.30.mlp")
    line.passes(1.0)
    line.passes(3.0, *silent)


def test_a_hang_is_named_with_stage_worker_layer_and_time(line: WorkerLine):
    hang(line)
    assert line.why(stage="2")["text"] == (
        "stage 2 waits for the gradient of step 118 microbatch 5 from stage 3 (worker w3, life 1), "
        "which took it 4 s ago and has made no progress since; it is in layers.30.mlp"
    )


def test_the_whole_chain_leads_to_the_root(line: WorkerLine):
    hang(line)
    facts = line.why()
    assert facts["text"] == (
        "stage 0 waits for the gradient of step 118 microbatch 5 from stage 1 (worker w1, life 1), "
        "which waits for the gradient of step 118 microbatch 5 from stage 2 (worker w2, life 1), "
        "which waits for the gradient of step 118 microbatch 5 from stage 3 (worker w3, life 1), "
        "which took it 4 s ago and has made no progress since; it is in layers.30.mlp"
    )
    assert [(lack["index"], lack["source"]) for lack in facts["chain"]] == [(0, 1), (1, 2), (2, 3)]  # type: ignore[attr-defined]
    assert (facts["root"]["cause"], facts["root"]["worker"]["pid"]) == ("stuck", 103)  # type: ignore[index]
    assert facts["action"] == (
        "check process 103 on desk; it is declared lost in 6 s, and the run ends (recovery.lease is 10 s)"
    )


def test_a_hang_that_holds_the_interpreter_is_silent_and_named_by_what_it_said_last(line: WorkerLine):
    hang(line, 3)
    facts = line.why(stage="2")
    assert str(facts["text"]).endswith(
        'which was silent for 3.5 s; it last reported: "3B5 of step 118", in layers.30.mlp'
    )
    assert facts["root"]["cause"] == "silent"  # type: ignore[index]


def test_the_run_that_is_given_up_has_the_same_words_last(line: WorkerLine):
    hang(line)
    line.passes(10.0)
    reason = str(line.status()["reason"])
    assert "is alive, but completed no action for 10.0 s" in reason
    assert reason.endswith(
        "Stage 0 waits for the gradient of step 118 microbatch 5 from stage 1 (worker w1, life 1), "
        "which waits for the gradient of step 118 microbatch 5 from stage 2 (worker w2, life 1), "
        "which waits for the gradient of step 118 microbatch 5 from stage 3 (worker w3, life 1), "
        "which took it 10 s ago and has made no progress since; it is in layers.30.mlp"
    )
    assert line.why()["text"] == reason


def test_a_killed_worker_is_named_by_its_signal(line: WorkerLine):
    hang(line)
    line.say(b"supervisor", Exited(3, 103, -9)), line.after(1.0)
    assert 'which was killed by SIGKILL; it last reported: "3B5 of step 118"' in str(line.status()["reason"])


def test_a_missing_worker_is_the_root_as_long_as_it_is_missing():
    line = WorkerLine(restarts=2, snapshots=True)
    line.waits(0, "backward-0", 7, 5), line.waits(1, "backward-1", 7, 5), line.says(3, "waits for the others to finish")
    line.say(b"supervisor", Exited(2, 102, -9)), line.after(EXIT_GRACE)
    del line.saying[2]
    line.passes(2.0)
    facts = line.why(stage="1")
    assert str(facts["text"]).startswith(
        "stage 1 waits for the gradient of step 7 microbatch 5 from stage 2 (worker 2), "
        "which was lost 2 s ago and has not been replaced: worker 2 (stage 2), w2 (pid 102, host desk), was killed"
    )
    assert facts["action"] == (
        "start `stageline worker CONFIG --broker URL --index 2`; the run is given up if none joins within 58 s"
    )
    assert facts["root"] == {"cause": "missing", "worker": {"index": 2, "stages": [2], "standing": "missing"}}
    line.hello(2, pid=202)
    line.passes(1.0, 2)
    assert "which has a worker that is still starting" in str(line.why(stage="1")["text"])


def test_before_the_run_the_missing_workers_are_named():
    talk = Talk()
    ((_, answer),) = talk.say(b"me", Ask("why"))
    assert isinstance(answer, Answer)
    assert answer.facts["text"] == "worker 0 (stage 0) and worker 1 (stage 1) did not join yet"


def test_what_another_action_holds_up_is_named_by_that_action(line: WorkerLine):
    line.waits(1, "backward-1", 7, 5)
    line.says(2, "2F7 of step 7", events=(computing(2, 7, 7, "forward"),))
    line.passes(2.0)
    text = str(line.why(stage="1")["text"])
    assert text.endswith("(worker w2, life 1), which began 2F7 of step 7 2 s ago and has made no progress since")


def test_a_message_that_was_put_and_does_not_arrive_is_on_its_way(line: WorkerLine):
    line.waits(1, "forward-1", 7, 5, action="1F5")
    line.says(0, "0F7 of step 7", events=(computing(0, 7, 5, "stashed"),))
    line.passes(3.0)
    facts = line.why(stage="1")
    assert facts["text"] == (
        "stage 1 waits for the activation of step 7 microbatch 5 from stage 0 (worker w0, life 1), "
        "which has put it; it has not arrived for 3.0 s"
    )
    assert facts["root"]["cause"] == "on its way"  # type: ignore[index]


def test_what_a_dead_worker_had_put_it_has_to_put_again(line: WorkerLine):
    line.waits(1, "forward-1", 7, 5, action="1F5")
    line.says(0, "0F7 of step 7", events=(computing(0, 7, 5, "stashed"),))
    line.passes(0.5)
    line.passes(QUIET + 1, 0)
    assert line.why(stage="1")["root"]["cause"] == "silent"  # type: ignore[index]


def test_a_circle_is_called_one(line: WorkerLine):
    line.waits(1, "forward-1", 7, 5), line.waits(0, "backward-0", 7, 1)
    line.passes(2.0)
    facts = line.why(stage="1")
    assert facts["root"]["cause"] == "circle"  # type: ignore[index]
    assert "a checked schedule cannot deadlock" in str(facts["action"])


def test_a_message_that_does_not_arrive_makes_no_circle(line: WorkerLine):
    """When a Redis server was gone, each of two workers waited for the other: that was called a circle."""
    line.says(0, "0F5 of step 7", events=(computing(0, 7, 5, "stashed"),))
    line.passes(0.5)
    line.waits(1, "forward-1", 7, 5), line.waits(0, "backward-0", 7, 5)
    line.passes(3.0)
    for stage in ("0", "1"):
        assert line.why(stage=stage)["root"]["cause"] == "on its way"  # type: ignore[index]


def test_reports_of_different_moments_make_no_circle(line: WorkerLine):
    """In a run of quick steps each of two workers was seen waiting for what the other had put a moment before: it was
    called a circle, to be reported."""
    line.waits(1, "forward-1", 7, 5), line.waits(0, "backward-0", 7, 1)
    line.passes(0.5)
    facts = line.why(stage="1")
    assert "circle" not in str(facts["text"])
    assert facts["action"] == "nothing: the run makes progress"


@pytest.mark.parametrize(("index", "queue", "what"), [(0, "forward-0", "activation"), (3, "target-3", "targets")])
def test_batches_that_do_not_come_are_the_sources(line: WorkerLine, index: int, queue: str, what: str):
    line.waits(index, queue, 7, 5)
    line.passes(2.0)
    facts = line.why(stage=str(index))
    assert facts["text"] == f"stage {index} waits for the {what} of step 7 microbatch 5 from the data source"
    assert facts["root"] == {"cause": "source", "worker": None}


def test_when_nobody_is_heard_it_is_the_broker(line: WorkerLine):
    hang(line, 0, 1, 2, 3)
    facts = line.why()
    assert facts["text"] == "the broker has received no report for 4 s"
    assert "the workers keep training without it" in str(facts["action"])


def test_a_run_that_gets_on_says_so(line: WorkerLine):
    line.waits(0, "backward-0", 7, 5)
    line.says(1, "1B5 of step 7", events=(computing(1, 7, 5, "backward"),))
    for _ in range(5):
        line.saying[1] = Report(2, line.saying[1].actions + 1, "1B5 of step 7", 0.0, 0.0)
        line.passes(0.5)
    facts = line.why(stage="0")
    assert facts["action"] == "nothing: the run makes progress"
    assert facts["root"]["cause"] == "computing"  # type: ignore[index]


def test_a_message_may_be_on_its_way_for_a_moment(line: WorkerLine):
    line.waits(1, "forward-1", 7, 5, action="1F5")
    line.says(0, "0F7 of step 7", events=(computing(0, 7, 5, "stashed"),))
    line.passes(0.5)
    assert line.core._supervision.diagnose(line.now, 1).chain.harmless
    line.passes(LATE)
    assert not line.core._supervision.diagnose(line.now, 1).chain.harmless


def test_a_worker_with_several_stages_may_need_another_one_first():
    talk = Talk(terms=replace(TERMS, schedule=make_schedule("1f1b", ((0, 2), (1,)), M)))
    for index in (0, 1):
        talk.join(index)
    wait = Wait("backward-0", 7 * M + 1, "0B1", 7, 0.0)
    talk.say(b"a", Report(1, 5, "waits for backward-0", 0.0, 0.0, waits=[wait]))
    talk.say(b"b", Report(2, 5, "waits", 0.0, 0.0, waits=[Wait("backward-1", 7 * M + 3, "1B3", 7, 0.0)]))
    text = talk.core._supervision.diagnose(talk.now, 1).text
    assert text.startswith(
        "stage 1 waits for the gradient of step 7 microbatch 3 from stage 2 (worker-0, life 1), "
        "whose worker first runs 0B1 of stage 0, which waits for the gradient of step 7 microbatch 1 from stage 1"
    )


def test_a_wait_for_room_leads_to_the_stage_that_does_not_get_on(line: WorkerLine):
    """It was taken for a hang: the worker that waited was the one to be given up."""
    line.lacks_room(1, "forward-2", 7, 5), line.waits(0, "backward-0", 7, 0)
    line.says(2, "2F1 of step 7", events=(computing(2, 7, 1, "forward"),), layer="layers.3")
    line.waits(3, "forward-3", 7, 1, action="3F1")
    line.passes(4.0)
    assert line.why(stage="0")["text"] == (
        "stage 0 waits for the gradient of step 7 microbatch 0 from stage 1 (worker w1, life 1), "
        "which waits for room in forward-2 until stage 2 (worker w2, life 1) makes progress, "
        "which began 2F1 of step 7 4 s ago and has made no progress since; it is in layers.3"
    )
    facts = line.why(stage="1")
    assert [(lack["stage"], lack["source"], lack["room"]) for lack in facts["chain"]] == [(1, 2, True)]  # type: ignore[attr-defined]
    assert facts["root"]["cause"] == "stuck"  # type: ignore[index]


def test_room_waits_for_whoever_has_finished_least_not_for_who_takes(line: WorkerLine):
    for stage in (0, 1, 2):
        line.has_finished(stage, 6)
    line.lacks_room(1, "forward-2", 7, 5), line.waits(2, "forward-2", 7, 5, action="2F5")
    line.says(3, "3B7 of step 6", events=(computing(3, 6, 7, "backward"),))
    line.passes(3.0)
    assert str(line.why(stage="2")["text"]).endswith(
        "from stage 1 (worker w1, life 1), which waits for room in forward-2 until stage 3 (worker w3, "
        "life 1) makes progress, which began 3B7 of step 6 3 s ago and has made no progress since"
    )


def test_a_worker_that_waits_for_room_outlives_its_lease(line: WorkerLine):
    line.lacks_room(1, "forward-2", 7, 5)
    for actions in range(60):  # the others get on, if slowly
        for index in (0, 2, 3):
            line.saying[index] = Report(line.saying[index].incarnation, actions, f"{index}F{actions}", 0.0, 0.0)
        line.passes(0.5)
    assert line.status()["phase"] == "running"
    assert line.status()["workers"][1]["now"].startswith("waits for room in forward-2")  # type: ignore[index]


def test_a_circle_that_room_would_break_says_how_to_make_some(line: WorkerLine):
    line.lacks_room(1, "forward-2", 7, 5), line.waits(2, "forward-2", 7, 5, action="2F5")
    line.waits(0, "backward-0", 7, 0), line.waits(3, "forward-3", 7, 5, action="3F5")
    line.passes(3.0)
    facts = line.why(stage="1")
    assert facts["root"]["cause"] == "circle"  # type: ignore[index]
    assert "a larger queues.retain_bytes" in str(facts["action"])


def test_a_standstill_for_want_of_room_is_found_and_named(line: WorkerLine):
    line.lacks_room(1, "forward-2", 7, 5), line.waits(2, "forward-2", 7, 5, action="2F5")
    line.waits(0, "backward-0", 7, 0), line.waits(3, "forward-3", 7, 5, action="3F5")
    line.passes(62.0)
    assert line.status()["phase"] == "failed"
    assert "every worker has been waiting for another for 60 s" in str(line.status()["reason"])
    assert "waits for room in forward-2 until" in str(line.status()["reason"])


AWAY = "Redis at redis://10.0.0.9:6379/0 cannot be reached: Error 111 connecting to 10.0.0.9:6379. Connection refused."


def test_a_server_that_is_away_is_what_workers_wait_for(line: WorkerLine):
    """When a Redis server was gone, the workers were said to wait for each other's messages."""
    line.says(0, "0F7 of step 7", events=(computing(0, 7, 5, "stashed"),))
    line.passes(0.5)
    for index, queue in ((0, "backward-0"), (1, "forward-1")):
        line.waits(index, queue, 7, 5, trouble=AWAY, troubled=12.0)
    line.waits(2, "forward-2", 7, 5)
    line.passes(1.0)
    away = f"waits for the server of its queues, for 12 s now: {AWAY[:-1]}"
    assert line.why(stage="1")["text"] == f"stage 1 (worker w1, life 1) {away}"
    facts = line.why(stage="2")
    assert facts["text"] == (
        "stage 2 waits for the activation of step 7 microbatch 5 from stage 1 (worker w1, life 1), which " + away
    )
    assert (facts["root"]["cause"], facts["root"]["worker"]["index"]) == ("server", 1)  # type: ignore[index]
    assert "start that server, or make sure that desk can reach it" in str(facts["action"])


def test_a_message_that_its_producer_cannot_bring_to_the_server_waits_for_that(line: WorkerLine):
    line.says(0, "0F7 of step 7", events=(computing(0, 7, 5, "stashed"),), trouble=AWAY, troubled=3.0)
    line.waits(1, "forward-1", 7, 5, action="1F5")
    line.passes(1.0)
    assert line.why(stage="1")["root"]["cause"] == "server"  # type: ignore[index]
    assert "from stage 0 (worker w0, life 1), which waits for the server" in str(line.why(stage="1")["text"])


def test_a_server_that_is_away_for_a_worker_that_computes_holds_up_nobody_yet(line: WorkerLine):
    line.says(1, "1F5 of step 7", trouble=AWAY, troubled=3.0)
    line.passes(0.5)
    assert line.why(stage="1")["root"]["cause"] == "computing"  # type: ignore[index]


def test_a_run_that_is_over_says_how_it_ended(line: WorkerLine):
    line.say(b"train", StopRun("enough", 130))
    assert (line.why()["text"], line.why()["root"]) == ("enough", None)


@pytest.mark.parametrize("of", [{"stage": "4"}, {"stage": "three"}])
def test_a_stage_that_there_is_not_is_refused(line: WorkerLine, of: dict[str, str]):
    ((_, refused),) = line.say(b"me", Ask("why", of))
    assert isinstance(refused, Refused)


_QUEUES = st.sampled_from(["forward-0", "forward-2", "backward-1", "target-3", "backward-9", "x", "forward-", "-1"])
_WAITS = st.builds(Wait, _QUEUES, st.integers(0, 99), st.just("1F3"), st.integers(0, 9), st.just(0.0), st.booleans())
_STATES = st.sampled_from(["forward", "stashed", "backward", "done"])


@given(st.data())
def test_whatever_is_reported_there_is_an_answer(data: st.DataObject):
    line = WorkerLine(restarts=1, snapshots=True)
    for index in range(4):
        waits = data.draw(st.lists(_WAITS, max_size=1))
        event = Event(index, data.draw(st.integers(0, 9)), data.draw(st.integers(0, 7)), data.draw(_STATES), 1000.0)
        trouble = data.draw(st.sampled_from(["", "Redis is away"]))
        line.says(index, data.draw(st.sampled_from(["1F3", "waits"])), *waits, events=(event,), trouble=trouble)
        if data.draw(st.booleans()):
            line.saying[index] = Report(index + 1, 9, "1U", 0.0, 0.0, [StepRecord(index, 3, b"")])
    line.passes(1.0)
    silent = data.draw(st.sets(st.integers(0, 3)))
    line.passes(data.draw(st.sampled_from([0.0, 2.0, 12.0])), *silent)
    facts = line.why()
    assert facts["text"]
    assert facts["action"]
