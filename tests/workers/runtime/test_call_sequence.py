"""A scripted run: results of a script's calls, bit for bit, with any schedule and after the loss of any worker."""

from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.broker.queues.ends import QueueOptions
from stageline.broker.transports.redis.queues import RedisQueues
from stageline.broker.transports.sockets.zeromq_queues import ZeroMQQueues
from stageline.pipeline.errors import DataError
from stageline.pipeline.schedule import schedule_names
from stageline.workers.runtime.calls import Call, CallKind, CallRefused, Position, encode_call
from stageline.workers.runtime.idle import CallWait
from support.payloads import bits
from support.programs import queue_named
from support.queue_pair import queue_of
from support.redis_server import shared_server
from support.reference import Recipe, train
from support.scripted_run import RUN, ScriptedRun, WiredScriptedRun
from support.shapes import line, looped

pytestmark = pytest.mark.usefixtures("one_thread")

CUT = [2, 4, 5]
PLACEMENTS = {"a line": line(4), "looped": looped(2, 2), "u-shaped": ((0, 3), (1, 2)), "alone": ((0, 1, 2, 3),)}
# What schedules are defined for alone.
ONLY = {"interleaved-1f1b": "looped", "looped-bfs": "looped", "zb-v": "u-shaped", "dualpipe-v": "u-shaped"}
CASES = [
    (name, placement) for name in schedule_names() for placement in PLACEMENTS if ONLY.get(name, placement) == placement
]
SIZES = [8, 8, 5, 8, 1, 0, 8]  # rows of each batch: with three microbatches, ragged, and empty ones


def build() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh(), nn.Sequential(nn.Dropout(0.2)), nn.Linear(8, 3)
    )


def build_with_statistics() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    rows = SIZES[step % len(SIZES)]
    return torch.randn(rows, 6, generator=drawn), torch.randint(3, (rows,), generator=drawn)


def whole_batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(9, 6, generator=drawn), torch.randint(3, (9,), generator=drawn)


def recipe(steps: int = len(SIZES), build=build, batch=batch, microbatches: int = 3) -> Recipe:
    return Recipe(
        build,
        batch,
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
        seed=40,
        steps=steps,
        microbatches=microbatches,
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture
def made() -> Iterator[list[ScriptedRun]]:
    runs: list[ScriptedRun] = []
    yield runs
    for run in runs:
        run.close()


@pytest.fixture
def make(made: list[ScriptedRun]):
    def make_run(of: Recipe | None = None, placement=PLACEMENTS["a line"], **terms) -> ScriptedRun:
        made.append(ScriptedRun(of or recipe(), CUT, placement, **terms))
        return made[-1]

    return make_run


@pytest.mark.parametrize(("schedule", "placement"), CASES)
def test_every_schedule_and_placement_trains_as_the_unsplit_model_does(make, schedule: str, placement: str) -> None:
    numbers = {"interleaved-1f1b": 2, "dualpipe-v": 4}
    of = recipe(microbatches=numbers[schedule]) if schedule in numbers else recipe()
    window = [4, 3, 2, 1] if schedule == "window" else None
    run = make(of, placement=PLACEMENTS[placement], schedule=schedule, window=window)
    losses = [run.train(*batch(step)) for step in range(of.steps)]
    expected = train(of)
    assert losses == expected.losses
    assert same(run.state(), expected.state)


def test_evaluation_changes_no_bit_of_what_is_trained(make) -> None:
    of = recipe(6, build_with_statistics, whole_batch)
    run = make(of, metrics={"accuracy": accuracy})
    losses = []
    for step in range(of.steps):
        for other in range(step % 3):
            run.evaluate(*whole_batch(100 + other))
        run.predict(whole_batch(200)[0])
        losses.append(run.train(*whole_batch(step)))
    expected = train(of)
    assert losses == expected.losses
    assert same(run.state(), expected.state)


def test_evaluation_is_that_of_the_unsplit_model_in_evaluation_mode(make) -> None:
    of = recipe(4, build_with_statistics, whole_batch)
    run = make(of, metrics={"accuracy": accuracy})
    for step in range(of.steps):
        run.train(*whole_batch(step))
    model = build_with_statistics()
    model.load_state_dict(run.state())
    x, y = whole_batch(100)
    with torch.no_grad():
        parts = [model.eval()(each) for each in x.tensor_split(3)]
    losses = [nn.functional.cross_entropy(*pair) for pair in zip(parts, y.tensor_split(3), strict=True)]
    assert all(map(torch.equal, run.predict(x), parts))
    found = run.evaluate(x, y)
    assert found["rows"] == 9
    assert found["loss"] == sum(3 * loss.item() for loss in losses)
    assert found["accuracy"] == pytest.approx(9 * accuracy(torch.cat(parts), y).item())


def test_evaluation_without_rows_measures_nothing(make) -> None:
    run = make(metrics={"accuracy": accuracy})
    assert run.evaluate(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64)) == {"rows": 0, "loss": None}
    assert [len(part) for part in run.predict(torch.zeros(1, 6))] == [1]
    assert [len(part) for part in run.predict(torch.zeros(0, 6))] == [0, 0, 0]


