"""Two versions of the weights: the microbatches of a step read those before the newest update."""

import copy
import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from stageline.pipeline.errors import ForeignState, ModelRefused, StageError
from stageline.pipeline.features.versions import Previous
from stageline.pipeline.schedule import Kind
from stageline.pipeline.schedule.alternating import alternate
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.stage.stage_state import StageState
from stageline.pipeline.tree import Tree
from support.states import difference

pytestmark = pytest.mark.usefixtures("one_thread")

MICROBATCHES, WARM_UP, STEPS = 3, 2, 4  # the first stage of three
SHAPE = (5, 43)  # of a weight, which nothing else has


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(43, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 3))


def stage(seed: int = 0) -> Stage:
    return Stage(layers(seed), optimizer=partial(torch.optim.AdamW, lr=0.1), settings=StageSettings(delay_weights=True))


def given(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    return torch.randn(4, 43, generator=generator).requires_grad_(), torch.randn(4, 3, generator=generator)


def run(made: Stage, steps: range) -> Iterator[tuple[str, Tree]]:
    """Each action with what comes out of it, as 1F1B has them without a flush."""
    for kind, _, number in alternate(0, range(steps.start * MICROBATCHES, steps.stop * MICROBATCHES), WARM_UP):
        step, microbatch = divmod(number, MICROBATCHES)
        x, gradient = given(step, microbatch)
        if kind is Kind.FORWARD:
            yield f"F{number}", made.forward(x, step=step, microbatch=microbatch)
            continue
        yield f"B{number}", made.backward(gradient, step=step, microbatch=microbatch)
        if microbatch == MICROBATCHES - 1:
            made.update(step)
            yield f"U{step}", None


def drive(made: Stage, steps: range) -> tuple[dict[str, Tree], dict[str, StageState]]:
    """Results of each action, and the state after each update."""
    out, states = {}, {}
    for name, given in run(made, steps):
        out[name] = given
        if name.startswith("U"):
            states[name] = made.snapshot()
    return out, states


def version(model: nn.Module) -> nn.Module:
    """A copy that shares the buffers, which have no versions."""
    return copy.deepcopy(model, {id(buffer): buffer for buffer in model.buffers()})


def test_gradients_of_a_step_are_those_at_the_weights_before_the_newest_update() -> None:
    newest = layers()
    optimizer = torch.optim.AdamW(newest.parameters(), lr=0.1)
    before, wanted = version(newest), {}
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            x, gradient = given(step, microbatch)
            wanted[f"F{step * MICROBATCHES + microbatch}"] = output = before(x)
            output.backward(gradient)
            wanted[f"B{step * MICROBATCHES + microbatch}"] = x.grad
        for new, old in zip(newest.parameters(), before.parameters(), strict=True):
            new.grad = old.grad
        before = version(newest)
        optimizer.step()
        optimizer.zero_grad()
    made = stage()
    found = {name: given for name, given in run(made, range(STEPS)) if isinstance(given, torch.Tensor)}
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []
    for name, tensor in newest.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor)


@pytest.mark.slow
def test_there_are_never_more_than_two_versions_in_memory() -> None:
    made = stage()
    counts = [len(versions(made)) for _ in run(made, range(STEPS))]
    assert (counts[0], max(counts)) == (1, 2)


def versions(made: Stage) -> set[int]:
    """Where in memory a tensor of `SHAPE` is that is neither a gradient nor the optimizer's."""
    assert made.optimizer is not None
    found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter) and each.shape == SHAPE]
    kept = [each for entry in made.optimizer.state.values() for each in entry.values()]
    gradients = [each.grad for each in found if each.is_leaf and each.grad is not None]
    return {each.data_ptr() for each in found} - {each.data_ptr() for each in (*kept, *gradients)}


@pytest.mark.parametrize("step", [1, 2, 3])
def test_from_a_snapshot_it_goes_on_with_the_same_bits(step: int) -> None:
    out, states = drive(stage(), range(STEPS))
    other = stage(seed=1)
    other.restore(states[f"U{step - 1}"])
    again, after = drive(other, range(step, STEPS))
    assert not difference(again, {name: out[name] for name in again})
    assert not difference(after, {name: states[name] for name in after})


def test_a_snapshot_with_other_weights_of_the_version_before_is_refused() -> None:
    state = drive(stage(), range(2))[1]["U1"]
    assert state.previous is not None
    weights = {name: each for name, each in state.previous.weights.items() if name != "0.weight"}
    with pytest.raises(ForeignState, match="the weights before update 2 are not those of all that is trained"):
        stage().restore(replace(state, previous=Previous(2, weights)))


def test_a_step_that_no_version_is_for_is_refused() -> None:
    with pytest.raises(StageError, match=r"microbatch 0 of step 2 came after 0 updates: .* for steps 0 and 1"):
        stage().forward(given(2, 0)[0], step=2, microbatch=0)


@pytest.mark.parametrize("shares", ["parameter", "view", "buffer"])
def test_a_trained_parameter_that_shares_memory_is_refused_by_name(shares: str) -> None:
    """The first update gave each of them memory of its own, and they went apart without a word."""
    made = nn.Linear(5, 5)
    match shares:
        case "parameter":
            made.other = nn.Parameter(made.weight.data)
        case "view":
            made.other = nn.Parameter(made.weight.data[2:], requires_grad=False)
        case _:
            made.register_buffer("other", made.weight.data[:2])
    with pytest.raises(ModelRefused, match=r"0\.(weight and 0\.other|other and 0\.weight) share memory.*clone one"):
        Stage([made], optimizer=partial(torch.optim.SGD, lr=0.1), settings=StageSettings(delay_weights=True))


def test_parameters_that_are_parts_of_one_memory_have_two_versions_as_others_do() -> None:
    """As torch lays out the weights of an LSTM on a GPU."""

    def made(*, flat: bool) -> Stage:
        module = layers()
        if flat:
            memory = torch.cat([module[0].weight.data.reshape(-1), module[2].weight.data.reshape(-1)])
            module[0].weight.data = memory[: 5 * 43].view(SHAPE)
            module[2].weight.data = memory[5 * 43 :].view(3, 5)
        return Stage(module, optimizer=partial(torch.optim.SGD, lr=0.1), settings=StageSettings(delay_weights=True))

    plain, flat = made(flat=False), made(flat=True)
    for each in (plain, flat):
        drive(each, range(STEPS))
    assert all(map(torch.equal, plain.state_dict().values(), flat.state_dict().values()))


@pytest.mark.parametrize("mode", ["delay_weights", "stash_weights"])
def test_a_forward_that_writes_to_a_weight_is_refused_by_name(mode: str) -> None:
    """It wrote to one version: how many microbatches ran before the update decided the weights."""
    made = Stage(
        [nn.Embedding(7, 3, max_norm=0.5)],
        optimizer=partial(torch.optim.SGD, lr=0.1),
        settings=StageSettings(**{mode: True}),
    )  # type: ignore[arg-type]
    with pytest.raises(StageError, match=r"a forward has written to 0\.weight, .*max_norm.*mode = \"sync\""):
        made.forward(torch.arange(7), step=0, microbatch=0)
