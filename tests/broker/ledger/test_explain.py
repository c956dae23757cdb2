"""Why a run waits, in the broker's words: chains of who waits for whom, and what is at their root."""

import pytest

from stageline.broker.control.messages import Answer, Ask, Exited, Refused, Report, StopRun
from stageline.broker.control.records import Lack, Wait
from stageline.broker.coordinator.run import ScriptCode
from stageline.broker.ledger.losses import EXIT_GRACE
from support.conversation import Conversation
from support.worker_line import M, WorkerLine, computing, hang


@pytest.fixture
def line() -> WorkerLine:
    return WorkerLine()


def test_a_hang_is_named_with_stage_worker_layer_and_time(line: WorkerLine):
    hang(line)
    assert line.why(stage="2")["text"] == (
        "stage 2 waits for the gradient of step 118 microbatch 5 from stage 3 (worker w3, generation 1), "
        "which took it 4 s ago and has made no progress since; it is in layers.30.mlp"
    )


def test_the_whole_chain_leads_to_the_root(line: WorkerLine):
    hang(line)
    facts = line.why()
    assert facts["text"] == (
        "stage 0 waits for the gradient of step 118 microbatch 5 from stage 1 (worker w1, generation 1), "
        "which waits for the gradient of step 118 microbatch 5 from stage 2 (worker w2, generation 1), "
        "which waits for the gradient of step 118 microbatch 5 from stage 3 (worker w3, generation 1), "
        "which took it 4 s ago and has made no progress since; it is in layers.30.mlp"
    )
    assert [(lack["index"], lack["source"]) for lack in facts["chain"]] == [(0, 1), (1, 2), (2, 3)]  # type: ignore[attr-defined]
    assert (facts["root"]["cause"], facts["root"]["worker"]["pid"]) == ("stuck", 103)  # type: ignore[index]
    assert facts["action"] == (
        "check process 103 on desk; it is declared lost in 6 s, and the run ends (recovery.action is 10 s)"
    )


def test_a_hang_that_holds_the_interpreter_is_silent_and_named_by_its_last_report(line: WorkerLine):
    hang(line, 3)
    facts = line.why(stage="2")
    assert str(facts["text"]).endswith(
        'which was silent for 3.5 s; it last reported: "3B5 of step 118", in layers.30.mlp'
    )
    assert facts["root"]["cause"] == "silent"  # type: ignore[index]


def test_a_killed_worker_is_named_by_its_signal(line: WorkerLine):
    hang(line)
    line.send(b"supervisor", Exited(3, 103, -9)), line.after(1.0)
    assert 'which was killed by SIGKILL; it last reported, 0.6 s ago: "3B5 of step 118"' in str(line.status()["reason"])


def test_a_missing_worker_is_the_root_as_long_as_it_is_missing():
    line = WorkerLine(restarts=2, snapshots=True)
    line.waits(0, "backward-0", 7, 5), line.waits(1, "backward-1", 7, 5), line.says(3, "waits for the others to finish")
    line.send(b"supervisor", Exited(2, 102, -9)), line.after(EXIT_GRACE)
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


@pytest.mark.parametrize(
    ("terms", "action"),
    [
        ({"supervised": True}, "wait: the process that started the broker starts a worker there"),
        (
            {"supervised": True, "code": ScriptCode("2.13.0", {})},
            "on its machine, in the folder with your code, start `stageline worker --join URL --index 2`",
        ),
    ],
)
def test_who_starts_a_replacement_is_said_as_the_run_was_started(terms: dict[str, object], action: str):
    line = WorkerLine(restarts=2, snapshots=True, **terms)
    line.waits(1, "backward-1", 7, 5)
    line.send(b"supervisor", Exited(2, 102, -9)), line.after(EXIT_GRACE)
    del line.saying[2]
    line.passes(2.0)
    said = str(line.why(stage="1")["action"])
    assert said == f"{action}; the run is given up if none joins within 58 s"


def test_before_the_run_the_missing_workers_are_named():
    talk = Conversation()
    ((_, answer),) = talk.send(b"me", Ask("why"))
    assert isinstance(answer, Answer)
    assert answer.facts["text"] == "worker 0 (stage 0) and worker 1 (stage 1) did not join yet"


