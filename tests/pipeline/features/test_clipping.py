"""Norms of gradients that stages send each other: their total is torch's, to the bit."""

import pytest
import torch
from torch import Tensor, nn

from stageline import Stage
from stageline.pipeline.errors import GradientMismatch, StageError
from stageline.pipeline.features.clipping import GradientClip, GradientNotFinite
from stageline.pipeline.stage.settings import StageSettings

HOST = torch.device("cpu")


def parameters(*dtypes: torch.dtype) -> dict[str, Tensor]:
    """With gradients, but for the second."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for number, dtype in enumerate(dtypes):
        found[f"p{number}"] = parameter = nn.Parameter(torch.randn(number + 2, 3, generator=generator).to(dtype))
        parameter.grad = None if number == 1 else torch.randn(number + 2, 3, generator=generator).to(dtype)
    return found


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,) * 9, (torch.float32, torch.bfloat16, torch.float64) * 3, (torch.bfloat16,) * 9],
    ids=["float32", "mixed", "bfloat16"],
)
def test_the_norm_over_stages_is_that_of_the_whole_model_in_its_own_order(dtypes: tuple[torch.dtype, ...]) -> None:
    whole, cut = parameters(*dtypes), parameters(*dtypes)
    order = {name: number for number, name in enumerate(cut)}
    wanted = nn.utils.clip_grad_norm_(whole.values(), 0.5)
    owned = [["p8", "p1", "p3"], ["p0", "p2"], ["p7", "p6", "p4", "p5"]]
    clips = [GradientClip(k, 0.5, {name: cut[name] for name in names}, order) for k, names in enumerate(owned)]
    norms = None
    for clip in reversed(clips):
        norms = clip.gather(norms)
    total = None
    for clip in clips:
        total = clip.clip(total, HOST)
        assert torch.equal(total, wanted)
        assert clip.total == wanted.item()
    assert all(torch.equal(whole[name].grad, cut[name].grad) for name in cut if name != "p1")


def test_without_any_gradient_the_norm_is_zero() -> None:
    clip = GradientClip(0, 1.0, {"p": nn.Parameter(torch.ones(2))}, {"p": 0})
    assert clip.gather(None) == ()
    assert clip.clip(None, HOST).item() == 0.0


@pytest.mark.parametrize(
    ("value", "name"),
    [(float("nan"), "the gradient of p2"), (float("inf"), "the gradient of p2"), (1.5e19, "all gradients together")],
)
def test_a_norm_that_is_no_finite_number_is_an_error_that_names_the_parameter(value: float, name: str) -> None:
    found = parameters(torch.float32, torch.float32, torch.float32, torch.float32)
    found["p2"].grad[0, 0] = found["p3"].grad[1, 1] = value
    clip = GradientClip(0, 1.0, found, {each: number for number, each in enumerate(found)})

    def both() -> None:
        clip.gather(None)
        clip.clip(None, HOST)

    with pytest.raises(GradientNotFinite, match=f"the norm of {name} is (nan|inf): .*lower the"):
        both()


def test_what_are_no_norms_is_refused() -> None:
    clip = GradientClip(1, 1.0, parameters(torch.float32), {"p0": 0})
    for given in (3, torch.ones(2), ((torch.ones(2), torch.ones(2)),), ((torch.ones(2).long(), torch.ones(3)),)):
        with pytest.raises(GradientMismatch, match=r"stage 1 got .* for the norms of later stages' gradients"):
            clip.gather(given)
    with pytest.raises(GradientMismatch, match=r"stage 1 got .* to clip by; expected one number"):
        clip.clip(torch.ones(2), HOST)


def test_stages_in_a_loop_of_ones_own_clip_as_the_whole_model() -> None:
    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3)]

    whole, x, y = nn.Sequential(*layers()), torch.randn(7, 4), torch.randn(7, 3)
    stages = [
        Stage(
            part,
            index=k,
            first_layer=low,
            loss=nn.functional.mse_loss if k else None,
            settings=StageSettings(clip_norm=0.01),
        )
        for k, (low, part) in enumerate([(0, layers()[:1]), (1, layers()[1:])])
    ]
    nn.functional.mse_loss(whole(x), y).backward()
    wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
    stages[1].forward(stages[0].forward(x), y)
    stages[0].backward(stages[1].backward())
    stages[0].norms(stages[1].norms())
    stages[1].clip(stages[0].clip())
    assert stages[0].gradient_norm == stages[1].gradient_norm == wanted.item()
    own = [parameter.grad for stage in stages for parameter in stage._body.parameters()]
    assert all(torch.equal(mine, each.grad) for mine, each in zip(own, whole.parameters(), strict=True))
    with pytest.raises(StageError, match="stage 0 clips no gradients: set clip_norm"):
        Stage(layers()).norms()
