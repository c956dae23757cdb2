"""A line of stages under a loader of one's own, all in one process; `test_process_run.py` has those of several."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from inspect import signature

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline
from stageline import DataError, LineClosed, ModelRefused, NotSaved, PlanRefused
from stageline.pipeline.stage.layers.passage import layer_seed
from stageline.workers.runtime.losses import ComputeFailed
from stageline.workers.script.arguments import LineOptions

ADAM = partial(torch.optim.AdamW, lr=0.01)
Line = partial(stageline.Line, workers="inline")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Dropout(0.1), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3)
    )


@pytest.fixture
def default_device() -> Iterator[Callable[[str], None]]:
    yield torch.set_default_device
    torch.set_default_device(None)


@pytest.mark.parametrize("workers", ["inline", "processes"])
def test_another_default_device_is_refused_when_the_line_is_made(
    workers: str, default_device: Callable[[str], None]
) -> None:
    """An inline line ended with a TypeError, one of processes blamed a layer's forward."""
    whole = model()
    default_device("meta")
    with pytest.raises(ModelRefused, match=r'script.*default device to meta .*set_default_device\("cpu"\).*device='):
        stageline.Line(whole, cut=[3], loss=functional.cross_entropy, optimizer=ADAM, workers=workers)


def test_a_default_device_that_the_function_changes_which_makes_the_model_is_refused(
    default_device: Callable[[str], None],
) -> None:
    def make() -> nn.Sequential:
        made = model()
        default_device("meta")
        return made

    with pytest.raises(ModelRefused, match="default device to meta"):
        Line(make, cut=[3], loss=functional.cross_entropy, optimizer=ADAM)


def test_a_default_device_that_is_changed_later_is_refused_at_the_next_call(
    default_device: Callable[[str], None],
) -> None:
    line = Line(model(), cut=[3], loss=functional.cross_entropy, optimizer=ADAM)
    ((x, y),) = batches(1)
    default_device("meta")
    with pytest.raises(ModelRefused, match="default device to meta"):
        line.step(x, y)
    default_device("cpu")
    assert line.step(x, y).item() > 0


def test_weights_without_values_are_refused_by_name() -> None:
    """The message blamed a factory, which a script has not."""
    with pytest.raises(ModelRefused, match=r"^0\.weight has no values: it is on torch's meta device"):
        Line(model().to("meta"), cut=[3], loss=functional.cross_entropy, optimizer=ADAM)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    sizes = [10] * (count - 1) + [3]  # fewer rows than microbatches at the end
    return [
        (torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)) for rows in sizes
    ]


def plain(steps: int, microbatches: int) -> tuple[dict[str, Tensor], list[float]]:
    whole, losses = model(), []
    optimizer = ADAM(whole.parameters())
    for step, (x, y) in enumerate(batches(steps)):
        total = torch.zeros(())
        for number, (xs, ys) in enumerate(zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True)):
            for index, layer in enumerate(whole):
                torch.default_generator.manual_seed(layer_seed(0, step, number, index))
                xs = layer(xs)
            loss = functional.cross_entropy(xs, ys) * (len(ys) / len(y))
            loss.backward()
            if len(ys):
                total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return whole.state_dict(), losses


def sometimes_constant(output: Tensor, target: Tensor) -> Tensor:
    """A loss that depends on the weights only where the targets do not say that nothing counts."""
    return functional.cross_entropy(output, target) if target.any() else torch.tensor(1.0)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("constant", [0, 1])
def test_a_loss_that_needs_no_gradient_for_some_microbatches_is_refused_as_its_backward_refuses_it(
    constant: int, schedule: str
) -> None:
    whole, x, y = model(), torch.ones(4, 6), torch.ones(4, dtype=torch.int64)
    y[2 * constant : 2 * constant + 2] = 0
    with pytest.raises(RuntimeError, match="does not require grad"):
        sometimes_constant(whole(x[:2]), torch.zeros(2)).backward()
    with (
        pytest.raises(ComputeFailed, match=rf"{constant}.* of step 0, the loss: StageError: the loss has no gradient"),
        Line(model(), cut=[3], schedule=schedule, loss=sometimes_constant, optimizer=ADAM, microbatches=2) as line,
    ):
        line.step(x, y).item()


