"""Layers that make what crosses a cut tell less."""

import pytest
import torch

from stageline import AddNoise, ClipRows, EqualNormGradients


def test_noise_has_its_share_of_the_deviation_in_training_and_in_evaluation() -> None:
    x = 3 * torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    layer = AddNoise(0.5)
    for mode in (True, False):
        torch.manual_seed(1)
        added = layer.train(mode)(x) - x
        assert 1.45 < added.std().item() < 1.55
    x.requires_grad_()
    layer(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_rows_above_the_norm_are_scaled_down_to_it_and_others_stay() -> None:
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    assert torch.allclose(ClipRows(1.0)(x), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))
    assert torch.equal(ClipRows(1.0)(x)[1:], x[1:])


def test_gradients_of_rows_get_the_mean_norm_and_their_directions_stay() -> None:
    x = torch.randn(3, 2, 2, requires_grad=True)
    found = EqualNormGradients()(x)
    assert torch.equal(found, x)
    gradient = torch.tensor([1.0, 3.0, 0.0])[:, None, None] * torch.ones(3, 2, 2) / 2
    found.backward(gradient)
    assert x.grad.flatten(1).norm(dim=1).tolist() == pytest.approx([4 / 3, 4 / 3, 0.0])


@pytest.mark.parametrize("make", [lambda: AddNoise(0.0), lambda: ClipRows(-1.0), lambda: AddNoise(float("nan"))])
def test_what_is_no_number_above_0_is_refused(make) -> None:
    with pytest.raises(ValueError, match="expected a number above 0"):
        make()
