"""Training that was interrupted by a snapshot and a restore ends with the bits of training that was not."""

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stageline.pipeline.errors import ForeignState, ModelRefused, StageError
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.stage.stage_state import StageState
from support.states import difference
from support.training_stages import (
    LAYERS,
    OPTIMIZERS,
    SCHEDULERS,
    SGD,
    counting,
    drive,
    groups,
    last_stage,
    living,
    middle_stage,
    mixed,
    spectral,
    tied,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("layers", LAYERS)
def test_training_goes_on_after_a_restore_as_if_there_had_been_none(layers, at):
    _check(partial(last_stage, layers), at)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_on_where_it_was(optimizer):
    _check(partial(last_stage, optimizer=optimizer), 3)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_learning_rate_scheduler_goes_on_where_it_was(scheduler):
    _check(partial(last_stage, scheduler=scheduler), 3)


def _check(new: Callable[..., Stage], at: int) -> None:
    undisturbed, first, second = new(), new(), new(seed=1)
    wanted = train(undisturbed, range(6))[4 * at :]
    train(first, range(at))
    state = first.snapshot()
    train(first, range(at, 6))  # must leave the state alone
    second.restore(state)
    assert not difference(train(second, range(at, 6)), wanted)
    assert not difference(second.snapshot(), undisturbed.snapshot())
    assert not difference(living(second), living(undisturbed))
    third = new(seed=2)
    third.restore(state)  # neither has what followed the restore touched it
    assert not difference(third.snapshot(), state)


@given(
    layers=st.sampled_from([mixed, counting, spectral, tied]),
    warm_up=st.integers(0, 3),
    steps=st.integers(1, 6),
    data=st.data(),
)
def test_what_was_in_flight_is_run_again_with_what_it_read_then(layers, warm_up, steps, data):
    undisturbed, states = drive(middle_stage(layers), range(steps), warm_up)
    died = data.draw(st.integers(0, steps), "died")
    again = data.draw(st.integers(died, steps), "died again")
    second = middle_stage(layers, seed=1)
    second.restore(states[died])
    out, second_states = drive(second, range(died, steps), warm_up)
    third = middle_stage(layers, seed=2)
    third.restore(second_states[again])
    more, third_states = drive(third, range(again, steps), warm_up)
    for actions in (out, more):
        assert not difference(actions, {action: undisturbed[action] for action in actions})
    assert not difference(second_states[steps], states[steps])
    assert not difference(third_states[steps], states[steps])


def test_the_state_of_a_step_in_flight_names_what_each_forward_read():
    # Warm-up 2: when step 3 begins, microbatches 3 and 4 have run forward, on the weights of steps 1 and 2.
    _, states = drive(middle_stage(mixed), range(6), 2)
    assert [(each.step, each.microbatch) for each in states[3].in_flight] == [(3, 0), (4, 0)]
    for each, version in zip(states[3].in_flight, (states[1], states[2]), strict=True):
        assert each.weights.keys() == {"0.weight", "0.bias", "1.weight", "1.bias", "5.weight", "5.bias"}
        assert all(torch.equal(weight, version.weights[name]) for name, weight in each.weights.items())
    counts = [each.buffers["1.num_batches_tracked"].item() for each in states[3].in_flight]
    assert counts == [3, 4]
    assert states[3].weights["1.num_batches_tracked"] == 5


def test_a_stage_that_sends_nothing_to_differentiate_keeps_its_place():
    # Its microbatches in flight are run again too, and must count once in its buffers.
    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return (x * self.weight).argmax(1) + self.seen

    def run(stage: Stage, numbers: range) -> list[Tensor]:
        return [stage.forward(torch.eye(6), step=n, microbatch=0) for n in numbers]

    stage = middle_stage(lambda: [Watch()])
    wanted = run(stage, range(2))
    state, other = stage.snapshot(), middle_stage(lambda: [Watch()])
    other.restore(state)
    assert not difference(run(other, range(2)), wanted)
    assert other.backward(None, step=0, microbatch=0) is None
    assert other.in_flight == 1
    assert other.state_dict()["0.seen"] == 2


def test_gradients_that_no_update_has_cleared_are_state():
    def accumulate(stage: Stage, microbatches: range) -> None:
        for m in microbatches:
            stage.forward(torch.full((2, 6), float(m)), torch.tensor([0, 1]), step=0, microbatch=m)
            stage.backward(step=0, microbatch=m)

    whole, first, second = (last_stage() for _ in range(3))
    accumulate(whole, range(4))
    accumulate(first, range(2))
    second.restore(first.snapshot())
    accumulate(second, range(2, 4))
    assert second.snapshot().gradients
    for stage in (whole, second):
        stage.update()
    assert not difference(second.snapshot(), whole.snapshot())


def test_a_stage_without_parameters_has_a_state_too():
    stage = Stage(nn.Tanh(), optimizer=SGD)
    stage.restore(stage.snapshot())
    assert stage.snapshot() == StageState({})


def test_names_in_a_state_are_those_of_the_unsplit_model():
    stage = Stage(
        [nn.Linear(2, 2), nn.BatchNorm1d(2)], optimizer=SGD, settings=StageSettings(names=("encoder", "norm"))
    )
    assert set(stage.snapshot().weights) == set(stage.state_dict())
    assert {name.partition(".")[0] for name in stage.snapshot().weights} == {"encoder", "norm"}


def test_a_synchronous_step_cannot_be_left_in_the_middle():
    stage = last_stage()
    stage.forward(torch.zeros(2, 6), torch.tensor([0, 1]), step=0, microbatch=0)
    with pytest.raises(StageError, match=r"stage 1 holds 1 microbatches .* between two steps"):
        stage.snapshot()


OTHERS = {
    r"the optimizer's lr is 0\.2 here, and 0\.1 in the state\. Give": lambda: last_stage(
        optimizer=partial(SGD, lr=0.2)
    ),
    "the optimizer is a AdamW, and that in the state has dampening, momentum, nesterov": lambda: last_stage(
        optimizer=partial(torch.optim.AdamW, lr=0.1)
    ),
    "2.0.bias is in the stage and not in the state": lambda: last_stage(tied),
    "an optimizer is in the state only": lambda: last_stage(optimizer=None),
    "a learning rate scheduler is in the stage only": lambda: last_stage(scheduler=SCHEDULERS[1]),
    "parameter group": lambda: last_stage(optimizer=groups),
    r"7.weight is float32 \[3, 8\] in the state and float64 \[3, 8\]": lambda: last_stage(
        lambda: [*mixed()[:-1], nn.Linear(8, 3, dtype=torch.float64)]
    ),
    r"7.weight is float32 \[3, 8\] in the state and float32 \[4, 8\] in the stage": lambda: last_stage(
        lambda: [*mixed()[:-1], nn.Linear(8, 4)]
    ),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_the_state_of_another_stage_is_refused_in_words(reason):
    stage = last_stage()
    train(stage, range(1))
    with pytest.raises(ForeignState, match=f"stage 1 cannot go on from this state: .*{reason}"):
        OTHERS[reason]().restore(stage.snapshot())


SCHEDULED = partial(torch.optim.lr_scheduler.StepLR, step_size=1)


def test_of_a_learning_rate_that_is_scheduled_the_first_one_is_compared():
    stage = last_stage(scheduler=SCHEDULED)
    train(stage, range(2))
    last_stage(scheduler=SCHEDULED).restore(stage.snapshot())
    with pytest.raises(ForeignState, match=r"the optimizer's initial_lr is 0\.2 here, and 0\.1 in the state"):
        last_stage(optimizer=partial(SGD, lr=0.2), scheduler=SCHEDULED).restore(stage.snapshot())


def halving(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Halves its learning rate after each step."""
    optimizer = SGD(parameters)

    def halve(*_: object) -> None:
        optimizer.param_groups[0]["lr"] /= 2

    optimizer.register_step_post_hook(halve)
    return optimizer


def test_settings_that_a_hook_changes_are_not_compared():
    _check(partial(last_stage, optimizer=halving), 3)


class Registering(nn.Module):
    """Registers a buffer, a parameter or a layer in its first forward, or takes away a buffer that it was made with."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("kept", torch.ones(()))
        self.register_buffer("filled", None)

    def forward(self, x: Tensor) -> Tensor:
        match self.what:
            case "a buffer":
                self.register_buffer("late", torch.ones(()))
            case "a buffer that no file has":
                self.register_buffer("late", torch.ones(()), persistent=False)
            case "a parameter":
                self.late = nn.Parameter(torch.ones(()))
            case "a layer":
                self.late = nn.Linear(3, 3)
            case "none":
                self.filled = torch.ones(3)
            case "one less":
                self.kept = None
        return x


@pytest.mark.parametrize("what", ["a buffer", "a buffer that no file has", "a parameter", "a layer", "one less"])
@pytest.mark.parametrize("asked", [Stage.snapshot, Stage.state_dict])
def test_what_a_forward_registers_is_refused_by_name_where_state_is_asked_for(asked, what):
    """It trained until a worker was killed; the next one could not go on, or went on without it and said nothing."""
    stage = Stage([Registering(what)], first_layer=5)
    stage.evaluate(torch.ones(1, 3))
    with pytest.raises(ModelRefused, match=r"^5\.kept " if what == "one less" else r"^5\.late"):
        asked(stage)


def test_a_buffer_that_was_registered_as_none_may_get_its_value_in_a_forward():
    stage, other = (Stage([Registering("none")], first_layer=5) for _ in range(2))
    stage.evaluate(torch.ones(1, 3))
    other.restore(stage.snapshot())
    assert torch.equal(other.state_dict()["5.filled"], torch.ones(3))