def test_steps_may_be_called_for_before_those_before_them_are_done(make) -> None:
    of = recipe()
    run = make(of)
    numbers = [run.put(CallKind.TRAIN, *batch(step)) for step in range(of.steps)]
    assert [run.reply(number, of_last_stage=True)[0] for number in numbers] == train(of).losses


def test_a_worker_that_waits_for_a_message_takes_the_next_call_meanwhile(make) -> None:
    run = make()
    numbers = [run.put(CallKind.TRAIN, *batch(step)) for step in range(3)]
    last = run.loops[-1]
    for _ in numbers:
        last.poll(0)
    assert last.doing == "3F0 of step 0 waits for message 0 of forward-3"
    assert (
        run.queues.outbound(queue_named("call-3")).depth().ready == 1
    )  # the first call is open, the second was looked at
    assert [run.reply(number, of_last_stage=True)[0] for number in numbers] == train(recipe(3)).losses


def test_a_snapshot_is_reported_once_the_script_has_the_losses_although_the_next_call_is_there(make) -> None:
    run = make()
    for step in range(4):
        run.put(CallKind.TRAIN, *batch(step))
    run.turns(lambda: run.loops[-1].calls == 1)
    run.loops[-1].progress.durable(3, 1)
    run.take(queue_named("loss-3"), 0)
    run.turns(lambda: run.loops[-1].calls == 2)
    run.rounds(1)
    assert run.loops[-1].progress.reportable


@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize(
    "moment", [pytest.param(0, marks=pytest.mark.slow), 7, pytest.param(23, marks=pytest.mark.slow)]
)
def test_a_lost_worker_begins_at_a_checkpoint_and_replies_the_same_again(make, lost: int, moment: int) -> None:
    of, (x, y) = recipe(6, build_with_statistics, whole_batch), whole_batch(100)
    run = make(of, metrics={"accuracy": accuracy})
    replies, saved = [run.evaluate(x, y)], None
    for step in range(of.steps):
        number = run.put(CallKind.TRAIN, *whole_batch(step))
        if step == 4:
            run.rounds(moment)
            run.lose(lost, saved)
        loss, *_ = run.reply(number, of_last_stage=True)
        replies.append(loss)
        if step == 1:
            saved = run.save()
        replies.append(run.evaluate(x, y))
    undisturbed = make(of, metrics={"accuracy": accuracy})
    expected = [undisturbed.evaluate(x, y)]
    for step in range(of.steps):
        expected += [undisturbed.train(*whole_batch(step)), undisturbed.evaluate(x, y)]
    assert replies == expected
    assert same(run.state(), train(of).state)


SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 80))]


def drawn_calls(dice: Random, count: int) -> list[tuple[CallKind, int]]:
    """Kinds of calls, each with the number of its batch."""
    kinds = (CallKind.TRAIN, CallKind.TRAIN, CallKind.TRAIN, CallKind.EVALUATE, CallKind.PREDICT, CallKind.STATE)
    return [(dice.choice(kinds), dice.randrange(5)) for _ in range(count)]


def put(run: ScriptedRun, kind: CallKind, number: int) -> int:
    x, y = batch(number)
    batches = {CallKind.TRAIN: (x, y), CallKind.EVALUATE: (x, y), CallKind.PREDICT: (x,)}
    return run.put(kind, *batches.get(kind, ()))


def replies(run: ScriptedRun, number: int) -> list[Any]:
    call, _ = run._unsettled[number]
    return [bits(run.take(key, number)) for key in run.answers(call.kind)]