def test_a_run_that_makes_progress_is_diagnosed_as_such(line: WorkerLine):
    line.waits(0, "backward-0", 7, 5)
    line.says(1, "1B5 of step 7", events=(computing(1, 7, 5, "backward"),))
    for _ in range(5):
        line.saying[1] = Report(2, line.saying[1].actions + 1, "1B5 of step 7", 0.0, 0.0)
        line.passes(0.5)
    facts = line.why(stage="0")
    assert facts["action"] == "nothing: the run makes progress"
    assert facts["root"]["cause"] == "computing"  # type: ignore[index]


def test_a_worker_that_waits_for_room_outlives_its_lease(line: WorkerLine):
    line.lacks_room(1, "forward-2", 7, 5)
    for actions in range(60):  # the others get on, if slowly
        for index in (0, 2, 3):
            line.saying[index] = Report(line.saying[index].incarnation, actions, f"{index}F{actions}", 0.0, 0.0)
        line.passes(0.5)
    assert line.status()["phase"] == "running"
    assert line.status()["workers"][1]["now"].startswith("waits for room in forward-2")  # type: ignore[index]


def test_a_stage_that_is_as_far_ahead_as_it_may_be_waits_for_the_next_one_and_that_for_the_root(line: WorkerLine):
    wait = Wait("forward-1", 7 * M + 5, "0F5", 7, 0.0, Lack.CREDIT)
    line.says(0, "waits for credit in forward-1 to run 0F5 of step 7", wait)
    line.waits(1, "backward-1", 2, 5), line.waits(2, "backward-2", 2, 5)
    line.says(3, "3B5 of step 2", events=(computing(3, 2, 5, "backward"),))
    line.passes(3.0)
    facts = line.why(stage="0")
    assert str(facts["text"]).startswith(
        "stage 0 waits for room in forward-1 until stage 1 (worker w1, generation 1) makes progress, which waits for "
        "the gradient of step 2 microbatch 5 from stage 2 (worker w2, generation 1), which waits for the gradient"
    )
    assert facts["root"]["worker"]["index"] == 3  # type: ignore[index]


def test_a_standstill_for_lack_of_room_is_found_and_named(line: WorkerLine):
    line.lacks_room(1, "forward-2", 7, 5), line.waits(2, "forward-2", 7, 5, action="2F5")
    line.waits(0, "backward-0", 7, 0), line.waits(3, "forward-3", 7, 5, action="3F5")
    line.passes(62.0)
    assert line.status()["phase"] == "failed"
    assert "every worker has been waiting for another for 60 s" in str(line.status()["reason"])
    assert "waits for room in forward-2 until" in str(line.status()["reason"])
    assert str(line.status()["reason"]).endswith("resume the run with a larger queues.retain_bytes")


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
    assert line.why(stage="1")["text"] == f"stage 1 (worker w1, generation 1) {away}"
    facts = line.why(stage="2")
    assert facts["text"] == (
        "stage 2 waits for the activation of step 7 microbatch 5 from stage 1 (worker w1, generation 1), which " + away
    )
    assert (facts["root"]["cause"], facts["root"]["worker"]["index"]) == ("server", 1)  # type: ignore[index]
    assert "start that server, make sure that desk can reach it" in str(facts["action"])


def test_a_message_that_its_producer_cannot_bring_to_the_server_waits_for_that(line: WorkerLine):
    line.says(0, "0F7 of step 7", events=(computing(0, 7, 5, "stashed"),), trouble=AWAY, troubled=3.0)
    line.waits(1, "forward-1", 7, 5, action="1F5")
    line.passes(1.0)
    assert line.why(stage="1")["root"]["cause"] == "server"  # type: ignore[index]
    assert "from stage 0 (worker w0, generation 1), which waits for the server" in str(line.why(stage="1")["text"])


def test_a_server_that_is_away_for_a_computing_worker_blocks_no_other_yet(line: WorkerLine):
    line.says(1, "1F5 of step 7", trouble=AWAY, troubled=3.0)
    line.passes(0.5)
    assert line.why(stage="1")["root"]["cause"] == "computing"  # type: ignore[index]


def test_why_of_a_run_that_is_over_is_its_outcome(line: WorkerLine):
    line.send(b"train", StopRun("enough"))
    assert (line.why()["text"], line.why()["root"]) == ("enough", None)


@pytest.mark.parametrize("of", [{"stage": "4"}, {"stage": "three"}])
def test_a_stage_that_there_is_not_is_refused(line: WorkerLine, of: dict[str, str]):
    ((_, refused),) = line.send(b"me", Ask("why", of))
    assert isinstance(refused, Refused)