@pytest.mark.parametrize(
    ("schedule", "cut", "placement"),
    [
        ("1f1b", [2], None),
        ("gpipe", [1, 3, 4], None),
        ("eager-1f1b", [2, 4], None),
        ("interleaved-1f1b", [1, 2, 4], [[0, 2], [1, 3]]),
        ("1f1b", [2, 4, 5], [[0, 3], [1, 2]]),
    ],
)
def test_a_line_trains_as_the_plain_loop_does(schedule, cut, placement):
    torch.set_num_threads(1)
    weights, losses = plain(steps=5, microbatches=4)
    with Line(
        model(),
        cut=cut,
        placement=placement,
        loss=functional.cross_entropy,
        optimizer=ADAM,
        schedule=schedule,
        microbatches=4,
    ) as line:
        found = [line.step(x, y) for x, y in batches(5)]
    assert found == losses
    assert all(torch.equal(line.state_dict()[name], value) for name, value in weights.items())
    assert line.state_dict().keys() == weights.keys()


def test_a_batch_without_rows_has_no_loss_and_moves_nothing():
    line = Line(model(), cut=[3], loss=functional.cross_entropy, optimizer=partial(torch.optim.SGD, lr=1.0))
    before = line.state_dict()
    assert line.step(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64)).item() is None
    assert all(torch.equal(line.state_dict()[name], value) for name, value in before.items())


def test_ready_stages_are_taken_as_they_are_and_evaluated_without_dropout():
    front, back = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)), nn.Linear(4, 3)
    line = Line([front, back], loss=functional.cross_entropy, optimizer=ADAM, microbatches=2)
    x, y = batches(2)[0]
    line.step(x, y)
    with torch.no_grad():
        assert torch.equal(line.predict(x), back(front[0](x)))
    assert set(line.state_dict()) == {"0.0.weight", "0.0.bias", "1.weight", "1.bias"}


def test_a_line_that_cannot_work_is_refused_when_it_is_made():
    with pytest.raises(ModelRefused, match="out of range"):
        Line(model(), cut=[9], loss=functional.cross_entropy, optimizer=ADAM)
    with pytest.raises(PlanRefused, match='did you mean "1f1b"'):
        Line(model(), cut=[2], loss=functional.cross_entropy, optimizer=ADAM, schedule="1f1")
    with pytest.raises(ModelRefused, match="nothing to train"):
        Line([nn.ReLU(), nn.Tanh()], loss=functional.mse_loss, optimizer=ADAM)


def test_help_names_the_arguments_of_a_line():
    parameters = signature(stageline.Line).parameters
    assert list(parameters) == ["model", *(field.name for field in fields(LineOptions)), "resume"]
    assert (parameters["schedule"].default, parameters["settings"].default) == ("1f1b", None)


def test_an_argument_that_there_is_not_is_named():
    with pytest.raises(TypeError, match=r"^Line.__init__\(\) got an unexpected keyword argument 'loader'"):
        Line(model(), loss=functional.mse_loss, optimizer=ADAM, loader=())
    with pytest.raises(TypeError, match=r"'microbatch' \(did you mean \"microbatches\"\?\)$"):
        Line(model(), loss=functional.mse_loss, optimizer=ADAM, microbatch=8)
    with pytest.raises(TypeError, match=r"^Line.__init__\(\) missing 1 required keyword-only argument: 'optimizer'"):
        Line(model(), loss=functional.mse_loss)


def test_an_inline_line_is_not_resumed():
    with pytest.raises(ValueError, match="resume = 'runs/line-1': an inline run saves nothing"):
        stageline.Line.resume(
            "runs/line-1", model(), cut=[2], loss=functional.cross_entropy, optimizer=ADAM, workers="inline"
        )


@pytest.mark.parametrize(
    ("key", "value"), [("memory.offload", ["activations"]), ("recovery.on_bad_microbatch", "skip")]
)
def test_what_needs_files_is_refused_inline(key, value):
    with pytest.raises(PlanRefused, match=f"{key} = .*: inline workers have no files"):
        Line(model(), cut=[2], loss=functional.cross_entropy, optimizer=ADAM, settings={key: value})


def test_an_inline_line_does_not_begin_anew_when_it_is_asked_to_resume():
    with pytest.raises(ValueError, match="an inline run saves nothing"):
        Line(model(), cut=[2], loss=functional.cross_entropy, optimizer=ADAM, workers="inline", resume="runs/line-1")


def test_what_a_layer_raises_is_reported_with_its_stage_and_action():
    line = Line(model(), cut=[3], loss=functional.cross_entropy, optimizer=ADAM, microbatches=2)
    with pytest.raises(
        ComputeFailed, match=r"stage 0 failed in 0F0 of step 0, layer 0: RuntimeError.* given float32 \[2, 7\]"
    ):
        line.step(torch.zeros(4, 7), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ComputeFailed, match="an earlier call failed"):
        line.step(torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64))


