"""Why a scripted run waits: workers for the script's next call, the script for their replies."""

import pytest

from stageline.broker.control.messages import Answer, Ask, Exited
from stageline.broker.control.records import Lack, Wait
from support.conversation import Conversation, name, report, steps
from support.scripted import OWN_CODE, SCRIPT, SCRIPTED, heartbeats, reach, script_says, scripted

Facts = dict[str, object]


@pytest.fixture
def talk() -> Conversation:
    return scripted()


def why(talk: Conversation, **of: str) -> Facts:
    ((_, answer),) = talk.send(b"me", Ask("why", of))
    assert isinstance(answer, Answer)
    return answer.facts


def awaits_call(talk: Conversation, worker: int, number: int) -> None:
    wait = Wait(f"call-{worker}", number, f"call {number}", number, 0.0)
    talk.send(name(worker), report(worker, actions=5, now=f"waits for call-{worker} message {number}", waits=[wait]))


def awaits_reply(talk: Conversation, worker: int, number: int, *, calls: int = 0) -> None:
    wait = Wait(f"reply-{worker}", number, f"call {number}", number, 0.0)
    talk.send(name(SCRIPT), script_says(f"waits for reply-{worker} message {number}", wait, calls=calls))


def awaits_loss(talk: Conversation, worker: int, step: int, call: int) -> None:
    wait = Wait(f"loss-{worker}", step, f"call {call}", call, 0.0)
    talk.send(name(SCRIPT), script_says(f"waits for the loss of call {call}", wait, calls=call + 1))


def awaits_activation(talk: Conversation, queue: str, number: int) -> None:
    wait = Wait(queue, number, "1F3", 0, 0.0)
    talk.send(name(1), report(1, actions=5, now=f"waits for {queue} to run 1F3", waits=[wait]))


def repeat(talk: Conversation, seconds: float) -> None:
    """All last messages are repeated while time passes."""
    members = talk.core.run.registry.members.values()
    said = {name(member.index): member.report for member in members if member.report is not None}
    for _ in range(round(seconds * 2)):
        for sender, last in said.items():
            talk.send(sender, last)
        talk.after(0.5)


def test_workers_wait_for_the_script_which_works_in_its_own_code(talk: Conversation):
    talk.send(name(SCRIPT), script_says(OWN_CODE, calls=7))
    awaits_call(talk, 0, 7), awaits_call(talk, 1, 7)
    repeat(talk, 12.0)
    facts = why(talk)
    assert facts["text"] == (
        "worker 0 (stage 0) waits for call 7 from the script; the script runs its own code, for 12 s now"
    )
    assert facts["action"] == "nothing, if the script's own code may take that long: see its output"
    assert (facts["root"]["cause"], facts["root"]["worker"]["name"]) == ("script", "script")  # type: ignore[index]
    (edge,) = facts["chain"]  # type: ignore[misc]
    assert [edge[key] for key in ("index", "on", "stage", "source", "flow", "step", "microbatch")] == [
        0, SCRIPT, None, None, "call", 7, 0,
    ]  # fmt: skip


def test_that_is_no_standstill(talk: Conversation):
    talk.send(name(SCRIPT), script_says(OWN_CODE, calls=7))
    awaits_call(talk, 0, 7), awaits_call(talk, 1, 7)
    repeat(talk, 300.0)
    assert talk.core.run.outcome is None


def test_the_script_waits_for_a_reply_and_the_chain_leads_to_the_worker_that_hangs(talk: Conversation):
    awaits_reply(talk, 1, 7, calls=8)
    awaits_activation(talk, "forward-1", 4 * 5 + 3)
    talk.send(name(0), report(0, actions=5, now="0F3 of step 5", layer="layers.3"))
    repeat(talk, 4.0)
    assert why(talk)["text"] == (
        "the script waits for the reply to call 7 from stage 1 (worker-1, generation 1), "
        "which waits for the activation of step 5 microbatch 3 from stage 0 (worker-0, generation 1), "
        "which began 0F3 of step 5 4 s ago and has made no progress since; it is in layers.3"
    )


def test_the_loss_of_a_step_is_named_by_its_call(talk: Conversation):
    awaits_loss(talk, 1, 5, call=7)
    talk.send(name(1), report(1, actions=5, now="1F3 of step 5", layer="layers.3"))
    repeat(talk, 4.0)
    assert why(talk)["text"] == (
        "the script waits for the loss of call 7 from stage 1 (worker-1, generation 1), "
        "which began 1F3 of step 5 4 s ago and has made no progress since; it is in layers.3"
    )


def test_a_loss_that_was_put_and_does_not_arrive_is_on_its_way_whatever_its_worker_computes_now(talk: Conversation):
    awaits_loss(talk, 1, 5, call=7)
    talk.send(name(1), report(1, actions=96, now="1F0 of step 6", steps=steps(1, *range(6), loss=0.5)))
    repeat(talk, 3.0)
    facts = why(talk)
    assert facts["root"]["cause"] == "on its way"  # type: ignore[index]
    assert str(facts["text"]).startswith(
        "the script waits for the loss of call 7 from stage 1 (worker-1, generation 1), which has put it; "
    )