@pytest.mark.parametrize("seed", SEEDS)
def test_whichever_workers_are_lost_at_any_moment_the_replies_are_those_of_an_undisturbed_run(make, seed: int) -> None:
    """Each at the newest checkpoint whose replies the script has; what is before that is trimmed now and then."""
    dice = Random(seed)
    placement, schedule = PLACEMENTS[dice.choice(sorted(PLACEMENTS))], dice.choice(["1f1b", "gpipe", "eager-1f1b"])
    terms = {"schedule": schedule, "metrics": {"accuracy": accuracy}}
    run, undisturbed = make(placement=placement, **terms), make(placement=placement, **terms)
    calls = drawn_calls(dice, 12)
    expected = [replies(undisturbed, put(undisturbed, *call)) for call in calls]
    found: list[Any] = []
    waiting = deque[int]()
    for call in [*calls, None, None, None]:
        if call is not None:
            waiting.append(put(run, *call))
        run.rounds(dice.randrange(40))
        if dice.random() < 0.4:
            run.lose(dice.randrange(len(placement)), run.checkpoint())
            run.rounds(dice.randrange(20))
        if dice.random() < 0.3:
            run.trim(run.checkpoint())
        while waiting and (call is None or len(waiting) > 1):
            found.append(replies(run, waiting.popleft()))
    assert found == expected


def open_ipc(folder: Path, place: int, incarnation: int, options: QueueOptions) -> ZeroMQQueues:
    return ZeroMQQueues(RUN, incarnation, f"ipc://{folder}/{place}-{incarnation}", options)


def open_redis(url: str, place: int, incarnation: int, options: QueueOptions) -> RedisQueues:
    return RedisQueues(RUN, incarnation, url, options)