def test_a_loss_that_raises_is_reported_with_what_it_was_given():
    line = Line(model(), cut=[3], loss=functional.cross_entropy, optimizer=ADAM, microbatches=2, workers="inline")
    with pytest.raises(ComputeFailed, match=r"given outputs float32 \[2, 3\] and targets int64 \[2\] from 8 to 9"):
        line.step(torch.zeros(4, 6), torch.tensor([8, 9, 0, 1]))


def test_a_metric_that_raises_is_reported_with_what_it_was_given():
    settings = {"loss": functional.cross_entropy, "optimizer": ADAM, "workers": "inline"}
    line = Line(model(), cut=[3], microbatches=2, **settings, metrics=[torch.dot])
    given = r"the metric dot: RuntimeError.* given outputs float32 \[2, 3\] and targets int64 \[2\] from 0 to 2"
    with pytest.raises(ComputeFailed, match=given):
        line.evaluate([(torch.zeros(4, 6), torch.tensor([0, 2, 0, 1]))])


class Interrupting(nn.Module):
    """Ends its second call as Ctrl-C does, or `sys.exit`."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise self.kind
        return x


@pytest.mark.parametrize(("kind", "told"), [(KeyboardInterrupt, KeyboardInterrupt), (SystemExit, ComputeFailed)])
def test_a_line_that_was_interrupted_does_not_go_on_with_half_a_step(kind, told):
    """It went on where it was, and an update was done twice."""
    layers = nn.Sequential(nn.Linear(4, 4), Interrupting(kind), nn.Linear(4, 2))
    line = Line(layers, cut=[2], loss=functional.mse_loss, optimizer=ADAM, microbatches=2)
    with pytest.raises(told):
        line.step(torch.ones(4, 4), torch.zeros(4, 2))
    with pytest.raises(ComputeFailed, match=f"an earlier call failed .*{kind.__name__}"):
        line.step(torch.ones(4, 4), torch.zeros(4, 2))


def test_a_buffer_that_two_stages_would_share_is_refused():
    norm = nn.BatchNorm1d(4, affine=False)
    with pytest.raises(ModelRefused, match="share one buffer"):
        Line([nn.Sequential(nn.Linear(4, 4), norm), norm], loss=functional.mse_loss, optimizer=ADAM)


def test_a_batchnorm_that_its_user_froze_stays_frozen_after_an_evaluation():
    """`evaluate` put all layers into evaluation mode, and the next step put all of them into training mode."""
    frozen, free = nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4)
    line = Line(
        nn.Sequential(nn.Linear(6, 4), frozen, free, nn.Linear(4, 3)),
        cut=[2],
        loss=functional.cross_entropy,
        optimizer=ADAM,
    )
    x, y = batches(2)[0]
    line.predict(x)
    assert (frozen.training, free.training) == (False, True)
    line.step(x, y)
    assert torch.equal(frozen.running_mean, torch.zeros(4))
    assert not torch.equal(free.running_mean, torch.zeros(4))


def test_a_line_leaves_the_scripts_random_numbers_alone():
    """A script's random numbers after a step were the same in every step: the layers' seeds were in its generator."""
    x, y = batches(2)[0]
    torch.manual_seed(5)
    wanted = [torch.rand(3) for _ in range(4)]
    line = Line(model(), cut=[3], loss=functional.cross_entropy, optimizer=ADAM, microbatches=2)
    broken = Line(
        [nn.Linear(6, 3), Interrupting(RuntimeError)], loss=functional.cross_entropy, optimizer=ADAM, microbatches=2
    )
    torch.manual_seed(5)
    found = [torch.rand(3)]
    line.step(x, y)
    found.append(torch.rand(3))
    line.predict(x)
    found.append(torch.rand(3))
    with pytest.raises(ComputeFailed):
        broken.step(x, y)
    found.append(torch.rand(3))
    assert all(map(torch.equal, found, wanted))


def test_a_line_that_is_closed_says_so_and_still_has_its_weights():
    """It said that "forward-0 is closed"."""
    x, y = batches(2)[0]
    with Line(model(), cut=[3], loss=functional.cross_entropy, optimizer=ADAM) as line:
        line.step(x, y)
    for closed in (lambda: line.step(x, y), lambda: line.predict(x)):
        with pytest.raises(LineClosed, match=r"this line is closed"):
            closed()
    line.close()
    assert line.state_dict().keys() == model().state_dict().keys()


def test_a_refused_batch_changes_nothing():
    """The next step failed too: half of the refused one was in the queues."""
    lines = [Line(model(), cut=[3], loss=functional.cross_entropy, optimizer=ADAM, microbatches=2) for _ in range(2)]
    (x, y), (u, v) = batches(3)[:2]
    with pytest.raises(DataError, match="no common number of rows"):
        lines[0].step(x, y[:4])
    assert lines[0].step(x, y) == lines[1].step(x, y)
    with pytest.raises(DataError, match="no common number of rows"):
        lines[0].step(u[:1], v)
    assert lines[0].step(u, v) == lines[1].step(u, v)
    assert all(torch.equal(lines[0].state_dict()[name], value) for name, value in lines[1].state_dict().items())


def test_two_lines_in_one_script_train_as_each_does_alone():
    torch.set_num_threads(1)
    weights, losses = plain(steps=5, microbatches=4)
    lines = [
        Line(model(), cut=cut, loss=functional.cross_entropy, optimizer=ADAM, microbatches=4) for cut in ([2], [1, 4])
    ]
    found = [[line.step(x, y) for line in lines] for x, y in batches(5)]
    assert found == [[loss, loss] for loss in losses]
    assert all(torch.equal(line.state_dict()[name], value) for line in lines for name, value in weights.items())


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_what_the_loops_body_raises_leaves_the_context_closed(kind):
    line, (x, y) = Line(model(), cut=[3], loss=functional.cross_entropy, optimizer=ADAM), batches(2)[0]

    def loop() -> None:
        with line:
            line.step(x, y)
            raise kind

    with pytest.raises(kind):
        loop()
    with pytest.raises(LineClosed):
        line.step(x, y)


@torch.no_grad()
def sums_of(whole: nn.Module, mean: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    """`mean` times its rows, over four microbatches."""
    cut = [(xs, ys) for xs, ys in zip(x.tensor_split(4), y.tensor_split(4), strict=True) if len(ys)]
    return sum(mean(whole(xs), ys).item() * len(ys) for xs, ys in cut)


def test_an_evaluation_gives_the_means_over_all_rows_and_changes_nothing():
    def top(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(1) == targets).float().mean()

    torch.set_num_threads(1)
    line = Line(model(), cut=[3], loss=functional.cross_entropy, optimizer=ADAM, microbatches=4, metrics=[top])
    other = Line(model(), cut=[3], loss=functional.cross_entropy, optimizer=ADAM, microbatches=4)
    found = []
    for x, y in batches(4):
        assert line.step(x, y) == other.step(x, y)
        found.append(line.evaluate(batches(3)))
    whole = model().eval()
    whole.load_state_dict(line.state_dict())
    for name, mean in (("loss", functional.cross_entropy), ("top", top)):
        assert found[-1][name] == sum(sums_of(whole, mean, x, y) for x, y in batches(3)) / 23
    assert all(torch.equal(line.state_dict()[name], value) for name, value in other.state_dict().items())
    with pytest.raises(DataError, match="no rows to evaluate"):
        line.evaluate([])


def test_weights_that_were_read_can_be_loaded():
    first = Line(model(), cut=[3], loss=functional.cross_entropy, optimizer=ADAM)
    first.step(*batches(2)[0])
    second = Line(model(), cut=[1, 4], loss=functional.cross_entropy, optimizer=ADAM)
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(second.state_dict()[name], value) for name, value in first.state_dict().items())
    with pytest.raises(ModelRefused, match=r"9.weight is not the model's .*; 0.weight is missing; .*, and 3 more"):
        second.load_state_dict({"9.weight": torch.zeros(1)})
    with pytest.raises(ModelRefused, match=r"0.bias has shape \(5,\), expected \(16,\)"):
        second.load_state_dict({**model().state_dict(), "0.bias": torch.zeros(5)})
    assert torch.equal(second.state_dict()["0.bias"], first.state_dict()["0.bias"])  # nothing was sent


def test_a_state_dict_has_the_unsplit_models_order_before_the_end_and_after():
    line = Line(model(), cut=[1, 3], placement=[[0, 2], [1]], loss=functional.cross_entropy, optimizer=ADAM)
    before = list(line.state_dict())
    line.close()
    assert before == list(line.state_dict()) == list(model().state_dict())


def test_the_position_counts_the_steps():
    line = Line(model(), cut=[3], loss=functional.cross_entropy, optimizer=ADAM)
    for number, (x, y) in enumerate(batches(3)):
        assert line.position == number
        line.step(x, y)
        line.predict(x)
    assert line.position == 3
    assert line.folder is None
    assert repr(line) == "Line(inline, 2 workers, step 3)"
    line.close()
    assert repr(line) == "Line(inline, 2 workers, step 3, finished)"


def test_an_inline_line_saves_no_checkpoint_and_says_what_does(tmp_path):
    line = Line(model(), cut=[3], loss=functional.cross_entropy, optimizer=ADAM)
    with pytest.raises(NotSaved, match="an inline line saves no checkpoints: leave out workers"):
        line.save(tmp_path / "saved")
    assert not list(tmp_path.iterdir())
