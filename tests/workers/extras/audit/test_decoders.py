"""Decoders find what is there to be found, and no more."""

import pytest
import torch
from torch import Tensor

from stageline.workers.extras.audit import measures as decoders


def rows(count: int, *shape: int) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))


def told(found: Tensor, wanted: Tensor, trained: int) -> float:
    return decoders.explained(found, wanted[trained:], wanted[:trained].mean(0))


def test_a_linear_image_of_the_inputs_is_decoded_and_noise_is_not() -> None:
    inputs = rows(120, 1, 4, 4)
    features = decoders.scaled(inputs.flatten(1) @ rows(16, 40), 90)
    assert told(decoders.decoded_linearly(features, inputs, 90), inputs, 90) > 0.99
    assert told(decoders.decoded_linearly(rows(120, 40).flip(0), inputs, 90), inputs, 90) < 0.1


@pytest.mark.slow
def test_the_network_decodes_images_and_rows_and_repeats_itself() -> None:
    before = torch.random.get_rng_state()
    images = (rows(160, 2) @ rows(2, 64)).reshape(160, 1, 8, 8)
    features = decoders.scaled(images.flatten(1)[:, ::3], 120)
    found = decoders.decoded_by_network(features, images, 120)
    assert told(found, images, 120) > 0.9
    assert torch.equal(found, decoders.decoded_by_network(features, images, 120))
    assert told(decoders.decoded_by_network(features, images.flatten(1), 120), images.flatten(1), 120) > 0.9
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_unit_that_is_still_in_all_trained_rows_and_acts_in_another_does_not_make_the_decoders_fail() -> None:
    inputs = rows(120, 4, 4).flatten(1)
    crossing = torch.cat([inputs, torch.zeros(120, 2)], dim=1)
    crossing[5, 16], crossing[100, 16], crossing[101, 17] = 1e-5, 3.0, 3.0  # one that hardly acts, one never
    features = decoders.scaled(crossing, 90)
    assert features.abs().max() <= decoders.FARTHEST
    assert torch.equal(features[:, 17], torch.zeros(120))
    assert told(decoders.decoded_linearly(features, inputs, 90), inputs, 90) > 0.99


@pytest.mark.slow
def test_the_network_stops_before_noise_makes_it_worse_than_the_mean_image() -> None:
    images, noise = rows(160, 1, 8, 8), rows(160 * 2, 40)[160:]
    assert told(decoders.decoded_by_network(noise, images, 120), images, 120) > -0.02


def test_many_features_become_their_main_components_by_rows_that_were_trained_on() -> None:
    features = rows(40, 900)
    found = decoders.scaled(features, 30)
    assert found.shape == (40, 30)
    changed = torch.cat([features[:30], features[30:] + 7])
    assert torch.equal(found[:30], decoders.scaled(changed, 30)[:30])


def test_large_images_are_decoded_at_32_pixels() -> None:
    assert decoders.small(rows(2, 3, 224, 224)).shape == (2, 3, 32, 32)
    assert decoders.small(rows(2, 3, 8, 40)).shape == (2, 3, 8, 32)
    assert decoders.small(rows(2, 5)).shape == (2, 5)