def test_a_loss_is_put_after_the_snapshot_of_its_step(talk: Conversation):
    awaits_loss(talk, 1, 5, call=7)
    writes = report(1, actions=96, now="waits until a snapshot is written", steps=steps(1, *range(6), loss=0.5))
    talk.send(name(1), writes)
    repeat(talk, 3.0)
    assert "has put it" not in str(why(talk)["text"])


def test_an_evaluation_is_named_by_its_batch(talk: Conversation):
    awaits_activation(talk, "evaluation-1", 4 * 5 + 3)
    awaits_call(talk, 0, 7)
    talk.send(name(SCRIPT), script_says(OWN_CODE, calls=7))
    repeat(talk, 2.0)
    assert why(talk, stage="1")["text"] == (
        "stage 1 waits for the activation of evaluated batch 5 microbatch 3 from stage 0 (worker-0, generation 1), "
        "which waits for call 7 from the script; the script runs its own code, for 2 s now"
    )


def test_a_call_that_was_put_and_does_not_arrive_is_on_its_way(talk: Conversation):
    talk.send(name(SCRIPT), script_says(OWN_CODE, calls=8))
    awaits_call(talk, 0, 7)
    repeat(talk, 3.0)
    facts = why(talk, stage="0")
    assert facts["text"] == (
        "worker 0 (stage 0) waits for call 7 from the script, which has put it; it has not arrived for 3.0 s"
    )
    assert facts["root"]["cause"] == "on its way"  # type: ignore[index]


def test_a_reply_that_was_put_and_does_not_arrive_is_on_its_way_and_no_circle(talk: Conversation):
    awaits_reply(talk, 0, 7, calls=8), awaits_call(talk, 0, 8), awaits_call(talk, 1, 8)
    repeat(talk, 3.0)
    facts = why(talk)
    assert facts["root"]["cause"] == "on its way"  # type: ignore[index]
    text = str(facts["text"])
    assert ", which waits for the reply to call 7 from stage 0 (worker-0, generation 1), which has put it" in text


def test_a_script_that_is_silent_is_named_with_what_will_happen(talk: Conversation):
    talk.send(name(SCRIPT), script_says("runs its own code after call 6", calls=7))
    awaits_call(talk, 0, 7)
    for _ in range(6):
        awaits_call(talk, 0, 7), awaits_call(talk, 1, 7)
        talk.after(0.5)
    facts = why(talk, stage="0")
    assert facts["text"] == (
        "worker 0 (stage 0) waits for call 7 from the script, which was silent for 3.0 s; "
        'it last reported: "runs its own code after call 6"'
    )
    assert facts["action"] == (
        "check process 102 on desk; it is declared lost in 7 s, and the run ends (recovery.lease is 10 s)"
    )


def test_a_script_that_is_gone_is_the_root_until_another_takes_its_place(talk: Conversation):
    reach(talk, 20)
    talk.send(b"launcher", Exited(SCRIPT, 102, -9))
    awaits_call(talk, 0, 7), awaits_call(talk, 1, 7)
    repeat(talk, 4.5)
    facts = why(talk)
    assert str(facts["text"]).startswith(
        "worker 0 (stage 0) waits for call 7 from the script, which was lost 4 s ago and has not been replaced: "
        "the script is gone: script (pid 102, host desk) was killed by SIGKILL"
    )
    assert (
        facts["action"] == "start the script again, with Line.resume, so that it resumes the run; "
        "the run stops if none joins within 6 s"
    )
    assert facts["root"] == {"cause": "missing", "worker": {"index": 2, "stages": [], "standing": "missing"}}


def test_before_the_run_the_script_is_named_among_the_missing():
    talk = Conversation(terms=SCRIPTED)
    assert why(talk)["text"] == "worker 0 (stage 0) and worker 1 (stage 1) and the script did not join yet"
    talk.join(0), talk.join(1)
    heartbeats(talk, 0.5, 0, 1)
    assert (why(talk)["text"], why(talk)["action"]) == ("the script did not join yet", "start the script")


def test_a_script_without_room_for_a_call_waits_for_the_stage_that_has_finished_least(talk: Conversation):
    room = Wait("call-0", 7, "call 7", 7, 0.0, Lack.ROOM)
    talk.send(name(SCRIPT), script_says("waits for room in call-0 to put call 7", room, calls=7))
    talk.send(name(0), report(0, actions=5, now="waits for call-0 message 6"))
    talk.send(name(1), report(1, actions=5, now="1F3 of step 5"))
    repeat(talk, 3.0)
    assert why(talk)["text"] == (
        "the script waits for room in call-0 until stage 1 (worker-1, generation 1) makes progress, "
        "which began 1F3 of step 5 3 s ago and has made no progress since"
    )