@pytest.mark.parametrize("transport", ["ipc", pytest.param("redis", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_over_sockets_a_lost_worker_replies_the_same_again(
    made, make, tmp_path: Path, transport: str, lost: int
) -> None:
    of, (x, y) = recipe(4, build_with_statistics, whole_batch), whole_batch(100)
    redis = transport == "redis"
    opened = partial(open_redis, shared_server().own_database()) if redis else partial(open_ipc, tmp_path)
    placement = PLACEMENTS["u-shaped"]
    run = WiredScriptedRun(of, CUT, placement, metrics={"accuracy": accuracy}, open_queues=opened)
    made.append(run)
    undisturbed = make(of, placement, metrics={"accuracy": accuracy})
    for step in range(of.steps):
        assert run.train(*whole_batch(step)) == undisturbed.train(*whole_batch(step))
        if step == 0:
            saved = run.save()
            run.trim(saved)
        assert run.evaluate(x, y) == undisturbed.evaluate(x, y)
        if step == 2:
            run.lose(lost, saved)
    assert same(run.state(), undisturbed.state())


@pytest.mark.parametrize("kind", [CallKind.EVALUATE, CallKind.PREDICT])
def test_however_much_is_evaluated_between_two_checkpoints_memory_has_room(
    made, tmp_path: Path, kind: CallKind
) -> None:
    """Each call's batch, and its activations, were kept until the next checkpoint: a validation set ended the run."""
    opened, limit = partial(open_ipc, tmp_path), 200_000
    made.append(run := WiredScriptedRun(recipe(), CUT, PLACEMENTS["u-shaped"], open_queues=opened, retain_bytes=limit))
    x, y = torch.randn(900, 6), torch.randint(3, (900,))
    batch, calls = (x, y) if kind is CallKind.EVALUATE else (x,), 30
    assert calls * x.nbytes > 3 * limit
    saved = run.save()
    first = run.reply(run.put(kind, *batch), of_last_stage=True)
    for _ in range(calls):
        last = run.reply(run.put(kind, *batch), of_last_stage=True)
    run.lose(1, saved)
    assert bits(run.reply(run.put(kind, *batch), of_last_stage=True)) == bits(last) == bits(first)


def test_a_worker_gives_up_a_batch_whose_result_the_script_has(made, make, tmp_path: Path) -> None:
    """It has read the call before it was settled, and waits for activations of one that begins with the settled
    call."""
    run = WiredScriptedRun(recipe(), CUT, PLACEMENTS["a line"], open_queues=partial(open_ipc, tmp_path))
    made.append(run)
    saved, number = run.save(), run.put(CallKind.EVALUATE, *batch(0))
    found = {key.producer: run.receive(key, number) for key in run.answers(CallKind.EVALUATE)}
    run.lose(1, saved)
    waiting = run.loops[1]
    while waiting.doing == "waits for call 0 of the script":
        waiting.poll(0)
        run.queues.pump(0)
    for worker, reply in found.items():
        run.note_reply(worker, number, reply)
    run.lose(0, saved)
    run.turns(lambda: all(loop.doing == "waits for call 1 of the script" for loop in run.loops))
    assert [executor.gives_up for executor in run.executors] == [True, True, False, False]
    undisturbed = make()
    undisturbed.evaluate(*batch(0))
    assert run.train(*batch(1)) == undisturbed.train(*batch(1))
    assert run.evaluate(*batch(0)) == undisturbed.evaluate(*batch(0))


def test_weights_that_are_loaded_are_those_that_are_trained_from_there(make) -> None:
    of = recipe()
    first, second = make(of), make(of)
    for step in range(2):
        first.train(*batch(step))
    weights = first.state()
    second.load(weights)
    assert same(second.state(), weights)
    assert torch.equal(second.predict(batch(0)[0])[0], first.predict(batch(0)[0])[0])


def test_the_state_that_was_replied_is_not_changed_by_the_steps_after_it(make) -> None:
    run = make()
    before = run.put(CallKind.STATE)
    run.put(CallKind.TRAIN, *batch(0))
    run.turns(lambda: all(loop.step == 1 for loop in run.loops))
    fresh = make()
    assert all(
        same(run.take(queue_named(f"reply-{worker}"), before), part) for worker, part in enumerate(states(fresh))
    )


def states(run: ScriptedRun) -> list[dict[str, Tensor]]:
    number = run.put(CallKind.STATE)
    return [run.take(queue_named(f"reply-{worker}"), number) for worker in range(len(run.loops))]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({}, "differ from those of stages 0 in their names: 0.bias, 0.weight"),
        (
            {"0.weight": torch.zeros(8, 6), "0.bias": torch.zeros(9)},
            r"do not fit stage 0: .*\n.*size mismatch for bias",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(make, wrong: dict[str, Tensor], reason: str) -> None:
    run = make()
    run.put(CallKind.LOAD, state=wrong)
    with pytest.raises(CallRefused, match=reason):
        run.reply(0)


@pytest.mark.parametrize("wrong", [{"number": 1}, {"step": 1}, {"evaluation": 2}], ids=str)
def test_a_call_that_is_not_the_next_one_is_refused(make, wrong: dict[str, int]) -> None:
    run = make()
    fields = {"kind": CallKind.STATE, "number": 0, "step": 0, "evaluation": 0, **wrong}
    run.put_payload(0, 0, encode_call(Call(**fields)))
    with pytest.raises(CallRefused, match=r"has carried out 0 calls, 0 steps and 0 evaluated batches"):
        run.rounds(1)


def test_a_batch_whose_inputs_and_targets_differ_in_rows_is_refused(make) -> None:
    run = make(placement=PLACEMENTS["alone"])
    run.put(CallKind.TRAIN, torch.zeros(4, 6), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(DataError, match="no common number of rows"):
        run.rounds(1)


def test_between_two_calls_a_worker_says_what_it_waits_for(make) -> None:
    run = make()
    run.train(*batch(0))
    run.rounds(1)
    assert {loop.doing for loop in run.loops} == {"waits for call 1 of the script"}
    assert [loop.step for loop in run.loops] == [1] * 4
    assert all(
        loop.progress.waits and loop.progress.call == CallWait("call 1 of the script", f"call-{worker}", 1, "call 1")
        for worker, loop in enumerate(run.loops)
    )


def test_the_last_call_ends_the_program(make) -> None:
    run = make()
    run.train(*batch(0))
    assert not any(loop.finished for loop in run.loops)
    run.stop()
    assert all(loop.finished for loop in run.loops)
    assert {(loop.step, loop.doing) for loop in run.loops} == {(None, "finished")}


def test_evaluated_batches_are_no_steps_of_the_run(make) -> None:
    run = make()
    run.train(*batch(0))
    actions = [loop.progress.actions for loop in run.loops]
    run.evaluate(*batch(1))
    for loop, before in zip(run.loops, actions, strict=True):
        progress = loop.progress
        assert progress.actions == before + 3
        assert [record.step for record in progress.steps] == [0]
        assert not any(progress.open.values())
        assert progress.evaluations == []


def test_a_snapshot_is_not_reported_before_the_script_has_its_replies(make) -> None:
    run = make(placement=PLACEMENTS["alone"])
    (loop,) = run.loops
    run.put(CallKind.TRAIN, *batch(0))
    run.turns(lambda: loop.step == 1)
    loop.progress.durable(0, 1)
    run.rounds(1)
    assert loop.progress.held_back
    run.take(queue_named("loss-0"), 0)
    run.rounds(1)
    assert loop.progress.reportable


def test_each_step_of_a_run_has_one_position(make) -> None:
    run = make()
    run.evaluate(*batch(0))
    run.train(*batch(0))
    run.predict(batch(0)[0])
    run.predict(batch(0)[0])
    run.train(*batch(1))
    assert [run.loops[0].progress.position(step) for step in (1, 2)] == [Position(1, 2, 1), Position(2, 5, 3)]
    assert run.retained(queue_of("evaluation-1")) == 3 * 3
    assert run.retained(queue_of("forward-1")) == 2 * 3
