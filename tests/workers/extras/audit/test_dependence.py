"""Distance correlation."""

import math

import torch

from stageline.workers.extras.audit.measures import by_chance, centred_distances, distance_correlation


def test_of_three_points_it_is_what_the_formula_gives_by_hand() -> None:
    x, y = [0.0, 1.0, 3.0], [0.0, 2.0, 1.0]

    def centred(values: list[float]) -> list[list[float]]:
        a = [[abs(one - other) for other in values] for one in values]
        rows, whole = [sum(row) / 3 for row in a], sum(map(sum, a)) / 9
        return [[a[i][j] - rows[i] - rows[j] + whole for j in range(3)] for i in range(3)]

    def mean(a: list[list[float]], b: list[list[float]]) -> float:
        return sum(a[i][j] * b[i][j] for i in range(3) for j in range(3)) / 9

    a, b = centred(x), centred(y)
    wanted = math.sqrt(max(mean(a, b), 0) / math.sqrt(mean(a, a) * mean(b, b)))
    assert abs(distance_correlation(torch.tensor(x)[:, None], torch.tensor(y)[:, None]) - wanted) < 1e-6
    assert wanted > 0.1


def test_it_is_one_of_a_similar_image_and_by_chance_far_less() -> None:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    assert distance_correlation(x, 5 - 2 * x) > 1 - 1e-6
    assert by_chance(centred_distances(x), centred_distances(5 - 2 * x)) < 0.3
    assert distance_correlation(x[:, :1].square(), x[:, :1]) > 0.4  # linearly they are uncorrelated


def test_what_does_not_vary_tells_nothing() -> None:
    assert distance_correlation(torch.randn(9, 2), torch.ones(9, 4)) == 0.0
